"""A rank that begins no step before all ranks have compared which collectives they are about to begin."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from autoshard.engine.initial import no_weights
from autoshard.engine.torch.engine import TorchEngine, build
from autoshard.engine.torch.fake import NoNumbers, batch_without_numbers
from autoshard.engine.torch.formats import NOWHERE
from autoshard.engine.torch.ledger import BegunCollective, refuse_other_order
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Allows, Batch, Run, StepReport, whenever_finite
from autoshard.run.reports import Measured


def build_agreeing(plan: Plan, run: Run) -> "TorchEngine | AgreeingEngine":
    """Build this rank's share of a plan, and compare it with that of the other ranks."""
    return agreeing(plan, run, build(plan, run))


def agreeing(plan: Plan, run: Run, engine: TorchEngine) -> "TorchEngine | AgreeingEngine":
    """Compare with the other ranks what a step of an engine begins, as the run says how often."""
    when = run.training.watchdog.collectives
    if when == "off" or dist.get_world_size() == 1:
        return engine
    if when == "every":
        return AgreeingEngine(plan, engine)
    try:
        collectives = begun_by(of_few_micro_batches(plan), engine)
    except Exception as error:  # a user's kernel may need numbers; ranks still compare that all of them failed alike
        what = f"{type(error).__name__}: {error}"
        warnings.warn(f"the order of collectives is not compared: a step without numbers failed ({what})", stacklevel=2)
        collectives = [
            BegunCollective(kind="a step without numbers", ranks=tuple(range(dist.get_world_size())), form=what)
        ]
    refuse_other_order(collectives, ordered_messages=bool(engine.world.channels))
    return engine


class AgreeingEngine:
    """Compares before every step what ranks are about to begin, and after it what this rank has begun."""

    def __init__(self, plan: Plan, engine: TorchEngine) -> None:
        """Take an engine; one that checks itself keeps a ledger."""
        self._plan, self.engine = plan, engine
        self.pieces, self.restored, self.evaluate = engine.pieces, engine.restored, engine.evaluate

    def step(
        self, micro_batches: Sequence[Batch], learning_rate: float, allows: Allows = whenever_finite
    ) -> StepReport:
        """Run one step."""
        expected, ledger = begun_by(self._plan, self.engine), self.engine.world.ledger
        refuse_other_order(expected, ordered_messages=bool(self.engine.world.channels))
        ledger.entries.clear()
        report = self.engine.step(micro_batches, learning_rate, allows)
        if report.updated:
            same = self._comparable(ledger.entries) == self._comparable(expected)
            assert same, "a step begins what its rank has said"
        return report

    def _comparable(self, entries: Sequence[BegunCollective]) -> list[BegunCollective]:
        """Leave out shapes where they follow from the experts that tokens choose."""
        routed = self.engine.programs.packed
        return [replace(entry, form=entry.form.partition("[")[0]) if routed else entry for entry in entries]

    def measured(self) -> Measured:
        """Return what was counted in the last step."""
        return self.engine.measured()


def of_few_micro_batches(plan: Plan) -> Plan:
    """Return the plan with two rounds of micro-batches at most: it begins, goes on and ends as the whole one does.

    A step of 512 micro-batches takes minutes even without numbers. Lists of actions of their own have no rounds.
    """
    schedule, count = plan.schedule, plan.schedule.num_micro_batches
    few = min(count, 2 * schedule.num_ranks + count % schedule.num_ranks)
    if schedule.actions is not None or few == count:
        return plan
    workload = replace(plan.workload, global_batch=plan.micro_batch * plan.mesh.size("dp") * few)
    return replace(plan, schedule=replace(schedule, num_micro_batches=few), workload=workload)


def begun_by(plan: Plan, engine: TorchEngine) -> list[BegunCollective]:
    """Return the collectives of a step, in the order in which they begin: the step runs on shapes, and sends nothing.

    Routing is taken to be even; the shapes of what depends on it are not compared.
    """
    silent, formats = engine.world.silent(keeps=True), replace(engine.formats, device=NOWHERE)
    with NoNumbers():
        twin = TorchEngine(plan, no_weights(engine.graph), formats, world=silent, programs=engine.programs)
        twin.step([batch_without_numbers(plan)] * plan.schedule.num_micro_batches, 0.0, lambda _: True)
    return silent.ledger.entries
