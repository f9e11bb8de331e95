"""The loop: it trains, on two ranks as on one."""

from autoshard.engine.base import Measured, RunReport, TimedStep


def test_the_first_two_steps_are_no_measure() -> None:
    steps = tuple(
        TimedStep(number=number, loss=1, norm=1, time_s=time_s, num_tokens=1)
        for number, time_s in enumerate([9.0, 8.0, 1.0, 3.0, 2.0], 1)
    )
    ranks = (Measured(memory_bytes={}, sent_bytes={}),)
    assert RunReport(steps=steps, ranks=ranks).step_time_s == 2
    assert RunReport(steps=steps[:2], ranks=ranks).step_time_s == 8.5
