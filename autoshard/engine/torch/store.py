"""A rank's weights and sums of gradients, as blocks see them: whole while a block runs, wherever they rest."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.engine.torch.update import Flat, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWeights:
    """What a block may take while it runs, by the weights' names in the model."""

    weights: Tensors
    sums: Tensors
    pending: tuple[tuple[Flat, torch.Tensor], ...] = ()  # sums that go back into their flats


class Store:
    """All weights of a rank; ``ties`` maps a weight to the other one here whose memory it uses."""

    def __init__(self, flats: Sequence[Flat], ties: Mapping[str, str]) -> None:
        """Name once what rests whole (``whole``), and of what this rank has a piece, by block."""
        self.flats, self.ties = flats, ties
        weights: dict[str, torch.Tensor] = {}
        sums: dict[str, torch.Tensor] = {}
        self._parted: dict[str, list[Flat]] = defaultdict(list)
        for flat in flats:
            if flat.parted:
                names = {one.instance for one in flat.weights}
                names |= {other for other, owner in ties.items() if owner in names}
                for block in {name.rsplit(".", 2)[0] for name in names}:
                    self._parted[block].append(flat)
            else:
                weights |= flat.views(flat.values)
                sums |= flat.views(flat.sums)
        for other, owner in ties.items():
            if owner in weights:
                weights[other], sums[other] = weights[owner], sums[owner]
        self.whole = OpenedWeights(weights=weights, sums=sums)

    def opened(self, block: str, *, reads: bool, adds: Collection[str] = ()) -> OpenedWeights:
        """Gather what a block needs for an action that reads its weights, or adds to the gradients of some weights."""
        apart = self._parted.get(block, ())
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
