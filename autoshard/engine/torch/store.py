"""A rank's weights and sums of gradients, as blocks see them: whole while a block runs, wherever they rest."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from autoshard.engine.torch.update import Flat, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWeights:
    """What a block may take while it runs, by the weights' names in the model."""

    weights: Tensors
    sums: Tensors
    pending: tuple[tuple[Flat, torch.Tensor], ...] = ()  # sums that go back into their flats


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """All weights of a rank."""

    flats: tuple[Flat, ...]
    ties: Mapping[str, str]  # here: which weight uses another's memory
    whole: OpenedWeights = field(init=False)
    apart: Mapping[str, tuple[Flat, ...]] = field(init=False)  # by block what each rank has a piece of

    def __post_init__(self) -> None:
        """Name once what rests whole, and what every block needs beside it."""
        weights: dict[str, torch.Tensor] = {}
        sums: dict[str, torch.Tensor] = {}
        for flat in self.flats:
            if not flat.parted:
                weights |= flat.views(flat.values)
                sums |= flat.views(flat.sums)
        for other, owner in self.ties.items():
            if owner in weights:
                weights[other], sums[other] = weights[owner], sums[owner]
        object.__setattr__(self, "whole", OpenedWeights(weights=weights, sums=sums))
        apart: dict[str, tuple[Flat, ...]] = {}
        for flat in (flat for flat in self.flats if flat.parted):
            names = {one.instance for one in flat.weights}
            names |= {other for other, owner in self.ties.items() if owner in names}
            for block in dict.fromkeys(map(_block_of, sorted(names))):
                apart[block] = (*apart.get(block, ()), flat)
        object.__setattr__(self, "apart", apart)

    def opened(self, block: str, *, reads: bool, adds: Collection[str] = ()) -> OpenedWeights:
        """Gather what a block needs for an action that reads its weights, or adds to the gradients of some weights."""
        apart = self.apart.get(block, ())
        if not apart:
            return self.whole
        values: dict[str, torch.Tensor] = dict(self.whole.weights)
        added: dict[str, torch.Tensor] = dict(self.whole.sums)
        pending: list[tuple[Flat, torch.Tensor]] = []
        owners = {self.ties.get(name, name) for name in adds}
        for flat in apart:
            values |= flat.views(flat.opened()) if reads else {}
            if owners.intersection(one.instance for one in flat.weights):
                pending.append((flat, flat.opened_sums()))
                added |= flat.views(pending[-1][1])
        for other, owner in self.ties.items():
            values |= {other: values[owner]} if owner in values else {}
            added |= {other: added[owner]} if owner in added else {}
        return OpenedWeights(weights=values, sums=added, pending=tuple(pending))

    def close(self, opened: OpenedWeights) -> None:
        """Bring sums back to where they rest."""
        for flat, sums in opened.pending:
            flat.add(sums)

    def clear(self) -> None:
        """Forget all gradients."""
        for flat in self.flats:
            flat.sums.zero_()

    def resting(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that lasts from step to step, but for the optimizer's."""
        for flat in self.flats:
            yield from (flat.values, flat.sums)


def _block_of(name: str) -> str:
    """Return the block that a weight is of: ``layer.3`` of ``layer.3.up.weight``."""
    kind, number, _ = name.split(".", 2)
    return f"{kind}.{number}"
