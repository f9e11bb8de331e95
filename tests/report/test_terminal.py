"""What a person reads: golden reports, shares, where layers lie, and nothing wider than a terminal."""

import functools
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from autoshard.cost.calibration import uncalibrated
from autoshard.cost.predict import predicted
from autoshard.plan.explanation import Certificate, Refusal
from autoshard.plan.plan import Plan
from autoshard.plan.proof import BlockProof, Proof
from autoshard.plan.rules.rule import Rejection
from autoshard.report.terminal import (
    TIME_WORDS,
    at_commas,
    frontier_report,
    make_console,
    plan_report,
    proof_report,
    rejections_report,
)
from autoshard.search.planner import SearchResult, search
from tests.plan.cases import ask, plan_of, with_prediction
from tests.report.printed import printed
from tests.search.brute_force import ask as request
from tests.tabled import tabled


def report(plan: Plan, found: SearchResult | None = None) -> str:
    certificate = found.certificate if found else None
    return printed(plan_report(plan, found.plans[1:] if found else (), certificate))


def test_the_whole_report(golden):
    found = search(request("llama3-70b", "trn1.32xlarge", 16), num_plans=5)
    golden("report/llama3-70b-trn1-16.txt", report(found.plans[0], found))


PLANS = {
    "interleaved": plan_of(ask(), "tp=8,pp=4,vp=5,dp=16,schedule=interleaved"),
    "uneven": plan_of(ask(), "tp=32,pp=4,stages=7/24/23/26"),
    "deep": plan_of(ask("llama3.1-405b", nodes=64), "tp=8,pp=64,cp=4,dp=1,recompute=selective[LlamaMLP]"),
    "long": plan_of(ask(), "tp=8,pp=8,dp=8,recompute=" + "/".join(["selective[CoreAttention,LlamaMLP]", "full:4"] * 4)),
    "one stage": plan_of(ask("tiny-llama", "local", 1, seq_len=1, global_batch=1), "tp=2,cp=2"),
    "mid-node": plan_of(ask(nodes=3, global_batch=1023), "tp=8,pp=4,dp=3"),
}


@functools.cache
def made(name: str) -> Plan:
    return predicted(tabled(PLANS[name]))


@functools.cache
def reported(name: str) -> str:
    return report(made(name))


def memory_rows(name: str) -> list[list[str]]:
    table = reported(name).partition("Memory per pipeline rank")[2].partition("\n\n")[0]
    return [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()[3:]]


def spans(cell: str) -> set[int]:
    pairs = (span.partition("-") for span in re.findall(r"[0-9]+-?[0-9]*", cell))
    return {number for first, _, last in pairs for number in range(int(first), int(last or first) + 1)}


