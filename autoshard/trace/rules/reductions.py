"""Rules of operations over some dims: needed whole, or summed, so that parts of a sum may wait; norms and losses."""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's users call it)

from autoshard.errors import InputError
from autoshard.trace.dims import Position, fresh, size_of
from autoshard.trace.nodes import Node, argument, arguments_of, axes_of, line_of
from autoshard.trace.program import Reading, TensorPlace, View, agreed

if TYPE_CHECKING:
    from autoshard.trace.capture import ProgramReader


def over(reader: "ProgramReader", node: Node) -> None:
    """Read an operation over some axes, which it needs whole; each result keeps them, or drops them."""
    readings, axes, value = reader.readings(node), axes_of(node), node.meta["val"]
    if len(readings) > 1:
        reader.whole(node)
        return
    view, whole = readings[0].view, [readings[0].positions[axis] for axis in axes]
    found: list[View] = []
    for number, result in enumerate([value] if isinstance(value, torch.Tensor) else value):
        reading = Reading(view, list(view.positions))
        made = _kept(reading.positions, axes, result.shape)
        changed = [one for one in made if one not in reading.positions]
        several = None if isinstance(value, torch.Tensor) else number
        found.append(reader.step(node, ([reading], made), whole=[*whole, *changed], number=several))
    reader.views[node] = found[0] if isinstance(value, torch.Tensor) else tuple(found)


def _kept(positions: Sequence[Position], axes: Sequence[int], shape: Sequence[int]) -> list[Position]:
    """Return the positions of a result: without some axes, or with these as they were, or in another length."""
    if len(shape) < len(positions):
        return [one for axis, one in enumerate(positions) if axis not in axes]
    return [one if size_of(one) == size else fresh(size) for one, size in zip(positions, shape, strict=True)]


def total(reader: "ProgramReader", node: Node) -> None:
    """Sum, or take the mean: parts of it may wait to be added.

    Sums over the first axis, where a batch stands, are no part of other operations: such an operation would need the
    whole batch.
    """
    (reading,), axes = reader.readings(node), axes_of(node)
    over_axes = [reading.positions[axis] for axis in axes]
    count = math.prod(size_of(one) for one in over_axes) if node.target._opname == "mean" else 1
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
    found = tensor.sum(tuple(axes), dtype=dtype) if axes else tensor.to(dtype)
    return found / count if count != 1 else found


def _added(reader: "ProgramReader", node: Node, each: View, *, count: int = 1, name: str = "") -> View:
    """Add up all numbers of a tensor of one dimension or more."""
    axes, dtype = tuple(range(len(each.positions))), node.meta["val"].dtype
    return reader.step(
        node, ([Reading(each, list(each.positions))], []), summed=each.positions, sort="sum", name=name,
        function=functools.partial(part_of_total, axes=axes, count=count, dtype=dtype), arguments=(TensorPlace(0),),
    )  # fmt: skip


def loss_of_each(reader: "ProgramReader", node: Node) -> None:
    """Compare number by number, then take the sum or the mean."""
    reduction, first = argument(node, "reduction"), node.args[0].meta["val"]
    readings, rank = reader.readings(node), first.dim()
    if reader.shape_of(readings[1]) != tuple(first.shape):  # broadcast
        reader.whole(node)
        return
    each = reader.step(
        node, (readings, agreed(readings, rank, range(rank))), name=f"{node.name}_each",
        arguments=arguments_of(node, reduction=0),
    )  # fmt: skip
    if reduction:
        _added(reader, node, each, count=first.numel() if reduction == 1 else 1)


