"""The torch engine as the runtime sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.engine.base import Batch, Measured, Run, StepReport
from autoshard.engine.programs import graph_of
from autoshard.engine.torch.executor import Executor
from autoshard.graph.evaluate import random_weights
from autoshard.plan.plan import Plan

_SCALE = 0.02  # of fresh weights: the initializer_range that most published configurations state


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchEngine:
    """One rank of a run on ``torch.distributed``."""

    executor: Executor
    learning_rate: float

    def step(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Run one optimizer step."""
        share = self.executor.step(micro_batches, self.learning_rate)
        return StepReport(loss=share.loss, norm=share.norm)

    def measured(self) -> Measured:
        """Return what was counted in the last step: nothing yet."""
        return Measured(memory_bytes={}, calls={}, sent_bytes={})


def build(plan: Plan, run: Run) -> TorchEngine:
    """Build this process's share of the plan; torch's world must be running."""
    weights = random_weights(graph_of(plan), np.random.default_rng(run.seed), scale=_SCALE)
    return TorchEngine(executor=Executor(plan, weights), learning_rate=run.learning_rate)
