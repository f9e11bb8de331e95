"""A plan on one rank: its micro-batches through the pipeline, then the step phase.

Nothing is derived here: every local operation and every Collective is an instruction of the plan's table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from autoshard.engine.base import Batch
from autoshard.engine.order import sequence_order
from autoshard.engine.place import Held, Place
from autoshard.engine.programs import programs_of, split_pending
from autoshard.engine.torch.block import Bench
from autoshard.engine.torch.collectives import all_reduce
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.kernels.kernel import as_array
from autoshard.engine.torch.kernels.rotations import Rotations
from autoshard.engine.torch.pipeline import Pipeline
from autoshard.engine.torch.update import OptimizerShard, Scalars, Weight, total_square, update
from autoshard.engine.torch.world import Group, World
from autoshard.errors import require
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What one rank has after a step: its parts of the gradients, reduced and not clipped, and of the weights."""

    gradients: Mapping[str, Held]
    weights: Mapping[str, Held]


class Executor:
    """One rank's share of a training run: its blocks, its weights, its pieces of the optimizer's state."""

    def __init__(self, plan: Plan, weights: Mapping[str, Array], formats: Formats = Formats()) -> None:  # noqa: B008
        """Take this rank's part of whole weights, named as in ``graph/evaluate``; torch's world must be running."""
        programs = programs_of(plan)
        meetings = {tuple(part) for atoms in programs.pending() for part in _meetings(atoms, plan.zero)}
        world = World.build(plan.mesh, {*programs.collective_atoms(), *meetings})
        place = Place(mesh=plan.mesh, rank=world.rank, sizes=programs.graph.sizes)
        positions = torch.from_numpy(sequence_order(plan))
        bench = Bench(world=world, place=place, formats=formats, positions=positions, rotations=Rotations())
        self._graph, self._formats = programs.graph, formats
        self._pipeline = Pipeline.of(plan, programs, bench)
        self._ties = {_instance(other): _instance(owner) for other, owner in programs.graph.tied.items()}
        self._held = self._weights_held()
        blocks = {name: held.cut_out(weights[name]) for name, held in self._held.items()}
        self._weights = {
            name: formats.tensor(block, self._held[name].block.tensors[self._held[name].name].dtype)
            for name, block in blocks.items()
        }
        self._sums = {name: held.zeros() for name, held in self._held.items()}
        self._optimizer = {
            name: OptimizerShard.start(held, blocks[name])
            for name, held in self._held.items()
            if name not in self._ties
        }
        self._gradients: dict[str, torch.Tensor] = {}

    def step(self, micro_batches: Sequence[Batch], learning_rate: float = 1e-2) -> tuple[float, float]:
        """Run one step; return the loss and the norm of the gradient, the same on every rank.

        A micro-batch holds whole arrays, of which the rank takes its part.
        """
        wanted = self._pipeline.plan.schedule.num_micro_batches
        require(
            (len(micro_batches) == wanted, "micro_batches", f"the plan takes {wanted} a step, not {len(micro_batches)}")
        )
        for total in self._sums.values():
            total.zero_()
        loss = self._pipeline.run(self._weights, self._sums, micro_batches)
        self._tie_gradients(self._sums)
        self._gradients = {name: self._held[name].reduced(self._sums[name]) for name in self._optimizer}
        square = total_square([self._held[name] for name in self._gradients], list(self._gradients.values()))
        total, loss = self._sum_of_all([square, loss])
        norm = self._update(total, learning_rate)
        self._tie_weights()
        self._bench.world.finish_sending()
        return loss, norm

    def shares(self) -> Shares:
        """Return this rank's parts of what the last step made, for who puts them together."""
        return Shares(
            gradients={name: self._held[name].share(piece) for name, piece in self._gradients.items()},
            weights={
                name: Held(bounds=self._held[name].bounds, array=as_array(block.clone()))
                for name, block in self._weights.items()
            },
        )

    @property
    def _bench(self) -> Bench:
        return self._pipeline.bench

    def _update(self, total_square: float, learning_rate: float) -> float:
        """Clip, update and gather every weight of this rank; return the norm."""
        op = self._graph.update.op("clip")
        clip, norm = op.kind.evaluate(self._graph.update.call(op, {}), np.asarray(total_square))
        held = [self._held[name] for name in self._optimizer]
        scalars = Scalars(clip=float(clip), learning_rate=learning_rate)
        update(held, list(self._optimizer.values()), list(self._gradients.values()), scalars)
        for name, own in self._optimizer.items():
            self._weights[name] = self._held[name].gathered(own.master)
        return float(norm)

    def _weights_held(self) -> Mapping[str, Weight]:
        pipeline, found = self._pipeline, dict[str, Weight]()
        for name, run in pipeline.blocks.items():
            for tensor in run.parts.block.parameters:
                layout = run.parts.program.results[f"{tensor.name}.sum"].layout
                held = run.parts.given(tensor.name).layout
                assert run.place.bounds(layout) == run.place.bounds(held), f"{layout} cannot update {held}"
                weight = Weight(
                    name=tensor.name, block=run.parts.block, layout=layout, place=run.place, formats=self._formats
                )
                meetings = _meetings(layout.sums, pipeline.plan.zero)
                found[f"{name}.{tensor.name}"] = weight.meeting(pipeline.bench.world, *meetings)
        return found

    def _sum_of_all(self, numbers: Sequence[float]) -> Sequence[float]:
        size = dist.get_world_size()
        if size == 1:
            return numbers
        handle = dist.group.WORLD
        assert handle, "torch's world is running"
        everybody = Group(ranks=tuple(range(size)), rank=self._bench.world.rank, handle=handle)
        return all_reduce(everybody, torch.tensor(numbers, dtype=torch.float64)).tolist()

    def _tie_gradients(self, sums: dict[str, torch.Tensor]) -> None:
        """Add the gradients of weights that share their values, where the first of them lives."""
        for number, (other, owner) in enumerate(self._ties.items()):
            if other in sums and owner in sums:
                sums[owner].add_(sums[other])
            elif other in sums:
                self._bench.world.send(sums[other], self._pipeline.rank_of(0), self._tie_tag(number, back=True))
            elif owner in sums:
                sums[owner].add_(self._tied(sums[owner], self._pipeline.last_stage, number, back=True))

    def _tie_weights(self) -> None:
        """Hand the new values to those who share them."""
        for number, (other, owner) in enumerate(self._ties.items()):
            held = self._weights
            if other in held and owner in held:
                held[other] = held[owner]
            elif owner in held:
                last = self._pipeline.rank_of(self._pipeline.last_stage)
                self._bench.world.send(held[owner], last, self._tie_tag(number, back=False))
            elif other in held:
                held[other] = self._tied(held[other], 0, number, back=False)

    def _tied(self, like: torch.Tensor, from_stage: int, number: int, *, back: bool) -> torch.Tensor:
        rank = self._pipeline.rank_of(from_stage)
        return self._bench.world.receive(torch.empty_like(like), rank, self._tie_tag(number, back=back))

    def _tie_tag(self, number: int, *, back: bool) -> int:
        return self._pipeline.tag(len(self._pipeline.plan.stages) + number, 0, back=back)


def _meetings(pending: tuple[str, ...], zero: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the atoms over which a gradient is summed for all, and those whose ranks each take a piece of the sum."""
    shards, others = split_pending(pending)
    return (others, shards) if zero else ((*shards, *others), ())


def _instance(parameter: str) -> str:
    """Name a parameter of a block that occurs once as an instance: ``head.unembed.weight`` is of ``head.0``."""
    kind, _, name = parameter.partition(".")
    return f"{kind}.0.{name}"
