"""A plan on one rank: its micro-batches through the pipeline, then the step phase.

Nothing is derived here: every local operation and every Collective is an instruction of the plan's table.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from autoshard.engine.activity import RankActivity
from autoshard.engine.base import HOST, Allows, Batch, EngineMode, Measured, Run, StepReport, whenever_finite
from autoshard.engine.initial import InitialWeights
from autoshard.engine.placement import MeshRank, StatePiece, sequence_order
from autoshard.engine.programs import BlockProgram, PlanPrograms, graph_of, programs_of, tied_instances
from autoshard.engine.torch.block import BY_BATCH, POSITIONS, BlockRun, InputSource, LiteralRun, RankContext, Values
from autoshard.engine.torch.formats import Formats, memory_of, own
from autoshard.engine.torch.generated import GeneratedRun, Generator
from autoshard.engine.torch.kernels import Rotations
from autoshard.engine.torch.update import OpenedWeights, Store, Tied, Weight, flats
from autoshard.engine.torch.world import World, channel_backend, refuse_crossing
from autoshard.graph.op import Array
from autoshard.layout.layout import Layout
from autoshard.plan.lowering import split_pending
from autoshard.plan.plan import Plan
from autoshard.schedule.builders import ActionKind
from autoshard.spec.training import Training


def _runs_of(
    blocks: Mapping[str, BlockProgram], context: RankContext, mode: EngineMode, kinds: Collection[str]
) -> Mapping[str, BlockRun]:
    """Return by name what executes each of a rank's blocks; equal layers share one."""
    compiler = None
    if mode == "compiled":
        from autoshard.engine.torch.compiled import inductor  # which takes a second

        compiler = inductor(context.formats.device)
    generator = Generator(context=context, kinds=[kind for kind in "FBIW" if kind in kinds], compiler=compiler)
    alike: dict[int, list[str]] = {}
    for name, parts in blocks.items():
        alike.setdefault(id(parts), []).append(name)
    found: dict[str, BlockRun] = {}
    for names in alike.values():
        parts = blocks[names[0]]
        run = LiteralRun.of(context, parts) if mode == "literal" else generator.generate(parts, names)
        found |= dict.fromkeys(names, run)
    return {name: found[name] for name in blocks}


