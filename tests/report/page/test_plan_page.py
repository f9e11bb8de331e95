"""The page of a plan: its figures are those of the JSON answer, and its drawings are the simulated step."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.plan.candidate import Candidate
from autoshard.plan.diff import diff
from autoshard.plan.found import search_record
from autoshard.plan.plan import Plan
from autoshard.report.comparison import sentences
from autoshard.report.page.elements import tag
from autoshard.report.page.headline import headline
from autoshard.report.page.mesh_drawing import mesh_section
from autoshard.report.page.runs import figures_of
from autoshard.report.page.shown import page_json
from autoshard.report.page.stretch import stretch_of
from autoshard.report.page.timeline import MOST_ACTIONS, MOST_MEMORIES, memory_charts, timeline
from autoshard.report.sheet import Node
from autoshard.report.words import prediction_of
from autoshard.search.bound.request import plan_at
from autoshard.units import format_at_most, format_bytes, format_count, format_dollars, format_seconds
from tests.report.page.pages import page_named, page_of, plan_named, read, shown
from tests.report.traces.test_predicted import CASES, case
from tests.search.brute_force import ask
from tests.slower import rest_is_slow

_SECTIONS = ("others", "pareto", "time", "timeline", "memory", "mesh", "blocks", "refused", "basis")
_MOST_BYTES = 300_000


def at(data: Any, path: str) -> Any:
    """Follow a path such as plans.0.prediction.mfu; keys may have dots themselves."""
    if not path:
        return data
    if isinstance(data, list):
        first, _, rest = path.partition(".")
        return at(data[int(first)], rest)
    key = max((key for key in data if path == key or path.startswith(f"{key}.")), key=len)
    return at(data[key], path.removeprefix(key).removeprefix("."))


@pytest.mark.parametrize("name", rest_is_slow(["small", "dense", "experts", "long"], 1, 3))
def test_every_figure_of_a_page_is_the_one_of_its_json(name: str):
    text, data = page_of(plan_named(name))
    page = read(text)
    figures = page.every("data")
    for figure in figures:
        assert float(figure.attributes["value"]) == at(data, figure.attributes["data-path"])
    texts = {figure.attributes["data-path"]: figure.whole_text for figure in figures}
    own, step = data["plans"][0], "plans.0.prediction"
    assert texts[f"{step}.step_time_s"] == format_seconds(own["prediction"]["step_time_s"])
    assert texts[f"{step}.tokens_per_s"] == format_count(own["prediction"]["tokens_per_s"], "tokens/s")
    assert texts["plans.0.peak_bytes"] == format_bytes(own["peak_bytes"])
    if own["dollars"]:
        assert texts["plans.0.dollars.usd_per_billion_tokens"] == format_dollars(
            own["dollars"]["usd_per_billion_tokens"]
        )
    named = {path for path in texts if path.startswith(f"{step}.time_parts.")}
    assert named == {f"{step}.time_parts.{part}" for part in own["prediction"]["time_parts"]}
    sizes = [f"{step}.stage_memory.{rank}.parts" for rank in range(len(own["prediction"]["stage_memory"]))]
    assert all(any(path.startswith(size) for path in texts) for size in sizes)
    sent = sum(len(one["sent"]) for block in own["blocks"] for one in block["steps"])
    assert sum(".sent_bytes" in path and ".sent." in path for path in texts) == sent
    answers = own["search"]["answers"]
    assert {f"plans.0.search.answers.{n}.step_time_s" for n in range(len(answers))} <= texts.keys()
    assert [section.attributes["aria-labelledby"] for section in page.every("section")] == list(_SECTIONS)
    assert len(text.encode()) <= _MOST_BYTES


def test_a_page_asks_for_nothing_from_elsewhere():
    page = read(page_named("dense"))
    assert not page.every("link") and not page.every("img")
    assert not [one for one in page.every("script") if "src" in one.attributes]
    style, script = page.every("style")[0].whole_text, page.every("script")[0].whole_text
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://", style + script)
    names = {one.attributes["id"] for one in page.every("h2")}
    assert {one.attributes["href"] for one in page.every("nav")[0].every("a")} == {f"#{name}" for name in names}


def pieces(path: str) -> list[tuple[int, int]]:
    """Return the pieces of a path of one horizontal line."""
    found, end = list[tuple[int, int]](), 0
    for move, length in re.findall(r"[Mm](-?\d+) \d+h(\d+)", path):
        start = end + int(move)
        end = start + int(length)
        found.append((start, end))
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_action_is_drawn_where_the_simulation_runs_it(name: str):
    plan, step = case(name)
    drawn = read(timeline(plan, step, step.end_s).text)
    units = int(drawn.every("div")[0].attributes["data-units"])
    per_s = units / step.end_s
    for number, group in enumerate(drawn.every("g")):
        rank = step.ranks[number]
        found = list[tuple[str, int, int, int, int]]()
        for path in group.every("path"):
            if "data-stage" in path.attributes:
                spans, listed = pieces(path.attributes["d"]), [*map(int, path.attributes["data-batches"].split())]
                batches = listed if len(listed) == len(spans) else range(listed[0], listed[0] + len(spans))
                stage = int(path.attributes["data-stage"])
                found += [
                    (path.attributes["class"], stage, one, *span) for one, span in zip(batches, spans, strict=True)
                ]
        found.sort(key=lambda one: one[3])
        assert "".join(one[0] for one in found) == rank.kinds
        assert [one[1] for one in found] == rank.stages.tolist()
        assert [one[2] for one in found] == rank.micro_batches.tolist()
        starts, ends = np.array([one[3:] for one in found]).T
        assert np.abs(starts - rank.start_s * per_s).max() <= 1
        assert (ends <= rank.end_s * per_s + 1).all() and (ends > starts).all()


def test_a_step_of_many_actions_is_drawn_at_its_ends_and_says_so():
    plan, step = case("1f1b")
    rank = step.ranks[0]
    many = 3 * MOST_ACTIONS
    long = replace(
        rank,
        kinds="F" * many,
        stages=np.zeros(many, dtype=int),
        micro_batches=np.arange(many),
        start_s=np.arange(many, dtype=float),
        end_s=np.arange(1, many + 1, dtype=float),
        held_from_s=np.arange(many, dtype=float),
        held_bytes=np.full(many, 5),
    )
    whole = replace(step, ranks=(long, *step.ranks[1:]), phases=())
    drawn = timeline(plan, whole, float(many)).text
    assert len(drawn) < 200_000
    keep = MOST_ACTIONS // (2 * len(step.ranks))
    assert f"the first and the last {keep} actions" in drawn and "explain --trace" in drawn


@pytest.mark.slow
def test_several_plans_are_drawn_on_one_axis_and_each_is_compared_with_the_first():
    fast, other, third = (plan_named("small", name) for name in ("fastest", "2", "3"))
    html, data = page_of(fast, other, third)
    page = read(html)
    ends = {float(one.attributes["data-end"]) for one in page.every("div") if "data-end" in one.attributes}
    assert len(ends) == 1 and len([one for one in page.every("div") if one.attributes.get("class") == "timeline"]) == 3
    text = page.whole_text
    assert sentences(diff(fast, other), ("plan0", "plan1"))[0] in text and "plan1 against plan0" in text
    assert sentences(diff(fast, third), ("plan0", "plan2"))[0] in text and len(data["further_differences"]) == 1
    assert 'id="difference"' in html and 'id="difference-2"' in html
    parts = data["difference"]["time"]["parts"]
    paths = {figure.attributes["data-path"] for figure in page.every("data")}
    assert {f"difference.time.parts.{number}.difference" for number in range(len(parts))} <= paths


def test_plans_of_different_questions_say_what_each_rests_on_and_write_bytes_as_bytes():
    text = read(page_of(plan_named("small"), plan_named("dense"))[0]).whole_text
    assert "Seconds of plan0: " in text and "Seconds of plan1: calibrated on" in text
    assert len(re.findall(r"buckets\.\w+_bytes[\d.]+ MiB[\d.]+ MiB", text)) == 2


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_a_short_drawing_shows_every_action_outside_its_cut_in_its_place(name: str):
    plan, step = case(name)
    assert stretch_of(case("gpipe")[1]) is None  # all of it fills or drains
    short = stretch_of(step)
    assert short and short.from_s < short.until_s
    end_s = short.drawn_s(step.end_s)
    drawn = read(timeline(plan, step, end_s, short=short).text)
    assert end_s < step.end_s
    frame = drawn.every("div")[0].attributes
    assert frame["data-cut"] == f"{short.from_s:.6g} {short.until_s:.6g} {short.gap_s:.6g}"
    per_s, whole = int(frame["data-units"]) / end_s, 0
    for rank, group in zip(step.ranks, drawn.every("g"), strict=True):
        outside = (rank.start_s < short.from_s) | (rank.end_s > short.until_s)
        starts = np.sort(short.place(rank.start_s[outside])) * per_s
        paths = [path for path in group.every("path") if "data-stage" in path.attributes]
        found = sorted(start for path in paths for start, _ in pieces(path.attributes["d"]))
        assert np.abs(np.array(found) - starts).max() <= 1
        assert {path.attributes["class"] for path in paths} == set(rank.kinds)
        whole += len(found)
    assert whole < sum(len(rank.kinds) for rank in step.ranks)
    areas = [one.attributes for one in drawn.every("div") if one.attributes.get("class") == "hatched"]
    assert [float(area["data-from"]) for area in areas] == [pytest.approx(short.from_s / end_s, rel=1e-5)]
    assert "The hatched part stands for" in drawn.whole_text


@pytest.mark.slow
def test_the_head_says_one_sentence_and_a_run_comes_first():
    plan = plan_named("dense")
    assert plan.prediction
    lead = head_of_page(page_named("dense"))
    assert re.fullmatch(
        r"llama3-8b trains on [\d.]+ billion tokens a day for \$[\d,]+ on 2 x trn1.32xlarge, by prediction; .*\.", lead
    )
    small = plan_named("small")
    run = run_of(small, [6.0, 5.5])
    page = read(page_of(small, run=run)[0])
    assert head_of_page(page_of(small, run=run)[0]).startswith("The run took ")
    cards = [card.every("dt")[0].whole_text for card in page.every("dl")[0].every("div")]
    assert cards[:3] == ["step, measured", "speed, measured", "loss, measured"] and "memory, predicted" in cards
    measured_s = run["step_time_s"]["measured"]
    assert page.every("dl")[0].every("dd")[0].whole_text.startswith(format_seconds(measured_s))
    slow = {**run, "step_time_s": {**run["step_time_s"], "measured": 30 * measured_s}}
    slow |= figures_of(small, slow)
    text = page_of(small, run=slow)[0]
    assert "45 times what was predicted and outside its interval" in head_of_page(text) and "lead bad" in text
    elsewhere = {**run, "same_machine": False}
    assert "on another machine" in head_of_page(page_of(small, run=elsewhere)[0])


def head_of_page(text: str) -> str:
    return next(one.whole_text for one in read(text).every("p") if one.attributes.get("class", "").startswith("lead "))


def test_the_plan_stands_beside_what_others_run():
    plan = plan_named("dense")
    text, data = page_of(plan)
    section = next(one for one in read(text).every("section") if one.attributes["aria-labelledby"] == "others")
    heads = [one.whole_text for one in section.every("thead")[0].every("th")]
    answers = {answer["name"]: answer for answer in data["plans"][0]["search"]["answers"]}
    assert heads[:2] == ["", "this plan"] and set(heads[2:]) <= set(answers) and len(heads) > 2
    rows = {row.every("th")[0].whole_text: row for row in section.every("tbody")[0].every("tr")}
    steps = [cell.whole_text for cell in rows["step"].every("td")]
    assert steps[1:] == [format_seconds(answers[name]["step_time_s"]) for name in heads[2:]]
    assert [name for name in rows if name.startswith("against")] == ["against this plan"], "one sense of more and less"
    for name, cell in zip(heads[2:], rows["compute"].every("td")[1:], strict=True):
        assert cell.whole_text == format_seconds(answers[name]["time_parts"]["compute"])


@pytest.mark.parametrize(
    ("name", "why", "said"),
    [
        ("other", "the fastest found without a pipeline", "those of the fastest layout found without a pipeline."),
        (
            "vendor",
            "AWS NxD Training 2.26, for llama3-70b",
            "those of the layout that AWS NxD Training 2.26 documents.",
        ),
        ("fsdp", "the fastest found with FSDP", "those of FSDP."),
    ],
)
def test_the_sentence_names_what_the_plan_is_compared_with(name: str, why: str, said: str):
    page = shown("small", plan_named("small"))
    figures = page_json([page], (), None)["plans"][0]
    twice_s = 2 * prediction_of(page.plan).step_time_s
    answer = {"name": name, "why": why, "candidate": "tp=2", "against": [], "step_time_s": twice_s}
    words = headline(page, Node({**figures, "search": {"answers": [answer]}}), Node(None))
    assert words.text.endswith(f"by prediction; its steps are 50% shorter than {said}")


def test_more_than_eight_stages_are_told_apart_by_number_and_by_colour():
    request = ask("llama3-8b", "h100-80", 2, global_batch=32)
    plan = plan_at(request, Candidate.parse("tp=1,pp=16", request.cluster.num_ranks))
    axes = page_json([shown("deep", plan)], (), None)["plans"][0]
    drawn = read(mesh_section("mesh", plan, Node(axes)).text)
    cells = [cell for cell in drawn.every("i") if "data-rank" in cell.attributes]
    assert [(cell.whole_text, cell.attributes["class"]) for cell in cells] == [(str(n), f"k{n}") for n in range(16)]
    colours = dict(re.findall(r"\.(k\d+)\{([^}]*)\}", drawn.every("style")[0].whole_text))
    assert len(colours) == len(set(colours.values())) == 16


def test_the_fullest_rank_is_among_those_whose_memory_is_drawn():
    plan, step = case("1f1b")
    assert plan.prediction
    rank, memory = step.ranks[0], plan.prediction.stage_memory[0]
    full = replace(rank, idle_bytes=2 * rank.most_bytes)
    ranks = [rank] * 21
    for place in (0, 1, 13, 20):
        many = replace(step, ranks=(*ranks[:place], full, *ranks[place + 1 :]))
        long = replace(plan, prediction=replace(plan.prediction, stage_memory=(memory,) * 21))
        drawn = read(memory_charts(long, many, step.end_s).text)
        titles = [one.whole_text for one in drawn.every("figcaption")]
        assert len(titles) == MOST_MEMORIES
        assert [title for title in titles if title.startswith(f"pipeline rank {place}: ")] == [
            f"pipeline rank {place}: at most {format_bytes(full.most_bytes)}"
        ]
        assert f"Drawn are {MOST_MEMORIES} of 21 pipeline ranks" in drawn.whole_text


def test_a_page_says_one_distance_from_the_best_of_its_plan_and_names_the_plan_of_any_further_one():
    plan, fastest = plan_named("dense"), plan_named("dense", "fastest")
    assert plan != fastest
    gaps = {answer.name: answer.gap for answer in (search_record(plan) or pytest.fail("it has a search")).answers}
    simple, best = (format_at_most(gaps[name]) for name in ("simple", "fastest"))
    assert simple != best
    page, said = read(page_named("dense")).whole_text, f"simple, this plan: at most {simple} from the best; fastest: "
    assert page.count(said) == page.count(f"within {best}") == 2
    assert "this plan: " not in read(page_of(fastest)[0]).whole_text


def test_a_plan_without_a_search_says_so_and_an_edited_one_as_well():
    plan = plan_named("small")
    bare = replace(plan, provenance={key: text for key, text in plan.provenance.items() if key != "search"})
    page = read(page_of(bare)[0])
    text = page.whole_text
    assert not [one for one in page.every("figure") if one.attributes.get("class") == "chart"]
    assert text.count("This plan keeps no search") == 1
    assert "What was refused" not in text and "distance from the best" not in text
    record = json.loads(plan.provenance["search"])
    for answer in record["answers"]:
        answer["candidate"] = "tp=2,pp=1,dp=1"
    other = replace(plan, provenance={**plan.provenance, "search": json.dumps(record)})
    assert "The plan was edited since" in page_of(other)[0]


def run_of(plan: Plan, losses: list[float | None]) -> dict[str, Any]:
    assert plan.prediction
    step_s = plan.prediction.step_time_s
    steps = [
        {"step": n, "loss": loss, "time_s": step_s * (1 + n / 10), "tokens_per_s": 1e3, "phase": "steady"}
        for n, loss in enumerate(losses, 1)
    ]
    pair = {"predicted": 2**20, "measured": 2**21}
    ranks = [{"ranks": [0, 1], "memory_bytes": {"weights": pair}, "sent_bytes": {"dp": pair}}]
    both = {"predicted": step_s, "low": step_s / 2, "high": step_s * 2, "measured": step_s * 1.5}
    run = {"folder": "runs/x", "same_machine": True, "steps": steps, "step_time_s": both, "ranks": ranks}
    return {**run, **figures_of(plan, run)}


def test_a_run_that_has_ended_has_one_prediction_that_of_before_it():
    plan = plan_named("small")
    run = run_of(plan, [6.0, 5.5])
    ended = {name: seconds / 2 for name, seconds in run["step_time_s"].items()}  # predicted by other constants
    figures = figures_of(plan, {**run, "step_time_s": ended})
    assert plan.prediction and figures["predicted"]["step_time_s"] == ended["predicted"]
    assert (figures["predicted"]["low_s"], figures["predicted"]["high_s"]) == (ended["low"], ended["high"])
    assert figures["predicted"]["tokens_per_s"] == pytest.approx(2 * plan.prediction.tokens_per_s)
    ratio = figures["measured"]["tokens_per_s"] / figures["predicted"]["tokens_per_s"]
    assert ratio == pytest.approx(ended["predicted"] / ended["measured"])


def test_a_run_stands_beside_its_prediction_step_by_step_and_part_by_part():
    plan = plan_named("small")
    text, data = page_of(plan, run=run_of(plan, [6.0, None, 5.5]))
    page = read(text)
    run = next(one for one in page.every("section") if one.attributes["aria-labelledby"] == "run")
    assert [figure.attributes["data-path"] for figure in run.every("data")] == [
        *(f"run.step_time_s.{key}" for key in ("predicted", "low", "high", "measured")),
        *(
            f"run.ranks.0.{key}.{pair}"
            for key in ("memory_bytes.weights", "sent_bytes.dp")
            for pair in ("predicted", "measured")
        ),
    ]
    assert [row.every("td")[-1].whole_text for row in run.every("tr")[1:] if row.every("td")][-2:] == ["2.00", "2.00"]
    charts = [one for one in run.every("figure") if one.attributes.get("class") == "chart"]
    tips = [[dot.attributes["data-tip"] for dot in chart.every("circle")] for chart in charts]
    assert [len(own) for own in tips] == [2, 3]  # a loss that is not finite is left out
    assert data["run"]["steps"][0]["loss"] == 6.0
    marks = [one.whole_text for one in charts[1].every("text") if one.attributes["class"] == "middle"]
    assert marks == ["1", "2", "3"]  # no step and a half
    early = run_of(plan, [6.0, 5.5])
    early["steps"][0]["phase"] = "warm-up"
    assert "The times of 1 that warmed up or compiled are left out." in page_of(plan, run=early)[0]


@given(st.text(), st.text())
def test_any_text_comes_back_from_an_element_as_it_went_in(text: str, attribute: str):
    made = read(tag("p", text, data_tip=attribute).text)
    assert made.whole_text == text.replace("\r\n", "\n").replace("\r", "\n") or "\r" in text or "\0" in text
    assert made.inside[0].attributes["data-tip"] == attribute or {"\r", "\0"} & set(attribute)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_figure_keeps_its_exact_value_and_its_place(value: float):
    made = read(tag("p", Node({"a": [value]})["a"][0].figure(format_seconds)).text).every("data")[0]
    assert (float(made.attributes["value"]), made.attributes["data-path"]) == (value, "a.0")
    assert made.whole_text == format_seconds(value)
