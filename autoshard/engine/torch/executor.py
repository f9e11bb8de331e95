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
        self._flats = flats(world, (one for name, one in held.items() if name not in self._ties), blocks, formats)
        self._weights = {name: view for flat in self._flats for name, view in flat.views(flat.values).items()}
        self._sums = {name: view for flat in self._flats for name, view in flat.views(flat.sums).items()}
        self._held = held
        for other in (held[name] for name in self._ties if name in held):
            self._tie(other, blocks[other.instance])
        self._pieces: list[torch.Tensor] = []
        self._saved_bytes = 0

    def step(self, micro_batches: Sequence[Batch], learning_rate: float = 1e-2) -> tuple[float, float]:
        """Run one step; return the loss and the norm of the gradient, the same on every rank.

        A micro-batch holds whole arrays, of which the rank takes its part.
        """
        wanted = self._pipeline.plan.schedule.num_micro_batches
        require(
            (len(micro_batches) == wanted, "micro_batches", f"the plan takes {wanted} a step, not {len(micro_batches)}")
        )
        self._bench.world.traffic.clear()
        for total in self._sums.values():
            total.zero_()
        counts = not self._saved_bytes  # every step keeps as much as the first
        passed = self._pipeline.run(self._weights, self._sums, micro_batches, counts=counts)
        self._saved_bytes = self._saved_bytes or passed.saved_bytes
        self._tie_gradients()
        self._pieces = [flat.reduced() for flat in self._flats]
        square = sum(flat.square(piece) for flat, piece in zip(self._flats, self._pieces, strict=True))
        total, loss = world_sum([square, passed.loss])
        op = self._graph.update.op("clip")
        clip, norm = op.kind.evaluate(self._graph.update.call(op, {}), np.asarray(total))
        for flat, piece in zip(self._flats, self._pieces, strict=True):
            flat.update(piece, float(clip), learning_rate)
        self._tie_weights()
        self._bench.world.finish_sending()
        return loss, float(norm)

    def shares(self) -> Shares:
        """Return this rank's parts of what the last step made, for who puts them together."""
        gradients: dict[str, Held] = {}
        for flat, piece in zip(self._flats, self._pieces, strict=True):
            gradients |= flat.shares(piece)
        weights = {name: (self._held[name].bounds, block) for name, block in self._weights.items()}
        held = {name: Held(bounds=bounds, array=as_array(block.clone())) for name, (bounds, block) in weights.items()}
        return Shares(gradients=gradients, weights=held)

    def measured(self) -> Measured:
        """Return what this rank holds, and what it sent in the last step."""
        traffic = self._bench.world.traffic
        masters = [flat.master for flat in self._flats if flat.master is not None]
        states = [state for flat in self._flats for state in (flat.moment1, flat.moment2)]
        return Measured(
            memory_bytes={
                "weights": _bytes(self._weights.values()),
                "gradients": _bytes(self._sums.values()),
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
            for tensor in run.parts.block.parameters:
                layout = run.parts.program.results[f"{tensor.name}.sum"].layout
                held = run.parts.given(tensor.name).layout
                assert run.place.bounds(layout) == run.place.bounds(held), f"{layout} cannot update {held}"
                spread, summed = split_pending(layout.sums)
                yield Weight(
                    instance=f"{name}.{tensor.name}", name=tensor.name, block=run.parts.block, layout=layout,
                    place=run.place, summed=summed, spread=spread, scatters=pipeline.plan.zero == 1,
                )  # fmt: skip

    def _tie(self, other: Weight, block: Array) -> None:
        """Let a weight share the memory of the one that it is tied to, or hold a copy where that is elsewhere."""
        name, owner = other.instance, self._ties[other.instance]
        if owner in self._weights:
            self._weights[name], self._sums[name] = self._weights[owner], self._sums[owner]
            return
        self._weights[name] = self._formats.tensor(block, other.block.tensors[other.name].dtype)
        self._sums[name] = torch.zeros(other.shape, dtype=other.dtype("sum", self._formats))

    def _tie_gradients(self) -> None:
        """Send the gradients of weights that share their values to where the first of them lives."""
        sums = self._sums
        for number, (other, owner) in enumerate(self._ties.items()):
            if other in sums and owner in sums:
                continue
            if other in sums:
                self._bench.world.send(sums[other], self._pipeline.rank_of(0), self._tie_tag(number, back=True))
            elif owner in sums:
                sums[owner].add_(self._tied(sums[owner], self._pipeline.last_stage, number, back=True))

    def _tie_weights(self) -> None:
        """Hand the new values to those who share them."""
        held = self._weights
        for number, (other, owner) in enumerate(self._ties.items()):
            if other in held and owner in held:
                continue
            if owner in held:
                last = self._pipeline.rank_of(self._pipeline.last_stage)
                self._bench.world.send(held[owner], last, self._tie_tag(number, back=False))
            elif other in held:
                held[other].copy_(self._tied(held[other], 0, number, back=False))

    def _tied(self, like: torch.Tensor, from_stage: int, number: int, *, back: bool) -> torch.Tensor:
        rank = self._pipeline.rank_of(from_stage)
        return self._bench.world.receive(torch.empty_like(like), rank, self._tie_tag(number, back=back))

    def _tie_tag(self, number: int, *, back: bool) -> int:
        return self._pipeline.tag(len(self._pipeline.plan.stages) + number, 0, back=back)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    places = {(memory_of(tensor), tensor.storage_offset()): tensor.nbytes for tensor in tensors}
    return sum(places.values())


def _instance(parameter: str) -> str:
    """Name a parameter of a block that occurs once as an instance: ``head.unembed.weight`` is of ``head.0``."""
    kind, _, name = parameter.partition(".")
    return f"{kind}.0.{name}"
