"""The micro-batches of a step on their way through the stages of one rank, in the order of the schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.engine.base import Batch
from autoshard.engine.programs import BlockProgram, PlanPrograms
from autoshard.engine.torch.block import BlockRun, InputSource, RankContext, Values
from autoshard.engine.torch.formats import memory_of, own
from autoshard.engine.torch.store import OpenedWeights, Store
from autoshard.layout.layout import Layout
from autoshard.plan.plan import Plan
from autoshard.schedule.builders import Action, ActionKind
from autoshard.spec.workload import Dtype

# Inputs that come in the order of the sequence; by document_starts the host decides what attends to what.
_ALONG_SEQUENCE = ("tokens", "labels", "token_weight", "document_starts")
_WITH_HOST = ("document_starts",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPipeline:
    """One rank's stages, each with its blocks by name in order, and the way to the other stages."""

    plan: Plan
    context: RankContext
    stages: Mapping[int, Mapping[str, BlockRun]]
    turns: Mapping[tuple[bool, int, int], int]  # way back or not, stage, micro-batch -> number of its rank's action

    @classmethod
    def of(cls, plan: Plan, programs: PlanPrograms, context: RankContext) -> "RankPipeline":
        """Take the stages that the schedule places on this rank."""
        made: dict[int, BlockRun] = {}  # equal layers share one run

        def runs(parts: BlockProgram) -> BlockRun:
            if id(parts) not in made:
                made[id(parts)] = BlockRun.of(context, parts)
            return made[id(parts)]

        stages = {
            stage: {name: runs(parts) for name, parts in blocks.items()}
            for stage, blocks in enumerate(programs.stages)
            if plan.schedule.place_of(stage)[0] == context.mesh_rank.coordinate("pp")
        }
        turns = {
            (action.kind != "F", action.stage, action.micro_batch): number
            for actions in plan.schedule.action_lists()
            for number, action in enumerate(actions)
            if action.kind != "W"  # which hands nothing on
        }
        return cls(plan=plan, context=context, stages=stages, turns=turns)

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
        """Whether this rank counts its part of the loss; its replicas along the other atoms do not."""
        if self.last_stage not in self.stages:
            return False
        parts = next(run.parts for run in self.stages[self.last_stage].values() if not run.parts.block.carry_out)
        pending = parts.program.results[parts.handed_on].layout.sums
        return self.context.mesh_rank.is_first(atom for atom, _ in self.plan.mesh.axes if atom not in ("pp", *pending))

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs a stage for the same part of the batch as this one."""
        return self.plan.mesh.group_of(self.context.mesh_rank.rank, "pp")[self.plan.schedule.place_of(stage)[0]]

    def tag(self, number: int, micro_batch: int, *, back: bool) -> int:
        """Number a message of a stage, or, beyond the last stage, of tied weights; what goes back is odd."""
        return 2 * (number * self.plan.schedule.num_micro_batches + micro_batch) + back

    def run(self, store: Store, micro_batches: Sequence[Batch], *, counts: bool) -> tuple[Mapping[int, float], int]:
        """Run the actions of this rank, which add to the sums of gradients.

        A micro-batch holds whole arrays, of which the rank takes its part. Return the losses by micro-batch, on ranks
        that count them, and the most bytes kept for backward if ``counts``.
        """
        passing = _MicroBatches(self, store, micro_batches)
        for action in self.plan.schedule.action_lists()[self.context.mesh_rank.coordinate("pp")]:
            passing.act(action)
            if counts:
                passing.count_saved()
        self.context.world.finish_sending()
        return {number: float(loss) for number, loss in passing.losses.items()}, passing.most_saved_bytes


class _MicroBatches:
    """What is kept of the micro-batches between the actions of a step."""

    def __init__(self, pipeline: RankPipeline, store: Store, batches: Sequence[Batch]) -> None:
        self.most_saved_bytes = 0
        self.losses: dict[int, torch.Tensor] = {}  # read at the end: no device is waited for meanwhile
        self._pipeline, self._context = pipeline, pipeline.context
        self._store, self._batches = store, batches
        self._values: dict[tuple[str, int], Values] = {}  # of blocks that wait for their backward pass
        self._inputs: dict[tuple[str, int, Layout], torch.Tensor] = {}
        self._kept: dict[int, torch.Tensor] = {}  # by tag: messages between two stages of this rank

    def act(self, action: Action) -> None:
        """Run one action of the schedule."""
        self._context.world.activity.act(f"{action} (stage {action.stage}, micro-batch {action.micro_batch})")
        if action.kind == "F":
            self._forward(action.stage, action.micro_batch)
        else:
            self._backward(action.kind, action.stage, action.micro_batch)

    def count_saved(self) -> None:
        """Count the bytes kept for backward, each memory once, without weights and batch."""
        lasting = (*self._store.resting(), *self._inputs.values(), self._context.positions)
        there = {memory_of(tensor) for tensor in lasting}
        kept = (tensor for values in self._values.values() for tensor in values.values())
        saved = {memory_of(tensor): tensor.untyped_storage().nbytes() for tensor in kept}
        total = sum(size for place, size in saved.items() if place not in there)
        self.most_saved_bytes = max(self.most_saved_bytes, total)

    def _forward(self, stage: int, number: int) -> None:
        hidden = self._receive(stage, stage - 1, number, back=False) if stage else None
        for name, run in self._pipeline.stages[stage].items():
            opened = self._store.opened(name, reads=True)
            hidden, self._values[name, number] = run.forward(self._source(name, run, number, hidden, opened))
        assert hidden is not None, "a stage has blocks"
        if stage < self._pipeline.last_stage:
            self._send(hidden, stage, stage + 1, number, back=False)
        elif self._pipeline.counts_loss:
            self.losses[number] = hidden

    def _backward(self, kind: ActionKind, stage: int, number: int) -> None:
        """Run B, or one half: I, which keeps the values for W, or W, which receives and sends nothing."""
        upstream = self._upstream(stage, number) if kind != "W" else None
        for name, run in reversed(list(self._pipeline.stages[stage].items())):
            adds = {f"{name}.{made.removesuffix('.sum')}" for made in run.made[kind] if made != run.parts.handed_back}
            opened = self._store.opened(name, reads=kind != "W", adds=adds)
            source = self._source(name, run, number, upstream, opened)
            values = self._values[name, number] if kind == "I" else self._values.pop((name, number))
            results = run.backward(kind, source, values)
            self._store.close(opened)
            if run.parts.handed_back and kind != "W":
                upstream = results[run.parts.handed_back]
        if stage and kind != "W":
            assert upstream is not None, "every stage but the first hands a gradient back"
            self._send(upstream, stage, stage - 1, number, back=True)

    def _upstream(self, stage: int, number: int) -> torch.Tensor:
        if stage < self._pipeline.last_stage:
            return self._receive(stage, stage + 1, number, back=True)
        formats = self._context.formats
        return torch.ones((), dtype=formats.of("fp32"), device=formats.device)

    def _source(
        self, name: str, run: BlockRun, number: int, passed: torch.Tensor | None, opened: OpenedWeights
    ) -> InputSource:
        """Return the source of a block's weights, sums of gradients, part of the batch, and neighbour's tensor."""
        block, handed_on = run.parts.block, run.parts.handed_on

        def give(tensor: str) -> torch.Tensor:
            if tensor in (block.carry_in, f"d.{handed_on}"):
                assert passed is not None, f"{tensor} is passed on by a neighbour"
                return passed
            owned = tensor.removesuffix(".grad")
            if owned != tensor:
                return opened.sums[f"{name}.{owned}"]
            role = block.tensors[tensor].role
            return opened.weights[f"{name}.{tensor}"] if role == "parameter" else self._input(run, tensor, number)

        return give

    def _input(self, run: BlockRun, tensor: str, number: int) -> torch.Tensor:
        """Cut this rank's part out of what a micro-batch brings; positions are the plan's own."""
        context, layout = self._context, run.parts.given(tensor).layout
        bounds = [slice(*one) for one in context.mesh_rank.bounds(layout)]
        if tensor not in _ALONG_SEQUENCE:
            return context.positions[bounds[0]]
        key = (tensor, number, layout)
        if key not in self._inputs:
            mine = self._batches[number][tensor][bounds[0]][:, context.positions.numpy()[bounds[1]]]
            dtype: Dtype = run.parts.block.tensors[tensor].dtype
            self._inputs[key] = own(mine) if tensor in _WITH_HOST else context.formats.tensor(mine, dtype)
        return self._inputs[key]

    def _send(self, tensor: torch.Tensor, stage: int, to_stage: int, number: int, *, back: bool) -> None:
        rank, tag = self._pipeline.rank_of(to_stage), self._pipeline.tag(stage, number, back=back)
        if rank == self._context.mesh_rank.rank:
            self._kept[tag] = tensor
        else:
            turn = self._pipeline.turns[back, to_stage, number]
            self._context.world.send(tensor, rank, tag, turn)

    def _receive(self, stage: int, from_stage: int, number: int, *, back: bool) -> torch.Tensor:
        rank, tag = self._pipeline.rank_of(from_stage), self._pipeline.tag(from_stage, number, back=back)
        if rank == self._context.mesh_rank.rank:
            return self._kept.pop(tag)
        turn = self._pipeline.turns[back, from_stage, number]
        return self._context.world.receive(self._hidden_memory(stage, back=back), rank, tag, turn)

    def _hidden_memory(self, stage: int, *, back: bool) -> torch.Tensor:
        """Return memory for the hidden state that a stage takes, or for its gradient where it ends."""
        runs = list(self._pipeline.stages[stage].values())
        parts = runs[-1 if back else 0].parts
        tensor = f"d.{parts.handed_on}" if back else parts.block.carry_in
        assert tensor, "the first stage takes nothing"
        formats, shape = self._context.formats, self._context.mesh_rank.shape(parts.given(tensor).layout)
        return torch.empty(shape, dtype=formats.of(parts.block.tensors[tensor].dtype), device=formats.device)
