"""A plan on one rank: its micro-batches through the pipeline, then the step phase.

Nothing is derived here: every local operation and every Collective is an instruction of the plan's table.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from autoshard.engine.base import Allows, Batch, Measured, Run, StepReport, whenever_finite
from autoshard.engine.order import sequence_order
from autoshard.engine.pieces import Piece
from autoshard.engine.place import Held, Place
from autoshard.engine.programs import programs_of
from autoshard.engine.torch.block import Bench
from autoshard.engine.torch.formats import Formats, memory_of
from autoshard.engine.torch.kernels.kernel import as_array
from autoshard.engine.torch.kernels.rotations import Rotations
from autoshard.engine.torch.lanes import lane_backend, refuse_crossing
from autoshard.engine.torch.pipeline import Pipeline
from autoshard.engine.torch.store import Store
from autoshard.engine.torch.update import Tied, Weight, flats, world_sum
from autoshard.engine.torch.world import World
from autoshard.errors import require
from autoshard.graph.op import Array
from autoshard.plan.lowering import split_pending
from autoshard.plan.plan import Plan
from autoshard.spec.training import Training

Whole = Callable[[str], Array]  # a whole weight by its name, as in ``graph/evaluate``
_AS_PLANNED = Formats()
_USUAL = Training()
_MOST_SUSPECTS = 3  # that a rank names of what it found


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What one rank has after a step: its parts of the gradients, reduced and not clipped, and of the weights."""

    gradients: Mapping[str, Held]
    weights: Mapping[str, Held]


