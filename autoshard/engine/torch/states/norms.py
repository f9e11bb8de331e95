"""Norms of gradients and weights by group: the weights of one name in all layers, so that a run shows what grows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoshard.engine.torch.formats import wide
from autoshard.engine.torch.states.flat import Flat
from autoshard.graph.block import OpGraph
from autoshard.run.reports import NormsReport


def norm_group(instance: str) -> str:
    """Return the group of a weight.

    >>> norm_group("layer.3.up.weight")
    'layer.up.weight'
    """
    block, _, name = instance.split(".", 2)
    return f"{block}.{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNorms:
    """The groups of a model, the same on all ranks, and how often their norms are noted."""

    every: int | None  # updates; None for never
    groups: tuple[str, ...]

    @classmethod
    def of(cls, graph: OpGraph, every: int | None) -> "GroupNorms":
        """Find the groups of the weights that gradients train."""
        names = (
            norm_group(f"{block_name}.{tensor.name}")
            for block_name, block in graph.instances()
            for tensor in block.parameters
            if block.trains(tensor.name) and f"{block.kind}.{tensor.name}" not in graph.tied
        )
        return cls(every=every, groups=tuple(dict.fromkeys(names)))

    def due(self, num_updates: int) -> bool:
        """Say whether the norms of the next update are noted, after so many."""
        return self.every is not None and (num_updates + 1) % self.every == 0

    def squares(self, flats: Sequence[Flat], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what this rank adds to the squared norms of all groups: of the gradient, then of the weights."""
        sums = wide(gradients[0]).new_zeros((2, len(self.groups)))
        for flat, gradient in zip(flats, gradients, strict=True):
            for row, piece in zip(sums, (gradient, flat.updated()), strict=True):
                for weight, square in flat.squares(piece):
                    row[self.groups.index(norm_group(weight.owner))] += square
        return sums.reshape(-1)

    def report(self, squares: Sequence[float]) -> NormsReport | None:
        """Return the norms, given their squares over all ranks; None where they were not due."""
        if not squares:
            return None
        norms, count = [square**0.5 for square in squares], len(self.groups)
        gradient, weights = (dict(zip(self.groups, part, strict=True)) for part in (norms[:count], norms[count:]))
        return NormsReport(gradient=gradient, weights=weights)
