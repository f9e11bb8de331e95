"""A permutation of 0 to n - 1 that needs no memory: any place of it is computed on its own."""

from collections.abc import Sequence
from math import isqrt

import numpy as np

from autoshard.graph.op import Array

_ROUNDS = 8  # four would be enough to look random (Luby and Rackoff, 1988); more cost a microsecond each


def permuted(places: Array, size: int, key: Sequence[int]) -> Array:
    """Return what stands at these places of the permutation that a key names.

    A Feistel network permutes a grid of rows and columns that has at most ``isqrt(size) + 1`` cells more than asked
    for; who lands on one of those goes on until it leaves them, which keeps it a permutation (cycle walking).

    >>> permuted(np.arange(10), 20, key=(1, 2)).tolist()
    [3, 0, 15, 4, 16, 10, 14, 2, 7, 12]
    """
    if size == 1:
        return np.zeros_like(places)
    keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    found = _network(places, rows, columns, keys)
    while (outside := found >= size).any():
        found[outside] = _network(found[outside], rows, columns, keys)
    return found


def _network(places: Array, rows: int, columns: int, keys: Array) -> Array:
    row, column = np.divmod(places, columns)
    for even, odd in keys.reshape(-1, 2):
        row = (row + _mixed(column, even) % np.uint64(rows)).astype(np.int64) % rows
        column = (column + _mixed(row, odd) % np.uint64(columns)).astype(np.int64) % columns
    return row * columns + column


def _mixed(numbers: Array, key: np.uint64) -> Array:
    """Scatter the bits of whole numbers over 64 bits (the finalizer of splitmix64)."""
    bits = numbers.astype(np.uint64) ^ key
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
