"""The seconds of a step: what warm-up is, what must agree, and what is too little."""

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.imports.logs.log import LogReport, PeakMemory, RateUnit, TrainingLog
from autoshard.imports.logs.measure import StepWork, measured_peak, measured_step

WORK = StepWork(sequences=64, seq_len=2048, ranks=8)
TOKENS = RateUnit(what="tokens", per_rank=True)


def log(steps: Sequence[LogReport], rate: RateUnit | None = None, clock_s: float = 1.0, **more: object) -> TrainingLog:
    values = {"program": "p", "file": "a.log", "configurations": (), "are_means": True} | more
    return TrainingLog(**values, steps=tuple(steps), rate=rate, clock_s=clock_s)  # pyright: ignore[reportArgumentType]


def timed(values: Sequence[float], first: int = 1) -> list[LogReport]:
    return [LogReport(number=number, time_s=value) for number, value in enumerate(values, first)]


def test_warm_up_is_dropped_and_outliers_do_not_move_the_median() -> None:
    step = measured_step(log(timed([90.0, 4.0, 3.0, 2.1, 2.0, 2.0, 30.0, 2.0, 1.9, 2.0])), WORK)
    assert (step.time_s, step.steps, step.reports) == (2.0, "4..10", 7)
    assert step.low_s <= 2.0 <= step.high_s <= 2.1


@given(st.lists(st.floats(1.0, 1.05), min_size=8, max_size=40), st.floats(2.0, 1e4))
def test_whatever_the_first_step_takes_the_rest_decides(values: list[float], first: float) -> None:
    step = measured_step(log(timed([first, *values])), WORK)
    assert 1.0 <= step.low_s <= step.time_s <= step.high_s <= 1.05 and step.first == 2


def test_few_steps_are_refused_unless_each_report_is_of_many() -> None:
    with pytest.raises(InputError, match="is too short: 3 steps in 3 reports"):
        measured_step(log(timed([9.0, 2.0, 2.0, 2.0])), WORK)
    every_tenth = [LogReport(number=10 * number, time_s=2.0) for number in (1, 2, 3)]
    assert measured_step(log(every_tenth), WORK).steps == "20..30"
    with pytest.raises(InputError, match="is too short"):
        measured_step(log(every_tenth, are_means=False), WORK)


def test_a_log_of_single_steps_that_begins_late_keeps_its_first() -> None:
    assert measured_step(log(timed([2.0] * 5, 45), are_means=False), WORK).steps == "45..49"
    assert measured_step(log(timed([3.0, *[2.0] * 5], 45), are_means=False), WORK).steps == "46..50"


def test_rates_become_seconds_and_say_what_was_taken_for_it() -> None:
    steps = [LogReport(number=number, rate=8192.0) for number in range(1, 9)]
    step = measured_step(log(steps, TOKENS), WORK)
    assert step.time_s == 2.0
    assert step.basis.endswith("64 sequences of 2048 tokens in a step over 8 ranks, by the configuration")
    whole = measured_step(log(steps, RateUnit(what="sequences", per_rank=False)), WORK)
    assert whole.time_s == 64 / 8192 and "over" not in whole.basis


def test_two_statements_that_differ_are_refused_with_both_figures() -> None:
    steps = [LogReport(number=number, time_s=2.0, rate=8192.0, stamp_s=2.0 * number) for number in range(1, 200)]
    step = measured_step(log(steps, TOKENS), WORK)
    assert step.time_s == 2.0 and len(step.checks) == 2
    with pytest.raises(InputError, match=r"contradicts itself: 2\.00 s a step by .*, 1\.00 s by tokens"):
        measured_step(log(steps, TOKENS), StepWork(sequences=32, seq_len=2048, ranks=8))
    slow = [LogReport(number=step.number, time_s=2.0, stamp_s=2.5 * step.number) for step in steps]
    with pytest.raises(InputError, match=r"2\.00 s a step by the time .*, 2\.50 s by the clock"):
        measured_step(log(slow), WORK)


def test_a_clock_alone_will_do_and_its_ticks_do_not() -> None:
    exact = [LogReport(number=number, stamp_s=float(int(2.6 * number))) for number in range(1, 300)]
    step = measured_step(log(exact), WORK)
    assert step.time_s == pytest.approx(2.6, rel=0.02) and step.basis == "the clock between reports"
    with pytest.raises(InputError, match="too few for a clock of 1 s"):
        measured_step(log(exact[:5]), WORK)
    still = [LogReport(number=number, stamp_s=5.0) for number in range(9)]
    with pytest.raises(InputError, match="says no time of a step"):
        measured_step(log(still), WORK)


def test_a_batch_that_grows_counts_from_where_it_is_whole() -> None:
    small = [LogReport(number=number, time_s=1.0, batch=32) for number in range(1, 9)]
    whole = [LogReport(number=number, time_s=2.0, batch=64) for number in range(9, 17)]
    assert measured_step(log([*small, *whole]), WORK).steps == "10..16"
    with pytest.raises(InputError, match=r"says 32 sequences in a step, its configuration 64\. Type --global-batch 32"):
        measured_step(log(small), WORK)


def test_steps_that_the_optimizer_left_out_count_only_where_there_are_no_others() -> None:
    skipped = [LogReport(number=number, time_s=1.5, skipped=True) for number in range(1, 9)]
    taken = [LogReport(number=number, time_s=2.0) for number in range(9, 17)]
    assert measured_step(log([*skipped, *taken]), WORK).time_s == 2.0
    assert measured_step(log(skipped), WORK).basis.endswith("of steps that the optimizer left out")


def test_memory_is_of_the_fullest_rank_if_all_stages_say_theirs() -> None:
    peaks = tuple(PeakMemory(rank=rank, gib=10.0 + rank, kind="allocated", step=9) for rank in (0, 4))
    more = PeakMemory(rank=0, gib=99.0, kind="reserved", step=9)
    run = log(timed([2.0]), memory=(*peaks, more))
    assert measured_peak(run, 1, 8).gib == 14.0 and measured_peak(run, 1, 8).by_stage is None
    assert measured_peak(run, 2, 8).by_stage == (10.0, 14.0)
    lacking = measured_peak(run, 4, 8)
    assert lacking.gib is None and "not of all 4 stages" in lacking.says
    unnamed = log(timed([2.0]), memory=(PeakMemory(rank=None, gib=7.0, kind="reserved", step=3),))
    assert measured_peak(unnamed, 1, 8).says == "most reserved of a rank until step 3"
    assert measured_peak(unnamed, 2, 8).gib is None and measured_peak(log(timed([2.0])), 1, 8).says == ""