class RankPipeline:
    """One rank's stages, each with its blocks by name in order, and what it keeps between the actions of a step."""

    def __init__(self, plan: Plan, programs: PlanPrograms, context: RankContext, mode: EngineMode) -> None:
        """Take the stages that the schedule places on this rank."""
        self.plan, self.context = plan, context
        self.last_stage = len(plan.stages) - 1
        place = context.mesh_rank.coordinate("pp")
        here = [stage for stage in range(len(plan.stages)) if plan.schedule.place_of(stage)[0] == place]
        taken = {action.kind for action in plan.schedule.action_lists()[place]}
        self.blocks = _runs_of(
            {name: one for stage in here for name, one in programs.stages[stage].items()}, context, mode, taken
        )
        self.stages = {stage: {name: self.blocks[name] for name in programs.stages[stage]} for stage in here}
        # By kind of action the weights to whose gradients a block adds.
        self._adds = {
            (kind, name): {
                f"{name}.{made.removesuffix('.sum')}" for made in run.parts.made(kind) if made != run.parts.handed_back
            }
            for name, run in self.blocks.items()
            for kind in taken
        }
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

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs a stage for the same part of the batch as this one."""
        return self.plan.mesh.group_of(self.context.mesh_rank.rank, "pp")[self.plan.schedule.place_of(stage)[0]]

    def tag(self, number: int, micro_batch: int, *, back: bool) -> int:
        """Number a message of a stage, or, beyond the last stage, of tied weights; what goes back is odd."""
        return 2 * (number * self.plan.schedule.num_micro_batches + micro_batch) + back

    def run(
        self, store: Store, micro_batches: Sequence[Batch], *, counts: bool
    ) -> tuple[Mapping[int, torch.Tensor], int]:
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
        losses, self._losses, self._batches = self._losses, {}, ()
        self._inputs.clear()
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
            made, self._values[name, number] = run.forward(self._source(name, run, number, hidden, opened))
            hidden = made.contiguous()  # blocks expect nothing else
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
            opened = store.opened(name, reads=kind != "W", adds=self._adds[kind, name])
            source = self._source(name, run, number, upstream, opened)
            values = self._values[name, number] if kind == "I" else self._values.pop((name, number))
            made = run.backward(kind, source, values)
            opened.close()
            if made is not None:
                upstream = made.contiguous()
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
        if tensor in POSITIONS:
            return context.positions[bounds[0]]
        key = (tensor, number, layout)
        if key not in self._inputs:
            mine = self._batches[number][tensor][bounds[0]][:, context.positions.numpy()[bounds[1]]]
            dtype = run.parts.block.tensors[tensor].dtype
            self._inputs[key] = own(mine) if tensor in BY_BATCH else context.formats.tensor(mine, dtype)
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


Whole = Callable[[str], Array]  # a whole weight by its name, as in ``OpGraph.instances``
_AS_PLANNED = Formats()
_USUAL = Training()
_MOST_SUSPECTS = 3  # that a rank names of what it found


def build(plan: Plan, run: Run) -> "TorchEngine":
    """Build this rank's share of a plan, with weights from the run's seed."""
    whole = InitialWeights(graph=graph_of(plan), seed=run.training.seed)
    engine = TorchEngine(plan, whole, Formats(device=torch.device(run.device)), run)
    engine.write_functions(run.folder / "generated")
    return engine


class TorchEngine:
    """One rank of a run in a running world of ``torch.distributed``: its blocks, weights, pieces of the state."""

    def __init__(
        self,
        plan: Plan,
        whole: Whole,
        formats: Formats = _AS_PLANNED,
        run: Run | None = None,
    ) -> None:
        """Take this rank's part of whole weights."""
        training, mode = (run.training, run.mode) if run else (_USUAL, "literal")
        programs = programs_of(plan)
        backend = channel_backend(formats.device)
        if backend:
            refuse_crossing(plan.schedule)
        activity = run.activity if run else RankActivity()
        self._world = World.build(plan.mesh, programs.group_atoms(), backend, activity)
        mesh_rank = MeshRank(mesh=plan.mesh, rank=self._world.rank, sizes=programs.graph.sizes)
        positions = torch.from_numpy(sequence_order(plan))
        context = RankContext(
            world=self._world, mesh_rank=mesh_rank, formats=formats, positions=positions, rotations=Rotations()
        )
        self.graph = programs.graph
        self._pipeline = RankPipeline(plan, programs, context, mode)
        ties = tied_instances(programs.graph)
        self.weights = {one.instance: one for one in self._weights_here(ties, training)}
        blocks = {name: mesh_rank.block(whole(name), one.layout) for name, one in self.weights.items()}
        here = {other: owner for other, owner in ties.items() if other in self.weights and owner in self.weights}
        owned = (one for name, one in self.weights.items() if name not in here)
        self.store = Store(flats=flats(self._world, owned, blocks, formats, here), ties=here)
        self.gradients: list[torch.Tensor] = []  # of every flat this rank's piece, reduced; after an update clipped
        self.clip, self._num_updates, self._saved_bytes = 1.0, 0, 0

    def step(
        self, micro_batches: Sequence[Batch], learning_rate: float, allows: Allows = whenever_finite
    ) -> StepReport:
        """Run one step; a micro-batch holds whole arrays, of which the rank takes its part.

        Weights are updated if ``allows`` says so of loss and norm, which are the same on every rank.
        """
        world, flats = self._world, self.store.flats
        world.sent_bytes.clear()
        self.store.clear()
        counts = not self._saved_bytes  # every step keeps as much as the first
        made, saved_bytes = self._pipeline.run(self.store, micro_batches, counts=counts)
        self._saved_bytes = self._saved_bytes or saved_bytes
        world.activity.act("reduction of gradients")
        self._tie_gradients()
        self.gradients = [flat.reduced() for flat in flats]
        numbers = [flat.square(piece) for flat, piece in zip(flats, self.gradients, strict=True)]
        known = (
            torch.stack([*numbers, *made.values()]).to(HOST).tolist()
        )  # a step waits for its device here, and nowhere else
        losses = dict(zip(made, known[len(flats) :], strict=True))
        squares = [flat.share(square) for flat, square in zip(flats, known, strict=False)]
        both = torch.tensor([sum(squares), sum(losses.values())], dtype=torch.float64)
        if dist.get_world_size() > 1:
            with world.activity.waiting("the norm of all ranks"):
                dist.all_reduce(both)
        total, loss = both.tolist()
        world.activity.act("update")
        op = self.graph.update.op("clip")
        clip, norm = op.kind.evaluate(self.graph.update.call(op, {}), np.asarray(total))
        world.finish_sending()
        report = StepReport(loss=loss, norm=float(norm))
        if not report.finite:
            report = replace(report, suspects=self._suspects(losses, squares))
        if not allows(report):
            return replace(report, updated=False)
        self._num_updates, self.clip = self._num_updates + 1, float(clip)
        scalars = {"clip": self.clip, "learning_rate": learning_rate, "step_number": self._num_updates}
        for flat, piece in zip(flats, self.gradients, strict=True):
            flat.update(piece, scalars)
        return report

    def _suspects(self, losses: Mapping[int, float], squares: Sequence[float]) -> tuple[str, ...]:
        """Return by rank what is not finite, the first few of each: losses of micro-batches, gradients of weights."""
        mine = [f"loss of micro-batch {number}" for number, loss in losses.items() if not math.isfinite(loss)]
        for flat, piece, square in zip(self.store.flats, self.gradients, squares, strict=True):
            for weight, (low, high), first in flat.ranges(len(piece)) if not math.isfinite(square) else ():
                if not piece[first : first + high - low].isfinite().all():
                    mine.append(f"gradient of {weight.instance}")
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, mine[:_MOST_SUSPECTS])
        return tuple(f"rank {rank}: {', '.join(its)}" for rank, its in enumerate(found) if its)

    def write_functions(self, folder: Path) -> None:
        """Write the functions that this rank runs, if it is the first of its stages: others run the same."""
        mesh_rank = self._pipeline.context.mesh_rank
        if mesh_rank.is_first(atom for atom, _ in self._pipeline.plan.mesh.axes if atom != "pp"):
            for run in {id(run): run for run in self._pipeline.blocks.values()}.values():
                if isinstance(run, GeneratedRun):
                    file = folder / f"rank_{mesh_rank.rank}" / f"{run.file_name}.py"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(run.text, encoding="utf-8")

    def pieces(self) -> tuple[StatePiece, ...]:
        """Return the boxes of the state that this rank holds; what loading fills counts after ``restored``."""
        return tuple(piece for flat in self.store.flats for piece in flat.state())

    def restored(self, num_updates: int) -> None:
        """Take over what the pieces were filled with: weights follow from the masters or pieces that are updated."""
        self._num_updates = num_updates
        for flat in self.store.flats:
            flat.restored()

    def measured(self) -> Measured:
        """Return what this rank holds, and what it sent in the last step."""
        flats = self.store.flats
        return Measured(
            memory_bytes={
                "weights": _bytes(flat.values for flat in flats),
                "gradients": _bytes(flat.sums for flat in flats),
                "masters": _bytes(flat.master for flat in flats if flat.master is not None),
                "optimizer": _bytes(state for flat in flats for state in flat.moments),
                "saved": self._saved_bytes,
            },
            sent_bytes=dict(self._world.sent_bytes),
        )

    def _weights_here(self, ties: Mapping[str, str], training: Training) -> Iterator[Weight]:
        pipeline, mesh_rank = self._pipeline, self._pipeline.context.mesh_rank
        parts = {name: run.parts for name, run in pipeline.blocks.items()}
        names = {f"{name}.{tensor.name}" for name, one in parts.items() for tensor in one.block.parameters}
        apart = {other: owner for other, owner in ties.items() if (other in names) != (owner in names)}
        roles: dict[str, Tied] = {**dict.fromkeys(apart, "copy"), **dict.fromkeys(apart.values(), "owner")}
        for name, one in parts.items():
            late = one.made("W") if pipeline.plan.schedule.splits_backward else {}
            for tensor in one.block.parameters:
                layout, given = one.program.results[f"{tensor.name}.sum"].layout, one.given(tensor.name).layout
                assert mesh_rank.bounds(layout) == mesh_rank.bounds(given), f"{layout} cannot update {given}"
                spread, summed = split_pending(layout.sums)
                instance = f"{name}.{tensor.name}"
                owner = apart.get(instance, instance)
                kind, _, parameter = owner.split(".", 2)
                yield Weight(
                    instance=instance, owner=owner, name=parameter, block=self.graph.block(kind), layout=layout,
                    mesh_rank=mesh_rank, summed=summed, spread=spread, zero=pipeline.plan.zero, training=training,
                    tied=roles.get(instance, ""), late=f"{tensor.name}.sum" in late,
                )  # fmt: skip

    def _tie_gradients(self) -> None:
        """Add up the gradients that two stages have for weights that share their values; both update them alike.

        The copy sends first and the owner takes first: devices that never talked wait for each other to connect.
        """
        world, pipeline = self._world, self._pipeline
        for number, flat in enumerate(flat for flat in self.store.flats if flat.tied):
            back, other = flat.tied == "copy", torch.empty_like(flat.sums)
            sent, taken = (pipeline.tag(len(pipeline.plan.stages) + number, 0, back=way) for way in (back, not back))
            rank = pipeline.rank_of(0 if back else pipeline.last_stage)
            if back:
                world.send(flat.sums, rank, sent)
            world.receive(other, rank, taken)
            if not back:
                world.send(flat.sums, rank, sent)
            flat.sums.add_(other)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({(memory_of(tensor), tensor.storage_offset()): tensor.nbytes for tensor in tensors}.values())
