"""What a search leaves in a plan: it comes back whole, changes nothing else of it, and keeps the right layouts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from autoshard.cost.predict import check_plan
from autoshard.errors import InputError
from autoshard.plan.codec import dump, load, plan_hash
from autoshard.plan.diff import diff
from autoshard.plan.found import SearchRecord, SolvedLayout, search_record
from autoshard.search.ask.answers import PlanResult, answers_of
from autoshard.search.ask.planner import search
from tests.search.brute_force import ask


@pytest.fixture(scope="module")
def result() -> PlanResult:
    request = ask("tiny-llama", ranks=2, global_batch=8)
    return answers_of(request, search(request, 3, simple_within=0.02))


def without_record(plan):
    return replace(plan, provenance={key: text for key, text in plan.provenance.items() if key != "search"})


@pytest.mark.slow
def test_the_record_comes_back_from_the_plan_file_with_every_answer(result: PlanResult, tmp_path: Path):
    path = result.save(tmp_path / "plan.json")
    record = search_record(load(path))
    assert record and record == search_record(result.plan)
    assert [one.name for one in record.answers] == [one.name for one in result.answers]
    for kept, answer in zip(record.answers, result.answers, strict=True):
        assert answer.plan.prediction
        assert (kept.candidate, kept.step_time_s) == (str(answer.plan.candidate), answer.plan.prediction.step_time_s)
        assert (kept.peak_bytes, kept.slower) == (answer.plan.prediction.peak_bytes, pytest.approx(answer.slower))
        assert kept.gap == pytest.approx(result.certificate.about(answer.plan).gap)
    fastest = min(record.layouts, key=lambda one: one.step_time_s)
    assert fastest.step_time_s == pytest.approx(record.answers[0].step_time_s)
    assert (record.num_legal, record.num_points) == (result.certificate.num_legal, result.certificate.num_points)
    assert record.refusals == result.certificate.refusals


@pytest.mark.slow
def test_the_record_is_no_part_of_what_is_predicted_or_compared(result: PlanResult):
    plan = result.plan
    bare = without_record(plan)
    assert plan_hash(plan) == plan_hash(bare) == (plan.prediction and plan.prediction.of)
    assert diff(plan, bare).is_nothing and not check_plan(load(dump(plan))).remark


def test_a_file_with_another_record_of_the_same_plan_is_written_anew_and_an_edited_plan_is_kept(
    result: PlanResult, tmp_path: Path
):
    path = tmp_path / "plan.json"
    path.write_text(dump(without_record(result.plan)), encoding="utf-8")
    result.save(path)
    assert search_record(load(path)) == search_record(result.plan)
    edited = dump(replace(result.plan, headroom=0.25))
    path.write_text(edited, encoding="utf-8")
    with pytest.raises(InputError, match="holds a plan that was edited, and is kept"):
        result.save(path, "2")
    assert path.read_text(encoding="utf-8") == edited


def test_a_record_that_was_edited_by_hand_is_refused_by_its_place(result: PlanResult):
    broken = json.loads(result.plan.provenance["search"])
    broken["num_legal"] = "many"
    plan = replace(result.plan, provenance={**result.plan.provenance, "search": json.dumps(broken)})
    with pytest.raises(InputError, match=r"provenance\.search\.num_legal"):
        search_record(plan)
    assert search_record(without_record(plan)) is None


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), max_size=120))
def test_of_many_layouts_those_are_kept_that_nothing_betters_and_the_fastest(
    result: PlanResult, sizes: list[tuple[int, int]]
):
    layouts = tuple(
        SolvedLayout(candidate=f"tp={number}", step_time_s=float(time_s), peak_bytes=size)
        for number, (time_s, size) in enumerate(sizes)
    )
    kept = SearchRecord.of_search(result.certificate, result.answers, layouts).layouts
    assert len(kept) == min(60, len(layouts)) and set(kept) <= set(layouts)
    both = [(one.step_time_s, one.peak_bytes) for one in layouts]
    best = {
        one for one in both if not any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in both)
    }
    shown = [(one.step_time_s, one.peak_bytes) for one in kept]
    assert len(best) > 60 or best <= set(shown)
    if layouts:
        assert shown[0] == min(both) and shown == sorted(shown)
