"""No notation that is printed is missing in docs/understand/reading-a-plan.md."""

import dataclasses
import re
from functools import cache

import pytest

from autoshard.blocks.explain import Explanation, explain
from autoshard.cost.timeline import RankTime, rank_times
from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import Alternatives, Certificate, Refusal, WhyNot
from autoshard.plan.plan import Plan
from autoshard.report.answers import runners_up_of
from autoshard.report.brief import brief_sheets
from autoshard.report.explanation import explanation_sheets
from autoshard.report.plan_sheets import plan_sheets
from autoshard.report.structured import answers_json, comparison_json, explanation_json, why_not_json
from autoshard.report.terminal import drawn
from autoshard.report.words import TIME_WORDS
from autoshard.schedule.builders import builders
from autoshard.search.ask.answers import answers_of
from autoshard.search.ask.choice.doubt import DOUBT
from autoshard.search.ask.planner import SearchResult, search
from tests.kit import numbered
from tests.report.printed import printed
from tests.runtime.cases import ROOT
from tests.search.brute_force import ask as request
from tests.slower import rest_is_slow

PAGE = (ROOT / "docs" / "understand" / "reading-a-plan.md").read_text(encoding="utf-8")
DATA = (ROOT / "docs" / "reference" / "plan-json.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())
QUESTIONS = {
    "70b": lambda: request("llama3-70b", "trn1.32xlarge", 16),
    "tiny": lambda: request("tiny-llama", ranks=4, global_batch=8),
    "experts": lambda: request("mixtral-8x7b", "a100-80", 2, global_batch=64, pins="ep=8,schedule=1f1b"),
}


@cache
def found(name: str) -> SearchResult:
    return search(QUESTIONS[name](), num_plans=3, simple_within=DOUBT)


@cache
def shown(name: str) -> str:
    answer = found(name)
    plan, *others = answer.plans
    sheets = plan_sheets(
        plan,
        answer.certificate,
        times=rank_times(plan),
        answers=[*answers_of(QUESTIONS[name](), answer).answers, *runners_up_of(plan, numbered(others))],
        total_tokens=2e12,
        next_step="x",
    )
    result = answers_of(QUESTIONS[name](), answer)
    first = brief_sheets(result, result.runnable(result.name), total_tokens=2e12, next_step="x")
    alternatives = Alternatives(rivals=numbered(others), unlimited_s=1.0, certificate=answer.certificate)
    return (
        printed(drawn(*first))
        + printed(drawn(*sheets))
        + printed(*explanation_sheets(plan, explain(plan), alternatives, rank_times(plan)))
    )


def headings(text: str) -> set[str]:
    """The headings of all tables: what stands above a rule."""
    lines = text.splitlines()
    above = [lines[number - 1] for number, line in enumerate(lines) if line and set(line) == {"─"}]
    return {name for line in above for name in re.split(r"\s{2,}", line.strip()) if name}


@pytest.mark.parametrize("name", rest_is_slow(["tiny", "70b", "experts"], 1, 2))
def test_labels_headings_and_words_of_the_output_stand_on_the_page(name: str):
    text = shown(name)
    labels = set(re.findall(r"^([a-z]+) {2,}\S", text.partition("Pipeline ranks")[0], re.MULTILINE))
    columns = headings(text)
    assert {"plan", "speed", "memory", "day", "total", "search", "next", "layout", "time"} <= labels
    assert {"rank", "work", "idle", "recomputed", "step", "why", "part", "optim", "rule", "operation"} <= columns
    pieces = {piece for heading in columns for piece in heading.split("; ")}
    assert (
        sorted(
            one for one in labels | pieces if f"`{one}`" not in WORDS and f"`{one}`" not in re.sub("[(;]", "`", WORDS)
        )
        == []
    )
    for axis in re.findall(r"(tensor|context|pipeline|data) \d+", text):
        assert f"{axis} " in WORDS
    for collective in re.findall(r"^ +(\w+) \w+/", text, re.MULTILINE):
        assert f"`{collective}`" in PAGE


def test_every_key_schedule_part_and_word_of_the_certificate_is_explained():
    names = [f"| `{field.name}` |" for field in dataclasses.fields(Candidate)]
    names += [f"`{words}`" for words in TIME_WORDS.values()]
    names += [f"`{name}`" for name in builders()]
    names += [
        f"`{field.name}`"
        for cls in (Certificate, Refusal)
        for field in dataclasses.fields(cls)
        if field.name not in ("refusals", "bound")
    ]
    assert [name for name in names if name not in PAGE] == []
    accounting = Certificate(num_solved=2).accounting
    for words in ("solved", "fit", "pruned by their bound", "too large for memory", "tables solved", "bound", "gap"):
        assert words in accounting and words in WORDS


def test_the_keys_of_json_are_documented():
    plan, *others = found("tiny").plans
    certificate = found("tiny").certificate
    documented = set(re.findall(r"`(\w+)`", DATA)) | {
        "candidate",
        "basis",
        "seconds_of",
        "rank",
    }
    alternatives = Alternatives(rivals=numbered(others), unlimited_s=1.0, certificate=certificate)
    none = WhyNot(pins="tp=2", rival=others[0], fits=True, against=(), flips=(), unmoved=())
    explained = explanation_json(plan, Explanation(candidate="", blocks=(), rules={}, basis=""), alternatives, ())
    why = why_not_json(plan, none)
    result = answers_of(QUESTIONS["tiny"](), found("tiny"))
    answered = answers_json(result.answers[0], result.answers, certificate)
    for data in (answered, *answered["answers"], explained, why, why["difference"]):
        assert set(data) - documented == set()
    assert {field.name for field in dataclasses.fields(RankTime)} <= documented
    assert comparison_json and isinstance(plan, Plan)
