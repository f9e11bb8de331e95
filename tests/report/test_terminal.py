"""What a person reads: golden reports, shares, where layers lie, and nothing wider than a terminal."""

import functools
import io
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from autoshard.cost.calibration import uncalibrated
from autoshard.cost.predict import predicted
from autoshard.plan.candidate import Candidate
from autoshard.plan.certificate import NOTHING_LOOKED_AT, Certificate, Refusal
from autoshard.plan.plan import Plan
from autoshard.plan.prediction import Prediction
from autoshard.plan.rules.rule import Rejection
from autoshard.report.terminal import at_commas, make_console, plan_report, rejections_report
from autoshard.search.planner import Found, search
from tests.plan.cases import ask, plan_of, with_prediction
from tests.search.brute_force import ask as request
from tests.tabled import tabled

Report = Callable[..., str]


def shown(*parts: object) -> str:
    console = make_console()
    console.file = io.StringIO()
    console.print(*parts)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def report(plan: Plan, found: Found | None = None) -> str:
    certificate = found.certificate if found else None
    return shown(plan_report(plan, found.plans[1:] if found else (), certificate, "autoshard verify plan.json"))


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("llama3-70b-trn1-16", request("llama3-70b", "trn1.32xlarge", 16)),
        ("tiny-llama-local", request("tiny-llama")),
    ],
)
def test_the_whole_report(name: str, question, golden):
    found = search(question, num_plans=5)
    text = report(found.plans[0], found)
    golden(f"report/{name}.txt", text)
    assert max(map(len, text.splitlines())) <= 120


