"""Rules of operations on places beside each other: convolution, pooling, padding, scaling."""

import functools
import re
from typing import Any

import torch

from autoshard.modules.dims import fresh, size_of
from autoshard.modules.nodes import Node, argument, arguments_of
from autoshard.modules.program import Reading, TensorPlace
from autoshard.modules.rules.reader import Reader
from autoshard.modules.rules.unknown import unknown


def convolution(reader: Reader, node: Node) -> None:
    """Convolve. The batch, output channels, and input channels (which are summed) may be cut; or groups of channels.

    So may places, if each is a product by itself.
    """
    x, weight, *bias = reader.readings(node)
    places = len(weight.positions) - 2
    channel, groups, positions = len(x.positions) - places - 1, argument(node, "groups"), list(x.positions)
    is_turned = "transpose" in node.target._opname
    whole = list(weight.positions[2:])
    if not _is_by_place(node, weight):
        positions[channel + 1 :] = [fresh(size) for size in node.meta["val"].shape[channel + 1 :]]
        whole += [*x.positions[channel + 1 :], *positions[channel + 1 :]]
    if groups > 1:
        _grouped(reader, node, (x, weight, bias), (positions, whole), channel)
        return
    weight.agree(1 - is_turned, x.positions[channel])
    positions[channel] = weight.positions[is_turned]
    product = reader.step(
        node, ([x, weight], positions), whole=whole, summed=[x.positions[channel]], sort="sum",
        name=f"{node.name}_product" if bias else "",
        products=[[*positions, x.positions[channel], *weight.positions[2:]]], arguments=arguments_of(node, bias=None),
    )  # fmt: skip
    for shift in bias:
        shift.agree(0, positions[channel])
        shifted = functools.partial(_shifted, places=places)
        reader.local(
            node,
            ([Reading(product, list(positions)), shift], positions),
            function=shifted,
            arguments=(TensorPlace(0), TensorPlace(1)),
        )


def _is_by_place(node: Node, weight: Reading) -> bool:
    """Say whether a convolution sees one place at a time, and each."""
    is_small = all(size_of(position) == 1 for position in weight.positions[2:])
    strides, pads = (_numbers(argument(node, name)) for name in ("stride", "padding"))
    more = _numbers(argument(node, "output_padding")) if "transpose" in node.target._opname else ()
    return is_small and {*strides} <= {1} and {*pads, *more} <= {0}


def _numbers(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _shifted(x: torch.Tensor, bias: torch.Tensor, *, places: int) -> torch.Tensor:
    """Add a number to each channel."""
    return x + bias.reshape(-1, *[1] * places)


def _grouped(reader: Reader, node: Node, reads: Any, results: Any, channel: int) -> None:
    """Convolve each group of channels by itself: groups may be cut, and the output channels of a group."""
    (x, weight, bias), (positions, whole), groups = reads, results, argument(node, "groups")
    if "transpose" in node.target._opname:
        unknown(reader, node)
        return
    group, inner = fresh(groups, "group"), fresh(size_of(x.positions[channel]) // groups)
    x.agree(channel, (*group, *inner))
    weight.agree(0, (*group, *fresh(size_of(weight.positions[0]) // groups)))
    weight.agree(1, inner)
    positions[channel] = weight.positions[0]
    for shift in bias:
        shift.agree(0, weight.positions[0])
    arguments = list(arguments_of(node, groups=None))
    function = functools.partial(_convolved_in_groups, function=node.target, channels=size_of(inner), axis=channel)
    reader.local(
        node, ([x, weight, *bias], positions), [*whole, inner], products=[[*positions, *weight.positions[1:]]],
        function=function, arguments=tuple(arguments[:-1]),
    )  # fmt: skip


def _convolved_in_groups(x: torch.Tensor, *weights: Any, function: Any, channels: int, axis: int) -> torch.Tensor:
    return function(x, *weights, x.shape[axis] // channels)


def last_axes_whole(reader: Reader, node: Node) -> None:
    """Read the last axes whole, as many as the name of the operation says (max_pool2d); others may be cut."""
    (reading,), shape = reader.readings(node), node.meta["val"].shape
    name = node.target._opname
    count = next((int(digit) for digit in re.findall(r"(\d)d", name)), _LAST.get(name, 0))
    positions = [*reading.positions[:-count], *(fresh(size) for size in shape[-count:])]
    reader.local(node, ([reading], positions), [*reading.positions[-count:], *positions[-count:]])


_LAST = {"tril": 2, "triu": 2, "pixel_shuffle": 3, "pixel_unshuffle": 3}


def padded(reader: Reader, node: Node) -> None:
    """Read the axes that are padded whole."""
    (reading,), shape, pads = reader.readings(node), node.meta["val"].shape, argument(node, "pad")
    axes = [-1 - place for place in range(len(pads) // 2) if any(pads[2 * place : 2 * place + 2])]
    positions = list(reading.positions)
    for axis in axes:
        positions[axis] = fresh(shape[axis])
    reader.local(node, ([reading], positions), [side[axis] for axis in axes for side in (reading.positions, positions)])