class Executor:
    """One rank's share of a training run: its blocks, its weights, its pieces of the optimizer's state."""

    def __init__(self, plan: Plan, whole: Whole, formats: Formats = _AS_PLANNED, run: Run | None = None) -> None:
        """Take this rank's part of whole weights; torch's world must be running."""
        training = run.training if run else _USUAL
        programs = programs_of(plan)
        meetings = {part for atoms in programs.pending() for part in split_pending(atoms)}
        backend = lane_backend(formats.device)
        if backend:
            refuse_crossing(plan.schedule)
        world = World.build(
            plan.mesh, {*programs.collective_atoms(), *meetings}, backend, run.position if run else None
        )
        place = Place(mesh=plan.mesh, rank=world.rank, sizes=programs.graph.sizes)
        positions = torch.from_numpy(sequence_order(plan))
        bench = Bench(world=world, place=place, formats=formats, positions=positions, rotations=Rotations())
        self._graph = programs.graph
        self._pipeline = Pipeline.of(plan, programs, bench)
        ties = {_instance(other): _instance(owner) for other, owner in programs.graph.tied.items()}
        held = {one.instance: one for one in self._weights_here(ties, training)}
        blocks = {name: place.block(whole(name), one.layout) for name, one in held.items()}
        here = {other: owner for other, owner in ties.items() if other in held and owner in held}
        own = flats(world, (one for name, one in held.items() if name not in here), blocks, formats)
        self._held, self._store = held, Store(flats=own, ties=here)
        self._pieces: list[torch.Tensor] = []
        self._num_updates, self._clip = 0, 1.0
        self._saved_bytes = 0

    def step(
        self, micro_batches: Sequence[Batch], learning_rate: float, allows: Allows = whenever_finite
    ) -> StepReport:
        """Run one step; a micro-batch holds whole arrays, of which the rank takes its part.

        Weights are updated if ``allows`` says so of loss and norm, which are the same on every rank.
        """
        wanted = self._pipeline.plan.schedule.num_micro_batches
        apart = self._pipeline.plan.workload.documents == "separate"
        told = all("document_starts" in batch for batch in micro_batches)
        require(
            (
                len(micro_batches) == wanted,
                "micro_batches",
                f"the plan takes {wanted} a step, not {len(micro_batches)}",
            ),
            (told or not apart, "document_starts", "the plan keeps documents separate, and a batch does not say where"),
        )
        self._bench.world.traffic.clear()
        self._store.clear()
        counts = not self._saved_bytes  # every step keeps as much as the first
        passed = self._pipeline.run(self._store, micro_batches, counts=counts)
        self._saved_bytes = self._saved_bytes or passed.saved_bytes
        self._bench.world.position.act("reduction of gradients")
        self._tie_gradients()
        self._pieces = [flat.reduced() for flat in self._store.flats]
        squares = [flat.square(piece) for flat, piece in zip(self._store.flats, self._pieces, strict=True)]
        self._bench.world.position.wait("the norm of all ranks")
        total, loss = world_sum([sum(squares), sum(passed.losses.values())])
        self._bench.world.position.act("update")
        op = self._graph.update.op("clip")
        clip, norm = op.kind.evaluate(self._graph.update.call(op, {}), np.asarray(total))
        self._bench.world.finish_sending()
        report = StepReport(loss=loss, norm=float(norm))
        if not report.finite:
            report = replace(report, suspects=self._suspects(passed.losses, squares))
        if not allows(report):
            return replace(report, updated=False)
        self._update(float(clip), learning_rate)
        return report

    def _update(self, clip: float, learning_rate: float) -> None:
        """Let the optimizer take the step."""
        self._num_updates += 1
        self._clip = clip
        scalars = {"clip": clip, "learning_rate": learning_rate, "step_number": self._num_updates}
        for flat, piece in zip(self._store.flats, self._pieces, strict=True):
            flat.update(piece, scalars)

    def _suspects(self, losses: Mapping[int, float], squares: Sequence[float]) -> tuple[str, ...]:
        """Say which ranks found what is not finite: losses of micro-batches, then gradients of weights."""
        mine = [f"loss of micro-batch {number}" for number, loss in losses.items() if not math.isfinite(loss)]
        for flat, piece, square in zip(self._store.flats, self._pieces, squares, strict=True):
            if not math.isfinite(square):
                shares = flat.shares(piece)
                mine += [f"gradient of {name}" for name, share in shares.items() if not np.isfinite(share.array).all()]
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, mine[:_MOST_SUSPECTS])
        return tuple(f"rank {rank}: {', '.join(its)}" for rank, its in enumerate(found) if its)

    def pieces(self) -> tuple[Piece, ...]:
        """Return the boxes of the state that this rank holds; what loading fills counts after ``restored``."""
        return tuple(piece for flat in self._store.flats for piece in flat.state())

    def restored(self, num_updates: int) -> None:
        """Take over what the pieces were filled with: weights follow from the masters or pieces that are updated."""
        self._num_updates = num_updates
        for flat in self._store.flats:
            flat.restored()

    def shares(self) -> Shares:
        """Return this rank's parts of what the last step made, for who puts them together."""
        gradients: dict[str, Held] = {}
        for flat, piece in zip(self._store.flats, self._pieces, strict=True):
            gradients |= {} if flat.tied == "copy" else flat.shares(piece / self._clip)
        weights: dict[str, Held] = {}
        for flat in self._store.flats:
            weights |= flat.shares(flat.values) if flat.parted else {}
        for name, block in self._store.whole.weights.items():
            weights[name] = Held(bounds=self._held[name].bounds, array=as_array(block.clone()))
        weights |= {other: weights[owner] for other, owner in self._store.ties.items()}
        return Shares(gradients=gradients, weights=weights)

    def measured(self) -> Measured:
        """Return what this rank holds, and what it sent in the last step."""
        traffic = self._bench.world.traffic
        own = self._store.flats
        return Measured(
            memory_bytes={
                "weights": _bytes(flat.values for flat in own),
                "gradients": _bytes(flat.sums for flat in own),
                "masters": _bytes(flat.master for flat in own if flat.master is not None),
                "optimizer": _bytes(state for flat in own for state in flat.moments),
                "saved": self._saved_bytes,
            },
            calls=dict(traffic.calls),
            sent_bytes=dict(traffic.sent_bytes),
        )

    @property
    def _bench(self) -> Bench:
        return self._pipeline.bench

    def _weights_here(self, ties: Mapping[str, str], training: Training) -> Iterator[Weight]:
        pipeline = self._pipeline
        blocks = {name: run.parts.block for name, run in pipeline.blocks.items()}
        names = {f"{name}.{tensor.name}" for name, block in blocks.items() for tensor in block.parameters}
        apart = {other: owner for other, owner in ties.items() if (other in names) != (owner in names)}
        roles: dict[str, Tied] = {**dict.fromkeys(apart, "copy"), **dict.fromkeys(apart.values(), "owner")}
        for name, run in pipeline.blocks.items():
            late = run.parts.made("W") if pipeline.plan.schedule.splits_backward else {}
            for tensor in run.parts.block.parameters:
                layout = run.parts.program.results[f"{tensor.name}.sum"].layout
                held = run.parts.given(tensor.name).layout
                assert run.place.bounds(layout) == run.place.bounds(held), f"{layout} cannot update {held}"
                spread, summed = split_pending(layout.sums)
                instance = f"{name}.{tensor.name}"
                owner = apart.get(instance, instance)
                kind, _, parameter = owner.split(".", 2)
                yield Weight(
                    instance=instance, owner=owner, name=parameter, block=self._graph.block(kind), layout=layout,
                    place=run.place, summed=summed, spread=spread, zero=pipeline.plan.zero, training=training,
                    tied=roles.get(instance, ""), late=f"{tensor.name}.sum" in late,
                )  # fmt: skip

    def _tie_gradients(self) -> None:
        """Add up what two stages found for weights that share their values; both update them alike.

        The copy sends first and the owner takes first: devices that never talked wait for each other to connect.
        """
        world, pipeline = self._bench.world, self._pipeline
        for number, flat in enumerate(flat for flat in self._store.flats if flat.tied):
            back, other = flat.tied == "copy", torch.empty_like(flat.sums)
            sent, taken = (pipeline.tag(len(pipeline.plan.stages) + number, 0, back=way) for way in (back, not back))
            rank = pipeline.rank_of(0 if back else pipeline.last_stage)
            if back:
                world.send(flat.sums, rank, sent)
                world.receive(other, rank, taken)
            else:
                world.receive(other, rank, taken)
                world.send(flat.sums, rank, sent)
            flat.sums.add_(other)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    places = {(memory_of(tensor), tensor.storage_offset()): tensor.nbytes for tensor in tensors}
    return sum(places.values())


def _instance(parameter: str) -> str:
    """Name a parameter of a block that occurs once as an instance: ``head.unembed.weight`` is of ``head.0``."""
    kind, _, name = parameter.partition(".")
    return f"{kind}.0.{name}"
