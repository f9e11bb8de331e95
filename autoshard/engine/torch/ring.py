"""Attention whose keys and values travel around a ring of ranks, hop by hop."""

from collections.abc import Callable, Sequence

import numpy as np

from autoshard.engine.place import Place
from autoshard.engine.torch.world import World
from autoshard.graph.kinds.attention import Attend
from autoshard.graph.op import Array
from autoshard.layout.collective import Collective
from autoshard.layout.local import joined_attention
from autoshard.layout.program import Compute

Evaluate = Callable[[Sequence[Array]], tuple[Array, ...]]
_RING_TAG = 0  # stages use positive tags


def attend_around(
    world: World, place: Place, compute: Compute, arrays: Sequence[Array], evaluate: Evaluate
) -> tuple[Array, ...]:
    """Run an attention, or its gradient, whose keys lie on several ranks."""
    ring = _Ring(world, place, compute.ring[0])
    if isinstance(compute.op.kind, Attend):
        return _forward(ring, len(compute.ring), arrays, evaluate)
    return _backward(ring, len(compute.ring), arrays, evaluate)


class _Ring:
    """The group of a ring, and the hand-over of arrays to the next member."""

    def __init__(self, world: World, place: Place, hop: Collective) -> None:
        group = world.group(hop.atoms)
        assert group, f"{hop} is a ring of one"
        self._world, self._group, self._place, self._atoms = world, group, place, hop.atoms
        self._hops = 0

    def hop(self, arrays: Sequence[Array], axes: Sequence[int]) -> list[Array]:
        """Hand arrays to the next rank and take those of the one before; ``axes`` is where keys lie in each."""
        self._hops += 1
        ranks = self._group.ranks
        here = ranks.index(self._place.rank)
        origin = ranks[(here - self._hops) % len(ranks)]
        start, stop = self._place.at(origin).dim_bounds("kv_seq", self._atoms)
        arrived: list[Array] = []
        for array in arrays:
            self._world.send(array, ranks[(here + 1) % len(ranks)], _RING_TAG)
        for array, axis in zip(arrays, axes, strict=True):
            shape = [stop - start if number == axis else size for number, size in enumerate(array.shape)]
            arrived.append(self._world.receive(shape, ranks[here - 1], _RING_TAG))
        return arrived


def _forward(ring: _Ring, hops: int, arrays: Sequence[Array], evaluate: Evaluate) -> tuple[Array, ...]:
    query, key, value, positions, key_positions = arrays
    joined = None
    for hop in range(hops + 1):
        if hop:
            key, value, key_positions = ring.hop((key, value, np.asarray(key_positions, float)), (1, 1, 0))
        part, weight = evaluate((query, key, value, positions, key_positions))
        joined = joined_attention(joined, (part, weight))
    assert joined, "a ring has at least one member"
    return joined


def _backward(ring: _Ring, hops: int, arrays: Sequence[Array], evaluate: Evaluate) -> tuple[Array, ...]:
    upstream, query, key, value, positions, key_positions, result, lse = arrays
    d_query, d_key, d_value = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    for _ in range(hops):
        made = evaluate((upstream, query, key, value, positions, key_positions, result, lse))
        d_query, d_key, d_value = d_query + made[0], d_key + made[1], d_value + made[2]
        travelling = (key, value, np.asarray(key_positions, float), d_key, d_value)
        key, value, key_positions, d_key, d_value = ring.hop(travelling, (1, 1, 0, 1, 1))
    return d_query, d_key, d_value
