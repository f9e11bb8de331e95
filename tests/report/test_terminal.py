"""What a person reads: golden reports, a first screen, shares, where layers lie, and nothing wider than a terminal."""

import functools
import math
import re
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console

from autoshard.blocks.explain import explain
from autoshard.cost.calibration import uncalibrated
from autoshard.cost.doubt import ratio_of
from autoshard.cost.predict import predicted
from autoshard.cost.timeline import rank_times, timeline_of
from autoshard.plan.explanation import Alternatives, Answer, Certificate, NearestRun, Refusal
from autoshard.plan.plan import Plan
from autoshard.plan.proof import BlockProof, Proof
from autoshard.plan.rules.rule import Rejection
from autoshard.report.answers import answers_sheet, runners_up_of
from autoshard.report.brief import brief_sheets, shown_answers
from autoshard.report.explanation import explanation_sheets
from autoshard.report.plan_sheets import (
    frontier_sheets,
    memory_table,
    plan_figures,
    plan_sheets,
    proof_sheet,
    refused_sheet,
    rejections_sheet,
    stage_table,
    time_sheet,
    work_words,
)
from autoshard.report.sheet import Bar, Node, Table, plain
from autoshard.report.structured import answers_json
from autoshard.report.terminal import drawn, make_console
from autoshard.report.words import TIME_WORDS, again_of, layout_words, prediction_of, ratio_words, signed_words
from autoshard.search.ask.answers import PlanResult, answers_of
from autoshard.search.ask.choice.doubt import DOUBT
from autoshard.search.ask.planner import SearchResult, search
from autoshard.spec.record import encode
from autoshard.units import format_at_most, format_bytes, format_seconds
from tests.kit import numbered
from tests.plan.cases import ask, plan_of, with_prediction
from tests.report.printed import printed
from tests.search.brute_force import ask as request
from tests.tabled import tabled


def report(plan: Plan, found: SearchResult | None = None) -> str:
    certificate, others = (found.certificate, found.plans[1:]) if found else (None, ())
    times = rank_times(plan) if plan.strategies else ()
    return printed(drawn(*plan_sheets(plan, certificate, answers=runners_up_of(plan, numbered(others)), times=times)))


def figures(plan: Plan) -> Node:
    return Node(plan_figures(plan, rank_times(plan)))


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
    table = printed(memory_table(made(name), figures(made(name))))
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
        assert row[8] == f"{fullest / 2**30:.2f}"
        assert sum(map(float, row[3:8])) == pytest.approx(float(row[8]), abs=0.03)


def test_layers_of_chunks_and_of_uneven_stages_are_listed():
    assert memory_rows("interleaved")[0][1] == "embed 0-3,16-19,32-35,..."
    assert [row[1] for row in memory_rows("uneven")] == ["embed 0-6", "7-30", "31-53", "54-79 head"]


@pytest.mark.parametrize("name", PLANS)
def test_the_work_and_the_idle_time_of_a_rank_are_those_of_the_simulated_step(name: str):
    plan, step = made(name), timeline_of(made(name))
    for own, rank in zip(rank_times(plan), step.ranks, strict=True):
        assert (own.work_s, own.sending_s) == pytest.approx((rank.busy_s, rank.sending_s), rel=1e-6, abs=1e-9)
        assert sum((own.work_s, own.sending_s, own.idle_s)) == pytest.approx(step.makespan_s, rel=1e-6)


NUMBER = re.compile(r"\d[\d.,]*")


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("name", PLANS)
def test_on_narrow_terminals_numbers_and_candidates_stay_whole_and_ascii_is_ascii(name: str, width: int):
    plan = made(name)
    tables = [stage_table(plan, figures(plan)), memory_table(plan, figures(plan))]
    wide = {number for table in tables for row in table.rows for cell in row for number in NUMBER.findall(plain(cell))}
    for encoding in ("utf-8", "ascii"):
        text = printed(
            drawn(*plan_sheets(plan, answers=runners_up_of(plan, numbered([plan])), times=rank_times(plan))),
            width=width,
            encoding=encoding,
        )
        assert "…" not in text and str(plan.candidate) in text, "it can be pasted"
        too_wide = [
            line
            for line in text.splitlines()
            if len(line) > width and len(line.split()) > 1 and str(plan.candidate) not in line
        ]
        assert not too_wide
        assert encoding == "utf-8" or text.isascii()
        for table in tables:
            shown = printed(table, width=width, encoding=encoding)
            assert (
                max(map(len, shown.splitlines())) <= width
                and set(NUMBER.findall(shown.partition("\n")[2])) <= wide | NUMBERS_OF_TITLES
            )


