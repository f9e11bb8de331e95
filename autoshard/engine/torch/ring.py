"""Attention whose keys and values travel around a ring of ranks, hop by hop."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoshard.engine.place import Place
from autoshard.engine.torch.kernels.attention import joined
from autoshard.engine.torch.kernels.kernel import Kernel
from autoshard.engine.torch.world import Group, World
from autoshard.graph.kinds.attention import Attend
from autoshard.layout.program import Compute

_RING_TAG = 0  # stages use positive tags


def around(world: World, place: Place, compute: Compute, attend: Kernel, positions: torch.Tensor) -> Kernel:
    """Return an attention, or its gradient, whose keys lie on several ranks; ``positions`` are those of all keys."""
    atoms = compute.ring[0].atoms
    group = world.group(atoms)
    assert group, f"{compute.ring[0]} is a ring of one"
    spans = [place.at(rank).dim_bounds("kv_seq", atoms) for rank in group.ranks]
    ring = _Ring(world=world, group=group, positions=tuple(positions[start:stop] for start, stop in spans))
    hops = len(compute.ring)
    if isinstance(compute.op.kind, Attend):
        return lambda *tensors: _forward(ring, hops, attend, tensors)
    return lambda *tensors: _backward(ring, hops, attend, tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """The group of a ring, the positions of every member's keys, and the hand-over to the next member."""

    world: World
    group: Group
    positions: tuple[torch.Tensor, ...]

    def keys_at(self, hop: int) -> torch.Tensor:
        """Return the positions of the keys that are here after so many hops."""
        return self.positions[(self.group.number - hop) % len(self.positions)]

    def hop(self, tensors: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
        """Hand tensors to the next rank and take those of the one before; this is which hop."""
        ranks, here = self.group.ranks, self.group.number
        count = len(self.keys_at(number))
        arrived: list[torch.Tensor] = []
        for tensor in tensors:
            self.world.send(tensor, ranks[(here + 1) % len(ranks)], _RING_TAG)
        for tensor in tensors:
            like = tensor.new_empty((tensor.shape[0], count, *tensor.shape[2:]))
            arrived.append(self.world.receive(like, ranks[here - 1], _RING_TAG))
        return arrived


def _forward(ring: _Ring, hops: int, attend: Kernel, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    query, key, value, positions, _ = tensors
    found = None
    for number in range(hops + 1):
        if number:
            key, value = ring.hop((key, value), number)
        part, weight = attend(query, key, value, positions, ring.keys_at(number))
        found = joined(found, (part, weight))
    assert found, "a ring has at least one member"
    return found


def _backward(ring: _Ring, hops: int, attend: Kernel, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Gradients of keys and values travel with them, and are at home after a whole round."""
    upstream, query, key, value, positions, _, result, lse = tensors
    d_query, d_key, d_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for number in range(hops):
        made = attend(upstream, query, key, value, positions, ring.keys_at(number), result, lse)
        d_query, d_key, d_value = d_query + made[0], d_key + made[1], d_value + made[2]
        key, value, d_key, d_value = ring.hop((key, value, d_key, d_value), number + 1)
    return d_query, d_key, d_value
