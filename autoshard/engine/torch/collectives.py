"""Each kind of collective as one call of ``torch.distributed``; blocks that do not divide travel padded."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from autoshard.engine.place import Place, dims_of
from autoshard.engine.torch.world import Group, World, to_torch
from autoshard.errors import InputError
from autoshard.graph.op import Array
from autoshard.layout.collective import Collective
from autoshard.layout.layout import Layout
from autoshard.layout.program import Communicate

_REDUCTIONS = {"all_reduce": dist.ReduceOp.SUM, "all_reduce_max": dist.ReduceOp.MAX}


def communicate(world: World, place: Place, change: Communicate, array: Array) -> Array:
    """Execute one collective of a program on this rank's block."""
    collective, before, after = change.collective, change.reads.layout, change.writes.layout
    group = world.group(collective.atoms)
    assert group, f"{change.entry}: {collective} is between no two ranks"
    match collective.kind:
        case "all_reduce" | "all_reduce_max":
            return all_reduce(group, array, _REDUCTIONS[collective.kind])
        case "all_gather":
            return _all_gather(group, place, _axis(before, collective), before, array)
        case "reduce_scatter":
            return _reduce_scatter(group, place, _axis(before, collective), (before, after), array)
        case "all_to_all":
            return _all_to_all(group, place, collective, (before, after), array)
        case "slice":
            (start, stop) = _inside(place, _axis(before, collective), before, after)
            return _cut(array, _axis(before, collective), start, stop)
        case _:
            raise InputError.of(change.entry, f"{collective} is not executed by the torch engine yet")


def all_reduce(group: Group, array: Array, reduction: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM) -> Array:
    """Sum (or take the maximum of) every member's array."""
    tensor = to_torch(array)
    dist.all_reduce(tensor, op=reduction, group=group.handle)
    return tensor.numpy()


def gather_flat(group: Group, piece: Array) -> Array:
    """Put equal flat pieces together in the order of the members."""
    mine = to_torch(piece)
    joined = torch.empty(len(group.ranks) * piece.size, dtype=mine.dtype)
    dist.all_gather_single(joined, mine, group=group.handle)
    pieces = np.split(joined.numpy(), len(group.ranks))
    return np.concatenate([pieces[group.torch_order.index(rank)] for rank in group.ranks])


def scatter_flat_sum(group: Group, whole: Array) -> Array:
    """Sum flat arrays whose length divides by the members; return this member's piece."""
    pieces = np.split(whole, len(group.ranks))
    ordered = np.concatenate([pieces[group.ranks.index(rank)] for rank in group.torch_order])
    given = to_torch(ordered)
    mine = torch.empty(len(whole) // len(group.ranks), dtype=given.dtype)
    dist.reduce_scatter_single(mine, given, group=group.handle)
    return mine.numpy()


def _all_gather(group: Group, place: Place, axis: int, before: Layout, array: Array) -> Array:
    counts = [place.at(rank).shape(before)[axis] for rank in group.ranks]
    padded = _padded(array, axis, max(counts))
    pieces = np.split(gather_flat(group, padded.reshape(-1)), len(group.ranks))
    blocks = [piece.reshape(padded.shape) for piece in pieces]
    return np.concatenate([_cut(block, axis, 0, count) for block, count in zip(blocks, counts, strict=True)], axis)


def _reduce_scatter(group: Group, place: Place, axis: int, layouts: tuple[Layout, Layout], array: Array) -> Array:
    parts = [_cut(array, axis, *_inside(place.at(rank), axis, *layouts)) for rank in group.ranks]
    most = max(part.shape[axis] for part in parts)
    padded = [_padded(part, axis, most) for part in parts]
    mine = scatter_flat_sum(group, np.concatenate([part.reshape(-1) for part in padded]))
    count = parts[group.ranks.index(place.rank)].shape[axis]
    return _cut(mine.reshape(padded[0].shape), axis, 0, count)


def _all_to_all(
    group: Group, place: Place, collective: Collective, layouts: tuple[Layout, Layout], array: Array
) -> Array:
    axis, to_axis = _axis(layouts[0], collective), dims_of(layouts[0]).index(collective.to_dim or "")
    sent = [_cut(array, to_axis, *_inside(place.at(rank), to_axis, *layouts)) for rank in group.torch_order]
    shapes = [_received(place, rank, axis, layouts) for rank in group.torch_order]
    sizes = [int(np.prod(shape)) for shape in shapes]
    packed = to_torch(np.concatenate([part.reshape(-1) for part in sent]))
    received = torch.empty(sum(sizes), dtype=packed.dtype)
    dist.all_to_all_single(received, packed, sizes, [part.size for part in sent], group=group.handle)
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    blocks = [
        received.numpy()[start:stop].reshape(shape) for (start, stop), shape in zip(pairwise(ends), shapes, strict=True)
    ]
    return np.concatenate([blocks[group.torch_order.index(rank)] for rank in group.ranks], axis=axis)


def _received(place: Place, from_rank: int, axis: int, layouts: tuple[Layout, Layout]) -> Sequence[int]:
    """Return the shape of what a rank sends here: its block along the dim that is gathered, mine along the others."""
    before, after = layouts
    shape = list(place.shape(after))
    shape[axis] = place.at(from_rank).shape(before)[axis]
    return shape


def _axis(layout: Layout, collective: Collective) -> int:
    return dims_of(layout).index(collective.dim or "")


def _inside(place: Place, axis: int, before: Layout, after: Layout) -> tuple[int, int]:
    """Return where a rank's block after a change lies in its block before it, along one dim."""
    offset = place.bounds(before)[axis][0]
    start, stop = place.bounds(after)[axis]
    return start - offset, stop - offset


def _cut(array: Array, axis: int, start: int, stop: int) -> Array:
    return array[(slice(None),) * axis + (slice(start, stop),)]


def _padded(array: Array, axis: int, size: int) -> Array:
    missing = [(0, size - count if number == axis else 0) for number, count in enumerate(array.shape)]
    return np.pad(array, missing)