PLANS = {
    "even": plan_of(ask(), "tp=8,pp=16,cp=4,dp=1"),
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


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return made(request.param)


def test_it_fits_a_terminal_of_120_columns(plan: Plan):
    assert max(map(len, report(plan).splitlines())) <= 120


def test_shares_of_time_add_up_to_the_whole(plan: Plan):
    table = report(plan).partition("Where the time goes")[2].partition("Memory per")[0]
    shares = [float(share) for share in re.findall(r" ([0-9.]+)%", table)]
    assert plan.prediction and len(shares) == len(plan.prediction.time_parts)
    assert abs(sum(shares) - 100) <= 0.05 * len(shares) + 1e-9


def memory_rows(plan: Plan) -> list[list[str]]:
    table = report(plan).partition("Memory per pipeline rank")[2].partition("\n\n")[0]
    return [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()[3:]]


def spans(cell: str) -> set[int]:
    pairs = (span.partition("-") for span in re.findall(r"[0-9]+-?[0-9]*", cell))
    return {number for first, _, last in pairs for number in range(int(first), int(last or first) + 1)}


def test_every_layer_and_every_rank_stands_in_one_row(plan: Plan):
    rows = memory_rows(plan)
    assert len(rows) <= 20
    ranks = [rank for row in rows for rank in sorted(spans(row[0]))]
    assert ranks == list(range(plan.schedule.num_ranks))
    if plan.schedule.num_chunks <= 4:
        layers = [layer for row in rows for layer in spans(row[1])]
        assert sorted(layers) == list(range(plan.model.num_layers))
    assert [number for number, row in enumerate(rows) if "embed" in row[1]] == [0]
    assert [number for number, row in enumerate(rows) if "head" in row[1]] == [len(rows) - 1]


def test_nodes_are_those_of_the_ranks(plan: Plan):
    for row in memory_rows(plan):
        ranks = [member for rank in spans(row[0]) for member in plan.mesh.ranks_of({"pp": rank})]
        nodes = {plan.cluster.node_of(member) for member in ranks}
        assert spans(row[2]) == nodes if "nodes" not in row[2] else int(row[2].split()[0]) == len(nodes)


def test_a_row_shows_the_fullest_of_its_ranks(plan: Plan):
    assert plan.prediction
    for row in memory_rows(plan):
        fullest = max(plan.prediction.stage_memory[rank].total for rank in spans(row[0]))
        assert row[-2] == f"{fullest / 2**30:.2f}"
        assert sum(map(float, row[3:-2])) == pytest.approx(float(row[-2]), abs=0.03)


def test_layers_of_chunks_and_of_uneven_stages_are_listed():
    assert memory_rows(made("interleaved"))[0][1] == "embed 0-3,16-19,32-35,48-51,..."
    assert [row[1] for row in memory_rows(made("uneven"))] == ["embed 0-6", "7-30", "31-53", "54-79 head"]


def test_a_long_candidate_is_broken_after_commas_and_still_reads_the_same():
    candidate = PLANS["long"].candidate
    text = report(made("long"))
    match = re.search(r"^plan (.*?)^step ", text, re.MULTILINE | re.DOTALL)
    assert match and len(match[1].strip().splitlines()) > 1
    assert Candidate.parse(match[1].strip()) == candidate


def test_breaking_at_commas_loses_nothing():
    for width in (1, 10, 40, 400):
        text = at_commas(str(PLANS["long"].candidate), width)
        assert text.replace("\n", "") == str(PLANS["long"].candidate)
        assert all(line.endswith(",") for line in text.splitlines()[:-1])


def test_what_looks_like_markup_is_text():
    plan = made("one stage")
    model = replace(plan.model, name="[red]m[/red]")
    cluster = replace(plan.cluster, name="[bold]c[/]")
    assert "[red]m[/red] (" in report(replace(plan, model=model))
    assert "on 1 x [bold]c[/]:" in report(replace(plan, cluster=cluster))
    odd = Rejection(rule_id="x", message="[red]no[/red]", source="[link=a]b[/link]")
    assert "refused [red]no[/red]\n        [link=a]b[/link]\n" in shown(rejections_report([odd]))


def test_tiny_and_huge_numbers_are_still_read():
    plan = with_prediction(PLANS["one stage"])
    assert plan.prediction
    small: Prediction = replace(
        plan.prediction, step_time_s=3e-9, low_s=1e-9, high_s=1e-8, time_parts={"compute": 3e-9}
    )
    huge: Prediction = replace(
        plan.prediction, step_time_s=4e12, low_s=1e12, high_s=1e13, time_parts={"compute": 4e12, "new part": 1e-3}
    )
    assert "step 0.0 us (0.0 us to 0.0 us)" in report(replace(plan, prediction=small))
    text = report(replace(plan, prediction=huge))
    assert max(map(len, text.splitlines())) <= 120
    assert re.search(r"new part +1.0 ms +0.0%", text)


def test_every_part_of_the_time_has_words_of_its_own():
    slow = replace(uncalibrated(), launch_s=1e-4, step_s=0.25)
    gpu = predicted(tabled(plan_of(ask("llama3-8b", "h100-80", 1), "tp=2,pp=2,cp=2,dp=1")), slow)
    experts = predicted(tabled(plan_of(ask("mixtral-8x7b", "h100-80", 1), "tp=2,ep=2,dp=4")), slow)
    assert gpu.prediction and experts.prediction
    assert {*gpu.prediction.time_parts, *experts.prediction.time_parts} == {
        "compute", "waiting", "tp", "cp", "ep", "pp", "bubble", "dp", "update", "fixed",
    }  # fmt: skip
    for plan in (gpu, experts):
        assert plan.prediction
        table = report(plan).partition("Where the time goes")[2].partition("Memory per")[0]
        names = [re.split(r"\s{2,}", line)[0] for line in table.splitlines()[3:] if line.strip()]
        assert len(set(names)) == len(plan.prediction.time_parts)
        assert not set(names) & ({*plan.prediction.time_parts} - {"compute"}), "no key of the file is left as it is"
        assert re.search(r"^waiting for kernels to start +[0-9.]+ m?s", table, re.MULTILINE)
        assert re.search(r"^fixed time of every step +250.0 ms", table, re.MULTILINE)


def test_products_of_another_format_are_said():
    plan = plan_of(ask("llama3-8b", "h100-80", 1), "tp=8")
    eight = replace(plan.workload, precision=replace(plan.workload.precision, products="fp8"))
    assert "bf16 with fp32 masters and fp8 products, adamw, ZeRO-1" in report(
        with_prediction(replace(plan, workload=eight))
    )


def test_counts_of_one_are_singular():
    text = report(made("one stage"))
    assert "1 sequence of 1 token a step" in text
    assert "1 micro-batch of 1 per data-parallel rank, 1 stage," in text


def test_padding_and_lnc_are_said():
    padded = plan_of(ask("gpt2-xl", "h100-80", 1, seq_len=1024), "tp=8")
    assert "vocab padded to 50264" in report(with_prediction(padded))
    trn2 = plan_of(ask("llama3-8b", "trn2.48xlarge", 2), "tp=4")
    assert "on 2 x trn2.48xlarge at lnc 2: 128 ranks" in report(predicted(tabled(trn2)))


def certificate(**changes: object) -> Certificate:
    return replace(NOTHING_LOOKED_AT, **{"num_points": 9, "num_legal": 5, "value": 2.0, "bound": 1.99, **changes})  # type: ignore[arg-type]


def test_refusals_come_by_number():
    refusals = tuple(Refusal(rule_id=name, num_points=count, example=f"{name}=1: no") for name, count in
                     (("few", 1), ("many", 7), ("some", 3)))  # fmt: skip
    found = Found(plans=(), nearest_miss=None, certificate=certificate(refusals=refusals, num_solved=4, num_fitting=2))
    text = report(made("one stage"), found)
    assert re.findall(r"^(many|some|few) +([0-9]+)", text, re.MULTILINE) == [("many", "7"), ("some", "3"), ("few", "1")]
    words = " ".join(text.split())
    assert "or within 0.50% of it, of 5 legal outer points" in words
    assert "4 points solved (2 fit)" in words and "bound 1.99 s, gap 0.500%" in words


def test_where_nothing_is_refused_there_is_no_table_of_it():
    found = Found(plans=(), nearest_miss=None, certificate=certificate(num_solved=5, num_fitting=5, bound=2.0))
    text = report(made("one stage"), found)
    assert "Refused" not in text and "within" not in text
    assert "5 points solved (5 fit)" in text


@pytest.mark.parametrize(("objective", "word"), [("time", "fastest"), ("memory", "smallest"), ("dollars", "cheapest")])
def test_the_claim_names_what_was_minimised_and_why_it_stopped(objective: str, word: str):
    found = certificate(objective=objective, ended="interrupted")
    assert found.claim.startswith(f"the {word} by this cost model") and "(interrupted)" in found.claim
    assert certificate(value=math.inf, bound=math.inf).gap == 0 and certificate(value=math.inf, bound=1.0).gap == 1


def test_no_rejection_prints_nothing():
    assert shown(rejections_report([])).strip() == ""


def test_a_terminal_is_used_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch):
    assert make_console().width == 120
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "77")
    assert make_console().width == 77


def test_a_price_shows_what_a_step_costs_and_how_old_it_is():
    plan = made("even")
    assert plan.prediction
    said = re.search(r"^cost \$([\d,.]+) a step, \$([\d,.]+) per billion tokens \((.*)\)$", report(plan), re.MULTILINE)
    assert said
    step, tokens = (float(amount.replace(",", "")) for amount in said.groups()[:2])
    usd = plan.prediction.step_time_s / 3600 * 16 * 21.5
    assert (step, tokens) == (round(usd, 2), round(usd / plan.workload.tokens_per_step * 1e9))
    assert said[3] == "$21.50 a node hour on demand, as of 2026-06-25; check yours"
    undated = replace(plan, cluster=replace(plan.cluster, price_date=None))
    assert "on demand, undated; check yours" in report(undated)


def test_where_no_price_is_known_no_cost_is_said():
    assert "$" not in report(made("one stage"))
