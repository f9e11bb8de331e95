"""A plan on one rank: its micro-batches through the pipeline, then the step phase.

Nothing is derived here: every local operation and every Collective is an instruction of the plan's table.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autoshard.engine.base import Batch, Measured
from autoshard.engine.order import sequence_order
from autoshard.engine.place import Held, Place
from autoshard.engine.programs import programs_of, split_pending
from autoshard.engine.torch.block import Bench
from autoshard.engine.torch.formats import Formats, memory_of
from autoshard.engine.torch.kernels.kernel import as_array
from autoshard.engine.torch.kernels.rotations import Rotations
from autoshard.engine.torch.pipeline import Pipeline
from autoshard.engine.torch.store import Store
from autoshard.engine.torch.update import Weight, flats, world_sum
from autoshard.engine.torch.world import World
from autoshard.errors import require
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan

Whole = Callable[[str], Array]  # a whole weight by its name, as in ``graph/evaluate``
_AS_PLANNED = Formats()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What one rank has after a step: its parts of the gradients, reduced and not clipped, and of the weights."""

    gradients: Mapping[str, Held]
    weights: Mapping[str, Held]


class Executor:
    """One rank's share of a training run: its blocks, its weights, its pieces of the optimizer's state."""

    def __init__(self, plan: Plan, whole: Whole, formats: Formats = _AS_PLANNED) -> None:
        """Take this rank's part of whole weights; torch's world must be running."""
        programs = programs_of(plan)
        meetings = {part for atoms in programs.pending() for part in split_pending(atoms)}
        world = World.build(plan.mesh, {*programs.collective_atoms(), *meetings})
        place = Place(mesh=plan.mesh, rank=world.rank, sizes=programs.graph.sizes)
        positions = torch.from_numpy(sequence_order(plan))
        bench = Bench(world=world, place=place, formats=formats, positions=positions, rotations=Rotations())
        self._graph, self._formats = programs.graph, formats
        self._pipeline = Pipeline.of(plan, programs, bench)
        self._ties = {_instance(other): _instance(owner) for other, owner in programs.graph.tied.items()}
        held = {one.instance: one for one in self._weights_here()}
        blocks = {name: place.block(whole(name), one.layout) for name, one in held.items()}
        own = flats(world, (one for name, one in held.items() if name not in self._ties), blocks, formats)
        here = {name: owner for name, owner in self._ties.items() if name in held and owner in held}
        copies = {
            name: self._copy(held[name], blocks[name]) for name in held if name in self._ties and name not in here
        }
        self._held, self._store = held, Store(flats=own, ties=here, copies=copies)
        self._pieces: list[torch.Tensor] = []
        self._num_steps = 0
        self._saved_bytes = 0

    def step(self, micro_batches: Sequence[Batch], learning_rate: float) -> tuple[float, float]:
        """Run one step; return the loss and the norm of the gradient, the same on every rank.

        A micro-batch holds whole arrays, of which the rank takes its part.
        """
        wanted = self._pipeline.plan.schedule.num_micro_batches
        require(
            (len(micro_batches) == wanted, "micro_batches", f"the plan takes {wanted} a step, not {len(micro_batches)}")
        )
        self._bench.world.traffic.clear()
        self._store.clear()
        counts = not self._saved_bytes  # every step keeps as much as the first
        passed = self._pipeline.run(self._store, micro_batches, counts=counts)
        self._saved_bytes = self._saved_bytes or passed.saved_bytes
        self._tie_gradients()
        self._pieces = [flat.reduced() for flat in self._store.flats]
        square = sum(flat.square(piece) for flat, piece in zip(self._store.flats, self._pieces, strict=True))
        total, loss = world_sum([square, passed.loss])
        op = self._graph.update.op("clip")
        clip, norm = op.kind.evaluate(self._graph.update.call(op, {}), np.asarray(total))
        self._num_steps += 1
        scalars = {"clip": float(clip), "learning_rate": learning_rate, "step_number": self._num_steps}
        for flat, piece in zip(self._store.flats, self._pieces, strict=True):
            flat.update(piece, scalars)
        self._tie_weights()
        self._bench.world.finish_sending()
        return loss, float(norm)

    def shares(self) -> Shares:
        """Return this rank's parts of what the last step made, for who puts them together."""
        gradients: dict[str, Held] = {}
        for flat, piece in zip(self._store.flats, self._pieces, strict=True):
            gradients |= flat.shares(piece)
        weights: dict[str, Held] = {}
        for flat in self._store.flats:
            weights |= {} if flat.is_whole else flat.shares(flat.values)
        for name, block in self._store.whole.weights.items():
            weights[name] = Held(bounds=self._held[name].bounds, array=as_array(block.clone()))
        weights |= {other: weights[owner] for other, owner in self._store.ties.items()}
        return Shares(gradients=gradients, weights=weights)

    def measured(self) -> Measured:
        """Return what this rank holds, and what it sent in the last step."""
        traffic = self._bench.world.traffic
        flats_here, copies = self._store.flats, self._store.copies.values()
        masters = [flat.master for flat in self._store.flats if flat.master is not None]
        states = [state for flat in self._store.flats for state in flat.moments]
        return Measured(
            memory_bytes={
                "weights": _bytes([*(flat.values for flat in flats_here), *(one for one, _ in copies)]),
                "gradients": _bytes([*(flat.sums for flat in flats_here), *(one for _, one in copies)]),
                "masters": _bytes(masters),
                "optimizer": _bytes(states),
                "saved": self._saved_bytes,
            },
            calls=dict(traffic.calls),
            sent_bytes=dict(traffic.sent_bytes),
        )

    @property
    def _bench(self) -> Bench:
        return self._pipeline.bench

    def _weights_here(self) -> Iterator[Weight]:
        pipeline = self._pipeline
        for name, run in pipeline.blocks.items():
            late = run.parts.made("W") if pipeline.plan.schedule.splits_backward else {}
            for tensor in run.parts.block.parameters:
                layout = run.parts.program.results[f"{tensor.name}.sum"].layout
                held = run.parts.given(tensor.name).layout
                assert run.place.bounds(layout) == run.place.bounds(held), f"{layout} cannot update {held}"
                spread, summed = split_pending(layout.sums)
                yield Weight(
                    instance=f"{name}.{tensor.name}", name=tensor.name, block=run.parts.block, layout=layout,
                    place=run.place, summed=summed, spread=spread, zero=pipeline.plan.zero,
                    late=f"{tensor.name}.sum" in late,
                )  # fmt: skip

    def _copy(self, other: Weight, block: Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Hold a copy of a weight that is updated elsewhere, and sums for its gradient."""
        values = self._formats.tensor(block, other.block.tensors[other.name].dtype)
        return values, torch.zeros(other.shape, dtype=other.dtype("sum", self._formats))

    def _tie_gradients(self) -> None:
        """Send the gradients of weights that share their values to where the first of them lives."""
        for number, (other, owner) in enumerate(self._ties.items()):
            if other in self._store.copies:
                _, sums = self._store.copies[other]
                self._bench.world.send(sums, self._pipeline.rank_of(0), self._tie_tag(number, back=True))
            elif owner in self._held and other not in self._held:
                dtype = self._held[owner].dtype("sum", self._formats)
                sums = self._tied(owner, self._pipeline.last_stage, dtype, self._tie_tag(number, back=True))
                self._store.add(owner, sums)

    def _tie_weights(self) -> None:
        """Hand the new values to those who share them."""
        for number, (other, owner) in enumerate(self._ties.items()):
            if other in self._store.copies:
                values, _ = self._store.copies[other]
                values.copy_(self._tied(other, 0, values.dtype, self._tie_tag(number, back=False)))
            elif owner in self._held and other not in self._held:
                last = self._pipeline.rank_of(self._pipeline.last_stage)
                self._bench.world.send(self._store.value(owner), last, self._tie_tag(number, back=False))

    def _tied(self, name: str, from_stage: int, dtype: torch.dtype | None, tag: int) -> torch.Tensor:
        like = torch.empty(self._held[name].shape, dtype=dtype)
        return self._bench.world.receive(like, self._pipeline.rank_of(from_stage), tag)

    def _tie_tag(self, number: int, *, back: bool) -> int:
        return self._pipeline.tag(len(self._pipeline.plan.stages) + number, 0, back=back)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    places = {(memory_of(tensor), tensor.storage_offset()): tensor.nbytes for tensor in tensors}
    return sum(places.values())


def _instance(parameter: str) -> str:
    """Name a parameter of a block that occurs once as an instance: ``head.unembed.weight`` is of ``head.0``."""
    kind, _, name = parameter.partition(".")
    return f"{kind}.0.{name}"
