"""What the benchmark of sweeps makes of what it saw."""

from pathlib import Path

from autoshard.sweep.points import Sweep, points_of
from benchmarks.sweep_overhead import BAR, GRID, Observed, judge


def seen(sweep_s: float = 120.0, **times: int) -> Observed:
    return Observed(
        plain_s=100.0, sweep_s=sweep_s, num_points=2, rows_at_kills=(0, 1, 1), times_done=times or {"a": 1, "b": 1}
    )


def test_there_are_200_questions():
    assert len(points_of(Sweep(grid={key: tuple(values) for key, values in GRID.items()}), Path())) == 200


def test_it_holds_only_where_every_point_was_done_once_at_little_cost():
    assert judge(seen(), 0.1).holds and judge(seen(), 0.1).value == 1.2
    assert not judge(seen(sweep_s=100 * BAR + 1), 0.1).holds
    assert not judge(seen(a=1), 0.1).holds, "one is missing"
    assert not judge(seen(a=1, b=2), 0.1).holds, "one was done twice"
