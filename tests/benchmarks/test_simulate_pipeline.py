import pytest

from benchmarks.measure import Usage
from benchmarks.simulate_pipeline import judge


def used(**cpu_s: float) -> dict[str, Usage]:
    return {name: Usage(cpu_s=value, peak_bytes=90_000_000) for name, value in cpu_s.items()}


def test_the_slower_schedule_is_judged_by_its_median() -> None:
    rounds = [used(interleaved=0.3, zb_v=0.5), used(interleaved=0.2, zb_v=9.0), used(interleaved=0.4, zb_v=0.4)]
    result = judge(rounds, 0.1)
    assert (result.value, result.holds) == (0.5, True)
    assert result.extras["interleaved_s"] == pytest.approx(0.3)


def test_the_bar_is_one_second() -> None:
    assert not judge([used(interleaved=0.3, zb_v=1.01)], 0.1).holds
