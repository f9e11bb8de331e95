"""The chart shows the figures of the table below it, for light and dark pages, and no text runs into another."""

import re
import xml.etree.ElementTree as ET

import pytest

from autoshard.calibration.choices import PLANNER, Choices
from benchmarks.pages import ROOT, table_in
from benchmarks.regret_chart import CHART, chart
from benchmarks.sweep_choices import PAGE, WORDS, page_text, sweep_choices

SVG = "{http://www.w3.org/2000/svg}"
SIZES = {"title": 15, "head": 12, "note": 12}


def texts(svg: str) -> list[tuple[str, float, float, int]]:
    """The texts of a picture, with where each begins and how large it is."""
    found = ET.fromstring(svg).iter(f"{SVG}text")
    return [(one.text or "", float(one.get("x", 0)), float(one.get("y", 0)), SIZES.get(one.get("class", ""), 13))
            for one in found]  # fmt: skip


def length(text: str, size: int) -> float:
    """How long a text is at most in DejaVu Sans, the widest of the fonts that are named."""
    return size * sum(0.65 if one.isdigit() else 0.95 if one == "%" else 0.53 for one in text)


def test_the_chart_shows_the_table_of_the_page():
    rows = [line.split(" | ") for line in table_in(PAGE.read_text("utf-8"), "choices").splitlines() if "%" in line]
    regrets = {(row[1], row[0].strip("| *")): row[3] for row in rows if "%" in row[3]}
    shown = texts(CHART.read_text("utf-8"))
    for who in WORDS.values():
        (y,) = (y for text, _, y, _ in shown if text == who)
        cells = [text for text, x, there, _ in sorted(shown, key=lambda one: one[1]) if there == y and text != who]
        figures = [float(one.strip("%")) for (name, _), one in regrets.items() if name == who]
        assert len(figures) == len(cells) > 3
        for cell, figure in zip(cells, figures, strict=True):
            assert abs(float(cell.strip("%")) - figure) <= (0.01 if figure < 100 else 0.5), (who, cell)


@pytest.mark.slow
def test_table_and_chart_are_what_the_command_writes():
    found, page = sweep_choices(), PAGE.read_text("utf-8")
    stale = "write them anew: python -m benchmarks sweep_choices --write, and take the figures into README.md"
    assert page_text(page, found) == page, stale
    assert chart(found, WORDS) == CHART.read_text("utf-8"), stale


def test_no_text_of_the_chart_runs_into_another():
    svg = CHART.read_text("utf-8")
    width = float(ET.fromstring(svg).get("width", 0))
    shown = texts(svg)
    for text, x, y, size in shown:
        following = [there for _, there, same, _ in shown if same == y and there > x]
        assert x + length(text, size) < min([*following, width]), text


def test_long_bars_end_in_an_arrow_and_dark_pages_have_their_colours():
    found = [Choices(set=name, who=PLANNER, num_groups=1, most_layouts=3, regret=regret)
             for name, regret in (("a_b", 0.05), ("c_d", 3.0), ("all", 0.1))]  # fmt: skip
    svg = chart(found, {PLANNER: "x < y"})
    bars = re.findall(r'planner-bar" d="([^"]*)"', svg)
    assert ["l8 8" in bar for bar in bars] == [False, True, False]
    assert "x &lt; y" in svg and "prefers-color-scheme: dark" in svg


def test_the_pages_show_it_and_the_readme_has_the_figures_of_the_table():
    readme, page = (ROOT / "README.md").read_text("utf-8"), PAGE.read_text("utf-8")
    assert "](docs/regret.svg)" in readme and "/regret.svg)" in page
    line = next(line for line in table_in(page, "choices").splitlines() if line.startswith("| **all** | autoshard |"))
    regret, error = (line.split(" | ")[place].rstrip("%") for place in (3, 7))
    said = " ".join(readme.split())
    assert f"takes {regret} % longer" in said and f"are off by {error} % there" in said


def test_the_page_for_users_has_the_figures_of_the_table():
    page = (PAGE.parents[1] / "understand" / "accuracy.md").read_text("utf-8")
    table = table_in(PAGE.read_text("utf-8"), "choices").splitlines()
    rows = [line.strip("| ").split(" | ") for line in table if line.startswith("| ")]
    means = {cells[1]: (cells[3], cells[4], cells[7]) for cells in rows if cells[0] == "**all**"}
    shown = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    figures = {cells[0]: tuple(cell.replace(" %", "%") for cell in cells[1:]) for cells in shown if cells[0] in means}
    assert len(figures) == 5 and figures == {who: means[who] for who in figures}
    measured = [row for row in rows if row[1] == "autoshard" and row[2].isdigit() and int(row[2]) and "*" not in row[0]]
    assert f"{sum(int(row[2]) for row in measured)} groups of {len(measured)} sweeps" in page
