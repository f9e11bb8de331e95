"""One layout, two renderers: what a terminal prints stands on the page, word for word."""

import html
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from autoshard.cost.timeline import rank_times
from autoshard.plan.diff import diff
from autoshard.plan.explanation import Alternatives
from autoshard.report.comparison import comparison_sheets
from autoshard.report.explanation import explanation_sheets
from autoshard.report.page.charts import Axis, Dot, Line, line_chart
from autoshard.report.page.elements import table
from autoshard.report.page.sweep_page import sweep_page
from autoshard.report.plan_sheets import plan_sheets
from autoshard.report.sheet import Bar, Figure, Node, Sheet, Table, Words, plain
from autoshard.report.structured import comparison_json
from autoshard.report.sweep import sweep_sheets
from autoshard.report.watch.page import progress_page
from autoshard.report.watch.sheets import headline_sheet, steps_sheet
from autoshard.report.watch.structured import progress_json
from tests.report.page.pages import page_named, page_of, plan_named, shown
from tests.report.page.test_sweep_page import ROWS
from tests.report.printed import printed
from tests.report.watch.made_runs import made_run, seen, steps_of
from tests.slower import rest_is_slow


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


def rows_on(page: str) -> set[tuple[str, ...]]:
    """The rows of all tables of a page, as the texts of their cells."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    return {tuple(map(text_of, re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL))) for row in rows}


def assert_on(page: str, sheets: Iterable[Sheet]) -> None:
    """Every row, and every fact with a figure, must stand on the page."""
    rows, text = rows_on(page), text_of(page)
    for sheet in sheets:
        for drawn in sheet.tables:
            assert {tuple(map(plain, row)) for row in drawn.rows} <= rows, drawn.title
        for fact in sheet.facts:
            assert plain(fact.value) in text and plain(fact.beside).lstrip(", ") in text, fact.name


@pytest.mark.parametrize("name", rest_is_slow(["small", "dense", "experts", "long"], 2, 2))
def test_what_plan_and_explain_print_stands_on_the_page(name: str) -> None:
    plan = plan_named(name)
    times, why = rank_times(plan), shown(name, plan).explanation
    assert why, "a whole page is of a plan that is explained"
    headline, _, ranks, *_ = plan_sheets(plan, times=times)
    _, time, tables, blocks, *_ = explanation_sheets(plan, why, Alternatives(rivals={}, unlimited_s=1.0), times)
    # A page has room for every part of memory by itself.
    stages = Sheet(tables=[part for part in (*ranks.tables, *tables.tables) if not part.title.startswith("Memory per")])
    assert time.tables and stages.tables and (blocks.tables or not why.blocks)
    assert_on(page_named(name), [headline, time, stages, blocks])


@pytest.mark.slow
def test_what_compare_prints_stands_on_the_page() -> None:
    plans = plan_named("small", "fastest"), plan_named("small", "2")
    found, names = diff(*plans), ("plan0", "plan1")
    _, verdict, *others = comparison_sheets(found, Node(comparison_json(found, ())), names, names)
    page = page_of(*plans)[0]
    assert plain(verdict.title) in text_of(page) and sum(len(sheet.tables) for sheet in others) > 2
    assert_on(page, others)


def test_what_watch_and_sweep_print_stands_on_their_pages(tmp_path: Path) -> None:
    now = seen(made_run(tmp_path, steps_of(40), host="far"))
    figures = Node(progress_json(now))
    assert_on(progress_page(now, 2.0), [headline_sheet(now, figures), steps_sheet(figures)])
    assert_on(sweep_page("mine", ROWS), sweep_sheets("mine", ROWS).values())


def test_looks_never_change_the_text_of_a_cell() -> None:
    figure = Figure("1.50 GiB", 1610612736, "peak_bytes")
    cells = ["[b]a < b[/b]", Words("x", "strong"), Words("y", "warning"), figure, (figure, Words(" of it", "sent"))]
    drawn = Table("T", [f"c{number}" for number in range(len(cells))], [cells])
    assert rows_on(table(drawn).text) == {tuple(drawn.columns), tuple(map(plain, cells))}
    assert all(plain(cell) in printed(drawn) for cell in cells)
    assert 'value="1610612736" data-path="peak_bytes"' in table(drawn).text


def test_a_bar_without_a_width_and_a_text_to_paste_are_not_in_a_terminals_table() -> None:
    rows = [["a", Bar(0.5, 0), Words("tp=8,pp=4", "code")], ["b", Bar(1.0, 0), ""]]
    text = printed(Table("T", ("name", "bar", "layout"), rows, below="layout"))
    assert "bar" not in text and "layout" not in text and text.endswith("\n\na  tp=8,pp=4\n")


def test_a_line_of_many_points_hides_its_dots_and_keeps_what_they_say():
    axis = Axis(name="", text="{:g}".format)
    for count, hidden in ((60, 0), (61, 61)):
        dots = [Dot(x=place, y=place, tip=f"step {place}") for place in range(count)]
        drawn = line_chart("", [Line(name="loss", points=dots)], axis, axis).text
        assert drawn.count(' close"') == hidden and drawn.count("data-tip=") == count
