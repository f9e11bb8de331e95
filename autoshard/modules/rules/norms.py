"""Rules of norms: of the last axes, of groups of channels, of a batch."""

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's users call it)

from autoshard.errors import InputError
from autoshard.modules.dims import fresh, size_of
from autoshard.modules.nodes import Node, argument, line_of
from autoshard.modules.program import Reading, TensorPlace, View
from autoshard.modules.rules.reader import Reader
from autoshard.modules.rules.reductions import part_of_total


def layer_norm(reader: Reader, node: Node) -> None:
    """Normalise the last axes, which need to be whole; scale and shift have just these."""
    x, *weights = reader.readings(node)
    count = len(node.args[1])
    for weight in weights:
        for axis in range(-count, 0):
            weight.agree(axis, x.positions[axis])
    reader.local(node, ([x, *weights], x.positions), x.positions[-count:])


def weight_norm(reader: Reader, node: Node) -> None:
    """Scale a weight to its norm over all axes but one, which may be cut; torch's kernel checks no shapes."""
    weight, scale = reader.readings(node)
    axis = node.args[2] if len(node.args) > 2 else 0
    if axis >= 0 and scale.positions[axis]:
        scale.agree(axis, weight.positions[axis])
    whole = [position for place, position in enumerate(weight.positions) if place != axis]
    reader.local(node, ([weight, scale], weight.positions), whole)


def group_norm(reader: Reader, node: Node) -> None:
    """Normalise each group of channels, and all places, which need to be whole; groups may be cut."""
    x, *weights = reader.readings(node)
    groups = argument(node, "num_groups")
    parts, rest = fresh(groups, "group"), fresh(size_of(x.positions[1]) // groups)
    x.agree(1, (*parts, *rest))
    for weight in weights:
        weight.agree(0, x.positions[1])
    scale, shift = (argument(node, name) is not None for name in ("weight", "bias"))
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


def batch_norm(reader: Reader, node: Node) -> None:
    """Normalise with the mean and the variance of all but the channels: those of training are sums that may wait."""
    x, *weights = reader.readings(node)
    for weight in weights:
        weight.agree(0, x.positions[1])
    if not argument(node, "training"):
        several = not isinstance(node.meta["val"], torch.Tensor)
        result = reader.step(node, ([x, *weights], x.positions), number=0 if several else None)
        reader.views[node] = (result,) * 3 if several else result  # the others are empty, and nobody reads them
        return
    is_tracked = node.target._opname != "batch_norm"  # gives its statistics as well
    nodes = {name: argument(node, name) for name in ("weight", "bias", "running_mean", "running_var")}
    if nodes["running_mean"] is not None and not is_tracked:
        raise InputError.of(line_of(node), "batch norm in training changes its running statistics in place")
    affine = [reading for name in ("weight", "bias") for reading in _reading(reader, nodes[name], x)]
    mean, variance, count = _statistics(reader, node, x)
    function = functools.partial(
        _normalised, eps=argument(node, "eps"), scale=nodes["weight"] is not None, shift=nodes["bias"] is not None
    )
    result = reader.step(
        node, ([_again(x.view), _again(mean), _again(variance), *affine], x.positions), function=function,
        arguments=tuple(TensorPlace(number) for number in range(3 + len(affine))), name=f"{node.name}_result",
    )  # fmt: skip
    if not is_tracked:
        return
    inverse = reader.step(
        node, ([_again(variance)], variance.positions), number=2, arguments=(TensorPlace(0),),
        function=functools.partial(_inverse, eps=argument(node, "eps")),
    )  # fmt: skip
    views = [result, mean, inverse]
    for number, (name, new, factor) in enumerate(
        (("running_mean", mean, 1.0), ("running_var", variance, count / (count - 1))), start=3
    ):
        moved = functools.partial(_moved_average, momentum=argument(node, "momentum"), factor=factor)
        reads = [*_reading(reader, nodes[name], x), _again(new)]
        views.append(
            reader.step(
                node, (reads, new.positions), number=number, function=moved, arguments=(TensorPlace(0), TensorPlace(1))
            )
        )
    reader.views[node] = tuple(views)


def _reading(reader: Reader, node: Node | None, x: Reading) -> list[Reading]:
    """Return the reading of a tensor with a number per channel, aligned with x; none where there is no node."""
    if node is None:
        return []
    reading = _again(reader.view_of(node))
    reading.agree(0, x.positions[1])
    return [reading]


def _again(view: View) -> Reading:
    return Reading(view, list(view.positions))


def _statistics(reader: Reader, node: Node, x: Reading) -> tuple[View, View, int]:
    """Return the mean and the variance of every channel, in FP32 at least, and of how many numbers they are."""
    axes = tuple(axis for axis in range(len(x.positions)) if axis != 1)
    channel, summed = [x.positions[1]], [x.positions[axis] for axis in axes]
    count = math.prod(size_of(position) for position in summed)
    dtype = torch.promote_types(node.args[0].meta["val"].dtype, torch.float32)
    mean = reader.step(
        node, ([x], channel), summed=summed, sort="sum", name=f"{node.name}_mean", format=dtype,
        function=functools.partial(part_of_total, axes=axes, count=count, dtype=dtype), arguments=(TensorPlace(0),),
    )  # fmt: skip
    variance = reader.step(
        node, ([_again(x.view), _again(mean)], channel), summed=summed, sort="sum", name=f"{node.name}_variance",
        function=functools.partial(_part_of_variance, axes=axes, count=count), format=dtype,
        arguments=(TensorPlace(0), TensorPlace(1)),
    )  # fmt: skip
    return mean, variance, count


def _inverse(variance: torch.Tensor, *, eps: float) -> torch.Tensor:
    return torch.rsqrt(variance + eps)


def _moved_average(old: torch.Tensor, new: torch.Tensor, *, momentum: float, factor: float) -> torch.Tensor:
    return (1 - momentum) * old + momentum * factor * new.to(old.dtype)


def _per_channel(numbers: torch.Tensor, rank: int) -> torch.Tensor:
    return numbers.reshape(1, -1, *[1] * (rank - 2))


def _part_of_variance(x: torch.Tensor, mean: torch.Tensor, *, axes: Sequence[int], count: int) -> torch.Tensor:
    """Return a part of the mean square distance from the mean; the mean of squares would lose digits."""
    return (x.to(mean.dtype) - _per_channel(mean, x.dim())).square().sum(tuple(axes)) / count


def _normalised(
    x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, *weights: torch.Tensor, eps: float, scale: bool,
    shift: bool,
) -> torch.Tensor:  # fmt: skip
    numbers = (x - _per_channel(mean, x.dim())) * _per_channel(torch.rsqrt(variance + eps), x.dim())
    numbers = numbers * _per_channel(weights[0], x.dim()) if scale else numbers
    numbers = numbers + _per_channel(weights[-1], x.dim()) if shift else numbers
    return numbers.to(x.dtype)
