"""Rules of views, slices and joins: which dims lie where afterwards."""

from collections.abc import Iterator
from typing import Any, cast

import torch

from autoshard.modules.dims import Collision, NotAligned, fresh, size_of, unify
from autoshard.modules.nodes import Node, argument, axes_of
from autoshard.modules.program import Reading, TensorPlace, View
from autoshard.modules.region import constant, expand
from autoshard.modules.rules.reader import Reader
from autoshard.modules.rules.unknown import unknown

_COPYING = {"view": torch.reshape, "_unsafe_view": torch.reshape, "view_as": torch.Tensor.reshape_as}


def reshape(reader: Reader, node: Node) -> None:
    """Group the dims otherwise; where the new positions are not made of the same dims, everything is kept whole."""
    view = reader.view_of(node.args[0])
    positions = tuple(fresh(size) for size in node.meta["val"].shape)
    try:
        unify(tuple(dim for position in view.positions for dim in position), tuple(dim for p in positions for dim in p))
    except (NotAligned, Collision):
        # The tensor may lie otherwise in memory than the traced one, of which this was a view.
        reader.whole(node, **({"function": _COPYING[node.target._opname]} if node.target._opname in _COPYING else {}))
        return
    reader.views[node] = View(view.value, positions)


def transposed(reader: Reader, node: Node) -> None:
    """Put positions into another order: a transpose, or a permutation."""
    view = reader.view_of(node.args[0])
    order = list(range(len(view.positions)))
    name = node.target._opname
    if name == "permute":
        order = [axis % len(order) for axis in node.args[1]]
    else:
        a, b = (-2, -1) if name == "mT" else (0, -1) if name in ("t", "numpy_T") else (node.args[1], node.args[2])
        a, b = a % len(order), b % len(order)
        order[a], order[b] = order[b], order[a]
    reader.views[node] = View(view.value, tuple(view.positions[axis] for axis in order))


def squeezed(reader: Reader, node: Node) -> None:
    """Add or drop positions of size 1; all other positions keep their order."""
    view = reader.view_of(node.args[0])
    real = iter([position for position in view.positions if position])
    positions = tuple(() if size == 1 else next(real) for size in node.meta["val"].shape)
    reader.views[node] = View(view.value, positions)


def expanded(reader: Reader, node: Node) -> None:
    """Repeat along new positions, and along those of size 1; several tensors are repeated to one shape."""
    if node.target._opname != "broadcast_tensors":
        reader.views[node] = _expanded(reader, node, node.args[0])
        return
    reader.views[node] = tuple(_expanded(reader, node, source, number) for number, source in enumerate(node.args[0]))


def _expanded(reader: Reader, node: Node, source: Node, number: int | None = None) -> View:
    view = reader.view_of(source)
    shape = (node.meta["val"] if number is None else node.meta["val"][number]).shape
    old = [*[()] * (len(shape) - len(view.positions)), *view.positions]
    positions = [
        fresh(size) if size > 1 and not position else position for position, size in zip(old, shape, strict=True)
    ]
    if positions == list(view.positions):
        return view
    reading = Reading(view, list(view.positions))
    return reader.step(node, ([reading], positions), function=expand, arguments=(TensorPlace(0),), number=number)


def repeated(reader: Reader, node: Node) -> None:
    """Repeat every place of an axis, or all of it, some times over: a new dim inside of the axis, or around it."""
    view, shape = reader.view_of(node.args[0]), node.meta["val"].shape
    counts: Any = argument(node, "repeats")
    axis: int | None = argument(node, "dim")
    inside = node.target._opname == "repeat_interleave"
    if inside and (not isinstance(counts, int) or axis is None):  # some places more often than others
        unknown(reader, node)
        return
    times = cast(list[int], counts)
    if axis is not None:
        times = [counts if place == axis % len(shape) else 1 for place in range(len(shape))]
    old = [*[()] * (len(shape) - len(view.positions)), *view.positions]
    pairs = [
        (position, fresh(count)) if inside else (fresh(count), position)
        for position, count in zip(old, times, strict=True)
    ]
    reading = Reading(view, [part for position in old for part in ((position, ()) if inside else ((), position))])
    positions = [position for pair in pairs for position in pair]
    result = reader.step(node, ([reading], positions), function=expand, arguments=(TensorPlace(0),))
    reader.views[node] = View(result.value, tuple((*first, *second) for first, second in pairs))


def copied(reader: Reader, node: Node) -> None:
    """Overwrite a whole tensor with the numbers of another; only its shape and its format stay."""
    source = node.args[1]
    reader.rounded(node, _expanded(reader, node, source), source.meta["val"].dtype)


def full_tensor(reader: Reader, node: Node) -> None:
    """Make a tensor that holds one number everywhere, in the shape of the node."""
    value, name = node.meta["val"], node.target._opname
    number = argument(node, "fill_value") if "full" in name else int("ones" in name)
    positions = [fresh(size) for size in value.shape]
    reader.step(node, ([], positions), sort="cheap", function=constant, arguments=(number, value.dtype))


