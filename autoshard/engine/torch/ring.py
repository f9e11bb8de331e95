"""Attention whose keys and values travel around a ring of ranks, hop by hop, while those at hand are attended to."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoshard.engine.place import Place
from autoshard.engine.torch.kernels.attention import joined
from autoshard.engine.torch.kernels.kernel import Kernel
from autoshard.engine.torch.world import Group, Passing, World
from autoshard.graph.kinds.attention import Attend
from autoshard.layout.program import Compute


def around(world: World, place: Place, compute: Compute, attend: Kernel, positions: torch.Tensor) -> Kernel:
    """Return an attention, or its gradient, whose keys lie on several ranks; ``positions`` are those of all keys."""
    atoms = compute.ring[0].atoms
    group = world.group(atoms)
    assert group, f"{compute.ring[0]} is a ring of one"
    spans = [place.at(rank).dim_bounds("kv_seq", atoms) for rank in group.ranks]
    ring = _Ring(group=group, positions=tuple(positions[start:stop] for start, stop in spans))
    hops = len(compute.ring)
    if isinstance(compute.op.kind, Attend):
        return lambda *tensors: _forward(ring, hops, attend, tensors)
    return lambda *tensors: _backward(ring, hops, attend, tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """The group of a ring, the positions of every member's keys, and the hand-over to the next member."""

    group: Group
    positions: tuple[torch.Tensor, ...]

    def keys_at(self, hop: int) -> torch.Tensor:
        """Return the positions of the keys that are here after so many hops."""
        return self.positions[(self.group.number - hop) % len(self.positions)]

    def hop(self, tensors: Sequence[torch.Tensor], number: int) -> Passing:
        """Start handing on what belongs to the keys that are here before this hop, for what does after it."""
        count = len(self.keys_at(number))
        arriving = [tensor.new_empty((tensor.shape[0], count, *tensor.shape[2:])) for tensor in tensors]
        return self.group.pass_on(tensors, arriving)


def _forward(ring: _Ring, hops: int, attend: Kernel, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    query, key, value, positions, _, *starts = tensors
    found = None
    for number in range(hops + 1):
        following = ring.hop((key, value), number + 1) if number < hops else None
        part, weight = attend(query, key, value, positions, ring.keys_at(number), *starts)
        found = joined(found, (part, weight))
        if following:
            key, value = following.arrived()
    assert found, "a ring has at least one member"
    return found


def _backward(ring: _Ring, hops: int, attend: Kernel, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Keys and values travel to all other ranks; their gradients follow a hop later, and come home with the last."""
    upstream, query, key, value, positions, _, result, lse, *starts = tensors
    total, own, travelling = None, [], None
    for number in range(hops):
        following = ring.hop((key, value), number + 1) if number + 1 < hops else None
        d_query, *made = attend(upstream, query, key, value, positions, ring.keys_at(number), result, lse, *starts)
        total = d_query if total is None else total + d_query
        if travelling:
            made = [one + two for one, two in zip(travelling.arrived(), made, strict=True)]
        if number:
            travelling = ring.hop(made, number + 1)
        else:
            own = made
        if following:
            key, value = following.arrived()
    assert total is not None and travelling, "a ring has at least two members"
    return total, *(one + two for one, two in zip(own, travelling.arrived(), strict=True))
