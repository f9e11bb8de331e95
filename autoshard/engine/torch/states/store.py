"""A rank's weights and sums of gradients, as blocks see them.

A bucket is reduced as soon as its last gradient is there, while earlier layers are still in their backward pass.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.engine.torch.states.flat import Flat, Tensors
from autoshard.engine.torch.world import Arrival, RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWeights:
    """The values that a block may take while it runs, by the weights' names in the model."""

    weights: Tensors
    sums: Tensors
    pending: tuple[tuple[Flat, RankGroup, torch.Tensor], ...] = ()  # sums that go back into their flats


class Store:
    """All weights of a rank; ``ties`` maps a weight to the other one here whose memory it uses.

    Under ZeRO-3 the next block's weights arrive while a block runs, and the sums of the last block are sent.
    """

    def __init__(self, flats: Sequence[Flat], ties: Mapping[str, str]) -> None:
        """Note which weights rest whole (``whole``), and for each block the flats of which this rank has a piece."""
        self.flats, self.ties = flats, ties
        weights: dict[str, torch.Tensor] = {}
        sums: dict[str, torch.Tensor] = {}
        self._parted: dict[str, list[tuple[Flat, RankGroup]]] = defaultdict(list)
        self._flat_of: dict[str, Flat] = {}  # of weights whose gradients are reduced as soon as they are complete
        for flat in flats:
            names = {weight.instance for weight in flat.weights}
            names |= {copy for copy, owner in ties.items() if owner in names}
            if flat.parted:
                for block in {name.rsplit(".", 2)[0] for name in names}:
                    self._parted[block].append((flat, flat.parted))
            else:
                weights |= flat.views(flat.values)
                sums |= flat.views(flat.sums)
                self._flat_of |= dict.fromkeys(names, flat) if not flat.tied else {}
        self.whole = self._with_ties(weights, sums)
        self._incomplete: dict[Flat, set[str]] = {}
        self._reducing: dict[Flat, Arrival] = {}
        self._arriving: tuple[str, Sequence[Arrival]] = "", ()
        self._leaving: list[tuple[Flat, Arrival]] = []

    def clear(self) -> None:
        """Forget all gradients."""
        for flat in self.flats:
            flat.sums.zero_()
        self._incomplete = {flat: set[str]() for flat in self._flat_of.values()}
        for name, flat in self._flat_of.items():
            self._incomplete[flat].add(name)

    def opened(
        self, block: str, *, reads: bool, adds: Collection[str] = (), following: str | None = None
    ) -> OpenedWeights:
        """Gather what a block needs for an action that reads its weights, or adds to the gradients of some weights.

        The weights of the ``following`` block that reads its own begin to arrive.
        """
        values, sums = dict(self.whole.weights), dict(self.whole.sums)
        if reads:
            expected, arriving = self._arriving
            assert expected in ("", block), f"{expected} was to be next, not {block}"
            for (flat, _), arrive in zip(self._parted[block], arriving or self._begin_gathers(block), strict=True):
                values |= flat.views(arrive())
            self._arriving = (following, self._begin_gathers(following)) if following else ("", ())
        if not self._parted[block]:
            return self.whole
        pending: list[tuple[Flat, RankGroup, torch.Tensor]] = []
        owners = {self.ties.get(name, name) for name in adds}
        for flat, group in self._parted[block]:
            if owners.intersection(weight.instance for weight in flat.weights):
                pending.append((flat, group, flat.sums.new_zeros(len(flat.sums) * len(group.ranks))))
                sums |= flat.views(pending[-1][2])
        return self._with_ties(values, sums, *pending)

    def close(self, opened: OpenedWeights, complete: Collection[str] = ()) -> None:
        """Scatter sums that rest in pieces, and begin to reduce the buckets that the ``complete`` gradients fill."""
        self.take_back()
        self._leaving = [(flat, group.begin_reduce_scatter(sums)) for flat, group, sums in opened.pending]
        filled = {self._flat_of[name]: None for name in complete if name in self._flat_of}
        for name in complete:
            if name in self._flat_of:
                self._incomplete[self._flat_of[name]].discard(name)
        for flat in self.flats:  # all ranks begin in this order
            if flat in filled and not self._incomplete[flat]:
                self._reducing[flat] = flat.begin_reducing()

    def reduced(self) -> list[torch.Tensor]:
        """Return this rank's piece of every flat's gradient, summed over the ranks that wait for it."""
        arrivals = [self._reducing.pop(flat, None) or flat.begin_reducing() for flat in self.flats]
        return [arrive() for arrive in arrivals]

    def _begin_gathers(self, block: str) -> Sequence[Arrival]:
        return [flat.begin_opening() for flat, _ in self._parted[block]]

    def take_back(self) -> None:
        """Add the sums that are on their way to where they rest."""
        for flat, arrive in self._leaving:
            flat.sums.add_(arrive())
        self._leaving = []

    def _with_ties(
        self, weights: Tensors, sums: Tensors, *pending: tuple[Flat, RankGroup, torch.Tensor]
    ) -> OpenedWeights:
        ties, all_tensors = self.ties.items(), (weights, sums)
        copies = ({copy: tensors[owner] for copy, owner in ties if owner in tensors} for tensors in all_tensors)
        return OpenedWeights(weights={**weights, **next(copies)}, sums={**sums, **next(copies)}, pending=pending)