NUMBERS_OF_TITLES = {"3.60", "14.40", "21.60", "71.19", "71.25", "85.52"}


def test_bars_go_first_then_columns_in_their_order_then_rows_become_lines():
    table = Table(
        "T",
        ("name", ">share", "", ">cost"),
        [["alpha", "50%", Bar(0.5, 10), "1,234"]],
        whole=("name",),
        drop=(">share",),
    )
    shown = {width: printed(table, width=width) for width in (40, 30, 20, 14, 8)}
    assert "█████" in shown[40] and "50%" in shown[30] and "█" not in shown[20] and "50%" in shown[20]
    assert "50%" not in shown[14] and "1,234" in shown[14]
    assert shown[8] == "T\nname  alpha\ncost  1,234\n"
    assert "#####" in printed(table, width=40, encoding="ascii")


def test_what_looks_like_markup_is_text():
    plan = made("one stage")
    text = report(
        replace(plan, model=replace(plan.model, name="[red]m[/red]"), cluster=replace(plan.cluster, name="[bold]c[/]"))
    )
    assert "[red]m[/red] (" in text and "on 1 x [bold]c[/]:" in text
    odd = Rejection(rule_id="x", message="[red]no[/red]", source="[link=a]b[/link]")
    assert "refused [red]no[/red]\n        [link=a]b[/link]\n" in printed(rejections_sheet([odd]))


def test_every_part_of_the_time_has_words_of_its_own():
    slow = replace(uncalibrated(), launch_s=1e-4, step_s=0.25)
    gpu = predicted(tabled(plan_of(ask("llama3-8b", "h100-80", 1), "tp=2,pp=2,cp=2,dp=1,kernels=te")), slow)
    experts = predicted(tabled(plan_of(ask("mixtral-8x7b", "h100-80", 1), "tp=2,ep=2,dp=4")), slow)
    host = predicted(tabled(plan_of(ask("llama3-8b", "a100-80", 1), "tp=2,pp=2,dp=2,recompute=none/full+offload")))
    assert gpu.prediction and experts.prediction
    alone = predicted(tabled(plan_of(ask("llama3-8b", "a100-80", 1), "tp=2,pp=2,dp=2,recompute=none+offload")))
    parts = (plan.prediction.time_parts for plan in (gpu, experts, alone) if plan.prediction)
    assert set().union(*parts) == set(TIME_WORDS)
    assert "no recompute, activations in host memory" in layout_words(alone)
    assert again_of(host, [1]) == "everything (host memory)" and again_of(host, [0]) == "nothing"
    assert len(set(TIME_WORDS.values())) == len(TIME_WORDS)
    assert "waiting in the pipeline" in printed(time_sheet(figures(gpu)))
    assert "expert-parallel" in printed(time_sheet(figures(experts)))


def test_the_headline_says_formats_padding_lnc_and_counts_of_one():
    plan = plan_of(ask("llama3-8b", "h100-80", 1), "tp=8")
    eight = replace(plan.workload, precision=replace(plan.workload.precision, products="fp8"))
    text = report(with_prediction(replace(plan, workload=eight)))
    assert "bf16 with fp32 masters and fp8 products, adamw, ZeRO-1" in text
    assert "1 sequence of 1 token a step" in reported("one stage")
    assert "; 1f1b with 1 micro-batch of 1 sequence;" in reported("one stage")
    padded = plan_of(ask("gpt2-xl", "h100-80", 1, seq_len=1024), "tp=8")
    assert "vocab padded to 50264" in report(with_prediction(padded))
    trn2 = plan_of(ask("llama3-8b", "trn2.48xlarge", 2), "tp=4")
    assert "on 2 x trn2.48xlarge at lnc 2: 128 ranks" in report(with_prediction(trn2))


def test_the_headline_says_over_how_many_ranks_states_are_divided():
    text, keys = "tp=1,pp=1,dp=32,zero=3", ("", ",zero_group=8", ",zero_group=8,weight_group=4")
    whole, nodes, parts = (plan_of(ask(cluster_name="h100-80", nodes=4), text + more) for more in keys)
    assert "ZeRO-3" in work_words(whole) and "groups" not in work_words(whole)
    assert "ZeRO-3 over groups of 8 ranks" in work_words(nodes) and "weights" not in work_words(nodes)
    assert "ZeRO-3 over groups of 8 ranks (weights over 4 ranks)" in work_words(parts)


