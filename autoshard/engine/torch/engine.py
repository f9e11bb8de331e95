"""A run's engine on one rank: weights from the run's seed, and the executor of its plan."""

from collections.abc import Sequence

from autoshard.engine.base import Batch, Measured, Run, StepReport
from autoshard.engine.initial import InitialWeights
from autoshard.engine.programs import graph_of
from autoshard.engine.torch.executor import Executor
from autoshard.plan.plan import Plan


class TorchEngine:
    """One rank of a run in a running world of ``torch.distributed``."""

    def __init__(self, plan: Plan, run: Run) -> None:
        self._executor = Executor(plan, InitialWeights(graph=graph_of(plan), seed=run.seed))
        self._run = run

    def step(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Run one optimizer step."""
        loss, norm = self._executor.step(micro_batches, self._run.learning_rate)
        return StepReport(loss=loss, norm=norm)

    def measured(self) -> Measured:
        """Return what this rank holds, and what it sent in the last step."""
        return self._executor.measured()


def build(plan: Plan, run: Run) -> TorchEngine:
    """Build this rank's share of a plan."""
    return TorchEngine(plan, run)
