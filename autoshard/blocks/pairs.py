"""Deliveries to two readers: what each of them takes is a variable, and one table prices the two with their maker."""

from typing import Any

import numpy as np

from autoshard.blocks.neighbours import numbers
from autoshard.blocks.passage import Passage


def pair_tables(passage: Passage) -> tuple[Any, Any]:
    """Return the price of what two readers take, and the memory it needs: axes for the maker and for each reader."""
    same = _same(passage)
    price = np.pad(passage.table(passage.plain), ((0, 0), (0, 1)), constant_values=np.inf)[:, same]
    plain = passage.kept(passage.plain)
    kept = None if plain is None else np.pad(plain, ((0, 0), (0, 1)))[:, same]
    for group in passage.groups:
        turned = (0, 1, 2) if group[0] == passage.readers[0].name else (0, 2, 1)
        delivered = passage.sides(passage.others(group))
        mixed, weight = passage.mixed(group).transpose(turned), passage.kept_by(delivered, [group] * len(delivered))
        price = np.minimum(price, mixed)
        if kept is not None:
            kept = np.where(np.isfinite(mixed), weight[:, None].transpose(turned), kept)
    return price, kept


def _same(passage: Passage) -> Any:
    """Return the number of the value that is what both readers take, -1 where they take different layouts."""
    ones, others = (passage.sides([reader.name]) for reader in passage.readers)
    values = [value.delivered for value in passage.plain]
    taken = numbers([side.taken for side in (*ones, *others, *values)])
    sums = np.array([passage.neighbours.mask(side.sent.sums) for side in (*ones, *others, *values)], int)
    first, second = slice(len(ones)), slice(len(ones), len(ones) + len(others))
    number = np.full((taken.max(initial=0) + 1, sums.max(initial=0) + 1), -1)
    number[taken[second.stop :], sums[second.stop :]] = np.arange(len(values))
    one, other = np.nonzero(taken[first, None] == taken[None, second])
    found = np.full((len(ones), len(others)), -1)
    found[one, other] = number[taken[first][one], sums[first][one] | sums[second][other]]
    return found
