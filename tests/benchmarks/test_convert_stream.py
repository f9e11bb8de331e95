from dataclasses import replace

import pytest

from benchmarks.convert_stream import Round, judge

ROUND = Round(way="to nxd", num_bytes=10**9, copy_s=2.0, convert_s=3.0, cpu_s=1.0, peak_bytes=2**29)


@pytest.mark.parametrize("worse", [{"convert_s": 4.1}, {"peak_bytes": 2**31}])
def test_the_slowest_way_and_the_largest_memory_are_judged(worse: dict[str, float]) -> None:
    back = replace(ROUND, way="from nxd", convert_s=3.5)
    good = judge([ROUND, back])
    assert good.holds and good.value == 1.75 and good.extras["peak_mib"] == 512
    assert good.extras["to_nxd_ratio"] == 1.5 and good.extras["from_nxd_copy_s"] == 2.0
    assert not judge([ROUND, replace(back, **worse)]).holds
