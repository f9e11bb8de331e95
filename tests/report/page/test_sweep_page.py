"""The page of a sweep: its figures are those of the rows, and its drawings say what the rows say."""

import re
from typing import Any

import pytest

from autoshard.report.page.sweep_page import sweep_page
from autoshard.report.sweep import best_trained, scaling_efficiency, sweep_sheets
from tests.report.page.pages import Element, read
from tests.report.page.test_plan_page import at
from tests.report.printed import printed


def row(nodes: int, tp: int, pp: int, **more: Any) -> dict[str, Any]:
    step_s = 800.0 / nodes + tp / 8 + pp / 16
    return {
        "id": f"{nodes}-{tp}-{pp}", "point": f"nodes={nodes} tp={tp} pp={pp}", "choice": 1, "status": "planned",
        "message": None, "at.nodes": nodes, "at.fix.tp": tp, "at.fix.pp": pp, "model": "llama3-70b", "nodes": nodes,
        "ranks": 32 * nodes, "tp": tp, "pp": pp, "candidate": f"tp={tp},pp={pp},dp={32 * nodes // tp // pp}",
        "step_time_s": step_s, "tokens_per_s": 1e6 / step_s, "mfu": 0.3, "peak_bytes": 2**33 + tp * 2**28,
        "usd_per_billion_tokens": nodes * step_s, **more,
    }  # fmt: skip


ROWS = [row(nodes, tp, pp) for nodes in (4, 8, 16) for tp in (8, 32) for pp in (2, 4)]
NONE = {"id": "x", "point": "nodes=1", "choice": 1, "status": "no plan", "message": "none fits <here>", "at.nodes": 1}


def sections(text: str) -> dict[str, Element]:
    return {one.attributes["aria-labelledby"]: one for one in read(text).every("section")}


def test_every_figure_of_a_sweep_is_that_of_its_row():
    ran = {"status": "ran", "measured_step_time_s": 130.0, "ran_predicted_s": 120.0, "measured_over_predicted": None}
    rows = [*ROWS, NONE, row(2, 8, 2, **ran)]
    text = sweep_page("mine", rows)
    figures = read(text).every("data")
    for figure in figures:
        assert float(figure.attributes["value"]) == at(rows, figure.attributes["data-path"].removeprefix("rows."))
    paths = {figure.attributes["data-path"] for figure in figures}
    good = [number for number, one in enumerate(rows) if one["status"] != "no plan"]
    keys = ("step_time_s", "tokens_per_s", "mfu", "peak_bytes", "usd_per_billion_tokens")
    assert {f"rows.{number}.{key}" for number in good for key in keys} <= paths
    assert "none fits <here>" in sections(text)["failed"].whole_text
    assert read(text).every("dl")[0].whole_text.count("predicted of") == 3  # also where points ran
    assert "1 of them ran on another machine" in sections(text)["measured"].whole_text


def trained(rate: float, loss: float | None, **more: Any) -> dict[str, Any]:
    ran = {"measured_step_time_s": 130.0, "ran_predicted_s": 120.0, "measured_over_predicted": 1.0}
    name = f"learning_rate={rate} {more}"
    return {key: value for key, value in row(4, 8, 2).items() if not key.startswith("at.")} | {
        "id": name, "point": name, "at.learning_rate": rate, "last_loss": loss, "num_steps": 20, "status": "ran",
        **ran, **more,
    }  # fmt: skip


def test_a_sweep_of_training_has_losses_and_the_best_point():
    rows = [trained(0.1, 3.0), trained(0.01, 2.5), trained(0.001, 2.75), trained(0.2, None)]
    page, words = sweep_page("mine", rows), printed(*sweep_sheets("mine", rows).values())
    assert words.count("least loss") == 1 and "2.5000 of learning_rate=0.01 {} after 20 steps, of 3 runs" in words
    assert all(loss in words for loss in (" 3.0000 ", " 2.5000 ", " 2.7500 "))
    dots = sections(page)["losses"].every("circle")
    assert len(dots) == 3 and "learning_rate" in sections(page)["losses"].whole_text
    assert "least loss" in read(page).every("dl")[0].whole_text


@pytest.mark.parametrize(
    ("rows", "bests"),
    [
        ([trained(0.1, 3.0, **{"at.model": one}) for one in ("a", "b")], []),
        ([trained(0.1, 3.0, **{"at.data.sets": one}) for one in ("a", "b")], []),
        ([trained(rate, rate, **{"at.model": one}) for one in ("a", "b") for rate in (0.1, 0.2)], [0.1, 0.1]),
        ([trained(0.1, 3.0)], []),
        ([trained(0.1, 3.0), trained(0.2, 2.0, num_steps=40)], [2.0]),
    ],
)
def test_losses_of_other_questions_or_data_are_not_compared(rows: list[dict[str, Any]], bests: list[float]):
    assert [best["last_loss"] for best, _ in best_trained(rows)] == bests
    words = printed(sweep_sheets("mine", rows)["head"])
    assert ("(they took 20 to 40 steps)" in " ".join(words.split())) == (bests == [2.0])


def test_plans_and_runs_of_one_training_name_no_best_loss():
    assert best_trained(ROWS) == [] and "least loss" not in printed(*sweep_sheets("mine", ROWS).values())


