"""In which order the kinds of layers of a model follow each other, as tables that answer for many ranges at once."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerOrder:
    """The kinds of a model's layers, by number; a range of layers is its first place and its length."""

    before: Ints  # [kind, place]: how many layers of a kind lie before a place
    earliest: Ints | None  # [length, place]: the first place with the same kinds; None where all layers are alike

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return self.before.shape[1] - 1

    @property
    def totals(self) -> list[int]:
        """How many layers of each kind there are."""
        totals: list[int] = self.before[:, -1].tolist()
        return totals

    def counts(self, first: Ints, length: Ints) -> list[Ints]:
        """Return how many layers of each kind lie in ranges."""
        if self.earliest is None:
            return [length]
        return [column[first + length] - column[first] for column in self.before]

    def alike(self, first: Ints, length: Ints) -> Ints:
        """Return the first place at which layers of the same kinds follow each other as in ranges."""
        return np.zeros_like(first) if self.earliest is None else self.earliest[length, first]


@cache
def layer_order(kinds: tuple[str, ...]) -> LayerOrder:
    """Return the order in which layers of these kinds follow each other.

    >>> order = layer_order(("local", "local", "layer", "local", "local"))
    >>> [counts.tolist() for counts in order.counts(np.array([0, 2]), np.array([3, 3]))]
    [[2, 2], [1, 1]]
    >>> order.alike(np.array([3, 2]), np.array([2, 1])).tolist()
    [0, 2]
    """
    names = tuple(dict.fromkeys(kinds))
    if len(names) == 1:
        return LayerOrder(before=np.arange(len(kinds) + 1)[None], earliest=None)
    numbers = np.array([names.index(kind) for kind in kinds])
    before = np.cumsum(numbers == np.arange(len(names))[:, None], axis=1)
    earliest = np.zeros((len(kinds) + 1, len(kinds) + 1), dtype=np.int64)
    alike = np.zeros(len(kinds), dtype=np.int64)  # by place: a number that equal ranges share
    for length in range(1, len(kinds) + 1):
        last = np.arange(length - 1, len(kinds))
        pairs = alike[: len(last)] * len(names) + numbers[last]
        _, first, alike = np.unique(pairs, return_index=True, return_inverse=True)
        earliest[length, : len(last)] = first[alike]
    return LayerOrder(before=np.pad(before, ((0, 0), (1, 0))), earliest=earliest)
