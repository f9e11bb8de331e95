"""What compare and explain print: golden, no wider than a terminal, and said as a person would."""

import dataclasses
import json
import re

import pytest

from autoshard.blocks.explain import explain
from autoshard.cost.built_in import calibration_of
from autoshard.cost.doubt import compared as compared_plans
from autoshard.plan.candidate import Candidate
from autoshard.plan.diff import diff
from autoshard.plan.explanation import Alternatives, Flip, WhyNot
from autoshard.plan.plan import StageMemory
from autoshard.report import comparison
from autoshard.report.comparison import comparison_sheets, misfits, sentences, why_not_sheets
from autoshard.report.explanation import explanation_sheets
from autoshard.report.sheet import Node
from autoshard.report.structured import comparison_json, why_not_json
from autoshard.report.terminal import drawn
from autoshard.search.ask.what_if import alternatives
from autoshard.search.bound.request import plan_at
from tests.plan.cases import ask as question, plan_of
from tests.plan.test_diff import predicted
from tests.report.printed import printed
from tests.search.brute_force import ask

FEW = plan_of(question(nodes=8), "tp=32,pp=8")


def compared(found, remarks=()):
    return printed(
        drawn(*comparison_sheets(found, Node(comparison_json(found, remarks)), ("old.json", "[red]new.json")))
    )


@pytest.mark.slow
def test_the_whole_comparison_and_explanation(golden):
    request = ask("llama3-70b", "trn1.32xlarge", 16)
    a, b = (plan_at(request, Candidate.parse(text)) for text in ("tp=32,pp=8,dp=2", "tp=8,pp=8,dp=8,recompute=full"))
    golden("report/compare-llama3-70b-trn1-16.txt", compared(compared_plans(a, b), ["new.json: was edited"]))
    report = drawn(*explanation_sheets(a, explain(a), alternatives(a, calibration_of(a))))
    golden("report/explain-llama3-70b-trn1-16.txt", printed(report))


@pytest.mark.parametrize(
    ("cluster", "text", "sums"),
    [
        ("h100-80", "tp=8,dp=1,kernels=mcore", r"compute .*, waiting .*, sending .*, .* of it hidden"),
        ("trn1.32xlarge", "tp=32,dp=1", r"compute [0-9.]+ ms, sending [0-9.]+ ms"),
    ],
)
def test_what_waits_and_what_hides_is_said_only_where_it_is(cluster, text, sums):
    plan = plan_at(ask("llama3-8b", cluster), Candidate.parse(text))
    found = printed(*explanation_sheets(plan, explain(plan), Alternatives(rivals={}, unlimited_s=1e-3)))
    assert re.search(rf"^layer, 32 times: .* \({sums}\)$", found, re.MULTILINE)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (
            {"compute": 200.0, "bubble": 14.1, "tp": 11.2},
            {"compute": 200.0, "bubble": 10.0, "tp": 12.4},
            "b is 1.3% faster (222.40 s against 225.30 s a step), mostly because waiting in the pipeline takes 4.10 s "
            "less; tensor-parallel communication takes 1.20 s more",
        ),
        (
            {"compute": 10.0, "pp": 1.0, "mine": 1.0},
            {"compute": 10.0, "pp": 2.0, "mine": 1.5},
            "b is 12.5% slower (13.50 s against 12.00 s a step), mostly because sends between stages take 1.00 s more "
            "and mine 500.0 ms more",
        ),
        ({"compute": 1.0}, {"compute": 3.0}, "b takes 3.0 times as long (3.00 s against 1.00 s a step), mostly"),
        ({"compute": 3.0}, {"compute": 1.0}, "b is 3.0 times as fast (1.00 s against 3.00 s a step), mostly"),
        ({"compute": 1.0}, {"compute": 1.0001}, "b is less than 0.1% slower (1.00 s against 1.00 s a step), mostly"),
    ],
)
def test_the_first_sentence_says_which_is_faster_and_why(a, b, words):
    assert sentences(diff(predicted(parts=a), predicted(parts=b)))[0].startswith(words)


def test_equal_plans_and_equal_seconds_are_said_to_be_equal():
    plan, other = predicted(), predicted(plan_of(question(), "tp=32,pp=8,zero=0"))
    assert sentences(diff(plan, plan)) == ["nothing differs: the plans are the same, 10.00 s a step"]
    text = compared(diff(plan, plan))
    assert "What" not in text and text.count("\n") == 6
    assert sentences(diff(plan, other)) == ["b takes as long as a, 10.00 s a step"]
    text = compared(diff(plan, other))
    assert "zero" in text and "Time of a step" not in text and "Sent in" not in text


def test_a_difference_inside_the_intervals_is_not_known_to_be_real():
    said = sentences(diff(predicted(parts={"compute": 10.0}), predicted(parts={"compute": 10.5})))
    assert said[1:] == [
        "each lies within the other's interval (a factor of 1.10 for a, 1.10 for b), "
        "so a prediction cannot say which is faster"
    ]
    assert len(sentences(diff(predicted(parts={"compute": 10.0}), predicted(parts={"compute": 12.0})))) == 1