def certificate(**changes: object) -> Certificate:
    return replace(Certificate(), **{"num_points": 9, "num_legal": 5, "value": 2.0, "bound": 1.99, **changes})  # type: ignore[arg-type]


def test_refusals_come_by_number_and_the_statement_names_what_was_minimised_and_why_it_stopped():
    counts = {"few": 1, "many": 7, "some": 3}
    refusals = tuple(Refusal(rule_id=key, num_points=count, example=f"{key}=1: no") for key, count in counts.items())
    whole = certificate(refusals=refusals, num_solved=4, num_fitting=2)
    text = printed(refused_sheet(Node({**encode(whole), "accounting": whole.accounting}), whole.statement))
    assert re.findall(r"^(many|some|few) +([0-9]+)", text, re.MULTILINE) == [("many", "7"), ("some", "3"), ("few", "1")]
    words = " ".join(text.split())
    assert "or within 0.50% of it, of 5 legal layouts" in words
    assert "4 points solved (2 fit)" in words and "bound 1.99 s, gap 0.50%" in words
    for objective, word in (("time", "fastest"), ("memory", "smallest"), ("dollars", "cheapest")):
        found = certificate(objective=objective, ended="interrupted")
        assert found.statement.startswith(f"the {word} by this cost model") and "(interrupted)" in found.statement
    assert certificate(value=math.inf, bound=math.inf).gap == 0 and certificate(value=math.inf, bound=1.0).gap == 1


def test_the_first_lines_say_what_was_not_finished_and_how_much_better_a_plan_may_be():
    plan = made("uneven")
    text = printed(drawn(*plan_sheets(plan, certificate(ended="interrupted"))))
    assert text.startswith("The search was not finished (interrupted): this is the best plan so far")
    done = printed(
        drawn(*plan_sheets(plan, certificate(), total_tokens=2e12, next_step="autoshard verify plan.json")), width=80
    )
    first = done.splitlines()[:13]
    assert first[0].startswith("llama3-70b (70.55 G") and "next     autoshard verify plan.json" in first
    assert "search   5 legal layouts searched: none can be more than 0.50% faster" in first
    prediction, dollars = plan.prediction, plan.dollars
    assert prediction and dollars
    days = 2e12 / prediction.tokens_per_s / 86_400
    usd, times = 2000 * dollars.usd_per_billion_tokens, prediction.high_s / prediction.step_time_s
    total = f"total 2 trillion tokens take {days:,.1f} days and ${usd:,.0f}; up to {times * days:,.1f} days and"
    assert f"{total} ${times * usd:,.0f} search" in " ".join(" ".join(first).split())
    assert "search   the fastest of 5 legal" in printed(drawn(*plan_sheets(plan, certificate(bound=2.0))))


def test_what_lies_within_the_interval_is_counted_and_named():
    plan = made("uneven")
    assert plan.prediction
    low, high = plan.prediction.step_time_s, plan.prediction.high_s
    others: list[Plan] = []
    for layers, time_s in (("8", low), ("9", high), ("10", (low + high) / 2), ("11", 2 * high)):
        other = plan_of(ask(), f"tp=32,pp=4,stages={layers}/{31 - int(layers)}/23/26")
        own = {"step_time_s": time_s, "low_s": time_s, "high_s": time_s, "time_parts": {"compute": time_s}}
        others.append(with_prediction(other, **own))
    text = " ".join(printed(answers_sheet(plan, runners_up_of(plan, numbered(others)))).split())
    assert "2, 3, 4 may be as fast as this plan" in text
    assert all(str(other.candidate) in text for other in others)
    time_s = 0.9 * plan.prediction.low_s
    own = {"step_time_s": time_s, "low_s": time_s, "high_s": time_s, "time_parts": {"compute": time_s}}
    rival = with_prediction(plan_of(ask(), "tp=32,pp=4,stages=6/25/23/26"), **own)
    text = " ".join(printed(answers_sheet(plan, runners_up_of(plan, numbered([rival, others[0]])))).split())
    assert "2 is predicted to be faster than this plan; 3 may be as fast as this plan" in text
    vendor = Answer(
        name="vendor", plan=others[0], why="documented", slower=0.1, against=("too little memory",), source="its page",
        nearest_run=NearestRun(
            run="on 32 nodes", num_runs=3, low_s=128.0, high_s=136.0, predicted_s=151.0, source="a table"
        ),
    )  # fmt: skip
    text = " ".join(printed(answers_sheet(plan, [vendor])).split())
    assert (
        "vendor: too little memory vendor: its page vendor: measured nearby: on 32 nodes: 3 runs, 128.00 s to 136.00 s"
        in text
    )
    assert "this model says 151.00 s" in text and "of these" not in text, "what may not run is not measured"
    assert vendor.nearest_run and "seen, not settled" not in text
    early = replace(vendor, unsettled_run=replace(vendor.nearest_run, high_s=137.0, unsettled="four steps"))
    text = " ".join(printed(answers_sheet(plan, [early])).split())
    assert "seen, not settled: on 32 nodes: 3 runs, 128.00 s to 137.00 s (four steps); this model says 151" in text


