from dataclasses import replace

import pytest

from autoshard.blocks.operators import OperatorSolution
from benchmarks import solve_block
from benchmarks.measure import Usage

FAST = Usage(cpu_s=0.5, peak_bytes=90_000_000)
EXACT = OperatorSolution(cuts={}, cost_s=0.01)
USED: dict[str, Usage] = dict.fromkeys(("two_axes", "three_axes", "limited", "deep"), FAST)
SHORT = {"limited": EXACT, "deep": EXACT}


def test_all_bars_of_a_block_hold() -> None:
    result = solve_block.judge(
        USED, [EXACT], [EXACT], {"limited": replace(EXACT, gap=0.004), "deep": replace(EXACT, gap=0.003)}
    )
    assert result.holds and result.value == 0.5
    assert (result.extras["limited_gap"], result.extras["deep_gap"], result.extras["deep_s"]) == (0.004, 0.003, 0.5)


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("two_axes", replace(FAST, cpu_s=1.1)),
        ("two_axes", replace(FAST, peak_bytes=200_000_001)),
        ("three_axes", replace(FAST, cpu_s=5.1)),
        ("limited", replace(FAST, cpu_s=5.1)),
        ("limited", replace(FAST, peak_bytes=200_000_001)),
        ("deep", replace(FAST, cpu_s=5.1)),
        ("deep", replace(FAST, peak_bytes=200_000_001)),
    ],
)
def test_every_bar_on_time_and_memory_counts(name: str, usage: Usage) -> None:
    assert not solve_block.judge({**USED, name: usage}, [EXACT], [EXACT], SHORT).holds


def test_every_gap_counts() -> None:
    open_gap = replace(EXACT, gap=0.006)
    assert not solve_block.judge(USED, [open_gap], [EXACT], SHORT).holds
    assert not solve_block.judge(USED, [EXACT], [open_gap], SHORT).holds
    for name in SHORT:
        assert not solve_block.judge(USED, [EXACT], [EXACT], {**SHORT, name: open_gap}).holds
        assert not solve_block.judge(USED, [EXACT], [EXACT], {**SHORT, name: replace(EXACT, fits=False)}).holds
