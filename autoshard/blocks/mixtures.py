"""Which deliveries are worth a look in which some readers take a tensor as it was made and the others do not.

A mixture is dropped if, whatever its neighbours choose, taking the tensor alike costs no more: the deliver's own price
changes by a known amount, and each reader can go over to a choice that fits the other delivery at no more than a known
loss. A loss is bounded table by table, by the largest difference between two rows. Where memory is limited, what is
gone over to must not need more of it either. So nothing is lost by dropping it, and most of them go.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.blocks.neighbours import Neighbours, numbers
from autoshard.blocks.passage import Delivery, Passage, Side
from autoshard.graph.op import Op

_TOLERANCE = 1e-12  # costs that differ by less are ties
_NOTHING = -1e30  # a loss that no sum of others makes positive
_CELLS = 1 << 20  # of a table of differences that is looked at in one go


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A table with a row per choice of an operation and a column per choice of a neighbour; its weight likewise."""

    table: Any
    weight: Any = None


def mixtures(passage: Passage, rows: Mapping[str, Sequence[Rows]], *, limited: bool = False) -> tuple[Delivery, ...]:
    """Return the mixtures that are not dropped; ``rows`` holds every reader's tables but that with this tensor."""
    if not passage.groups:
        return ()
    losses = {one.name: _Losses(passage, one, rows[one.name], limited=limited) for one in passage.readers}
    found = (_undominated(passage, group, losses, limited=limited) for group in passage.groups)
    return tuple(itertools.chain.from_iterable(found))


def _undominated(
    passage: Passage, group: tuple[str, ...], losses: Mapping[str, "_Losses"], *, limited: bool
) -> Iterator[Delivery]:
    """Yield the mixtures in which just this group takes the tensor as it was made."""
    rest = passage.others(group)
    made, delivered = passage.sides(group), passage.sides(rest)
    if not (made and delivered):
        return
    problem = passage.neighbours.problem
    kept, plain_kept = passage.kept_by(delivered, [group] * len(delivered)), passage.kept(passage.plain)
    mixed, alike = passage.mixed(group), passage.table(passage.plain)
    if kept is not None:
        mixed, alike = mixed + problem.second_per_byte * kept[:, None], alike + problem.second_per_byte * plain_kept
    over: Any = alike[:, :, None] + np.sum([losses[name].of(delivered) for name in rest], axis=0)
    if kept is not None and limited:
        over = np.where(plain_kept[:, :, None] <= kept[:, None], over, np.inf)
    own: Any = np.sum([losses[name].of(made) for name in group], axis=0)
    worth: Any = np.zeros(mixed.shape[1:], bool)
    for row, one in np.argwhere(np.isfinite(mixed).any(axis=2)):
        best = (over[row] + own[:, one, None]).min(axis=0, initial=np.inf)
        worth[one] |= np.isfinite(mixed[row, one]) & (best > mixed[row, one] * (1 + _TOLERANCE))
    for one, side in enumerate(made):
        yield from (Delivery(delivered=delivered[at], made=side, by=group) for at in np.flatnonzero(worth[one]))


class _Losses:
    """What a reader loses at most that goes over from a side to one that all readers can take."""

    def __init__(self, passage: Passage, reader: Op, rows: Sequence[Rows], *, limited: bool) -> None:
        self._passage, self._reader = passage, reader
        losses = np.where(_replaces(passage.neighbours, reader, passage.tensor), 0.0, np.inf)
        for one in rows:
            losses = losses + _differences(one.table)
        if limited:
            heavier = sum((_differences(one.weight) for one in rows if one.weight is not None), np.zeros(losses.shape))
            losses = np.where(heavier <= 0, losses, np.inf)
        fits: Any = passage.fitting(reader, [one.delivered for one in passage.plain])
        self._best = np.array([losses[fit].min(axis=0, initial=np.inf) for fit in fits]).reshape(-1, len(losses))

    def of(self, sides: Sequence[Side]) -> Any:
        """Return the loss from each side (a column) to each that all can take (a row)."""
        fits = self._passage.fitting(self._reader, sides)
        return np.stack([self._best[:, fit].max(axis=1, initial=_NOTHING) for fit in fits], axis=1)


def _differences(table: Any) -> Any:
    """Return by how much each row is at most above each other one, where that one is finite: [this row, other row]."""
    rows, place = np.unique(table.reshape(len(table), -1), axis=0, return_inverse=True)
    place = place.reshape(-1)
    finite = np.isfinite(rows)
    found = np.empty((len(rows), len(rows)))
    step = max(1, _CELLS // rows.size)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        base = np.where(finite[part], rows[part], 0.0)
        more = np.where(finite[part][:, None], rows[None] - base[:, None], _NOTHING)
        found[:, part] = more.max(axis=2).T
    return found[np.ix_(place, place)]


def _replaces(neighbours: Neighbours, reader: Op, tensor: str) -> Any:
    """Return where one choice takes an operation's other inputs as another does, and sends back no more."""
    choices = neighbours.choices[reader.name]
    same = np.ones((len(choices), len(choices)), dtype=bool)
    for name in reader.inputs:
        if name == tensor or name not in neighbours.readers:
            continue
        taken = numbers([neighbours.wanted(reader, choice, name) for choice in choices])
        sends = np.array([neighbours.mask(neighbours.sends(reader, choice, name)) for choice in choices])
        same &= (taken[:, None] == taken[None]) & ((sends[:, None] & ~sends[None]) == 0)
    if neighbours.rules[reader.name].forward and reader.inputs[0] != tensor:
        passing = numbers([(choice.busy, choice.passed) for choice in choices])
        same &= passing[:, None] == passing[None]
    return same