def test_scaling_curves_go_through_every_point_of_a_series():
    drawn = sections(sweep_page("mine", ROWS))["scaling"]
    speed, shares, cost = drawn.every("figure")
    per_rank = scaling_efficiency(ROWS)
    for chart, text in ((speed, "tokens"), (shares, "%"), (cost, "$")):
        tips = [dot.attributes["data-tip"] for dot in chart.every("circle")]
        assert len(tips) == len(ROWS) and chart.every("svg")[0].attributes["aria-label"]
        assert text != "%" or f"nodes=16 tp=8 pp=2: {per_rank['16-8-2']:.0%}" in tips
    assert len([one for one in speed.every("path") if "line" in one.attributes["class"]]) == 4  # tp x pp
    ticks = [one.whole_text for one in speed.every("text") if one.attributes["class"] == "middle"]
    assert ticks == ["4", "8", "16"]


def test_a_series_has_its_colour_in_every_chart_also_where_another_has_no_price():
    rows = [
        row(nodes, tp, 2, usd_per_billion_tokens=float(nodes) if tp == 32 else None)
        for nodes in (4, 8)
        for tp in (8, 32)
    ]
    speed, _, cost = sections(sweep_page("mine", rows))["scaling"].every("figure")
    colours = [
        {item.whole_text: item.every("i")[0].attributes["class"] for item in chart.every("li")}
        for chart in (speed, cost)
    ]
    assert len(set(colours[0].values())) == 2 and not colours[1]  # one line needs no legend
    dots = {dot.attributes["class"] for dot in cost.every("circle")}
    assert dots == {colours[0]["fix.tp 32, fix.pp 2"]}


def test_the_table_of_points_has_only_columns_that_say_something():
    def columns(rows: list[dict[str, Any]]) -> list[str]:
        return [
            one.whole_text
            for one in sections(sweep_page("mine", rows))["points"].every("th")
            if "scope" in one.attributes
        ]

    free = [{**one, "usd_per_billion_tokens": None, "cluster": "h100-80"} for one in ROWS]
    told = sections(sweep_page("mine", free))["pareto"].whole_text
    assert told.startswith("Time and memoryPredicted") and "the key price of a sweep gives one" in told
    assert (
        "key price"
        not in sections(sweep_page("mine", [{**one, "cluster": "local"} for one in free]))["pareto"].whole_text
    )
    both = [*ROWS, row(4, 8, 2, choice=2, id="second")]
    figures = ["layout", "step", "tokens/s", "MFU", "peak", "per rank"]
    assert columns(free)[:9] == ["nodes", "fix.tp", "fix.pp", *figures]
    assert columns(both)[:11] == ["nodes", "fix.tp", "fix.pp", "answer", *figures, "$ / 1e9 tokens"]


def test_a_heat_map_is_darkest_where_a_step_is_fastest():
    maps = sections(sweep_page("mine", ROWS))["sizes"].every("table")
    assert len(maps) == 3
    assert "sizes" not in sections(sweep_page("mine", [row(4, 8, 2), row(4, 8, 4)]))  # two cells are no map
    for one, nodes in zip(maps, (4, 8, 16), strict=True):
        assert f"nodes {nodes}" in one.every("caption")[0].whole_text
        cells = [cell for cell in one.every("td") if "style" in cell.attributes]
        shades = {float(cell.attributes["style"].removeprefix("--good:")): cell for cell in cells}
        best = min((own for own in ROWS if own["nodes"] == nodes), key=lambda own: own["step_time_s"])
        assert max(shades) == 1.0 and min(shades) == 0.0 and best["point"] in shades[1.0].attributes["data-tip"]


def test_the_frontier_has_no_point_below_it():
    chart = sections(sweep_page("mine", ROWS))["pareto"].every("figure")[0]
    path = next(one for one in chart.every("path") if one.attributes["class"] == "frontier").attributes["d"]
    corners = re.findall(r"[MH]([\d.]+)[V ]([\d.]+)", path)
    assert corners
    dots = [(float(one.attributes["cx"]), float(one.attributes["cy"])) for one in chart.every("circle")]
    for x, y in ((float(x), float(y)) for x, y in corners):
        assert (x, y) in dots and not any(a <= x and b >= y and (a, b) != (x, y) for a, b in dots)


def test_points_of_the_frontier_are_named_unless_they_are_many_or_their_names_long():
    def names(rows: list[dict[str, Any]]) -> list[list[str]]:
        charts = sections(sweep_page("mine", rows))["pareto"].every("figure")
        words = [[one.whole_text for one in chart.every("text")] for chart in charts]
        return [[name for name in texts if any(one["point"] in name for one in rows)] for texts in words]

    memory, dollars = names(ROWS)
    assert memory == ["nodes=16 tp=8 pp=2"]
    assert set(dollars) == {f"nodes={nodes} tp=8 pp=2" for nodes in (4, 8, 16)}
    assert names([{**one, "point": "a name of a point that no chart has room for"} for one in ROWS]) == [[], []]
    many = [row(nodes, 128 // nodes, 2) for nodes in range(4, 20)]  # the faster, the fuller
    falling = [{**one, "peak_bytes": 2**33 + number * 2**29} for number, one in enumerate(many)]
    assert names(falling)[0] == [] and len(names(falling[:3])[0]) == 3


@pytest.mark.parametrize("rows", [[NONE], [row(4, 8, 2)], [row(4, 8, 2, usd_per_billion_tokens=None)]])
def test_a_sweep_of_one_point_or_none_has_a_page(rows: list[dict[str, Any]]):
    found = sections(sweep_page("mine", rows))
    assert set(found) == ({"failed"} if rows[0]["status"] == "no plan" else {"points"})