def loss_of_classes(reader: "ProgramReader", node: Node) -> None:
    """Take the loss of every token, which needs all classes; their sums, and the count of tokens, may wait."""
    logits, target, *weights = reader.readings(node)
    if weights or len(logits.positions) != 2 or len(target.positions) != 1:
        reader.whole(node)
        return
    target.agree(0, logits.positions[0])
    ignored, reduction = argument(node, "ignore_index"), argument(node, "reduction")
    each: functools.partial[torch.Tensor] = functools.partial(F.nll_loss, reduction="none", ignore_index=ignored)
    if node.target._opname == "cross_entropy_loss":
        smoothing = argument(node, "label_smoothing")
        each = functools.partial(F.cross_entropy, reduction="none", ignore_index=ignored, label_smoothing=smoothing)
    count = [logits.positions[0]]
    tokens = reader.step(
        node, ([logits, target], count), whole=[logits.positions[1]], name=f"{node.name}_tokens",
        function=each, arguments=(TensorPlace(0), TensorPlace(1)),
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


def layer_norm(reader: "ProgramReader", node: Node) -> None:
    """Normalise the last axes, which need to be whole; scale and shift have just these."""
    x, *weights = reader.readings(node)
    count = len(node.args[1])
    for weight in weights:
        for axis in range(-count, 0):
            weight.agree(axis, x.positions[axis])
    reader.local(node, ([x, *weights], x.positions), x.positions[-count:])


def group_norm(reader: "ProgramReader", node: Node) -> None:
    """Normalise each group of channels, and all places, which need to be whole; groups may be cut."""
    x, *weights = reader.readings(node)
    groups = argument(node, "num_groups")
    parts, rest = fresh(groups, "group"), fresh(size_of(x.positions[1]) // groups)
    x.agree(1, (*parts, *rest))
    for weight in weights:
        weight.agree(0, x.positions[1])
    scale, shift = (argument(node, one) is not None for one in ("weight", "bias"))
    function = functools.partial(
        _group_norm, channels=size_of(rest), eps=argument(node, "eps"), scale=scale, shift=shift
    )
    slots = tuple(TensorPlace(number) for number in range(1 + len(weights)))
    reader.local(node, ([x, *weights], x.positions), [rest, *x.positions[2:]], function=function, arguments=slots)


def _group_norm(
    x: torch.Tensor, *weights: torch.Tensor, channels: int, eps: float, scale: bool, shift: bool
) -> torch.Tensor:
    weight, bias = weights[0] if scale else None, weights[-1] if shift else None
    return F.group_norm(x, x.shape[1] // channels, weight, bias, eps)


def batch_norm(reader: "ProgramReader", node: Node) -> None:
    """Normalise with the mean and the variance of all but the channels; in training these are sums that may wait."""
    training = argument(node, "training")
    if training and argument(node, "running_mean") is not None:
        message = "batch norm in training changes its running statistics in place; set track_running_stats=False"
        raise InputError.of(line_of(node), message)
    x, *others = reader.readings(node)
    for one in others:
        one.agree(0, x.positions[1])
    if not training:
        reader.local(node, ([x, *others], x.positions))
        return
    axes, channel = tuple(axis for axis in range(len(x.positions)) if axis != 1), [x.positions[1]]
    summed = [x.positions[axis] for axis in axes]
    count = math.prod(size_of(one) for one in summed)

    def again(view: View) -> Reading:
        return Reading(view, list(view.positions))

    mean = reader.step(
        node, ([x], channel), summed=summed, sort="sum", name=f"{node.name}_mean",
        function=functools.partial(part_of_total, axes=axes, count=count, dtype=node.meta["val"].dtype),
        arguments=(TensorPlace(0),),
    )  # fmt: skip
    variance = reader.step(
        node, ([again(x.view), again(mean)], channel), summed=summed, sort="sum", name=f"{node.name}_variance",
        function=functools.partial(_part_of_variance, axes=axes, count=count),
        arguments=(TensorPlace(0), TensorPlace(1)),
    )  # fmt: skip
    scale, shift = (argument(node, one) is not None for one in ("weight", "bias"))
    function = functools.partial(_normalised, eps=argument(node, "eps"), scale=scale, shift=shift)
    reads = [again(x.view), again(mean), again(variance), *others]
    slots = tuple(TensorPlace(number) for number, _ in enumerate(reads))
    reader.step(node, (reads, x.positions), function=function, arguments=slots)


def _per_channel(numbers: torch.Tensor, rank: int) -> torch.Tensor:
    return numbers.reshape(1, -1, *[1] * (rank - 2))


def _part_of_variance(x: torch.Tensor, mean: torch.Tensor, *, axes: Sequence[int], count: int) -> torch.Tensor:
    """Return a part of the mean square distance from the mean; the mean of squares would lose digits."""
    return (x - _per_channel(mean, x.dim())).square().sum(tuple(axes)) / count


def _normalised(
    x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, *weights: torch.Tensor, eps: float, scale: bool,
    shift: bool,
) -> torch.Tensor:  # fmt: skip
    found = (x - _per_channel(mean, x.dim())) * _per_channel(torch.rsqrt(variance + eps), x.dim())
    found = found * _per_channel(weights[0], x.dim()) if scale else found
    return found + _per_channel(weights[-1], x.dim()) if shift else found
