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
    """Convolve: the batch, the channels that are made, and those that are summed may be cut; or groups of both."""
    x, weight, *bias = reader.readings(node)
    places = len(weight.positions) - 2
    channel, groups, made = len(x.positions) - places - 1, argument(node, "groups"), list(x.positions)
    is_turned = "transpose" in node.target._opname
    made[channel + 1 :] = [fresh(size) for size in node.meta["val"].shape[channel + 1 :]]
    whole = [*x.positions[channel + 1 :], *made[channel + 1 :], *weight.positions[2:]]
    if groups > 1:
        _grouped(reader, node, (x, weight, bias), (made, whole), channel)
        return
    weight.agree(1 - is_turned, x.positions[channel])
    made[channel] = weight.positions[is_turned]
    product = reader.step(
        node, ([x, weight], made), whole=whole, summed=[x.positions[channel]], sort="sum",
        name=f"{node.name}_product" if bias else "", products=[[*made, x.positions[channel], *weight.positions[2:]]],
        arguments=arguments_of(node, bias=None),
    )  # fmt: skip
    for one in bias:
        one.agree(0, made[channel])
        shifted = functools.partial(_shifted, places=places)
        reader.local(
            node,
            ([Reading(product, list(made)), one], made),
            function=shifted,
            arguments=(TensorPlace(0), TensorPlace(1)),
        )


def _shifted(x: torch.Tensor, bias: torch.Tensor, *, places: int) -> torch.Tensor:
    """Add a number to each channel."""
    return x + bias.reshape(-1, *[1] * places)


def _grouped(reader: Reader, node: Node, reads: Any, found: Any, channel: int) -> None:
    """Convolve groups of channels apart: groups may be cut, and what each of them makes."""
    (x, weight, bias), (made, whole), groups = reads, found, argument(node, "groups")
    if "transpose" in node.target._opname:
        unknown(reader, node)
        return
    group, own = fresh(groups, "group"), fresh(size_of(x.positions[channel]) // groups)
    x.agree(channel, (*group, *own))
    weight.agree(0, (*group, *fresh(size_of(weight.positions[0]) // groups)))
    weight.agree(1, own)
    made[channel] = weight.positions[0]
    for one in bias:
        one.agree(0, weight.positions[0])
    arguments = list(arguments_of(node, groups=None))
    function = functools.partial(_convolved_in_groups, function=node.target, channels=size_of(own), axis=channel)
    reader.local(
        node, ([x, weight, *bias], made), [*whole, own], products=[[*made, *weight.positions[1:]]], function=function,
        arguments=tuple(arguments[:-1]),
    )  # fmt: skip


def _convolved_in_groups(x: torch.Tensor, *others: Any, function: Any, channels: int, axis: int) -> torch.Tensor:
    return function(x, *others, x.shape[axis] // channels)


def beside(reader: Reader, node: Node) -> None:
    """Read the last axes whole, as many as the name of the operation says (max_pool2d); others may be cut."""
    (reading,), shape = reader.readings(node), node.meta["val"].shape
    name = node.target._opname
    count = next((int(one) for one in re.findall(r"(\d)d", name)), _LAST.get(name, 0))
    made = [*reading.positions[:-count], *(fresh(size) for size in shape[-count:])]
    reader.local(node, ([reading], made), [*reading.positions[-count:], *made[-count:]])


_LAST = {"tril": 2, "triu": 2, "pixel_shuffle": 3, "pixel_unshuffle": 3}


def padded(reader: Reader, node: Node) -> None:
    """Read the axes that are padded whole."""
    (reading,), shape, pads = reader.readings(node), node.meta["val"].shape, argument(node, "pad")
    axes = [-1 - place for place in range(len(pads) // 2) if any(pads[2 * place : 2 * place + 2])]
    made = list(reading.positions)
    for axis in axes:
        made[axis] = fresh(shape[axis])
    reader.local(node, ([reading], made), [one[axis] for axis in axes for one in (reading.positions, made)])
