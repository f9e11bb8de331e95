"""Rules of thumb, by which people choose a layout without a planner.

``autoshard validate ROWS --chooser benchmarks/baselines/rules.py:node_wide,benchmarks/baselines/rules.py:at_random``
prints what their choices cost beside those of the planner. They choose among layouts that ran: who ran out of memory is
in no row.
"""

from collections.abc import Callable, Sequence

from autoshard.calibration.measured_run import MeasuredRun


def _least(runs: Sequence[MeasuredRun], key: Callable[[MeasuredRun], tuple[float, ...]]) -> list[int]:
    """Return the places of all runs with the smallest key."""
    keys = [key(run) for run in runs]
    return [place for place, one in enumerate(keys) if one == min(keys)]


def node_wide(runs: Sequence[MeasuredRun]) -> list[int]:
    """Tensor parallelism over a node, as NVIDIA's guides say, then the fewest stages, then the largest micro-batch."""

    def key(run: MeasuredRun) -> tuple[float, ...]:
        node = min(run.cluster.ranks_per_node, run.model.num_kv_heads)
        return (abs(run.candidate.tp - node), run.candidate.pp, -run.candidate.mbs)

    return _least(runs, key)


def most_data_parallelism(runs: Sequence[MeasuredRun]) -> list[int]:
    """The most replicas, then the largest micro-batch."""
    return _least(runs, lambda run: (-run.candidate.dp, -run.candidate.mbs))


def at_random(runs: Sequence[MeasuredRun]) -> list[int]:
    """Any layout that ran: the mean of all."""
    return list(range(len(runs)))