@pytest.mark.parametrize("name", PLANS)
def test_every_layer_and_every_rank_stands_in_one_row_of_memory(name: str):
    plan, rows = made(name), memory_rows(name)
    assert len(rows) <= 20 and plan.prediction
    ranks = [rank for row in rows for rank in sorted(spans(row[0]))]
    assert ranks == list(range(plan.schedule.num_ranks))
    if plan.schedule.num_chunks <= 3:
        layers = [layer for row in rows for layer in spans(row[1])]
        assert sorted(layers) == list(range(plan.model.num_layers))
    assert [number for number, row in enumerate(rows) if "embed" in row[1]] == [0]
    assert [number for number, row in enumerate(rows) if "head" in row[1]] == [len(rows) - 1]
    for row in rows:
        members = [member for rank in spans(row[0]) for member in plan.mesh.ranks_of({"pp": rank})]
        nodes = {member // plan.cluster.ranks_per_node for member in members}
        assert spans(row[2]) == nodes if "nodes" not in row[2] else int(row[2].split()[0]) == len(nodes)
        fullest = max(plan.prediction.stage_memory[rank].total for rank in spans(row[0]))
        assert row[-2] == f"{fullest / 2**30:.2f}"
        assert sum(map(float, row[3:-2])) == pytest.approx(float(row[-2]), abs=0.03)


def test_layers_of_chunks_and_of_uneven_stages_are_listed():
    assert memory_rows("interleaved")[0][1] == "embed 0-3,16-19,32-35,..."
    assert [row[1] for row in memory_rows("uneven")] == ["embed 0-6", "7-30", "31-53", "54-79 head"]


def test_a_long_candidate_is_broken_after_commas():
    candidate = str(PLANS["long"].candidate)
    for width in (1, 40, 400):
        text = at_commas(candidate, width)
        assert text.replace("\n", "") == candidate and all(line.endswith(",") for line in text.splitlines()[:-1])


def test_what_looks_like_markup_is_text():
    plan = made("one stage")
    text = report(
        replace(plan, model=replace(plan.model, name="[red]m[/red]"), cluster=replace(plan.cluster, name="[bold]c[/]"))
    )
    assert "[red]m[/red] (" in text and "on 1 x [bold]c[/]:" in text
    odd = Rejection(rule_id="x", message="[red]no[/red]", source="[link=a]b[/link]")
    assert "refused [red]no[/red]\n        [link=a]b[/link]\n" in printed(rejections_report([odd]))


def test_every_part_of_the_time_has_words_of_its_own():
    slow = replace(uncalibrated(), launch_s=1e-4, step_s=0.25)
    gpu = predicted(tabled(plan_of(ask("llama3-8b", "h100-80", 1), "tp=2,pp=2,cp=2,dp=1")), slow)
    experts = predicted(tabled(plan_of(ask("mixtral-8x7b", "h100-80", 1), "tp=2,ep=2,dp=4")), slow)
    assert gpu.prediction and experts.prediction
    assert {*gpu.prediction.time_parts, *experts.prediction.time_parts} == set(TIME_WORDS)
    assert len(set(TIME_WORDS.values())) == len(TIME_WORDS)
    assert "waiting in the pipeline" in report(gpu) and "expert-parallel" in report(experts)


def test_the_headline_says_formats_padding_lnc_and_counts_of_one():
    plan = plan_of(ask("llama3-8b", "h100-80", 1), "tp=8")
    eight = replace(plan.workload, precision=replace(plan.workload.precision, products="fp8"))
    text = report(with_prediction(replace(plan, workload=eight)))
    assert "bf16 with fp32 masters and fp8 products, adamw, ZeRO-1" in text
    assert "1 sequence of 1 token a step" in reported("one stage")
    assert "1 micro-batch of 1 per data-parallel rank, 1 stage," in reported("one stage")
    padded = plan_of(ask("gpt2-xl", "h100-80", 1, seq_len=1024), "tp=8")
    assert "vocab padded to 50264" in report(with_prediction(padded))
    trn2 = plan_of(ask("llama3-8b", "trn2.48xlarge", 2), "tp=4")
    assert "on 2 x trn2.48xlarge at lnc 2: 128 ranks" in report(with_prediction(trn2))


def certificate(**changes: object) -> Certificate:
    return replace(Certificate(), **{"num_points": 9, "num_legal": 5, "value": 2.0, "bound": 1.99, **changes})  # type: ignore[arg-type]


def test_refusals_come_by_number_and_the_claim_names_what_was_minimised_and_why_it_stopped():
    counts = {"few": 1, "many": 7, "some": 3}
    refusals = tuple(Refusal(rule_id=key, num_points=count, example=f"{key}=1: no") for key, count in counts.items())
    whole = certificate(refusals=refusals, num_solved=4, num_fitting=2)
    text = report(made("one stage"), SearchResult(plans=(), nearest_miss=None, certificate=whole))
    assert re.findall(r"^(many|some|few) +([0-9]+)", text, re.MULTILINE) == [("many", "7"), ("some", "3"), ("few", "1")]
    words = " ".join(text.split())
    assert "or within 0.50% of it, of 5 legal outer points" in words
    assert "4 points solved (2 fit)" in words and "bound 1.99 s, gap 0.500%" in words
    for objective, word in (("time", "fastest"), ("memory", "smallest"), ("dollars", "cheapest")):
        found = certificate(objective=objective, ended="interrupted")
        assert found.statement.startswith(f"the {word} by this cost model") and "(interrupted)" in found.statement
    assert certificate(value=math.inf, bound=math.inf).gap == 0 and certificate(value=math.inf, bound=1.0).gap == 1


def test_a_terminal_is_used_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch):
    assert make_console().width == 120
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "77")
    assert make_console().width == 77


def test_a_price_shows_what_a_step_costs_and_how_old_it_is():
    plan, text = made("uneven"), reported("uneven")
    assert plan.prediction and "$" not in reported("one stage"), "no price of this machine is known"
    said = re.search(r"^cost \$([\d,.]+) a step, \$([\d,.]+) per billion tokens \((.*)\)$", text, re.MULTILINE)
    assert said
    step, tokens = (float(amount.replace(",", "")) for amount in said.groups()[:2])
    usd = plan.prediction.step_time_s / 3600 * 16 * 21.5
    assert (step, tokens) == (round(usd, 2), round(usd / plan.workload.tokens_per_step * 1e9))
    assert said[3] == "$21.50 a node hour on demand, as of 2026-06-25; check yours"
    undated = replace(plan, cluster=replace(plan.cluster, price_date=None))
    assert "on demand, undated; check yours" in report(undated)


def test_a_frontier_has_a_line_per_plan():
    plans = [made("uneven"), made("interleaved")]
    text = printed(frontier_report(plans, 0.0005, "complete"))
    assert text.count("tp=") == 2 and "cost a step" in text and "within 0.05%" in text
    assert "there may be more" not in " ".join(text.split())
    stopped = printed(frontier_report(plans, 0.0, "stopped after 3 s"))
    assert "stopped after 3 s: there may be more" in " ".join(stopped.split())
    assert "node seconds" in printed(frontier_report([made("one stage")], 0.0, "complete"))


def test_a_proof_names_what_was_executed_what_was_left_out_and_differences():
    good = BlockProof(name="layer", error=2e-16, num_results=11, collectives={"all_gather": 4})
    bad = BlockProof(name="head", error=0.5, num_results=4, collectives={})
    proof = Proof(candidate="tp=2,pp=1,dp=2", lost=("ep=8: not kept here",), blocks=(good, bad))
    text = printed(proof_report(proof))
    assert "tp=2,pp=1,dp=2" in text and "4 all_gather" in text and "not kept: ep=8" in text
    assert "  equal   layer" in text and "  DIFFERS head" in text and "no collectives" in text
