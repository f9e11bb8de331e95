"""The first screen of an answer: short, and true to the answers behind it."""

from dataclasses import replace
from functools import cache

import pytest

from autoshard.blocks.explain import explain
from autoshard.cost.doubt import ratio_of
from autoshard.plan.explanation import Alternatives, Answer
from autoshard.plan.plan import Plan
from autoshard.report.brief import brief_sheets, shown_answers
from autoshard.report.explanation import explanation_sheets
from autoshard.report.terminal import drawn, make_console
from autoshard.report.words import prediction_of, signed_words
from autoshard.search.ask.answers import PlanResult, answers_of
from autoshard.search.ask.choice.doubt import DOUBT
from autoshard.search.ask.planner import search
from autoshard.units import format_at_most, format_bytes, format_seconds
from tests.plan.cases import with_prediction
from tests.report.printed import printed
from tests.search.brute_force import ask as request

QUESTIONS = {
    "vendor": lambda: request("llama3-70b", "trn1.32xlarge", 16),
    "other": lambda: request("tiny-llama", ranks=4, global_batch=8),
}


@cache
def result_of(name: str) -> PlanResult:
    question = QUESTIONS[name]()
    return answers_of(question, search(question, num_plans=3, simple_within=DOUBT))


def screen(name: str) -> str:
    result = result_of(name)
    written = result.runnable(result.name)
    return printed(drawn(*brief_sheets(result, written, next_step="autoshard verify plan.json")))


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_first_answer_fits_on_one_screen(name: str) -> None:
    assert len(screen(name).splitlines()) <= 26


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_share_of_the_peak_is_the_one_that_comparisons_and_runs_print(name: str) -> None:
    prediction = result_of(name).runnable(result_of(name).name).prediction
    assert prediction.mfu_causal is not None
    assert f"MFU {prediction.mfu:.1%} ({prediction.mfu_causal:.1%} causal)" in screen(name)


def test_an_explanation_says_how_far_the_plan_itself_may_be_from_the_best() -> None:
    result = result_of("vendor")
    fastest, proven = result.answers[0].plan, result.certificate
    plan = next(answer.plan for answer in result.answers if answer.slower > 0.01)
    assert proven.statement_of(fastest) == proven.statement and proven.statement.startswith("the fastest by this")
    gap = 1 - proven.bound / prediction_of(plan).step_time_s
    assert proven.statement_of(plan).startswith(f"within {format_at_most(gap)} of the fastest by this cost model, of ")
    sheets = explanation_sheets(
        plan, explain(plan), Alternatives(rivals={"2": fastest}, unlimited_s=1, certificate=proven)
    )
    text = " ".join(printed(drawn(*sheets)).split())
    assert proven.statement_of(plan) in text and f"gap {format_at_most(gap)}" in text
    assert "Runners-up; slower than this plan" in text and "the fastest by this cost model, or" not in text


def test_a_plan_whose_memory_may_reach_more_than_a_rank_has_says_so() -> None:
    result = result_of("vendor")
    written = result.runnable(result.name)
    usable = written.plan.cluster.rank_memory_bytes
    for most, says in ((usable, False), (usable + 2**30, True)):
        gpu_kernels = replace(written.plan, kernels="torch_engine_gpu")
        plan = with_prediction(gpu_kernels, peak_interval_bytes=(usable - 2**30, most))
        sheets = brief_sheets(result, replace(written, plan=plan), next_step="autoshard run plan.json")
        text = " ".join(printed(drawn(*sheets)).split())
        assert (f"may reach {format_bytes(most, usable)}, which does not fit: --headroom 0.26 leaves" in text) == says


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_answer_shows_its_own_time_beside_what_is_written(name: str) -> None:
    result, text = result_of(name), screen(name)
    written = result.runnable(result.name)
    shown = shown_answers(result.answers, written.name)
    assert [answer.name for answer in shown][:2] == [written.name, name]
    for answer in shown:
        line = next(line for line in text.splitlines() if line.startswith(f"{answer.name} "))
        assert format_seconds(prediction_of(answer.plan).step_time_s) in line
        if answer.plan is not written.plan:
            ratio = ratio_of(answer.plan, written.plan)
            assert f"{signed_words(ratio.low - 1)} to {signed_words(ratio.high - 1)}" in line, (
                "no gain without its interval"
            )


def test_an_answer_that_is_another_by_name_only_is_shown_once() -> None:
    result = result_of("vendor")
    plan: Plan = result.answers[0].plan
    alike = [Answer(name=name, plan=plan, why="", slower=0.0) for name in ("simple", "vendor", "fastest")]
    assert [answer.name for answer in shown_answers(alike, "simple")] == ["simple"]


def test_a_reader_that_goes_away_ends_the_answer_and_not_the_program_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = make_console()

    def gone(_: str) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(console.file, "write", gone, raising=False)
    with pytest.raises(BrokenPipeError):
        console.print("text")


def test_what_the_choice_hinges_on_follows_the_answers_that_it_is_about() -> None:
    result = replace(result_of("vendor"), remarks=("interleaved would be 2.0% faster, which nobody has measured",))
    text = printed(drawn(*brief_sheets(result, result.runnable(result.name))))
    assert text.startswith("llama3-70b (70.55 G parameters)")
    assert text.index("Answers; ") < text.index("\n\ninterleaved would be 2.0% faster") < text.index("\nprediction ")
