"""A plan on one rank: its micro-batches through the pipeline, then the step phase.

Every collective is a call of ``torch.distributed``; local operations are evaluated by numpy in double precision, as
the graph defines them, so that results can be compared to the last digits. A module in the plan's own precision comes
with the engine proper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from autoshard.engine.place import Held
from autoshard.engine.programs import programs_of, split_pending
from autoshard.engine.torch.block import Arrays
from autoshard.engine.torch.collectives import all_reduce
from autoshard.engine.torch.pipeline import Pipeline
from autoshard.engine.torch.update import OptimizerShard, Weight
from autoshard.engine.torch.world import Group, World
from autoshard.errors import require
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """What one rank knows after a step: loss and norm as all know them, its parts of gradients and weights by name."""

    loss: float
    norm: float
    gradients: Mapping[str, Held]
    weights: Mapping[str, Held]


class Executor:
    """One rank's share of a training run: its blocks, its weights, its pieces of the optimizer's state."""

    def __init__(self, plan: Plan, weights: Arrays) -> None:
        """Take this rank's part of whole weights, named as in ``graph/evaluate``; torch's world must be running."""
        programs = programs_of(plan)
        meetings = {tuple(part) for atoms in programs.pending() for part in _meetings(atoms, plan.zero)}
        world = World.build(plan.mesh, {*programs.collective_atoms(), *meetings})
        self._graph = programs.graph
        self._pipeline = Pipeline.of(plan, programs, world)
        self._ties = {_instance(other): _instance(owner) for other, owner in programs.graph.tied.items()}
        self._held = self._weights_held()
        self._weights = {name: held.cut_out(weights[name]) for name, held in self._held.items()}
        self._optimizer = {
            name: OptimizerShard.start(held.cut(self._weights[name]))
            for name, held in self._held.items()
            if name not in self._ties
        }
        self._num_steps = 0

    def step(self, micro_batches: Sequence[Arrays], learning_rate: float = 1e-2) -> StepShare:
        """Run one step; a micro-batch holds whole arrays, of which the rank takes its part."""
        wanted = self._pipeline.plan.schedule.num_micro_batches
        require(
            (len(micro_batches) == wanted, "micro_batches", f"the plan takes {wanted} a step, not {len(micro_batches)}")
        )
        summed = self._pipeline.run(self._weights, micro_batches)
        self._tie_gradients(summed.gradients)
        gradients = {name: self._held[name].reduced(summed.gradients[name]) for name in self._optimizer}
        squares = sum(self._held[name].square(gradient) for name, gradient in gradients.items())
        total, loss = self._sum_of_all([squares, summed.loss])
        norm = self._update(gradients, total, learning_rate)
        self._tie_weights()
        self._pipeline.world.finish_sending()
        return StepShare(
            loss=loss,
            norm=norm,
            gradients={name: self._held[name].share(gradient) for name, gradient in gradients.items()},
            weights={name: Held(bounds=self._held[name].bounds, array=block) for name, block in self._weights.items()},
        )

    def _update(self, gradients: Arrays, total_square: float, learning_rate: float) -> float:
        """Clip, update and gather every weight of this rank; return the norm."""
        self._num_steps += 1
        op = self._graph.update.op("clip")
        clip, norm = op.kind.evaluate(self._graph.update.call(op, {}), np.asarray(total_square))
        scalars = {"clip": float(clip), "learning_rate": learning_rate, "step_number": self._num_steps}
        for name, gradient in gradients.items():
            self._optimizer[name] = self._optimizer[name].updated(self._held[name], gradient, scalars)
            self._weights[name] = self._held[name].gathered(self._optimizer[name].master)
        return float(norm)

    def _weights_held(self) -> Mapping[str, Weight]:
        pipeline, found = self._pipeline, dict[str, Weight]()
        for name, run in pipeline.blocks.items():
            for tensor in run.parts.block.parameters:
                layout = run.parts.program.results[f"{tensor.name}.sum"].layout
                held = run.parts.given(tensor.name).layout
                assert run.place.bounds(layout) == run.place.bounds(held), f"{layout} cannot update {held}"
                weight = Weight(name=tensor.name, block=run.parts.block, layout=layout, place=run.place)
                meetings = _meetings(layout.sums, pipeline.plan.zero)
                found[f"{name}.{tensor.name}"] = weight.meeting(pipeline.world, *meetings)
        return found

    def _sum_of_all(self, numbers: Sequence[float]) -> Sequence[float]:
        size = dist.get_world_size()
        if size == 1:
            return numbers
        handle = dist.group.WORLD
        assert handle, "torch's world is running"
        everybody = Group(ranks=tuple(range(size)), rank=self._pipeline.world.rank, handle=handle)
        return [float(number) for number in all_reduce(everybody, np.array(numbers))]

    def _tie_gradients(self, sums: dict[str, Array]) -> None:
        """Add the gradients of weights that share their values, where the first of them lives."""
        for number, (other, owner) in enumerate(self._ties.items()):
            if other in sums and owner in sums:
                sums[owner] = sums[owner] + sums[other]
            elif other in sums:
                self._pipeline.world.send(sums[other], self._pipeline.rank_of(0), self._tie_tag(number, back=True))
            elif owner in sums:
                sums[owner] = sums[owner] + self._tied(owner, self._pipeline.last_stage, number, back=True)

    def _tie_weights(self) -> None:
        """Hand the new values to those who share them."""
        for number, (other, owner) in enumerate(self._ties.items()):
            held = self._weights
            if other in held and owner in held:
                held[other] = held[owner]
            elif owner in held:
                last = self._pipeline.rank_of(self._pipeline.last_stage)
                self._pipeline.world.send(held[owner], last, self._tie_tag(number, back=False))
            elif other in held:
                held[other] = self._tied(other, 0, number, back=False)

    def _tied(self, name: str, from_stage: int, number: int, *, back: bool) -> Array:
        shape, rank = self._weights[name].shape, self._pipeline.rank_of(from_stage)
        return self._pipeline.world.receive(shape, rank, self._tie_tag(number, back=back))

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
