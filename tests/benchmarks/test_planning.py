"""The planner benchmarks hold only if every bar does; what is measured here is a stand-in."""

import sys
from pathlib import Path
from typing import Any

import pytest

from autoshard.errors import RunFailed
from benchmarks import planning
from benchmarks.measure import Usage
from benchmarks.plan_scaling import Growth, judge as judge_scaling
from benchmarks.plan_speed import judge, judge_70b
from benchmarks.planning import Planned, Round, Summary, rounds_of

COUNTS = dict.fromkeys(("num_points", "num_legal", "num_solved", "num_bounded", "num_too_large", "num_tables"), 1)
TOO_LARGE = ["--model", "llama3-8b", "--fix", "tp=8,pp=1,cp=1,mbs=1,sp=true,zero=1,schedule=1f1b,recompute=none"]
SMALL = [*TOO_LARGE, "--seq-len", "2048"]


def planned(cpu_s: float = 0.5, peak_mb: float = 100, gap: float = 0.0, found: bool = True) -> Planned:
    certificate: dict[str, Any] = {"value": 2.0, "bound": 2.0 * (1 - gap), **COUNTS}
    usage = Usage(cpu_s=cpu_s, peak_bytes=int(peak_mb * 1e6))
    return Planned(usage=usage, certificate=certificate if found else None)


def one_round(**searches: Planned) -> Round:
    return Round(planned=searches, yardstick_s=0.1)


def test_the_median_is_judged_and_the_fastest_told() -> None:
    rounds = [one_round(own=planned(cpu_s)) for cpu_s in (0.9, 0.4, 7.0)]
    result = judge("plan", rounds, 1.0, {"more": 3})
    assert (result.value, result.bar, result.holds) == (0.9, 1.0, True)
    assert (result.extras["fastest_s"], result.extras["peak_mb"], result.extras["more"]) == (0.4, 100.0, 3)
    assert (result.extras["num_legal"], result.extras["rounds"], result.extras["yardstick_s"]) == (1, 3, 0.1)


@pytest.mark.parametrize("slow", [planned(cpu_s=1.1), planned(gap=0.002), planned(found=False)])
def test_every_bar_of_a_search_counts(slow: Planned) -> None:
    assert not judge("plan", [one_round(own=slow)], 1.0, {}).holds


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
    result = judge_70b([one_round(own=own, any=other)])
    assert result.holds is holds
    assert result.extras["any_engine_s"] == other.usage.cpu_s


def test_the_exponent_is_judged_and_sizes_without_a_plan_count() -> None:
    rounds = [one_round(**{str(nodes): planned(nodes**0.5, found=nodes != 9) for nodes in (1, 4, 9)})]
    result = judge_scaling(rounds, 64)
    assert result.value == pytest.approx(0.5) and result.holds
    assert (result.extras["nodes_without_a_plan"], result.extras["slowest_s"]) == ("9", 3.0)
    assert (result.extras["4_nodes_s"], result.extras["4_nodes_fitted_s"]) == (2.0, 2.0)
    steep = [one_round(**{str(nodes): planned(nodes**1.1) for nodes in (1, 4, 9)})]
    assert not judge_scaling(steep, 64).holds


def test_no_growth_is_explained_in_full() -> None:
    assert Growth.of({1: 2.0, 4: 2.0}).explained == 1.0


@pytest.mark.slow
def test_a_search_is_a_process_whose_certificate_is_read() -> None:
    summary = Summary.of(rounds_of({"small": SMALL}, 1), "small")
    assert summary.last.certificate and summary.last.counts["num_points"] == 1
    assert summary.last.gap <= 0.001 and summary.cpu_s > 0


@pytest.mark.slow
def test_that_nothing_fits_is_an_answer() -> None:
    (only,) = rounds_of({"none": TOO_LARGE}, 1)
    assert only.planned["none"].certificate is None and only.planned["none"].gap == 0.0
    assert not only.planned["none"].counts


@pytest.mark.slow
def test_a_wrong_question_is_no_answer() -> None:
    with pytest.raises(RunFailed, match="exit code 2"):
        rounds_of({"wrong": ["--model", "no-such-model"]}, 1)


def test_a_crash_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "autoshard").write_text("raise ValueError('broken')", encoding="utf-8")
    with pytest.raises(RunFailed, match=r"exit code 1:[\s\S]*broken"):
        planning.planned_with([], tmp_path, {"PYTHONPATH": ":".join(sys.path)})