def test_no_gain_over_a_vendor_stands_without_its_interval_and_its_chance():
    plan, other = made("uneven"), plan_of(ask(), "tp=32,pp=4,stages=8/23/23/26")
    assert plan.prediction
    time_s = 1.1 * plan.prediction.step_time_s
    theirs = with_prediction(other, step_time_s=time_s, low_s=time_s, high_s=time_s, time_parts={"compute": time_s})
    vendor = Answer(name="vendor", plan=theirs, why="documented", slower=0.1, ratio=ratio_of(theirs, plan))
    text = " ".join(printed(answers_sheet(plan, [vendor])).split())
    assert f"against the vendor's layout: {ratio_words(ratio_of(plan, theirs))}" in text and vendor.ratio
    assert re.search(r"\+10\.0% \([-+][\d.]+% to [-+][\d.]+%\) +\d+%", text)
    data = answers_json(Answer(name="simple", plan=plan, why="", slower=0.0), [vendor], certificate(bound=2.0))
    assert data["against_vendor"].items() >= encode(ratio_of(plan, theirs)).items()
    assert data["against_vendor"]["evidence"].keys() == {one["name"] for one in data["against_vendor"]["parts"]}
    assert data["answers"][0]["ratio"]["low"] > 0 and "rests on" in text and "data sheet of the chip" in text
    same = replace(vendor, plan=plan, ratio=None, slower=0.0)
    assert "against the vendor's" not in printed(answers_sheet(plan, [same]))
    assert answers_json(same, [same], certificate(bound=2.0))["against_vendor"] is None


def test_a_terminal_is_used_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch):
    assert make_console().width == 120
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "77")
    assert make_console().width == 77


def test_a_price_shows_what_a_day_costs_and_how_old_it_is():
    plan, text = made("uneven"), reported("uneven")
    assert plan.prediction and "$" not in reported("one stage"), "no price of this machine is known"
    found = re.search(
        r"^day      ([\d.]+) billion tokens for \$([\d,]+): \$([\d,.]+) a billion \((.*)\)$", text, re.MULTILINE
    )
    assert found
    tokens, usd, billion = (float(amount.replace(",", "")) for amount in found.groups()[:3])
    assert tokens == pytest.approx(plan.prediction.tokens_per_s * 86_400 / 1e9, abs=0.005)
    assert usd == 21.5 * 24 * 16 and billion == pytest.approx(usd / tokens, rel=0.002)
    assert found[4] == "price of 2026-06-25"
    undated = replace(plan, cluster=replace(plan.cluster, price_date=None))
    assert "(price of an unknown date)" in report(undated)


def test_a_frontier_has_a_line_per_plan():
    plans = [made("uneven"), made("interleaved")]
    text = printed(drawn(*frontier_sheets(plans, 0.0005, "complete")))
    assert text.count("tp=") == 2 and "cost a step" in text and "within 0.05%" in text
    assert "there may be more" not in " ".join(text.split())
    stopped = printed(drawn(*frontier_sheets(plans, 0.0, "stopped after 3 s")))
    assert "(stopped after 3 s): there may be more" in " ".join(stopped.split())
    assert "node seconds" in printed(drawn(*frontier_sheets([made("one stage")], 0.0, "complete")))


def test_a_proof_names_what_was_executed_what_was_left_out_and_differences():
    good = BlockProof(name="layer", error=2e-16, num_results=11, collectives={"all_gather": 4})
    bad = BlockProof(name="head", error=0.5, num_results=4, collectives={})
    proof = Proof(candidate="tp=2,pp=1,dp=2", lost=("ep=8: not kept here",), blocks=(good, bad))
    text = printed(proof_sheet(proof))
    assert "tp=2,pp=1,dp=2" in text and "4 all_gather" in text and "not kept: ep=8" in text
    assert "equal   layer" in text and "DIFFERS head" in text and "no collectives" in text


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
