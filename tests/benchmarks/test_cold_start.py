from collections.abc import Mapping

import pytest

from benchmarks.cold_start import judge
from benchmarks.measure import Usage


def used(**cpu_s: float) -> dict[str, Usage]:
    return {name: Usage(cpu_s=value, peak_bytes=90_000_000) for name, value in cpu_s.items()}


def test_ratios_are_taken_within_a_round() -> None:
    # The machine is ten times slower in the second round; the ratios must not notice.
    rounds = [used(numpy=0.1, list=0.2, plan=0.5), used(numpy=1.0, list=2.0, plan=5.0)]
    result = judge(rounds, 0.1)
    assert result.value == pytest.approx(5.0)
    assert result.extras["list_value"] == pytest.approx(2.0)
    assert result.holds


SLOW_LIST = used(numpy=0.1, list=0.31, plan=0.5)
SLOW_PLAN = used(numpy=0.1, list=0.2, plan=0.61)
FAT_PLAN = used(numpy=0.1, list=0.2, plan=0.5) | {"plan": Usage(cpu_s=0.5, peak_bytes=150_000_000)}


@pytest.mark.parametrize("measured", [SLOW_LIST, SLOW_PLAN, FAT_PLAN])
def test_every_bar_counts(measured: Mapping[str, Usage]) -> None:
    assert not judge([dict(measured)], 0.1).holds
