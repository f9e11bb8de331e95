"""The verdicts of benchmarks follow the numbers: what is judged, over which rounds, and that every bar counts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.blocks.operators import OperatorSolution
from autoshard.calibration.choices import EVERY, PLANNER, Choices
from autoshard.cost.built_in import built_in
from autoshard.sweep.points import Sweep, points_of
from benchmarks import (
    bytes_vs_gspmd,
    checkpoint_bandwidth,
    cold_start,
    convert_stream,
    estimate_batch,
    few_rows,
    local_prediction,
    metrics_cost,
    plan_all,
    plan_scaling,
    plan_speed,
    report_page,
    runtime_vs_plain,
    shard_module,
    sharded_vs_plain,
    simulate_pipeline,
    solve_block,
    sweep_choices,
    sweep_overhead,
    validate_speed,
)
from benchmarks.measure import Usage
from benchmarks.planning import Planned, Round

PEAK = 90_000_000


def used(peak_bytes: int = PEAK, **cpu_s: float) -> dict[str, Usage]:
    return {name: Usage(cpu_s=value, peak_bytes=peak_bytes) for name, value in cpu_s.items()}


def test_cold_start_takes_ratios_within_a_round() -> None:
    # The machine is ten times slower in the second round; the ratios must not notice.
    result = cold_start.judge([used(numpy=0.1, list=0.2, plan=0.5), used(numpy=1.0, list=2.0, plan=5.0)], 0.1)
    assert result.value == pytest.approx(5.0) and result.extras["list_value"] == pytest.approx(2.0) and result.holds
    for worse in ({"list": 0.31}, {"plan": 0.61}, {"peak_bytes": 150_000_000}):
        assert not cold_start.judge([used(**{"numpy": 0.1, "list": 0.2, "plan": 0.5, **worse})], 0.1).holds  # type: ignore[arg-type]


def test_a_page_is_judged_by_the_slower_plan_and_by_the_size_of_the_first() -> None:
    rounds = [{"70b_16": used(x=0.6)["x"], "405b_512": used(x=later)["x"]} for later in (0.7, 0.8, 5.0)]
    result = report_page.judge(rounds, {"70b_16": 200_000, "405b_512": 400_000}, 0.1)
    assert result.holds and result.value == 0.8 and result.extras["70b_16_s"] == 0.6
    assert not report_page.judge(rounds[2:], {"70b_16": 200_000, "405b_512": 1}, 0.1).holds
    assert not report_page.judge(rounds, {"70b_16": 300_001, "405b_512": 1}, 0.1).holds


def test_a_traced_layer_is_judged_by_the_case_nearest_to_its_bar_and_by_its_proof() -> None:
    one = shard_module.SolvedCase(cpu_s=1.0, gap=0.0, fits=True)

    def judged(grown: int = 2**20, **worse: Any) -> Any:
        cases = {**dict.fromkeys(shard_module.CASES, one), "bert_large_8x8": replace(one, **worse)}
        return shard_module.judge(cases, (2**28, grown + 2**28), 0.1)

    assert judged().holds and judged().value == 0.5 and judged(cpu_s=1.5).extras["worst"] == "bert_large_8x8"
    faults: tuple[dict[str, Any], ...] = {"cpu_s": 2.1}, {"gap": 0.01}, {"fits": False}, {"grown": 2**29}
    assert not any(judged(**worse).holds for worse in faults)


def test_what_a_rank_sends_is_judged_in_every_layout() -> None:
    result = bytes_vs_gspmd.judge({"one": (6.0, 8.0), "other": (8.0, 8.0)}, "one")
    assert result.value == 0.75 and result.holds and result.extras["other.share"] == 1.0
    assert not bytes_vs_gspmd.judge({"one": (6.0, 8.0), "other": (9.0, 8.0)}, "one").holds


def test_a_checkpoint_is_judged_both_ways_by_its_waiting_and_by_its_memory() -> None:
    one = checkpoint_bandwidth.Round(
        copy_s=1.0, save_s=1.6, load_s=0.8, blocked_s=0.1, beside_s=2.0, step_s=4.0, plain_step_s=3.9,
        save_peak_bytes=2**20, load_peak_bytes=2**26,
    )  # fmt: skip

    def judged(**worse: Any) -> Any:
        rounds = (replace(one, **worse),) * 3
        return checkpoint_bandwidth.judge(checkpoint_bandwidth.Measured(rounds=rounds, state_bytes=2**30))

    good = judged()
    assert good.holds and good.value == 0.625 and good.extras["load_ratio"] == 1.25
    assert good.extras["blocked_share"] == 0.05 and good.extras["load_peak_mib"] == 64.0
    worse = {"save_s": 2.1, "load_s": 2.1, "blocked_s": 0.3, "save_peak_bytes": 2**28, "load_peak_bytes": 2**28}
    assert not any(judged(**{name: value}).holds for name, value in worse.items())


def test_the_slowest_conversion_and_the_largest_memory_are_judged() -> None:
    one = convert_stream.Round(
        direction="to nxd", num_bytes=10**9, copy_s=2.0, convert_s=3.0, cpu_s=1.0, peak_bytes=2**29
    )
    back = replace(one, direction="from nxd", convert_s=3.5)
    good = convert_stream.judge([one, back])
    assert good.holds and good.value == 1.75 and good.extras["peak_mib"] == 512
    assert not convert_stream.judge([one, replace(back, convert_s=4.1)]).holds
    assert not convert_stream.judge([one, replace(back, peak_bytes=2**31)]).holds


BAR, LEAST, SAME = estimate_batch.BAR_US, estimate_batch.LEAST, estimate_batch.SAME


@pytest.mark.parametrize(
    ("each_us", "count", "difference", "holds"),
    [
        ([BAR, 1.0, 3 * BAR], LEAST, SAME, True),
        ([BAR, 2 * BAR, 3 * BAR], LEAST, 0.0, False),
        ([1.0], LEAST - 1, 0.0, False),
        ([1.0], LEAST, 2 * SAME, False),
    ],
)
def test_the_median_the_count_and_the_difference_of_a_batch_decide(
    each_us: list[float], count: int, difference: float, holds: bool
) -> None:
    assert estimate_batch.judge(each_us, count, difference, 0.1).holds is holds


@pytest.mark.parametrize(
    ("errors", "median", "holds"),
    [((0.1, -0.12, 0.29), 0.12, True), ((-0.13, 0.13, 0.0), 0.13, False), ((0.1, 0.0, -0.31), 0.1, False)],
)
def test_half_of_the_local_predictions_may_be_off_by_more_than_the_bar_but_none_by_far(
    errors: Sequence[float], median: float, holds: bool
) -> None:
    found = [local_prediction.PredictedRun(name=str(one), predicted_s=1 + one, measured_s=1.0) for one in errors]
    result = local_prediction.judge(found, built_in("trn1.32xlarge"))
    assert (result.value, result.holds) == (pytest.approx(median), holds)


def test_the_median_of_steps_with_tensorboard_is_judged() -> None:
    cheap, dear = (metrics_cost.StepTimes(passed_ms=(ms, ms, 9.0), cpu_ms=ms) for ms in (0.05, 0.2))
    assert metrics_cost.judge({"file": cheap, "tensorboard": cheap, "wandb_offline": dear}).holds
    result = metrics_cost.judge({"file": cheap, "tensorboard": dear, "wandb_offline": None})
    assert not result.holds and result.value == 0.2 and result.extras["wandb_offline_median_ms"] is None


COUNTS = dict.fromkeys(("num_points", "num_legal", "num_solved", "num_bounded", "num_too_large", "num_tables"), 1)


def planned(cpu_s: float = 0.5, peak_mb: float = 100, gap: float = 0.0, found: bool = True) -> Planned:
    certificate: dict[str, Any] = {"value": 2.0, "bound": 2.0 * (1 - gap), **COUNTS}
    usage = Usage(cpu_s=cpu_s, peak_bytes=int(peak_mb * 1e6))
    return Planned(usage=usage, certificate=certificate if found else None)


def one_round(**searches: Planned) -> Round:
    return Round(planned=searches, yardstick_s=0.1)


def test_the_median_of_a_search_is_judged_and_the_fastest_told() -> None:
    result = plan_speed.judge("plan", [one_round(own=planned(cpu_s)) for cpu_s in (0.9, 0.4, 7.0)], 1.0, {"more": 3})
    assert (result.value, result.bar, result.holds) == (0.9, 1.0, True)
    assert (result.extras["fastest_s"], result.extras["peak_mb"], result.extras["more"]) == (0.4, 100.0, 3)
    for slow in (planned(cpu_s=1.1), planned(gap=0.002), planned(found=False)):
        assert not plan_speed.judge("plan", [one_round(own=slow)], 1.0, {}).holds


def answered(nodes: int, cpu_s: float, complaint: str = "") -> plan_all.Answered:
    question = ("--model", "llama3-8b", "--cluster", "h100-80", "--nodes", str(nodes))
    return plan_all.Answered(question=question, usage=Usage(cpu_s=cpu_s, peak_bytes=1), complaint=complaint)


def test_the_slowest_answer_of_a_thousand_ranks_and_remedies_that_fail_are_judged() -> None:
    none = "no plan\n  try --nodes 2\n  try --seq-len 512"
    good = [answered(128, 3.9), answered(129, 9.0), answered(1, 2.9, none)]
    result = plan_all.judge(good, {}, 0.1)
    assert result.holds and result.value == 3.9 and result.extras["remedies"] == 2
    assert result.extras["slowest_larger_s"] == 9.0 and str(result.extras["slowest"]).endswith("--nodes 128")
    assert not plan_all.judge([*good, answered(8, 4.1)], {}, 0.1).holds
    assert not plan_all.judge([*good, answered(8, 3.1, none)], {}, 0.1).holds
    assert not plan_all.judge(good, {"--nodes 2": "no plan"}, 0.1).holds


def test_every_question_about_all_cards_and_clusters_is_judged() -> None:
    asked = [*plan_all.questions()]
    usage = Usage(cpu_s=1.0, peak_bytes=1)
    found = [plan_all.Answered(question=question, usage=usage, complaint="") for question in asked]
    assert plan_all.judge(found, {}, 0.1).extras["questions"] == len(asked) > 1000


@pytest.mark.parametrize(
    ("own", "other", "holds"),
    [
        (planned(), planned(cpu_s=19.0, peak_mb=900), True),
        (planned(peak_mb=201), planned(), False),
        (planned(cpu_s=1.1), planned(), False),
        (planned(), planned(cpu_s=21.0), False),
        (planned(), planned(gap=0.002), False),
        (planned(), planned(found=False), False),
    ],
)
def test_memory_and_other_engines_have_bars_too(own: Planned, other: Planned, holds: bool) -> None:
    assert plan_speed.judge_70b([one_round(own=own, any=other)]).holds is holds


@pytest.mark.parametrize(("own", "other", "holds"), [(0.03, 0.04, True), (0.05, 0.04, False), (0.12, 0.5, False)])
def test_the_regret_of_the_planner_is_held_against_the_bar_and_against_whoever_else_chooses_best(
    own: float, other: float, holds: bool
) -> None:
    counts: dict[str, Any] = {"num_groups": 3, "most_layouts": 4}
    found = [Choices(set=EVERY, who=who, regret=regret, **counts) for who, regret in ((PLANNER, own), ("b", other))]
    found += [Choices(set="sweep", who="b", regret=0.0, **counts), Choices(set=EVERY, who="c", mape=0.1, **counts)]
    result = sweep_choices.judge(found, 1.0)
    assert (result.value, result.holds) == (own, holds)


def test_three_rows_may_not_make_a_choice_worse_on_average_over_sweeps() -> None:
    def draws(before: float, after: float, count: int) -> list[few_rows.Draw]:
        return [few_rows.Draw(regret=before, regret_with=after, error=0.2, error_with=0.1)] * count

    result = few_rows.judge({("a", "the group"): draws(0.1, 0.0, 1), ("b", "the group"): draws(0.0, 0.04, 9)}, 1.0)
    assert (result.value, result.holds) == (-0.03, True), "each sweep counts once"
    assert not few_rows.judge({("b", "the group"): draws(0.0, 0.04, 1)}, 1.0).holds


def test_validating_many_rows_has_a_bar_of_cpu_seconds() -> None:
    usage = used(own=validate_speed.BAR_S)["own"]
    assert validate_speed.judge(usage, 2044, 0.1).holds
    assert not validate_speed.judge(replace(usage, cpu_s=validate_speed.BAR_S + 0.1), 2044, 0.1).holds
    rows = validate_speed.rows_at((1024, 2048))
    assert len({*rows}) == len(rows) == 2 * len(validate_speed.ROWS.read_text("utf-8").splitlines())


def test_the_exponent_is_judged_and_sizes_without_a_plan_count() -> None:
    rounds = [one_round(**{str(nodes): planned(nodes**0.5, found=nodes != 9) for nodes in (1, 4, 9)})]
    result = plan_scaling.judge(rounds, 64)
    assert result.value == pytest.approx(0.5) and result.holds
    assert (result.extras["nodes_without_a_plan"], result.extras["slowest_s"]) == ("9", 3.0)
    steep = [one_round(**{str(nodes): planned(nodes**1.1) for nodes in (1, 4, 9)})]
    assert not plan_scaling.judge(steep, 64).holds
    assert plan_scaling.Growth.of({1: 2.0, 4: 2.0}).explained == 1.0


@pytest.mark.parametrize("slow", [None, *runtime_vs_plain.CASES])
def test_each_case_of_the_runtime_may_fail_it(slow: str | None) -> None:
    fair = runtime_vs_plain.Compared(ratios=(0.99, 1.0, 1.01, 1.0, 0.98))
    worse = runtime_vs_plain.Compared(ratios=(0.8, 0.81, 0.82, 0.8, 0.79))
    found = {
        name: {"generated_wall": worse, "compiled_wall": worse if name == slow else fair}
        for name in runtime_vs_plain.CASES
    }
    result = runtime_vs_plain.judge(found)
    assert result.holds == (slow is None) and result.value == (0.8 if slow == "one" else 1.0)


def test_a_sharded_module_is_judged_by_its_time_its_memory_and_what_it_learns() -> None:
    fair = runtime_vs_plain.Compared(ratios=(0.99, 1.0, 1.01, 1.0, 0.98))
    slow = runtime_vs_plain.Compared(ratios=(0.8, 0.81, 0.82, 0.8, 0.79))
    same, more = sharded_vs_plain.Sides(3.0, 3.0), sharded_vs_plain.Sides(3.01, 3.0)

    def judged(**worse: Any) -> Any:
        case = sharded_vs_plain.Measured(
            ratios={"generated_wall": fair, "generated_cpu": slow}, losses={"generated": same}, peak_bytes=same
        )
        return sharded_vs_plain.judge({"ddp": case, "tp_fsdp2": replace(case, **worse)})

    assert judged().holds and judged().value == 1.0
    faults: tuple[dict[str, Any], ...] = (
        {"ratios": {"compiled_wall": slow}}, {"losses": {"generated": more}}, {"peak_bytes": more},
    )  # fmt: skip
    assert not any(judged(**worse).holds for worse in faults)


def test_the_slower_schedule_is_judged_by_its_median() -> None:
    rounds = [used(interleaved=0.3, zb_v=0.5), used(interleaved=0.2, zb_v=9.0), used(interleaved=0.4, zb_v=0.4)]
    result = simulate_pipeline.judge(rounds, 0.1)
    assert (result.value, result.holds, result.extras["interleaved_s"]) == (0.5, True, pytest.approx(0.3))
    assert not simulate_pipeline.judge([used(interleaved=0.3, zb_v=1.01)], 0.1).holds


EXACT = OperatorSolution(cuts={}, cost_s=0.01)
BLOCKS = used(two_axes=0.5, three_axes=0.5, limited=0.5, deep=0.5)
SHORT: Mapping[str, OperatorSolution] = {"limited": EXACT, "deep": EXACT}


def test_every_bar_and_every_gap_of_a_block_counts() -> None:
    good = solve_block.judge(BLOCKS, [EXACT], [EXACT], {**SHORT, "limited": replace(EXACT, gap=0.004)})
    assert good.holds and good.value == 0.5 and good.extras["limited_gap"] == 0.004
    for worse in (used(two_axes=1.1), used(three_axes=5.1), used(limited=5.1), used(deep=5.1)):
        assert not solve_block.judge({**BLOCKS, **worse}, [EXACT], [EXACT], SHORT).holds
    for name in ("two_axes", "limited", "deep"):
        assert not solve_block.judge({**BLOCKS, **used(200_000_001, **{name: 0.5})}, [EXACT], [EXACT], SHORT).holds
    wide, full = replace(EXACT, gap=0.006), replace(EXACT, fits=False)
    assert not solve_block.judge(BLOCKS, [wide], [EXACT], SHORT).holds
    assert not solve_block.judge(BLOCKS, [EXACT], [wide], SHORT).holds
    assert not any(solve_block.judge(BLOCKS, [EXACT], [EXACT], {**SHORT, "deep": one}).holds for one in (wide, full))


def test_a_sweep_holds_only_where_every_point_was_done_once_at_little_cost() -> None:
    def judged(sweep_s: float = 120.0, **times: int) -> Any:
        done = times or {"a": 1, "b": 1}
        seen = sweep_overhead.Observed(
            plain_s=100.0, sweep_s=sweep_s, num_points=2, rows_at_kills=(0, 1, 1), times_done=done
        )
        return sweep_overhead.judge(seen, 0.1)

    assert judged().holds and judged().value == 1.2 and not judged(sweep_s=100 * sweep_overhead.BAR + 1).holds
    assert not judged(a=1).holds, "one is missing"
    assert not judged(a=1, b=2).holds, "one was done twice"
    grid = {key: tuple(values) for key, values in sweep_overhead.GRID.items()}
    assert len(points_of(Sweep(grid=grid), Path())) == math.prod(map(len, grid.values())) == 200