def test_other_questions_are_compared_by_token_rank_and_dollar():
    plan = plan_of(question(seq_len=16384), "tp=32,pp=8")
    longer = predicted(plan, {"compute": 15.0}, tokens_per_s=plan.workload.tokens_per_step / 15)
    said = sentences(diff(predicted(), longer))
    assert said[0] == "the plans answer different questions: workload differs"
    assert said[1].startswith("b has 33.3% more tokens/s (1.12 M against 838.86 k); 33.3% more tokens per dollar (")
    text = compared(diff(predicted(), longer))
    assert "Time per million tokens" in text and "The questions differ in" in text
    few = sentences(diff(predicted(), predicted(FEW)))
    assert few[0].endswith("cluster differs")
    assert few[1].startswith("b has as many tokens/s, 838.86 k; 2.0 times the tokens/s per rank (3.28 k against 1.64 k")
    model = sentences(diff(predicted(), predicted(plan_of(question("llama3-8b", nodes=8), "tp=32,pp=8"))))
    assert model[0].endswith("cluster and model differ") and model[2].startswith(
        "a token costs each model different work"
    )


def test_what_does_not_fit_and_what_rests_on_other_grounds_is_said():
    large = (StageMemory(num_weights=1, parts={"weights": 20 * 2**30}),) * 8
    found = diff(predicted(), predicted(stage_memory=large, basis="measured by me", parts={"compute": 20.0}))
    assert misfits(found) == ["b does not fit in memory: 20.00 of 16.00 GiB"]
    assert sentences(found)[1].startswith("the predictions use different calibrations")
    text = compared(found, ["new.json: prediction: was edited"])
    assert "prediction of b measured by me" in text and "note: new.json: prediction: was edited" in text


def with_tables(*tables):
    return diff(*(predicted(dataclasses.replace(FEW, strategies=table)) for table in tables))


def test_long_lists_and_texts_are_cut_and_counted():
    many = ({"layer": {f"op{number}": f"[{side}]" for number in range(9)}} for side in ("x", "y"))
    assert "Layouts of operations: 9 lines differ, the first 6 are printed" in " ".join(
        compared(with_tables(*many)).split()
    )
    one = ({"layer": {"op": side}} for side in "xy")
    assert "Layouts of operations: 1 line differs layer, op a x b y" in " ".join(compared(with_tables(*one)).split())
    lone = {"layer full": {"op": "x"}}
    assert "only a has this block" in compared(with_tables(lone, {}))
    assert "only b has this block" in compared(with_tables({}, lone))
    provenances = ({f"key{number}": side * 300 for number in range(20)} for side in "xy")
    text = compared(diff(*(predicted(dataclasses.replace(FEW, provenance=one)) for one in provenances)))
    assert "and 4 more" in text and "x" * 300 not in "".join(text.split())


def test_as_data_there_are_the_sentences_and_every_term():
    found = diff(predicted(parts={"compute": 8.0, "tp": 2.0}), predicted(parts={"compute": 9.0, "tp": 3.0}))
    data = json.loads(json.dumps(comparison_json(found, ["remark"])))
    assert data["summary"] == sentences(found) and isinstance(data["memory"]["total"]["a"], int)
    assert (data["slower_by"], data["within_intervals"], data["seconds_of"]) == (0.2, False, "a step")
    assert data["time"]["total"] == {"name": "total", "a": 10.0, "b": 12.0, "difference": 2.0}
    assert data["time"]["parts"][0] == {"name": "compute", "a": 8.0, "b": 9.0, "difference": 1.0, "share": 0.5}
    assert data["a"]["dollars"]["price_date"] == "2026-06-25" and data["remarks"] == ["remark"]


FLIPS = (
    Flip(name="global batch", now=1024, then=128),
    Flip(name="memory of a rank", now=16 * 2**30, then=8 * 2**30),
    Flip(name="bandwidth of all links", now=1.0, then=2.5),
)


def found_of(other, **changes):
    values = {"pins": "tp=32", "rival": other, "fits": True, "against": (), "flips": (), "unmoved": (), **changes}
    return WhyNot(**values)


def why_not(plan, answer):
    return printed(drawn(*why_not_sheets(plan, answer, Node(why_not_json(plan, answer)))))


def test_another_layout_is_compared_and_what_would_turn_the_order_follows():
    own, other = predicted(), predicted(plan_of(question(), "tp=8,pp=8"), {"compute": 20.0})
    found = found_of(other, flips=FLIPS, unmoved=("sequence length",))
    text = why_not(own, found)
    assert "the best with tp=32" in text and "b takes 2.0 times as long" in text
    for words in (
        " 0.125",
        "8.00 GiB",
        "250%",
        "a change of up to 16 times does not make b the faster: sequence length",
    ):
        assert words in text
    data = json.loads(json.dumps(why_not_json(own, found)))
    assert data["other"]["candidate"] == str(other.candidate) and data["pins"] == "tp=32"
    assert [flip["factor"] for flip in data["flips"]] == [0.125, 0.5, 2.5]
    assert "the plan has these values already" in why_not(own, found_of(own))
    refused = found_of(None, fits=False, against=("--why-not tp=3: no",))
    assert why_not(own, refused).strip() == "refused --why-not tp=3: no"
    assert why_not_json(own, refused)["other"] is None
    text = why_not(own, found_of(other, fits=False, against=("too large",)))
    assert "refused too large" in text and "the smallest with tp=32" in text


def test_parts_that_differ_beside_equal_totals_have_no_share_of_a_difference():
    row = {"name": "compute", "a": 2.0, "b": 1.0, "difference": -1.0, "share": None}
    rows = [row, {**row, "name": "idle", "a": 1.0, "b": 2.0, "difference": 1.0}]
    whole = Node({"parts": rows, "total": {"name": "all", "a": 3.0, "b": 3.0, "difference": 0.0, "share": None}})
    text = printed(comparison._breakdown("Time", whole, lambda size, _: f"{size} s", ("this", "that")))
    assert "+1.0 s" in text and "same" in text and "%" not in text
