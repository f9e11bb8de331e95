"""Setups beside the vendors' layouts: lines of the page are what is planned, and sentences say what the terms say."""

import functools
from dataclasses import replace

import pytest

from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.search.ask.answers import VENDOR
from autoshard.search.bound.request import plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from benchmarks.pages import line, table_in
from benchmarks.plan_difference import sentence
from benchmarks.setups import MOST_CPU_S, NAME, PAGE, SETUPS, Planned, cells, judge, page_text, planned
from tests.search.brute_force import ask

QUICK = tuple(
    one for one in SETUPS if (one.model, one.cluster) in [("llama3-8b", "trn1.32xlarge"), ("llama3-8b", "b200")]
)
COMMAND = f"python -m benchmarks {NAME} --write"


@functools.cache
def quick() -> tuple[Planned, ...]:
    return planned(QUICK)


def of_a_layout(text: str) -> Plan:
    cluster = load_cluster("h100-80", 2)
    request = replace(ask("llama3-8b", seq_len=4096, global_batch=128), cluster=cluster, engines=("torch",))
    return plan_at(request, Candidate.parse(text, cluster.num_ranks), even_refused=True)


def test_there_are_25_setups_of_many_sizes_on_each_kind_of_machine():
    assert len({one.name for one in SETUPS}) == len(SETUPS) == 25
    assert {one.cluster.split("-")[0].split(".")[0] for one in SETUPS} == {"a100", "h100", "b200", "trn1", "trn2"}
    assert {one.nodes for one in SETUPS} >= {1, 512} and max(one.seq_len or 0 for one in SETUPS) == 2**20


@pytest.mark.slow
def test_lines_of_the_page_are_what_is_planned():
    table = table_in(PAGE.read_text(encoding="utf-8"), NAME)
    lines = [text.rpartition(" | ")[0] for text in table.splitlines()]  # without the time of the search
    assert len(QUICK) == 2
    for one in quick():
        assert line(cells(one)).rpartition(" | ")[0] in lines, f"{one.setup.name}: run {COMMAND}"
        assert not one.sentence or one.sentence in table, f"{one.setup.name}: run {COMMAND}"
    assert table.count("\n| ") == 2 + len(SETUPS) - 1 + 1, "a head, a rule and a line for each"


@pytest.mark.slow
def test_a_page_gets_its_table_and_a_sentence_for_each_large_difference():
    (one, _), page = quick(), f"before\n<!-- {NAME} -->\n<!-- /{NAME} -->\nafter\n"
    slow = of_a_layout("tp=8,dp=2")
    answers = [replace(answer, plan=slow) if answer.name == VENDOR else answer for answer in one.result.answers]
    other = replace(one, result=replace(one.result, answers=tuple(answers)))
    large = "9.00 GiB more than fit on a rank"
    too_large = [
        replace(answer, against=(f"{large}; as documented elsewhere it needs less",))
        if answer.name == VENDOR
        else answer
        for answer in answers
    ]
    short = page_text(page, [replace(one, result=replace(one.result, answers=tuple(too_large)))])
    assert f"may not run: {large} |" in short and "elsewhere" not in short
    text = page_text(page, [other])
    assert text.startswith("before\n") and text.endswith("after\n") and line(cells(other)) in text
    assert f"\n- **llama3-8b on {one.setup.nodes} x {one.setup.cluster}**: " in text


@pytest.mark.slow
def test_a_search_that_takes_too_long_or_overlooks_a_layout_does_not_hold():
    found = quick()
    result = judge(found)
    assert result.holds and result.extras["overlooked"] is None and result.bar == MOST_CPU_S
    assert not judge([replace(found[0], cpu_s=MOST_CPU_S + 1), *found[1:]]).holds
    (one,) = [entry for entry in found if entry.vendor][:1]
    answers = [
        replace(entry, slower=-0.1, against=()) if entry.name == VENDOR else entry for entry in one.result.answers
    ]
    missed = judge([replace(one, result=replace(one.result, answers=tuple(answers)))])
    assert not missed.holds and missed.extras["overlooked"] == one.setup.name


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("tp=2,dp=8", "tp=8,dp=2", ["less of tensor-parallel communication (tp 2 instead of 8)"]),
        ("tp=2,dp=8", "tp=2,dp=8,recompute=full", ["less of compute (recompute none instead of full)"]),
        (
            "tp=2,pp=8,dp=1,vp=2,schedule=interleaved", "tp=2,pp=8,dp=1,mbs=16",
            ["less of waiting in the pipeline (128 micro-batches through 8 ranks by interleaved, 2 chunks each"],
        ),
        ("tp=8,dp=2", "tp=2,dp=8", ["more time", "more of tensor-parallel communication (tp 8 instead of 2)"]),
    ],
)  # fmt: skip
def test_a_sentence_names_the_part_and_the_choice_behind_it(ours: str, theirs: str, said: list[str]):
    text = sentence(of_a_layout(ours), of_a_layout(theirs))
    assert text.endswith(".") and all(words in text for words in said), text


def test_a_sentence_gives_the_direction_and_plans_that_are_alike_get_none():
    fast, slow = of_a_layout("tp=2,dp=8"), of_a_layout("tp=8,dp=2")
    assert " less time than" in sentence(fast, slow) and " more time than" in sentence(slow, fast)
    assert sentence(fast, fast) == ""
