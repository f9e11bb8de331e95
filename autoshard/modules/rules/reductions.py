"""Rules of operations over some dims: needed whole, or summed, so that parts of a sum may wait and losses."""

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's users call it)

from autoshard.modules.dims import Position, fresh, size_of
from autoshard.modules.nodes import Node, argument, arguments_of, axes_of
from autoshard.modules.program import Reading, TensorPlace, View, agreed
from autoshard.modules.rules.reader import Reader


def over(reader: Reader, node: Node) -> None:
    """Read an operation over some axes, which it needs whole; each result keeps them, or drops them."""
    if node.target._overloadname == "other":  # the larger or the smaller of two numbers
        reader.local(node, reader.broadcast(node))
        return
    readings, axes, value = reader.readings(node), axes_of(node), node.meta["val"]
    if len(readings) > 1:
        reader.whole(node)
        return
    view, whole = readings[0].view, [readings[0].positions[axis] for axis in axes]
    views: list[View] = []
    for number, result in enumerate([value] if isinstance(value, torch.Tensor) else value):
        reading = Reading(view, list(view.positions))
        positions = _kept(reading.positions, axes, result.shape)
        changed = [position for position in positions if position not in reading.positions]
        several = None if isinstance(value, torch.Tensor) else number
        views.append(reader.step(node, ([reading], positions), whole=[*whole, *changed], number=several))
    reader.views[node] = views[0] if isinstance(value, torch.Tensor) else tuple(views)


def _kept(positions: Sequence[Position], axes: Sequence[int], shape: Sequence[int]) -> list[Position]:
    """Return the positions of a result: without some axes, or with these as they were, or in another length."""
    if len(shape) < len(positions):
        return [position for axis, position in enumerate(positions) if axis not in axes]
    return [
        position if size_of(position) == size else fresh(size) for position, size in zip(positions, shape, strict=True)
    ]


def total(reader: Reader, node: Node) -> None:
    """Sum, or take the mean: parts of it may wait to be added.

    Sums over the first axis, where a batch stands, are no part of other operations: such an operation would need the
    whole batch.
    """
    (reading,), axes = reader.readings(node), axes_of(node)
    over_axes = [reading.positions[axis] for axis in axes]
    count = math.prod(size_of(position) for position in over_axes) if node.target._opname == "mean" else 1
    reader.step(
        node,
        ([reading], _kept(reading.positions, axes, node.meta["val"].shape)),
        summed=over_axes,
        sort="sum" if 0 in axes else "local",
        function=functools.partial(part_of_total, axes=axes, count=count, dtype=node.meta["val"].dtype),
        arguments=(TensorPlace(0),),
    )


def part_of_total(tensor: torch.Tensor, *, axes: Sequence[int], count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a part of the numbers gives to their sum, over the count of all of them."""
    part = tensor.sum(tuple(axes), dtype=dtype) if axes else tensor.to(dtype)
    return part / count if count != 1 else part


def _added(reader: Reader, node: Node, view: View, *, count: int = 1, name: str = "") -> View:
    """Add up all numbers of a tensor of one dimension or more."""
    axes, dtype = tuple(range(len(view.positions))), node.meta["val"].dtype
    return reader.step(
        node, ([Reading(view, list(view.positions))], []), summed=view.positions, sort="sum", name=name,
        function=functools.partial(part_of_total, axes=axes, count=count, dtype=dtype), arguments=(TensorPlace(0),),
    )  # fmt: skip


def loss_of_each(reader: Reader, node: Node) -> None:
    """Compare number by number, then take the sum or the mean."""
    reduction, first = argument(node, "reduction"), node.args[0].meta["val"]
    readings, rank = reader.readings(node), first.dim()
    if reader.shape_of(readings[1]) != tuple(first.shape):  # broadcast
        reader.whole(node)
        return
    function, arguments = node.target, arguments_of(node, reduction=0)
    if node.target._opname == "kl_div":  # its last argument goes by name alone
        function, arguments = functools.partial(function, log_target=arguments[-1]), arguments[:-1]
    losses = reader.step(
        node, (readings, agreed(readings, rank, range(rank))), name=f"{node.name}_each", function=function,
        arguments=arguments,
    )  # fmt: skip
    if reduction:
        _added(reader, node, losses, count=first.numel() if reduction == 1 else 1)


def loss_of_classes(reader: Reader, node: Node) -> None:
    """Take the loss of every token, which needs all classes; their sums, and the count of tokens, may wait.

    Classes stand on the second axis, and tokens or pixels along all others.
    """
    logits, target, *weights = reader.readings(node)
    count = [position for axis, position in enumerate(logits.positions) if axis != 1]
    if weights or len(logits.positions) < 2 or len(target.positions) != len(count):
        reader.whole(node)
        return
    for axis, position in enumerate(count):
        target.agree(axis, position)
    ignored, reduction = argument(node, "ignore_index"), argument(node, "reduction")
    loss: functools.partial[torch.Tensor] = functools.partial(F.nll_loss, reduction="none", ignore_index=ignored)
    if node.target._opname == "cross_entropy_loss":
        smoothing = argument(node, "label_smoothing")
        loss = functools.partial(F.cross_entropy, reduction="none", ignore_index=ignored, label_smoothing=smoothing)
    tokens = reader.step(
        node, ([logits, target], count), whole=[logits.positions[1]], name=f"{node.name}_tokens",
        function=loss, arguments=(TensorPlace(0), TensorPlace(1)),
    )  # fmt: skip
    if reduction == 0:
        return
    summed = _added(reader, node, tokens, name=f"{node.name}_sum" if reduction == 1 else "")
    if reduction == 1:
        again = Reading(target.view, list(target.positions), dict(target.renamed))
        counted = reader.step(
            node, ([again], []), summed=count, sort="sum", name=f"{node.name}_count",
            function=functools.partial(_number_of, ignored=ignored, dtype=node.meta["val"].dtype),
            arguments=(TensorPlace(0),),
        )  # fmt: skip
        parts = [Reading(summed, []), Reading(counted, [])]
        reader.step(node, (parts, []), function=torch.div, arguments=(TensorPlace(0), TensorPlace(1)))


def _number_of(target: torch.Tensor, *, ignored: int, dtype: torch.dtype) -> torch.Tensor:
    """Count the tokens that have a loss."""
    return (target != ignored).sum(dtype=dtype)
