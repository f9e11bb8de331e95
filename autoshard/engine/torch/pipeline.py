"""The micro-batches of a step on their way through the stages of one rank, in the order of the schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.engine.place import Place
from autoshard.engine.programs import PlanPrograms
from autoshard.engine.torch.block import Arrays, BlockRun, Values
from autoshard.engine.torch.world import World
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan
from autoshard.schedule.action import Action, ActionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """What all micro-batches give: gradients summed (some still pending), and the loss where it is counted."""

    gradients: dict[str, Array]
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One rank's stages, each with its blocks by name in order, and the way to the other stages."""

    plan: Plan
    world: World
    place: Place
    stages: Mapping[int, Mapping[str, BlockRun]]

    @classmethod
    def of(cls, plan: Plan, programs: PlanPrograms, world: World) -> "Pipeline":
        """Take the stages that the schedule places on this rank."""
        place = Place(mesh=plan.mesh, rank=world.rank, sizes=programs.graph.sizes)
        stages = {
            stage: {name: BlockRun(world=world, place=place, parts=parts) for name, parts in blocks.items()}
            for stage, blocks in enumerate(programs.stages)
            if plan.schedule.place_of(stage)[0] == place.coordinate("pp")
        }
        return cls(plan=plan, world=world, place=place, stages=stages)

    @property
    def blocks(self) -> Mapping[str, BlockRun]:
        """All blocks of this rank by name."""
        return {name: run for runs in self.stages.values() for name, run in runs.items()}

    @property
    def last_stage(self) -> int:
        """The stage that ends in the loss."""
        return len(self.plan.stages) - 1

    @property
    def counts_loss(self) -> bool:
        """Whether this rank states its part of the loss, which ranks along the other atoms have alike."""
        if self.last_stage not in self.stages:
            return False
        parts = next(run.parts for run in self.stages[self.last_stage].values() if not run.parts.block.carry_out)
        pending = parts.program.results[parts.handed_on].layout.sums
        return self.place.is_first(atom for atom, _ in self.plan.mesh.axes if atom not in ("pp", *pending))

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs a stage for the same part of the batch as this one."""
        return self.plan.mesh.group_of(self.place.rank, "pp")[self.plan.schedule.place_of(stage)[0]]

    def tag(self, number: int, micro_batch: int, *, back: bool) -> int:
        """Number a message of a stage (or, beyond the last stage, of tied weights); 0 is left to rings."""
        return 1 + 2 * (number * self.plan.schedule.num_micro_batches + micro_batch) + back

    def run(self, weights: Arrays, micro_batches: Sequence[Arrays]) -> Summed:
        """Run the actions of this rank; a micro-batch holds whole arrays, of which the rank takes its part."""
        passing = _MicroBatches(self, weights, micro_batches)
        for action in self.plan.schedule.action_lists()[self.place.coordinate("pp")]:
            passing.act(action)
        self.world.finish_sending()
        return Summed(gradients=passing.gradients, loss=passing.loss)


class _MicroBatches:
    """What is kept of the micro-batches between the actions of a step."""

    def __init__(self, pipeline: Pipeline, weights: Arrays, batches: Sequence[Arrays]) -> None:
        self.gradients: dict[str, Array] = {}
        self.loss = 0.0
        self._pipeline = pipeline
        self._weights = weights
        self._batches = batches
        self._values: dict[tuple[str, int], Values] = {}  # of blocks that wait for their backward pass
        self._kept: dict[int, Array] = {}  # by tag: messages between two stages of this rank

    def act(self, action: Action) -> None:
        """Run one action of the schedule."""
        if action.kind == "F":
            self._forward(action.stage, action.micro_batch)
        else:
            self._backward(action.kind, action.stage, action.micro_batch)

    def _forward(self, stage: int, number: int) -> None:
        hidden = self._arrived(stage, stage - 1, number, back=False) if stage else np.zeros(())
        for name, run in self._pipeline.stages[stage].items():
            given = self._inputs(name, run, number)
            if run.parts.block.carry_in:
                given[run.parts.block.carry_in] = hidden
            hidden, self._values[name, number] = run.forward(given)
        if stage < self._pipeline.last_stage:
            self._hand(hidden, stage, stage + 1, number, back=False)
        elif self._pipeline.counts_loss:
            self.loss += float(hidden)

    def _backward(self, kind: ActionKind, stage: int, number: int) -> None:
        """Run B, or one half: I, which keeps the values, and W, which is handed nothing and hands on nothing."""
        upstream = self._upstream(stage, number) if kind != "W" else np.zeros(())
        for name, run in reversed(list(self._pipeline.stages[stage].items())):
            given = self._inputs(name, run, number) | self._so_far(name, run)
            given[f"d.{run.parts.handed_on}"] = upstream
            values = self._values[name, number] if kind == "I" else self._values.pop((name, number))
            results = dict(run.backward(kind, given, values))
            if run.parts.handed_back and kind != "W":
                upstream = results.pop(run.parts.handed_back)
            self.gradients |= {f"{name}.{tensor.removesuffix('.sum')}": array for tensor, array in results.items()}
        if stage and kind != "W":
            self._hand(upstream, stage, stage - 1, number, back=True)

    def _upstream(self, stage: int, number: int) -> Array:
        is_last = stage == self._pipeline.last_stage
        return np.ones(()) if is_last else self._arrived(stage, stage + 1, number, back=True)

    def _inputs(self, name: str, run: BlockRun, number: int) -> dict[str, Array]:
        """Return a block's weights, and its part of the micro-batch."""
        block, batch = run.parts.block, self._batches[number]
        found = {tensor.name: self._weights[f"{name}.{tensor.name}"] for tensor in block.parameters}
        inputs = [tensor.name for tensor in block.tensors.values() if tensor.role == "input" and tensor.name in batch]
        return found | {tensor: run.place.block(batch[tensor], run.parts.given(tensor).layout) for tensor in inputs}

    def _so_far(self, name: str, run: BlockRun) -> dict[str, Array]:
        """Return the sums of gradients of the micro-batches before."""
        found: dict[str, Array] = {}
        for tensor in run.parts.block.parameters:
            zeros = np.zeros(run.place.shape(run.parts.given(f"{tensor.name}.grad").layout))
            found[f"{tensor.name}.grad"] = self.gradients.get(f"{name}.{tensor.name}", zeros)
        return found

    def _hand(self, array: Array, stage: int, to_stage: int, number: int, *, back: bool) -> None:
        rank, tag = self._pipeline.rank_of(to_stage), self._pipeline.tag(stage, number, back=back)
        if rank == self._pipeline.place.rank:
            self._kept[tag] = array
        else:
            self._pipeline.world.send(array, rank, tag)

    def _arrived(self, stage: int, from_stage: int, number: int, *, back: bool) -> Array:
        rank, tag = self._pipeline.rank_of(from_stage), self._pipeline.tag(from_stage, number, back=back)
        if rank == self._pipeline.place.rank:
            return self._kept.pop(tag)
        return self._pipeline.world.receive(self._hidden_shape(stage, back=back), rank, tag)

    def _hidden_shape(self, stage: int, *, back: bool) -> tuple[int, ...]:
        """Return the shape of the hidden state where a stage takes it, or of its gradient where it ends."""
        runs = list(self._pipeline.stages[stage].values())
        parts = runs[-1 if back else 0].parts
        tensor = f"d.{parts.handed_on}" if back else parts.block.carry_in
        assert tensor, "the first stage takes nothing"
        return self._pipeline.place.shape(parts.given(tensor).layout)
