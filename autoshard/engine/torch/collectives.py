"""Each kind of collective of a program on a rank's block, and attention whose keys travel around a ring of ranks.

Blocks that do not divide travel padded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from autoshard.engine.torch.kernels import Kernel
from autoshard.engine.torch.kernels.attention import join_parts
from autoshard.engine.torch.world import RankGroup, World
from autoshard.errors import InputError
from autoshard.graph.kinds.attention import Attend
from autoshard.layout.layout import Layout
from autoshard.layout.program import Communicate, Compute
from autoshard.run.placement import MeshRank, dims_of

Change = Callable[[torch.Tensor], torch.Tensor]


def communication(world: World, mesh_rank: MeshRank, change: Communicate) -> Change:
    """Return the function that executes one collective of a program on this rank's block."""
    collective, before, after = change.collective, change.reads.layout, change.writes.layout
    group = world.group(collective.atoms)
    assert group, f"{change.entry}: {collective} is between no two ranks"
    if collective.kind in ("all_reduce", "all_reduce_max"):
        largest = collective.kind == "all_reduce_max"
        return lambda block: group.all_reduce(block.clone(memory_format=torch.contiguous_format), largest=largest)
    axis = dims_of(before).index(collective.dim or "")
    match collective.kind:
        case "all_gather":
            return _all_gather(group, axis, [mesh_rank.at(rank).shape(before)[axis] for rank in group.ranks])
        case "reduce_scatter":
            spans = [span_inside(mesh_rank.at(rank), axis, before, after) for rank in group.ranks]
            return _reduce_scatter(group, axis, spans)
        case "all_to_all":
            return _all_to_all(group, mesh_rank, (axis, dims_of(before).index(collective.to_dim or "")), before, after)
        case "slice":
            start, stop = span_inside(mesh_rank, axis, before, after)
            return lambda block: block.narrow(axis, start, stop - start).clone()
        case _:
            raise InputError.of(change.entry, f"{collective} is not executed by the torch engine yet")


def _all_gather(group: RankGroup, axis: int, counts: Sequence[int]) -> Change:
    most = max(counts)
    even = len(set(counts)) == 1

    def gather(block: torch.Tensor) -> torch.Tensor:
        whole = group.all_gather(_padded(block.movedim(axis, 0), most))
        if not even:
            whole = torch.cat([piece[:count] for piece, count in zip(whole.split(most), counts, strict=True)])
        return whole.movedim(0, axis)

    return gather


def _reduce_scatter(group: RankGroup, axis: int, spans: Sequence[tuple[int, int]]) -> Change:
    counts = [stop - start for start, stop in spans]
    most, count = max(counts), counts[group.number]
    even = len(set(counts)) == 1 and all(span[1] == following[0] for span, following in pairwise(spans))

    def scatter(block: torch.Tensor) -> torch.Tensor:
        moved = block.movedim(axis, 0)
        if not even:
            moved = torch.cat([_padded(moved[start:stop], most) for start, stop in spans])
        return group.reduce_scatter(moved)[:count].movedim(0, axis)

    return scatter


def _all_to_all(group: RankGroup, mesh_rank: MeshRank, axes: tuple[int, int], before: Layout, after: Layout) -> Change:
    """Send parts cut along the second axis to the members; put the received parts together along the first."""
    axis, to_axis = axes
    members = [mesh_rank.at(rank) for rank in group.torch_order]
    sent = [span_inside(member, to_axis, before, after) for member in members]
    shape_after = mesh_rank.shape(after)
    shapes = [(*shape_after[:axis], member.shape(before)[axis], *shape_after[axis + 1 :]) for member in members]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    order = [group.torch_order.index(rank) for rank in group.ranks]

    def exchange(block: torch.Tensor) -> torch.Tensor:
        parts = [block.narrow(to_axis, start, stop - start).reshape(-1) for start, stop in sent]
        received = group.all_to_all(torch.cat(parts), sizes, [len(part) for part in parts])
        blocks = [part.reshape(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
        return torch.cat([blocks[number] for number in order], axis)

    return exchange


def span_inside(mesh_rank: MeshRank, axis: int, before: Layout, after: Layout) -> tuple[int, int]:
    """Return where a rank's new block lies in its old block, along one dim."""
    offset = mesh_rank.bounds(before)[axis][0]
    start, stop = mesh_rank.bounds(after)[axis]
    return start - offset, stop - offset


def _padded(block: torch.Tensor, count: int) -> torch.Tensor:
    """Add rows of zeros until there are so many."""
    missing = count - len(block)
    return torch.cat([block, block.new_zeros((missing, *block.shape[1:]))]) if missing else block


def around_ring(world: World, mesh_rank: MeshRank, compute: Compute, attend: Kernel, positions: torch.Tensor) -> Kernel:
    """Return an attention, or its gradient, whose keys lie on several ranks; ``positions`` are those of all keys."""
    atoms = compute.ring[0].atoms
    group = world.group(atoms)
    assert group, f"{compute.ring[0]} is a ring of one"
    spans = [mesh_rank.at(rank).dim_bounds("kv_seq", atoms) for rank in group.ranks]
    keys = tuple(positions[start:stop] for start, stop in spans)
    ring = _KeyRing(group=group, positions=keys, hops=len(compute.ring), attend=attend)
    return ring.forward if isinstance(compute.op.kind, Attend) else ring.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeyRing:
    """The group of a ring, the positions of every member's keys, the number of hops, and the attention."""

    group: RankGroup
    positions: tuple[torch.Tensor, ...]
    hops: int
    attend: Kernel

    def keys_at(self, hop: int) -> torch.Tensor:
        """Return the positions of the keys that are here after so many hops."""
        return self.positions[(self.group.number - hop) % len(self.positions)]

    def hop(self, tensors: Sequence[torch.Tensor], number: int) -> Callable[[], Sequence[torch.Tensor]]:
        """Start sending what belongs to the keys that are here before this hop, and receiving those of the next."""
        count = len(self.keys_at(number))
        arriving = [tensor.new_empty((tensor.shape[0], count, *tensor.shape[2:])) for tensor in tensors]
        return self.group.pass_on(tensors, arriving)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Attend to the keys of all ranks, one after the other."""
        query, key, value, positions, _, *more = tensors
        attention = None
        for number in range(self.hops + 1):
            following = self.hop((key, value), number + 1) if number < self.hops else None
            part, weight = self.attend(query, key, value, positions, self.keys_at(number), *more)
            attention = join_parts(attention, (part, weight))
            if following:
                key, value = following()
        assert attention, "a ring has at least one member"
        return attention

    def backward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values travel to all other ranks; their gradients follow a hop later, and come home at last."""
        upstream, query, key, value, positions, _, result, lse, *more = tensors
        total, first_d_keys, travelling = None, [], None
        for number in range(self.hops):
            following = self.hop((key, value), number + 1) if number + 1 < self.hops else None
            keys = self.keys_at(number)
            d_query, *d_keys = self.attend(upstream, query, key, value, positions, keys, result, lse, *more)
            total = d_query if total is None else total + d_query
            if travelling:
                d_keys = [arrived + here for arrived, here in zip(travelling(), d_keys, strict=True)]
            if number:
                travelling = self.hop(d_keys, number + 1)
            else:
                first_d_keys = d_keys
            if following:
                key, value = following()
        assert total is not None and travelling, "a ring has at least two members"
        return total, *(here + arrived for here, arrived in zip(first_d_keys, travelling(), strict=True))
