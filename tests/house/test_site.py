"""The site of the documentation: it builds with every link checked, and asks nobody for anything when it is read."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import autoshard
from autoshard.calibration.rows import MeasuredRow
from autoshard.commands import COMMANDS
from autoshard.plan.plan import Plan
from autoshard.spec.recipe import RECIPE_KEYS
from autoshard.spec.training import Training
from tests.report.page.browser import PROGRAM, browser

ROOT = Path(__file__).parents[2]
SITE = ROOT / "mkdocs.yml"
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--quiet", "-d", folder]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Loads(HTMLParser):
    """What a page asks for when it is opened, and has to get from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an address that a browser would ask for."""
        stated = dict(attrs)
        address = stated.get(LOADS.get(tag, "")) or ""
        if tag == "link" and stated.get("rel") in ("canonical", "next", "prev"):
            return
        if re.match(r"(?:https?:)?//", address):
            self.elsewhere.append(address)


def pages_of(entries: list[Any]) -> Iterator[str]:
    """The pages of a navigation, in order."""
    for entry in entries:
        for place in [entry] if isinstance(entry, str) else entry.values():
            yield from [place] if isinstance(place, str) else pages_of(place)


@pytest.mark.slow
def test_the_site_has_every_page_of_its_navigation_and_no_page_asks_for_anything_elsewhere(site: Path) -> None:
    named = [*pages_of(yaml.safe_load(SITE.read_text(encoding="utf-8"))["nav"])]
    assert len(named) == len({*named}) >= 15
    for name in named:
        page = Loads()
        page.feed((site / name).with_suffix(".html").read_text(encoding="utf-8"))
        assert page.elsewhere == [], name
    assert not [
        path for path in site.rglob("*.css") if re.search(r"url\(['\"]?(?:https?:)?//", path.read_text("utf-8"))
    ]


@pytest.mark.slow
def test_the_search_lies_in_the_site(site: Path) -> None:
    assert "var __index = " in (site / "search" / "search_index.js").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_reference_has_every_command_key_of_recipes_and_name_of_python(site: Path) -> None:
    def ids(page: str) -> set[str]:
        return set(re.findall(r'id="([^"]+)"', (site / "reference" / f"{page}.html").read_text("utf-8")))

    def codes(page: str) -> set[str]:
        return set(
            re.findall(r"<td><code>([^<]+)</code></td>", (site / "reference" / f"{page}.html").read_text("utf-8"))
        )

    assert ids("commands") >= {*COMMANDS}
    assert ids("python") >= {f"autoshard{name}" for name in autoshard.__all__ if name != "__version__"}
    sections = {key: getattr(Training(), key, None) for key in RECIPE_KEYS}
    keys = {key for key, section in sections.items() if not dataclasses.is_dataclass(section)}
    for key, section in sections.items():
        if dataclasses.is_dataclass(section):
            keys |= {f"{key}.{field.name}" for field in dataclasses.fields(section)}
    assert codes("recipe-keys") == keys
    assert codes("rows") == {field.name for field in dataclasses.fields(MeasuredRow)}
    assert codes("plan-json") >= {field.name for field in dataclasses.fields(Plan)}


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_pages_open_and_are_searched_as_files_without_a_word_of_the_console(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as tab:
        for path in sorted(site.rglob("*.html")):
            if path.name != "404.html":  # its addresses are those of a server
                tab.open(path, 1280)
        tab.open(site / "index.html", 1280)
        tab.value("document.querySelector('label[for=__search]').click()")
        tab.value("document.querySelector('input.md-search__input').focus()")
        for key in "headroom":
            tab.press(key)
        results = "document.querySelectorAll('.md-search-result__item').length"
        look = f"const count = {results}; if (count || looks++ > 300) ends(count); else setTimeout(look, 100);"
        assert tab.value(f"new Promise(ends => {{ let looks = 0; const look = () => {{ {look} }}; look(); }})")
        assert tab.errors == []


def test_every_picture_of_the_repository_stands_in_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    pictures = {
        path.name for folder in (ROOT, ROOT / "docs") for kind in ("png", "svg") for path in folder.glob(f"*.{kind}")
    }
    assert pictures and {name for name in pictures if not re.search(rf"[/(]{re.escape(name)}\)", text)} == set()
