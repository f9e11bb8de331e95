"""Graphs of the real NxD engine are timed by name: those of a step, in its order (``benchmarks/trainium/timed.py``)."""

import pytest

from benchmarks.trainium.timed import timing
from tests.neuron.cases import CASES, PATIENCE_S, as_started
from tests.neuron.nxd_ranks import on_nxd_ranks
from tests.ranks.cases import Task

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]


def graphs(task: Task) -> list[str]:
    """What every rank runs: the steps of a task; the names of the graphs that it has ended."""
    found = list[str]()
    with as_started(task.plan.mesh.size("tp")), timing(lambda name, seconds: found.append(name), lambda: None):
        from autoshard.engine.nxd.engine import NxdEngine

        engine = NxdEngine(task.plan, task.weights.__getitem__, task.training.adamw)
        for batches in task.steps:
            engine.step(batches, task.learning_rate, lambda _: True)
    return found


def test_a_step_is_its_micro_batches_the_reduction_and_the_update() -> None:
    task = Task.of(CASES["tp + sp, several sequences"].plan(), 2)
    step = [*["micro_batch"] * len(task.steps[0]), "reduction", "update"]
    for rank in on_nxd_ranks(task.plan.mesh.num_ranks, graphs, task, timeout_s=PATIENCE_S):
        assert rank == ["tables", *step, *step]
