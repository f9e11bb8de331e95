"""The step phase on one rank: gradients reduced, clipped by their norm, weights updated by AdamW and gathered.

Every weight travels on its own; the plan's buckets join them in the engine proper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.optim.adamw import adamw

from autoshard.engine.place import Held, Place
from autoshard.engine.torch.collectives import all_reduce, gather_flat, scatter_flat_sum
from autoshard.engine.torch.formats import Formats, wide
from autoshard.engine.torch.kernels.kernel import as_array
from autoshard.engine.torch.world import Group, World
from autoshard.graph.block import Block
from autoshard.graph.kinds.optimizer import AdamW
from autoshard.graph.op import Array
from autoshard.layout.layout import Layout


@dataclass(frozen=True, kw_only=True)  # its kernels are made once
class Weight:
    """How one weight is updated: its block on this rank, over whom its gradient is summed, who shares the work."""

    name: str  # in its block: ``up.weight``
    block: Block
    layout: Layout  # of the weight, and of its gradient's sum
    place: Place
    formats: Formats
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

    @property
    def dtype(self) -> torch.dtype:
        """The format in which the weight is used."""
        return self.formats.of(self.block.tensors[self.name].dtype)

    def zeros(self) -> torch.Tensor:
        """Return a sum of gradients to which nothing was added yet."""
        dtype = self.formats.of(self.block.tensors[f"{self.name}.sum"].dtype)
        return torch.zeros(self.place.shape(self.layout), dtype=dtype)

    def reduced(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum a gradient over the ranks that wait for it; return this rank's piece, flat and padded with zeros."""
        whole = all_reduce(self.summed, gradient) if self.summed else gradient
        return scatter_flat_sum(self.shared, self._padded(whole)) if self.shared else whole.reshape(-1)

    def cut(self, block: Array) -> torch.Tensor:
        """Return this rank's piece of its block in the optimizer's format, flat and padded with zeros."""
        owned = self.block.tensors.get(f"{self.name}.master", self.block.tensors[self.name])
        start = self._piece_size * (self.shared.number if self.shared else 0)
        return self._padded(self.formats.tensor(block, owned.dtype))[start : start + self._piece_size].clone()

    def gathered(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the whole block from everybody's piece, in the format in which it is used."""
        used = piece.to(self.dtype)
        joined = gather_flat(self.shared, used) if self.shared else used
        return joined[: self._num_elements].reshape(self.place.shape(self.layout))

    def share(self, piece: torch.Tensor) -> Held:
        """Name what a piece is part of, without its padding."""
        start = self._piece_size * (self.shared.number if self.shared else 0)
        ends = min(start, self._num_elements), min(start + self._piece_size, self._num_elements)
        return Held(bounds=self.bounds, array=as_array(piece[: ends[1] - ends[0]].clone()), piece=ends)

    @property
    def optimizer(self) -> AdamW:
        """What takes a step."""
        kind = self.block.op(f"{self.name}.update").kind
        assert isinstance(kind, AdamW), f"{self.name} is updated by {kind}"
        return kind

    @cached_property
    def _num_elements(self) -> int:
        return math.prod(self.place.shape(self.layout))

    @cached_property
    def _piece_size(self) -> int:
        return -(-self._num_elements // (len(self.shared.ranks) if self.shared else 1))

    def _padded(self, block: torch.Tensor) -> torch.Tensor:
        size = self._piece_size * (len(self.shared.ranks) if self.shared else 1)
        flat = block.reshape(-1)
        return flat if len(flat) == size else torch.cat([flat, flat.new_zeros(size - len(flat))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """What a step of the optimizer takes beside tensors."""

    clip: float  # the factor that brings the gradient's norm down to the limit
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerShard:
    """A piece of a weight in the optimizer's precision, with its moments; a step changes them in place."""

    master: torch.Tensor
    moment1: torch.Tensor
    moment2: torch.Tensor
    num_steps: torch.Tensor

    @classmethod
    def start(cls, weight: Weight, block: Array) -> "OptimizerShard":
        """Begin with a weight's piece, without memory of earlier steps."""
        master = weight.cut(block)
        dtype = weight.formats.of(weight.block.tensors[f"{weight.name}.moment1"].dtype)
        first, second = (torch.zeros_like(master, dtype=dtype) for _ in range(2))
        return cls(master=master, moment1=first, moment2=second, num_steps=torch.zeros(()))


def total_square(weights: Sequence[Weight], pieces: Sequence[torch.Tensor]) -> float:
    """Return this rank's share of the squared norm: what several ranks hold alike counts once."""
    if not pieces:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(wide(piece)) for piece in pieces]).double()
    copies = torch.tensor([weight.num_copies for weight in weights], dtype=torch.float64)
    return float((norms.square() / copies).sum())


def update(
    weights: Sequence[Weight], shards: Sequence[OptimizerShard], pieces: Sequence[torch.Tensor], scalars: Scalars
) -> None:
    """Take a step of AdamW, all weights that are updated alike at once."""
    alike: dict[AdamW, list[int]] = {}
    for number, weight in enumerate(weights):
        alike.setdefault(weight.optimizer, []).append(number)
    for kind, numbers in alike.items():
        own = [shards[number] for number in numbers]
        adamw(
            [one.master for one in own],
            [pieces[number] * scalars.clip for number in numbers],
            [one.moment1 for one in own],
            [one.moment2 for one in own],
            [],
            [one.num_steps for one in own],
            fused=all(one.master.dtype == one.moment1.dtype for one in own),
            amsgrad=False,
            beta1=kind.beta1,
            beta2=kind.beta2,
            lr=scalars.learning_rate,
            weight_decay=kind.decay,
            eps=kind.eps,
            maximize=False,
        )
