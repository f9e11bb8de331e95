"""How far attention looks, read off the masks that a decoder makes of its positions."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autoshard.errors import Fault, InputError
from autoshard.modules.capture import Captured
from autoshard.modules.program import Traced

NOT_CAUSAL = "has attention that sees neither all tokens nor a window of one size, before a token or on both sides"
_NO_VALUES = "has a mask made of a buffer without values; build the module without a meta device"
_HIDDEN = -1e4  # what masks add to scores that must vanish is far below


class NoValues(InputError):
    """A mask that cannot be computed because the module has no numbers."""

    def under(self, parent: str | Path) -> "NoValues":
        """Return the same error seen from what contains the faulty value."""
        return NoValues(fault.under(parent) for fault in self.faults)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """How many tokens each token sees, itself included (None: all before it), and whether by different numbers.

    Or it sees what comes after it, too.
    """

    window: int | None
    is_biased: bool = False
    is_of_all: bool = False


def sight_of(captured: Captured, masks: Sequence[Traced], name: str) -> Sight:
    """Return what masks let each token see; raise InputError where that is neither all, nor all or some before it."""
    for fill in (torch.zeros, torch.ones):  # an input that says which tokens there are is all ones
        values = [_evaluated(captured, mask, name, fill) for mask in masks]
        visible = functools.reduce(torch.logical_and, map(_visible, values))
        visible = visible.reshape(-1, *visible.shape[-2:])
        length = visible.shape[-1]
        window = int(visible[0, -1].sum())
        distance = torch.arange(length)[:, None] - torch.arange(length)
        expected = (distance >= 0) & (distance < window)
        added = [mask.masked_fill(mask <= _HIDDEN, 0) for mask in values if mask.is_floating_point()]
        is_biased = any(bool(bias.any()) for bias in added)
        if visible.shape[1:] == expected.shape and bool((visible == expected).all()):
            return Sight(window=window if window < length else None, is_biased=is_biased)
        if fill is torch.ones and (reach := _reach_both_ways(visible)):
            return Sight(window=reach if reach < length else None, is_biased=is_biased, is_of_all=True)
    raise InputError.of(name, NOT_CAUSAL)


def _reach_both_ways(visible: torch.Tensor) -> int:
    """Return how many tokens each token sees to either side, itself included; 0 where that differs among them."""
    length = visible.shape[-1]
    if bool(visible.all()):
        return length
    reach = int(visible[0, 0].sum())
    where = torch.arange(length)
    expected = (where[:, None] - where).abs() < reach
    return reach if visible.shape[1:] == expected.shape and bool((visible == expected).all()) else 0


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """Return whom a mask lets be seen; some say who is not seen, which is never oneself."""
    visible = mask if mask.dtype == torch.bool else mask > _HIDDEN
    return visible if visible.diagonal(dim1=-2, dim2=-1).all() else ~visible


def _evaluated(captured: Captured, mask: Traced, name: str, fill: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Compute a tensor that depends on no weight, for inputs filled with one number."""
    exported = captured.exported
    part = exported.part([captured.inputs[mask.name]])
    for node in part.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    part.recompile()
    buffers = dict(exported.program.named_buffers())
    used = {node.name for node in part.graph.nodes if node.op == "placeholder" and node.users}
    specs = [spec for spec in exported.program.graph_signature.input_specs if spec.arg.name in used]
    if any(spec.kind.name == "BUFFER" and _has_no_values(buffers[spec.target]) for spec in specs):
        raise NoValues([Fault(where=name, message=_NO_VALUES)])
    arguments = {
        key: fill(argument.shape, dtype=argument.dtype) if isinstance(argument, torch.Tensor) else argument
        for key, argument in exported.arguments.items()
    }
    try:
        (value,) = exported.values(part, arguments, buffers, torch.tensor(0))
    except Exception as error:  # whatever torch raises where tensors without numbers meet others
        message = f"has a mask that cannot be computed: {type(error).__name__}: {error}"
        raise NoValues([Fault(where=name, message=message)]) from error
    return value


def _has_no_values(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)
