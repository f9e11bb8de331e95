"""A run's engine on one rank: weights from the run's seed, and the executor of its plan."""

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from autoshard.engine.base import Batch, Measured, Run, StepReport
from autoshard.engine.programs import graph_of
from autoshard.engine.torch.executor import Executor
from autoshard.graph.evaluate import random_weights
from autoshard.plan.plan import Plan

_SCALE = 0.02  # cited: the standard deviation of GPT-2's weights (Radford et al. 2019), Llama's too


class TorchEngine:
    """One rank of a run in a running world of ``torch.distributed``."""

    def __init__(self, plan: Plan, run: Run) -> None:
        assert dist.is_initialized(), "torch's world is running before an engine is built"
        weights = random_weights(graph_of(plan), np.random.default_rng(run.seed), scale=_SCALE)
        self._executor = Executor(plan, weights)
        self._run = run

    def step(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Run one optimizer step."""
        loss, norm = self._executor.step(micro_batches, self._run.learning_rate)
        return StepReport(loss=loss, norm=norm)

    def measured(self) -> Measured:
        """Return what was counted in the last step: nothing yet."""
        return Measured(memory_bytes={}, calls={}, sent_bytes={})


def build(plan: Plan, run: Run) -> TorchEngine:
    """Build this rank's share of a plan."""
    return TorchEngine(plan, run)
