"""Each kind of collective as one call of ``torch.distributed``; blocks that do not divide travel padded."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from autoshard.engine.place import Place, dims_of
from autoshard.engine.torch.world import Group, World
from autoshard.errors import InputError
from autoshard.layout.collective import Collective
from autoshard.layout.layout import Layout
from autoshard.layout.program import Communicate

Change = Callable[[torch.Tensor], torch.Tensor]
_REDUCTIONS = {"all_reduce": dist.ReduceOp.SUM, "all_reduce_max": dist.ReduceOp.MAX}


def communication(world: World, place: Place, change: Communicate) -> Change:
    """Return what executes one collective of a program on this rank's block."""
    collective, before, after = change.collective, change.reads.layout, change.writes.layout
    group = world.group(collective.atoms)
    assert group, f"{change.entry}: {collective} is between no two ranks"
    match collective.kind:
        case "all_reduce" | "all_reduce_max":
            reduction = _REDUCTIONS[collective.kind]
            return lambda block: all_reduce(group, block, reduction)
        case "all_gather":
            axis = _axis(before, collective)
            return _all_gather(group, axis, [place.at(rank).shape(before)[axis] for rank in group.ranks])
        case "reduce_scatter":
            axis = _axis(before, collective)
            return _reduce_scatter(group, axis, [_inside(place.at(rank), axis, before, after) for rank in group.ranks])
        case "all_to_all":
            return _all_to_all(group, place, collective, before, after)
        case "slice":
            axis = _axis(before, collective)
            start, stop = _inside(place, axis, before, after)
            return lambda block: block.narrow(axis, start, stop - start).clone()
        case _:
            raise InputError.of(change.entry, f"{collective} is not executed by the torch engine yet")


def all_reduce(
    group: Group, block: torch.Tensor, reduction: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Sum (or take the maximum of) every member's block."""
    total = block.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=reduction, group=group.handle)
    return total


def gather_flat(group: Group, piece: torch.Tensor) -> torch.Tensor:
    """Put equal pieces together along their first dim, in the order of the members."""
    joined = piece.new_empty((len(group.ranks) * len(piece), *piece.shape[1:]))
    dist.all_gather_single(joined, piece.contiguous(), group=group.handle)
    return _ordered(joined, group.torch_order, group.ranks)


def scatter_flat_sum(group: Group, whole: torch.Tensor) -> torch.Tensor:
    """Sum what divides along its first dim by the members; return this member's piece."""
    given = _ordered(whole.contiguous(), group.ranks, group.torch_order)
    mine = given.new_empty((len(given) // len(group.ranks), *given.shape[1:]))
    dist.reduce_scatter_single(mine, given, group=group.handle)
    return mine


def _ordered(joined: torch.Tensor, now: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """Bring equal pieces, one of each rank, from one order of ranks into another."""
    if now == wanted:
        return joined
    pieces = joined.chunk(len(now)) if len(joined) else [joined] * len(now)
    return torch.cat([pieces[now.index(rank)] for rank in wanted])


def _all_gather(group: Group, axis: int, counts: Sequence[int]) -> Change:
    most = max(counts)
    even = len(set(counts)) == 1

    def gather(block: torch.Tensor) -> torch.Tensor:
        padded = _padded(block.movedim(axis, 0), most)
        joined = gather_flat(group, padded)
        if not even:
            pieces = zip(joined.split(most), counts, strict=True)
            joined = torch.cat([piece[:count] for piece, count in pieces])
        return joined.movedim(0, axis)

    return gather


def _reduce_scatter(group: Group, axis: int, spans: Sequence[tuple[int, int]]) -> Change:
    counts = [stop - start for start, stop in spans]
    most, mine = max(counts), counts[group.number]
    even = len(set(counts)) == 1 and all(one[1] == other[0] for one, other in pairwise(spans))

    def scatter(block: torch.Tensor) -> torch.Tensor:
        moved = block.movedim(axis, 0)
        if not even:
            moved = torch.cat([_padded(moved[start:stop], most) for start, stop in spans])
        return scatter_flat_sum(group, moved)[:mine].movedim(0, axis)

    return scatter


def _all_to_all(group: Group, place: Place, collective: Collective, before: Layout, after: Layout) -> Change:
    axis, to_axis = _axis(before, collective), dims_of(before).index(collective.to_dim or "")
    sent = [_inside(place.at(rank), to_axis, before, after) for rank in group.torch_order]
    shapes = [_received(place, rank, axis, before, after) for rank in group.torch_order]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    order = [group.torch_order.index(rank) for rank in group.ranks]

    def exchange(block: torch.Tensor) -> torch.Tensor:
        parts = [block.narrow(to_axis, start, stop - start).reshape(-1) for start, stop in sent]
        received = block.new_empty(sum(sizes))
        dist.all_to_all_single(received, torch.cat(parts), sizes, [len(part) for part in parts], group=group.handle)
        blocks = [part.reshape(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
        return torch.cat([blocks[number] for number in order], axis)

    return exchange


def _received(place: Place, from_rank: int, axis: int, before: Layout, after: Layout) -> Sequence[int]:
    """Return the shape of what a rank sends here: its block along the dim that is gathered, mine along the others."""
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


def _padded(block: torch.Tensor, count: int) -> torch.Tensor:
    """Add rows of zeros until there are so many."""
    missing = count - len(block)
    return torch.cat([block, block.new_zeros((missing, *block.shape[1:]))]) if missing else block
