"""What the README and the pages of docs show is true: commands, options, the picture and the line of a table."""

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from autoshard.cli import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
MOST_WORDS = 700


def shell_blocks(page: Path) -> list[str]:
    """The shell blocks of a page as they stand there."""
    return re.findall(r"^```(?:bash|console|sh)\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def shell_lines(page: Path) -> Iterator[str]:
    """The lines of the shell blocks of a page, continued lines joined, without prompts and comments."""
    for line in "\n".join(shell_blocks(page)).replace("\\\n", " ").splitlines():
        yield re.sub(r"^\$ |\s+#.*$", "", line).strip()


def recipe(target: str) -> str:
    """The last line that make would run for a target."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "picture.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_two_commands_come_first() -> None:
    assert list(shell_lines(README))[:2] == ["make plan", "make test"]
    assert "-m pytest" in recipe("test")


def test_the_readme_is_read_in_one_breath() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_the_glossary_has_at_most_40_terms_and_each_is_used() -> None:
    glossary = (ROOT / "docs" / "understand" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| ([\w -]+) \|", glossary, flags=re.M)[2:]
    used = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "glossary.md")
    assert 20 < len(terms) <= 40
    assert not [term for term in terms if not re.search(rf"\b{term}", used, flags=re.I)]


def test_every_command_and_option_of_the_pages_exists(capsys: pytest.CaptureFixture[str]) -> None:
    helps: dict[str, str] = {}
    unknown: list[str] = []
    for page in PAGES:
        for line in shell_lines(page):
            found = re.search(r"(?:^|\s)autoshard ([a-z]+)((?:\s.*)?)$", line)
            if not found:
                continue
            command, rest = found[1], found[2]
            if command not in helps:
                assert main([command, "--help"]) == 0, f"{page.name}: autoshard {command}"
                helps[command] = capsys.readouterr().out
            options = set(re.findall(r"(?<=\s)--[a-z][a-z-]*", rest))
            unknown += [f"{page.name}: autoshard {command} {one}" for one in options if one not in helps[command]]
    assert not unknown
    assert len(helps) >= 10, "the pages show most commands"


def test_every_page_that_is_named_exists() -> None:
    links = [
        (page, link) for page in PAGES for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert links
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]


@pytest.mark.slow
def test_the_picture_and_the_line_of_a_table_are_those_of_the_plan(picture: ModuleType, tmp_path: Path) -> None:
    drawn = picture.svg(picture.terminal_text(tmp_path))
    assert drawn == picture.PICTURE.read_text(encoding="utf-8"), "draw it again: python docs/picture.py"
    line = re.search(r'^"(\w+)": "(.*)"$', README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert line
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert plan["strategies"]["layer"][line[1]] == line[2]
