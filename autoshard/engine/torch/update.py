"""The step phase on one rank: gradients reduced, clipped by their norm, weights updated by AdamW and gathered.

Every weight travels on its own; the plan's buckets join them in the engine proper.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoshard.engine.place import Held, Place
from autoshard.engine.torch.collectives import all_reduce, gather_flat, scatter_flat_sum
from autoshard.engine.torch.world import Group, World
from autoshard.graph.block import Block
from autoshard.graph.op import Array
from autoshard.layout.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """How one weight is updated: its block on this rank, over whom its gradient is summed, who shares the work."""

    name: str  # in its block: ``up.weight``
    block: Block
    layout: Layout  # of the weight, and of its gradient's sum
    place: Place
    summed: Group | None = None  # ranks that all need the sum
    shared: Group | None = None  # ranks that each update a piece (ZeRO-1)
    num_copies: int = 1  # ranks of a stage that update the same numbers

    def meeting(self, world: World, summed: tuple[str, ...], shared: tuple[str, ...]) -> "Weight":
        """Return the same weight with the groups along these atoms."""
        cutting = {atom for _, atoms in self.layout.dims for atom in atoms}
        alike = [atom for atom, _ in self.place.mesh.axes if atom != "pp" and atom not in {*cutting, *shared}]
        groups = world.group(summed), world.group(shared)
        return replace(self, summed=groups[0], shared=groups[1], num_copies=world.num_ranks(alike))

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Which block of the weight this rank holds."""
        return self.place.bounds(self.layout)

    def cut_out(self, whole: Array) -> Array:
        """Return this rank's block of the whole weight."""
        return self.place.block(whole, self.layout)

    def reduced(self, gradient: Array) -> Array:
        """Sum a gradient over the ranks that wait for it; return this rank's piece, flat and padded with zeros."""
        whole = all_reduce(self.summed, gradient) if self.summed else gradient
        return scatter_flat_sum(self.shared, self._padded(whole)) if self.shared else whole.reshape(-1)

    def cut(self, block: Array) -> Array:
        """Return this rank's piece of its block, flat and padded with zeros."""
        start = self._piece_size * (self.shared.number if self.shared else 0)
        return self._padded(block)[start : start + self._piece_size].copy()

    def gathered(self, piece: Array) -> Array:
        """Return the whole block from everybody's piece."""
        joined = gather_flat(self.shared, piece) if self.shared else piece
        return joined[: self._num_elements].reshape(self.place.shape(self.layout))

    def share(self, piece: Array) -> Held:
        """Name what a piece is part of, without its padding."""
        start = self._piece_size * (self.shared.number if self.shared else 0)
        ends = min(start, self._num_elements), min(start + self._piece_size, self._num_elements)
        return Held(bounds=self.bounds, array=piece[: ends[1] - ends[0]], piece=ends)

    def square(self, piece: Array) -> float:
        """Return this rank's share of the squared norm: what several ranks hold alike counts once."""
        op = self.block.op(f"{self.name}.square")
        (total,) = op.kind.evaluate(self.block.call(op, {}), piece)
        return float(total) / self.num_copies

    @property
    def _num_elements(self) -> int:
        return math.prod(self.place.shape(self.layout))

    @property
    def _piece_size(self) -> int:
        return -(-self._num_elements // (len(self.shared.ranks) if self.shared else 1))

    def _padded(self, block: Array) -> Array:
        size = self._piece_size * (len(self.shared.ranks) if self.shared else 1)
        return np.pad(block.reshape(-1), (0, size - self._num_elements))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerShard:
    """A piece of a weight in the optimizer's precision, with its moments."""

    master: Array
    moment1: Array
    moment2: Array

    @classmethod
    def start(cls, master: Array) -> "OptimizerShard":
        """Begin with a weight's piece, without memory of earlier steps."""
        return cls(master=master, moment1=np.zeros_like(master), moment2=np.zeros_like(master))

    def updated(self, weight: Weight, gradient: Array, scalars: Mapping[str, float]) -> "OptimizerShard":
        """Take one step; ``scalars`` holds clip, learning_rate and step_number."""
        op = weight.block.op(f"{weight.name}.update")
        numbers = [np.asarray(scalars[name]) for name in ("clip", "learning_rate", "step_number")]
        state = (self.master, self.moment1, self.moment2)
        master, first, second = op.kind.evaluate(weight.block.call(op, {}), *state, gradient, *numbers)
        return OptimizerShard(master=master, moment1=first, moment2=second)
