"""A plan on one rank: its micro-batches through the pipeline, then the step phase.

Nothing is derived here: every local operation and every Collective is an instruction of the plan's table.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from autoshard.engine.initial import InitialWeights
from autoshard.engine.observing import RouterNotes
from autoshard.engine.programs import PlanPrograms, graph_of, programs_of, tied_instances
from autoshard.engine.torch.formats import Formats, memory_of
from autoshard.engine.torch.generated import GeneratedRun
from autoshard.engine.torch.joint import neighbours
from autoshard.engine.torch.kernels import Rotations
from autoshard.engine.torch.kernels.grouped import groups_products
from autoshard.engine.torch.ledger import Ledger
from autoshard.engine.torch.pipeline import RankPipeline
from autoshard.engine.torch.states.flat import flats
from autoshard.engine.torch.states.norms import GroupNorms
from autoshard.engine.torch.states.scaling import unscale
from autoshard.engine.torch.states.store import Store
from autoshard.engine.torch.states.weight import Tied, Weight
from autoshard.engine.torch.steps import RankContext
from autoshard.engine.torch.world import World, channel_backend
from autoshard.files import replace_text
from autoshard.graph.op import Array
from autoshard.plan.lowering import split_pending
from autoshard.plan.plan import Plan
from autoshard.run.activity import RankActivity
from autoshard.run.placement import MeshRank, StatePiece, sequence_order
from autoshard.run.protocol import HOST, Allows, Batch, Run, StepReport, whenever_finite
from autoshard.run.reports import Measured
from autoshard.schedule.verify import refuse_crossing
from autoshard.spec.training import Training

Whole = Callable[[str], Array]  # a whole weight by its name, as in ``OpGraph.instances``
_AS_PLANNED = Formats()
_USUAL = Training()
_MOST_SUSPECTS = 3  # losses and gradients that a rank names


def build(plan: Plan, run: Run) -> "TorchEngine":
    """Build this rank's share of a plan, with weights from the run's seed."""
    whole = InitialWeights.of(plan, graph_of(plan), run.training.seed)
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
        *,
        world: World | None = None,
        programs: PlanPrograms | None = None,
    ) -> None:
        """Take this rank's part of whole weights, in a running ``world`` or in a world that is built for the plan.

        ``programs`` are those of the plan's table, if no others are given; rows of experts are packed where the device
        has products of groups.
        """
        training, mode = (run.training, run.mode) if run else (_USUAL, "literal")
        self.formats = formats
        self.programs = programs = programs or programs_of(plan, packs=groups_products(formats.device))
        self.world = world or _world_of(plan, programs, formats, run)
        mesh_rank = MeshRank(mesh=plan.mesh, rank=self.world.rank, sizes=programs.graph.sizes)
        positions = torch.from_numpy(sequence_order(plan))
        context = RankContext(
            world=self.world,
            mesh_rank=mesh_rank,
            formats=formats,
            positions=positions,
            rotations=Rotations(),
            packed=programs.packed,
            in_fp8=plan.workload.precision.products == "fp8" and not formats.exact,
        )
        self.graph = programs.graph
        self._pipeline = RankPipeline(plan, programs, context, mode, training.seed)
        self._notes = RouterNotes.of(plan, programs.graph)
        self._norms = GroupNorms.of(programs.graph, training.track.norms)
        ties = tied_instances(programs.graph)
        self.weights = {weight.instance: weight for weight in self._weights_here(ties, training)}
        blocks = {name: mesh_rank.block(whole(name), weight.layout) for name, weight in self.weights.items()}
        ties_here = {copy: owner for copy, owner in ties.items() if {copy, owner} <= self.weights.keys()}
        bucket_bytes = plan.buckets.reduce_scatter_bytes
        in_memory = (weight for name, weight in self.weights.items() if name not in ties_here)
        self.store = Store(flats=flats(self.world, in_memory, blocks, formats, ties_here, bucket_bytes), ties=ties_here)
        self.gradients: list[torch.Tensor] = []  # this rank's piece of every flat, reduced; after an update clipped
        self.clip, self._num_updates, self._saved_bytes = 1.0, 0, 0

    def step(
        self, micro_batches: Sequence[Batch], learning_rate: float, allows: Allows = whenever_finite
    ) -> StepReport:
        """Run one step; a micro-batch holds whole arrays, of which the rank takes its part.

        Weights are updated if ``allows`` accepts loss and norm, which are the same on every rank.
        """
        world, flats = self.world, self.store.flats
        world.sent_bytes.clear()
        self.store.clear()
        counts = not self._saved_bytes  # every step keeps as much as the first
        device_losses, saved_bytes = self._pipeline.run(self.store, micro_batches, counts=counts)
        self._saved_bytes = self._saved_bytes or saved_bytes
        world.activity.act("reduction of gradients")
        self._tie_gradients()
        self.gradients = self.store.reduced()
        unscale(flats, self.gradients, self._pipeline.scale)
        device_squares = [flat.square(piece) for flat, piece in zip(flats, self.gradients, strict=True)]
        # A step waits for its device here, and nowhere else.
        noted, stacked = self._pipeline.noted, torch.stack([*device_squares, *device_losses.values()])
        by_group = [self._norms.squares(flats, self.gradients)] if self._norms.due(self._num_updates) else []
        numbers = iter(torch.cat([stacked, *noted.values(), *by_group]).to(HOST).tolist())
        squares = [flat.share(next(numbers)) for flat in flats]
        losses = {number: next(numbers) for number in device_losses}
        row = self._notes.row({key: [*islice(numbers, len(row))] for key, row in noted.items()})
        sums = torch.tensor([sum(squares), sum(losses.values()), *row, *numbers], dtype=torch.float64)
        total, loss, *sums_of_all = world.total(sums).tolist()
        row, squares_by_group = sums_of_all[: len(row)], sums_of_all[len(row) :]
        world.activity.act("update")
        op = self.graph.update.op("clip")
        clip, norm = op.kind.evaluate(self.graph.update.call(op, {}), np.asarray(total))
        world.finish_sending()
        report = StepReport(loss=loss, norm=float(norm), router=self._notes.report(row))
        report = replace(report, norms=self._norms.report(squares_by_group))
        if not report.finite:
            report = replace(report, suspects=self._suspects(losses, squares))
        if not allows(report):
            return replace(report, updated=False)
        self._num_updates, self.clip = self._num_updates + 1, float(clip)
        scalars = {"clip": self.clip, "learning_rate": learning_rate, "step_number": self._num_updates}
        for flat, piece in zip(flats, self.gradients, strict=True):
            flat.update(piece, scalars)
        return report

    def evaluate(self, micro_batches: Sequence[Batch]) -> float:
        """Return the loss of a step's batch by forward passes alone; no sum and no weight changes."""
        sent_by_step = dict(self.world.sent_bytes)  # which is what is measured
        losses = self._pipeline.evaluate(self.store, micro_batches)
        self.world.sent_bytes.clear()
        self.world.sent_bytes.update(sent_by_step)
        loss = sum(loss.to(HOST, torch.float64).item() for loss in losses.values())
        return self.world.total(torch.tensor([loss], dtype=torch.float64)).item()

    def _suspects(self, losses: Mapping[int, float], squares: Sequence[float]) -> tuple[str, ...]:
        """Return the first few losses of micro-batches and gradients of weights that are not finite, by rank."""
        suspects = [f"loss of micro-batch {number}" for number, loss in losses.items() if not math.isfinite(loss)]
        for flat, piece, square in zip(self.store.flats, self.gradients, squares, strict=True):
            for weight, (low, high), first in flat.ranges(len(piece)) if not math.isfinite(square) else ():
                if not piece[first : first + high - low].isfinite().all():
                    suspects.append(f"gradient of {weight.instance}")
        by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, suspects[:_MOST_SUSPECTS])
        return tuple(f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(by_rank) if names)

    def write_functions(self, folder: Path) -> None:
        """Write this rank's functions to files if it is the first rank of its stages: the others run the same."""
        mesh_rank = self._pipeline.context.mesh_rank
        if mesh_rank.is_first(atom for atom, _ in self._pipeline.plan.mesh.axes if atom != "pp"):
            for run in {id(run): run for run in self._pipeline.blocks.values()}.values():
                if isinstance(run, GeneratedRun):
                    file = folder / f"rank_{mesh_rank.rank}" / f"{run.file_name}.py"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    replace_text(file, run.text)

    def pieces(self) -> tuple[StatePiece, ...]:
        """Return the boxes of the state that this rank holds; ``restored`` applies values loaded into them."""
        return tuple(piece for flat in self.store.flats for piece in flat.state())

    def restored(self, num_updates: int) -> None:
        """Take over the values loaded into the pieces: weights follow from the masters or pieces that are updated."""
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
                **({"host": host_bytes} if (host_bytes := self._pipeline.host.most_bytes) else {}),
            },
            sent_bytes=dict(self.world.sent_bytes),
        )

    def _weights_here(self, ties: Mapping[str, str], training: Training) -> Iterator[Weight]:
        pipeline, mesh_rank = self._pipeline, self._pipeline.context.mesh_rank
        programs = {name: run.parts for name, run in pipeline.blocks.items()}
        names = {f"{name}.{tensor.name}" for name, parts in programs.items() for tensor in parts.block.parameters}
        split_ties = {copy: owner for copy, owner in ties.items() if (copy in names) != (owner in names)}
        roles: dict[str, Tied] = {**dict.fromkeys(split_ties, "copy"), **dict.fromkeys(split_ties.values(), "owner")}
        for name, parts in programs.items():
            late = parts.results("W") if pipeline.plan.schedule.splits_backward else {}
            tensors = [(number, tensor) for group in neighbours(parts) for number, tensor in enumerate(group)]
            for number, tensor in tensors:
                layout = parts.program.results[f"{tensor.name}.sum"].layout
                forward = parts.input_value(tensor.name).layout
                assert mesh_rank.bounds(layout) == mesh_rank.bounds(forward), f"{layout} cannot update {forward}"
                spread, summed = split_pending(layout.sums)
                instance = f"{name}.{tensor.name}"
                owner = split_ties.get(instance, instance)
                _, _, parameter = owner.split(".", 2)
                yield Weight(
                    instance=instance, owner=owner, name=parameter, block=self.graph.block_of(owner), layout=layout,
                    mesh_rank=mesh_rank, summed=summed, spread=spread, zero=pipeline.plan.zero, training=training,
                    copies=pipeline.plan.num_copies if "edp" in spread else 1,
                    parts=pipeline.plan.num_parts if "edp" in spread else 1,
                    tied=roles.get(instance, ""), late=f"{tensor.name}.sum" in late, follows=number > 0,
                )  # fmt: skip

    def _tie_gradients(self) -> None:
        """Add up the gradients of two stages for weights that share their values; both stages make the same update.

        The copy sends first and the owner receives first: devices that never talked wait for each other to connect.
        """
        world, pipeline = self.world, self._pipeline
        for number, flat in enumerate(flat for flat in self.store.flats if flat.tied):
            back, received = flat.tied == "copy", torch.empty_like(flat.sums)
            to_tag, from_tag = (
                pipeline.tag(len(pipeline.plan.stages) + number, 0, back=way) for way in (back, not back)
            )
            rank = pipeline.rank_of(0 if back else pipeline.last_stage)
            if back:
                world.send(flat.sums, rank, to_tag)
            world.begin_receiving(received, rank, from_tag)()
            if not back:
                world.send(flat.sums, rank, to_tag)
            flat.sums.add_(received)


def _world_of(plan: Plan, programs: PlanPrograms, formats: Formats, run: Run | None) -> World:
    """Make the groups of a plan, which keep a ledger where every step is compared with what it should begin."""
    backend = channel_backend(formats.device)
    if backend:
        refuse_crossing(plan.schedule)
    ledger = Ledger(is_kept=run is not None and run.training.watchdog.collectives == "every")
    activity = run.activity if run else RankActivity()
    world = World.build(plan.mesh, programs.group_atoms(), backend, activity, ledger=ledger)
    return world.divided(plan.num_copies, plan.num_parts, programs.spreads())


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({(memory_of(tensor), tensor.storage_offset()): tensor.nbytes for tensor in tensors}.values())
