"""A run's engine on one rank: weights from the run's seed, and the executor of its plan."""

from collections.abc import Sequence

import torch

from autoshard.engine.base import HOST, Allows, Batch, Measured, Run, StepReport, whenever_finite
from autoshard.engine.initial import InitialWeights
from autoshard.engine.pieces import Piece
from autoshard.engine.programs import graph_of
from autoshard.engine.torch.executor import Executor
from autoshard.engine.torch.formats import Formats
from autoshard.plan.plan import Plan


class TorchEngine:
    """One rank of a run in a running world of ``torch.distributed``."""

    def __init__(self, plan: Plan, run: Run) -> None:
        formats = Formats(device=torch.device(run.device))
        whole = InitialWeights(graph=graph_of(plan), seed=run.training.seed)
        self._executor = Executor(plan, whole, formats, run)
        self._run = run

    def step(
        self, micro_batches: Sequence[Batch], learning_rate: float, allows: Allows = whenever_finite
    ) -> StepReport:
        """Run one optimizer step."""
        report = self._executor.step(micro_batches, learning_rate, allows)
        if self._run.device != HOST:
            torch.accelerator.synchronize()  # a step ends when its update does
        return report

    def pieces(self) -> Sequence[Piece]:
        """Return what this rank holds of the state."""
        return self._executor.pieces()

    def restored(self, num_updates: int) -> None:
        """Take over what the pieces were filled with."""
        self._executor.restored(num_updates)

    def measured(self) -> Measured:
        """Return what this rank holds, and what it sent in the last step."""
        return self._executor.measured()


def build(plan: Plan, run: Run) -> TorchEngine:
    """Build this rank's share of a plan."""
    return TorchEngine(plan, run)
