"""The micro-batches of a step on their way through the stages of one rank, in the order of the schedule."""

from collections.abc import Mapping, Sequence

import torch

from autoshard.engine.base import Batch
from autoshard.engine.programs import PlanPrograms
from autoshard.engine.torch.block import BlockRun, InputSource, RankContext, Values
from autoshard.engine.torch.formats import memory_of, own
from autoshard.engine.torch.update import OpenedWeights, Store
from autoshard.layout.layout import Layout
from autoshard.plan.plan import Plan
from autoshard.schedule.builders import ActionKind

# Inputs that come in the order of the sequence; by document_starts the host decides what attends to what.
_ALONG_SEQUENCE = ("tokens", "labels", "token_weight", "document_starts")
_WITH_HOST = ("document_starts",)


class RankPipeline:
    """One rank's stages, each with its blocks by name in order, and what it keeps between the actions of a step."""

    def __init__(self, plan: Plan, programs: PlanPrograms, context: RankContext) -> None:
        """Take the stages that the schedule places on this rank."""
        self.plan, self.context = plan, context
        self.last_stage = len(plan.stages) - 1
        self.stages: dict[int, dict[str, BlockRun]] = {}
        runs: dict[int, BlockRun] = {}  # equal layers share one
        for stage, blocks in enumerate(programs.stages):
            if plan.schedule.place_of(stage)[0] == context.mesh_rank.coordinate("pp"):
                new = {id(parts): parts for parts in blocks.values() if id(parts) not in runs}
                runs |= {number: BlockRun.of(context, parts) for number, parts in new.items()}
                self.stages[stage] = {name: runs[id(parts)] for name, parts in blocks.items()}
        # Way back or not, stage, micro-batch -> number of its rank's action.
        self._turns = {
            (action.kind != "F", action.stage, action.micro_batch): number
            for actions in plan.schedule.action_lists()
            for number, action in enumerate(actions)
            if action.kind != "W"  # which hands nothing on
        }
        self._batches: Sequence[Batch] = ()
        self._inputs: dict[tuple[str, int, Layout], torch.Tensor] = {}
        self._values: dict[tuple[str, int], Values] = {}  # of blocks that wait for their backward pass
        self._losses: dict[int, torch.Tensor] = {}  # read at the end: no device is waited for meanwhile
        self._kept: dict[int, torch.Tensor] = {}  # by tag: messages between two stages of this rank

    @property
    def blocks(self) -> Mapping[str, BlockRun]:
        """All blocks of this rank by name."""
        return {name: run for runs in self.stages.values() for name, run in runs.items()}

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
        world, most_bytes, self._batches = self.context.world, 0, micro_batches
        for action in self.plan.schedule.action_lists()[self.context.mesh_rank.coordinate("pp")]:
            world.activity.act(f"{action} (stage {action.stage}, micro-batch {action.micro_batch})")
            if action.kind == "F":
                self._forward(store, action.stage, action.micro_batch)
            else:
                self._backward(store, action.kind, action.stage, action.micro_batch)
            if counts:
                most_bytes = max(most_bytes, self._saved_bytes(store))
        world.finish_sending()
        losses = {number: float(loss) for number, loss in self._losses.items()}
        self._batches = ()
        self._inputs.clear()
        self._losses.clear()
        return losses, most_bytes

    def _saved_bytes(self, store: Store) -> int:
        """Count the bytes kept for backward, each memory once, without weights and batch."""
        resting = (tensor for flat in store.flats for tensor in (flat.values, flat.sums))
        there = {memory_of(tensor) for tensor in (*resting, *self._inputs.values(), self.context.positions)}
        kept = (tensor for values in self._values.values() for tensor in values.values())
        saved = {memory_of(tensor): tensor.untyped_storage().nbytes() for tensor in kept}
        return sum(size for place, size in saved.items() if place not in there)

    def _forward(self, store: Store, stage: int, number: int) -> None:
        hidden = self._receive(stage, stage - 1, number, back=False) if stage else None
        run = None
        for name, run in self.stages[stage].items():
            opened = store.opened(name, reads=True)
            hidden, self._values[name, number] = run.forward(self._source(name, run, number, hidden, opened))
        assert hidden is not None and run, "a stage has blocks"
        if stage < self.last_stage:
            self._send(hidden, stage, stage + 1, number, back=False)
            return
        pending = run.parts.program.results[run.parts.handed_on].layout.sums
        replicated = [atom for atom, _ in self.plan.mesh.axes if atom not in ("pp", *pending)]
        if self.context.mesh_rank.is_first(replicated):  # its replicas do not count their part of the loss
            self._losses[number] = hidden

    def _backward(self, store: Store, kind: ActionKind, stage: int, number: int) -> None:
        """Run B, or one half: I, which keeps the values for W, or W, which receives and sends nothing."""
        upstream, formats = None, self.context.formats
        if kind != "W" and stage < self.last_stage:
            upstream = self._receive(stage, stage + 1, number, back=True)
        elif kind != "W":
            upstream = torch.ones((), dtype=formats.of("fp32"), device=formats.device)
        for name, run in reversed(list(self.stages[stage].items())):
            adds = {f"{name}.{made.removesuffix('.sum')}" for made in run.made[kind] if made != run.parts.handed_back}
            opened = store.opened(name, reads=kind != "W", adds=adds)
            source = self._source(name, run, number, upstream, opened)
            values = self._values[name, number] if kind == "I" else self._values.pop((name, number))
            results = run.backward(kind, source, values)
            opened.close()
            if run.parts.handed_back and kind != "W":
                upstream = results[run.parts.handed_back]
        if stage and kind != "W":
            assert upstream is not None, "every stage but the first hands a gradient back"
            self._send(upstream, stage, stage - 1, number, back=True)

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
        context, layout = self.context, run.parts.given(tensor).layout
        bounds = [slice(*one) for one in context.mesh_rank.bounds(layout)]
        if tensor not in _ALONG_SEQUENCE:
            return context.positions[bounds[0]]
        key = (tensor, number, layout)
        if key not in self._inputs:
            mine = self._batches[number][tensor][bounds[0]][:, context.positions.numpy()[bounds[1]]]
            dtype = run.parts.block.tensors[tensor].dtype
            self._inputs[key] = own(mine) if tensor in _WITH_HOST else context.formats.tensor(mine, dtype)
        return self._inputs[key]

    def _send(self, tensor: torch.Tensor, stage: int, to_stage: int, number: int, *, back: bool) -> None:
        rank, tag = self.rank_of(to_stage), self.tag(stage, number, back=back)
        if rank == self.context.mesh_rank.rank:
            self._kept[tag] = tensor
        else:
            self.context.world.send(tensor, rank, tag, self._turns[back, to_stage, number])

    def _receive(self, stage: int, from_stage: int, number: int, *, back: bool) -> torch.Tensor:
        """Return the hidden state that a stage takes, or its gradient where the stage ends."""
        rank, tag = self.rank_of(from_stage), self.tag(from_stage, number, back=back)
        if rank == self.context.mesh_rank.rank:
            return self._kept.pop(tag)
        parts = list(self.stages[stage].values())[-1 if back else 0].parts
        tensor = f"d.{parts.handed_on}" if back else parts.block.carry_in
        assert tensor, "the first stage takes nothing"
        formats, shape = self.context.formats, self.context.mesh_rank.shape(parts.given(tensor).layout)
        memory = torch.empty(shape, dtype=formats.of(parts.block.tensors[tensor].dtype), device=formats.device)
        return self.context.world.receive(memory, rank, tag, self._turns[back, from_stage, number])
