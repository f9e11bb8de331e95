"""A run's engine on one rank: weights from the run's seed, and the executor of its plan."""

from collections.abc import Sequence

import torch

from autoshard.engine.base import HOST, Batch, Measured, Run, StepReport
from autoshard.engine.initial import InitialWeights
from autoshard.engine.programs import graph_of
from autoshard.engine.torch.executor import Executor
from autoshard.engine.torch.formats import Formats
from autoshard.plan.plan import Plan


class TorchEngine:
    """One rank of a run in a running world of ``torch.distributed``."""

    def __init__(self, plan: Plan, run: Run) -> None:
        formats = Formats(device=torch.device(run.device))
        self._executor = Executor(plan, InitialWeights(graph=graph_of(plan), seed=run.seed), formats)
        self._run = run

    def step(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Run one optimizer step."""
        loss, norm = self._executor.step(micro_batches, self._run.learning_rate)
        if self._run.device != HOST:
            torch.accelerator.synchronize()  # a step ends when its update does
        return StepReport(loss=loss, norm=norm)

    def measured(self) -> Measured:
        """Return what this rank holds, and what it sent in the last step."""
        return self._executor.measured()


def build(plan: Plan, run: Run) -> TorchEngine:
    """Build this rank's share of a plan."""
    return TorchEngine(plan, run)
