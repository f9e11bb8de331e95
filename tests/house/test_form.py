"""The form of the source that ruff does not know: lengths, names, state, places outside the repository."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.sources import ROOT, nodes_of

PYTHON_FOLDERS = ("autoshard", "benchmarks", "tests")
SOURCES = sorted(path for folder in PYTHON_FOLDERS for path in (ROOT / folder).rglob("*.py"))
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".yaml", ".yml"}
TEXT_NAMES = {"Makefile", "LICENSE", "run", ".editorconfig", ".gitignore"}
FOLDERS = (".ci", *PYTHON_FOLDERS, "models", "recipes")

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 600

# A name made of these words does not say what it stands for.
BANNED_WORDS = {"manager", "managers", "helper", "helpers", "util", "utils", "info", "infos"}
BANNED_STARTS = ("do_", "process_")

# The only code that may read the environment.
READS_ENVIRONMENT = {ROOT / "autoshard" / name for name in ("cli.py", "runtime/launch.py", "runtime/machine.py")}

# A clone must make sense on any machine: nothing may point above its root, into somebody's folders,
# or to an index that only some can reach.
ELSEWHERE = (
    re.compile(r"(?<![.\w])\.\./"),
    re.compile(r"(?<![\w.-])" + "shared" + r"/\w"),
    re.compile(r"(?<![\w.}-])/(home|root|Users|work|tmp)/"),
)
INDEX = re.compile(r"https?://[^\s\"'`)]*(?:/simple|/whl|pypi|pip\.)[^\s\"'`),]*")
PUBLIC_INDEXES = (
    "https://download.pytorch.org/whl/cpu",
    "https://pip.repos.neuron.amazonaws.com",
    "https://pypi.org",
)


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    """Every node of every source."""
    return ((path, node) for path in SOURCES for node in nodes_of(path))


def text_files() -> Iterator[Path]:
    """Every file of the repository that people read, and none that a tool wrote."""
    inside = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")))
    beside = (path for path in sorted(ROOT.iterdir()) if path.suffix != ".json")  # commands write plan.json here
    for path in (*inside, *beside):
        if path.is_file() and (path.suffix in TEXT or path.name in TEXT_NAMES):
            yield path


def name_of(node: ast.AST) -> str | None:
    """The name that a node defines, if it defines one."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
            return name
        case _:
            return None


def words(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def is_banned(name: str) -> bool:
    return bool(words(name) & BANNED_WORDS) or name.lstrip("_").startswith(BANNED_STARTS)


def elsewhere(line: str) -> bool:
    """Say whether a line names a place that is not in the repository.

    >>> elsewhere("see models/llama3-70b.json"), elsewhere("see .." + "/notes")
    (False, True)
    """
    indexes = (url for url in INDEX.findall(line) if not url.startswith(PUBLIC_INDEXES))
    return any(pattern.search(line) for pattern in ELSEWHERE) or any(True for _ in indexes)


def test_functions_fit_in_the_eye_and_files_have_one_subject() -> None:
    functions = [
        f"{short(path)}:{node.lineno} {node.name}"
        for path, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES
    ]
    files = [
        f"{short(path)}: {lines} lines"
        for path in SOURCES
        if (lines := len(path.read_text(encoding="utf-8").splitlines()))
        > (MAX_TEST_FILE_LINES if short(path).startswith("tests/") else MAX_FILE_LINES)
    ]
    assert not functions and not files


def test_the_rule_of_names_knows_its_words() -> None:
    assert all(map(is_banned, ("MeshManager", "_do_step", "process_rows", "model_info", "StageUtils")))
    assert not any(map(is_banned, ("information", "dot", "process", "redo_step")))


def test_names_say_what_they_stand_for() -> None:
    named = [(path, path.stem) for path in SOURCES]
    named += [(path, name) for path, node in nodes() if (name := name_of(node))]
    assert not [f"{short(path)}: {name}" for path, name in named if is_banned(name)]


def test_there_is_no_global_state_and_the_environment_is_read_at_the_door() -> None:
    assert not [f"{short(path)}:{node.lineno}" for path, node in nodes() if isinstance(node, ast.Global)]
    readers = [
        f"{short(path)}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}
        if path.is_relative_to(ROOT / "autoshard") and path not in READS_ENVIRONMENT
    ]
    assert not readers


def test_the_rule_of_places_knows_its_words() -> None:
    assert all(map(elsewhere, ("/ho" + "me/me/x", "in .." + "/x", "https:" + "//pypi.example.org/simple")))
    assert not any(map(elsewhere, (*PUBLIC_INDEXES, "stages=9/10*6/11", "models/x.json", ".../x")))


def test_the_repository_names_no_place_outside_itself() -> None:
    found = [
        f"{short(path)}:{number} {line.strip()[:100]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if elsewhere(line)
    ]
    assert not found


def test_counts_that_may_be_one_have_their_noun_from_a_function() -> None:
    """`units.counted` writes "1 sequence"; these nouns have no text in which the number is always larger."""
    written = re.compile(r"\{[^{}]*\} (sequences|faults|reports)\b")
    package = (path for path in SOURCES if "autoshard" in path.parts[len(ROOT.parts) :])
    found = [f"{short(path)}: {match[0]}" for path in package for match in written.finditer(path.read_text("utf-8"))]
    assert not found


def test_differences_in_percent_are_written_by_a_function_that_knows_none() -> None:
    """`units.format_change` writes "+1.2%", and "0.0%" without a sign; errors have signs of their own."""
    signed, exempt = re.compile(r"\+\.[0-9]%"), {"units.py", "validation.py"}
    package = (path for path in SOURCES if "autoshard" in path.parts[len(ROOT.parts) :] and path.name not in exempt)
    assert not [f"{short(path)}: {match[0]}" for path in package for match in signed.finditer(path.read_text("utf-8"))]
