"""The shape of the package: no folder too full, no class name twice, no cycle of imports, lazy ones and types too."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.house.sources import ROOT, nodes_of

PACKAGE = ROOT / "autoshard"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MOST_FILES = 20


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that a module imports, at its top or later, for types as well."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_folder_is_too_full() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {path.parent for path in MODULES.values()}}
    assert not {str(folder.relative_to(PACKAGE)): count for folder, count in counts.items() if count > MOST_FILES}


def test_every_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[Path]] = defaultdict(list)
    for path in MODULES.values():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not {name: [path.stem for path in paths] for name, paths in twice.items()}


# Besides the reader of files, these read JSON that comes with the package, or that this process or its child wrote.
OF_OUR_OWN = {
    "calibration.words", "cost.calibration", "search.ask.vendor.documented", "spec.kernels", "jobs.job", "sweep.points",
    "sweep.work", "runtime.checkpoint.files", "runtime.convert.copying",
}  # fmt: skip


def test_json_that_anybody_may_have_written_is_read_in_one_place() -> None:
    readers = {
        name.removeprefix("autoshard.")
        for name, path in MODULES.items()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and re.fullmatch(r"json(_text)?\.loads?", ast.unparse(node))
    }
    assert readers - OF_OUR_OWN == {"spec.files"}, "parsed_json says what is wrong, json_line leaves it out"


# A conversion writes into a folder that gets its name at the end.
WRITE_IN_PLACE = {"files", "runtime.convert.hf", "runtime.convert.nxd"}


def test_files_are_replaced_whole() -> None:
    writers = {
        name.removeprefix("autoshard.")
        for name, path in MODULES.items()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in ("write_text", "write_bytes")
    }
    assert writers == WRITE_IN_PLACE, "files.replace_text writes aside, and renames"


def test_imports_go_round_nowhere() -> None:
    graph = {name: {one for one in imported(path) if one in MODULES} - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a cycle of imports: {' <- '.join(error.args[1])}") from None


def test_files_that_pages_name_exist() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"]
    named = {
        (page.name, name)
        for page in pages
        if page.name != "CHANGELOG.md"
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 20, "pages name files in back quotes"
    missing = sorted((page, name) for page, name in named if not any(f"/{file}".endswith(f"/{name}") for file in files))
    assert not missing, f"pages name files that are not there: {missing}"


ON_RANKS = {"on_ranks", "on_nxd_ranks"}
PATCHES = {"setattr", "setitem", "setenv", "delattr", "delitem", "delenv", "chdir"}


def test_nothing_is_patched_here_for_ranks_that_are_processes_elsewhere() -> None:
    """They never see it; what changes on them is `replaced`, or patched in the function that they call."""
    unseen = list[str]()
    for path in (ROOT / "tests").rglob("*.py"):
        for function in nodes_of(path):
            if isinstance(function, ast.FunctionDef):
                called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {node.id for node in called if isinstance(node, ast.Name)}
                methods = {node.attr for node in called if isinstance(node, ast.Attribute)}
                if names & ON_RANKS and methods & PATCHES:
                    unseen.append(f"{path.relative_to(ROOT)}: {function.name}")
    assert not unseen
