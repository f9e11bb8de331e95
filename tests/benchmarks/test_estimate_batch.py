"""The batch benchmark holds only for enough candidates, each as fast and as exact as promised."""

import pytest

from benchmarks.estimate_batch import BAR_US, LEAST, SAME, Evaluated, case, evaluate, furthest, judge


@pytest.mark.parametrize(
    ("each_us", "count", "difference", "holds"),
    [
        ([BAR_US, 1.0, 3 * BAR_US], LEAST, SAME, True),
        ([BAR_US, 2 * BAR_US, 3 * BAR_US], LEAST, 0.0, False),
        ([1.0], LEAST - 1, 0.0, False),
        ([1.0], LEAST, 2 * SAME, False),
    ],
)
def test_the_median_the_count_and_the_difference_decide(each_us, count, difference, holds):
    assert judge(each_us, count, difference, 0.1).holds is holds


def test_a_batch_that_is_off_is_found():
    question, space, cutting = case("llama3-8b", "h100-80", 1, 16)
    found = evaluate(question, space, cutting)
    assert furthest(question, space, cutting, found, 4) <= SAME
    wrong = Evaluated(time_s=found.time_s * (1 + 1e-6), peak_bytes=found.peak_bytes)
    assert furthest(question, space, cutting, wrong, 4) == pytest.approx(1e-6, rel=1e-3)