def sliced(reader: Reader, node: Node) -> None:
    """Take a part of one axis, or one place of it; the axis is needed whole."""
    (reading,) = reader.readings(node)
    (axis,) = axes_of(node)
    shape, whole = node.meta["val"].shape, reading.positions[axis]
    if tuple(shape) == tuple(node.args[0].meta["val"].shape):
        reader.views[node] = reading.view
        return
    rest = reading.positions[:axis], reading.positions[axis + 1 :]
    if len(shape) < len(reading.positions):  # one place
        reader.local(node, ([reading], [*rest[0], *rest[1]]), [whole])
        return
    length, size = shape[axis], size_of(whole)
    start, _, steps = slice(argument(node, "start"), argument(node, "end"), argument(node, "step")).indices(size)
    in_turns = length * steps == size and start < steps > 1  # as gates and what they scale lie in one product
    beside = reader.is_product(reading, axis) and length and not (size % length or start % length) and steps == 1
    beside = beside and length == min(_lengths_beside(node, axis))  # a longer part is none of these: heads of queries
    if in_turns or beside:  # as queries, keys and values lie in one product
        parts, part = fresh(size // length), fresh(length)
        as_read = [part, parts] if in_turns else [parts, part]
        try:
            unify(whole, (*as_read[0], *as_read[1]))
        except (NotAligned, Collision):
            pass
        else:
            reading.positions = [*rest[0], *as_read, *rest[1]]
            chosen = (TensorPlace(0), axis + in_turns, start if in_turns else start // length)
            reader.local(
                node, ([reading], [*rest[0], part, *rest[1]]), [parts], function=torch.select, arguments=chosen
            )
            return
    part_position = fresh(length)
    reader.local(node, ([reading], [*rest[0], part_position, *rest[1]]), [whole, part_position])


def _lengths_beside(node: Node, axis: int) -> Iterator[int]:
    """Yield how long the parts of an axis are that are sliced off the same tensor."""
    sliced_by = getattr(node.target, "_opname", None)
    for user in node.args[0].users:
        if user.op == "call_function" and getattr(user.target, "_opname", None) == sliced_by and axis in axes_of(user):
            yield user.meta["val"].shape[axis]


def split_axis(reader: Reader, node: Node) -> None:
    """Split an axis into parts: where they are equal its dims become (part, rest), and each result takes one part."""
    results, rank = node.meta["val"], node.args[0].meta["val"].dim()
    axis = argument(node, "dim") % rank
    lengths = [] if node.target._opname == "unbind" else [result.shape[axis] for result in results]
    view, start, views = reader.view_of(node.args[0]), 0, list[View]()
    before, axis_position, after = view.positions[:axis], view.positions[axis], view.positions[axis + 1 :]
    parts, rest = fresh(len(results)), fresh(max(lengths, default=1))
    try:
        if len(set(lengths)) > 1:
            raise NotAligned
        unify(axis_position, (*parts, *rest))
    except (NotAligned, Collision):
        for number, length in enumerate(lengths):
            part = fresh(length)
            reading, chosen = Reading(view, list(view.positions)), (TensorPlace(0), axis, start, length)
            views.append(
                reader.step(
                    node,
                    ([reading], [*before, part, *after]),
                    whole=[axis_position, part],
                    number=number,
                    function=torch.narrow,
                    arguments=chosen,
                )
            )
            start += length
    else:
        as_read = [*before, parts, *([rest] if lengths else []), *after]
        for number, _ in enumerate(results):
            positions = [*before, *([rest] if lengths else []), *after]
            views.append(
                reader.step(
                    node,
                    ([Reading(view, list(as_read))], positions),
                    whole=[parts],
                    number=number,
                    function=torch.select,
                    arguments=(TensorPlace(0), axis, number),
                )
            )
    reader.views[node] = tuple(views)


def concatenated(reader: Reader, node: Node) -> None:
    """Put tensors one after the other along an axis, which needs it whole; or along a new one."""
    full = [
        tensor for tensor in node.args[0] if tensor.meta["val"].shape != (0,)
    ]  # torch takes such a tensor for nothing
    if len(full) == 1 < len(node.args[0]):
        reader.views[node] = reader.view_of(full[0])
        return
    readings = reader.readings(node)
    shape = node.meta["val"].shape
    axis = argument(node, "dim") % len(shape)
    is_new = node.target._opname == "stack"
    first, *later = readings
    for reading in later:
        for place in range(len(reading.positions)):
            if (is_new or place != axis) and reading.positions[place]:
                reading.agree(place, first.positions[place])
    whole = [] if is_new else [reading.positions[axis] for reading in readings]
    positions = [*first.positions[:axis], fresh(shape[axis]), *first.positions[axis + (not is_new) :]]
    reader.local(node, (readings, positions), [*whole, positions[axis]])
