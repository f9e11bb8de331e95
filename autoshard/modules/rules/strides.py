"""Rules of operations that read memory by strides: parts may lie otherwise in memory than the traced tensor."""

import math
from collections.abc import Sequence

import torch

from autoshard.errors import InputError
from autoshard.modules.nodes import Node, argument, line_of
from autoshard.modules.program import TensorPlace
from autoshard.modules.rules.reader import Reader


def strided(reader: Reader, node: Node) -> None:
    """Take numbers by their places in the memory of the traced tensor; what is written there is refused."""
    if node.target._opname == "as_strided_scatter":
        message = "a result of as_strided is changed in place, which is not supported; change a slice instead"
        raise InputError.of(line_of(node), message)
    x = node.args[0].meta["val"]
    order = sorted(range(x.dim()), key=lambda axis: (-x.stride(axis), -x.shape[axis]))
    offset = argument(node, "storage_offset")
    first = 0 if offset is None else offset - x.storage_offset()
    size, strides = argument(node, "size"), argument(node, "stride")
    last = first + sum((length - 1) * step for length, step in zip(size, strides, strict=True))
    if not x.permute(order).is_contiguous() or first < 0 or (math.prod(size) and last >= x.numel()):
        message = "as_strided reads memory between or beside the numbers of its tensor; call contiguous() before it"
        raise InputError.of(line_of(node), message)
    reader.whole(node, function=_taken, arguments=(TensorPlace(0), order, size, strides, first))


def _taken(x: torch.Tensor, order: Sequence[int], size: Sequence[int], strides: Sequence[int], first: int):
    """Return what as_strided does, of a tensor in any memory; ``order`` has the axes as they lay when it was traced."""
    places = torch.full([1] * len(size), first, device=x.device)
    for axis, (length, step) in enumerate(zip(size, strides, strict=True)):
        along = torch.arange(length, device=x.device) * step
        places = places + along.view([-1 if place == axis else 1 for place in range(len(size))])
    return x.permute(*order).reshape(-1)[places.expand(*size)] if size else x.permute(*order).reshape(-1)[first]
