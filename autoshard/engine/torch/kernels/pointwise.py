"""Element-wise operations, sums over dims, and what is only laid out otherwise."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from autoshard.engine.torch.kernels.kernel import Kernel, Local, kernel, laid_out, shape_of
from autoshard.graph.kinds.pointwise import Add, Cast, Function, Multiply, Reduce, Repeat, Unary, UnaryGradient
from autoshard.graph.op import Call

_aten = torch.ops.aten
_VALUES: Mapping[Function, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "exp": torch.exp,
    "log": torch.log,
    "negate": torch.neg,
}
_GRADIENTS: Mapping[Function, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": _aten.silu_backward,
    "gelu": _aten.gelu_backward,
    "gelu_tanh": lambda upstream, x: _aten.gelu_backward(upstream, x, approximate="tanh"),
    "relu": lambda upstream, x: _aten.threshold_backward(upstream, x, 0),
    "exp": lambda upstream, x: upstream * x.exp(),
    "log": torch.div,
    "negate": lambda upstream, _: -upstream,
}


@kernel.register
def _unary(kind: Unary, call: Call, local: Local) -> Kernel:
    value = _VALUES[kind.function]
    return lambda x: (value(x),)


@kernel.register
def _unary_gradient(kind: UnaryGradient, call: Call, local: Local) -> Kernel:
    gradient = _GRADIENTS[kind.function]
    return lambda upstream, x: (gradient(upstream, x),)


@kernel.register
def _multiply(kind: Multiply, call: Call, local: Local) -> Kernel:
    dtype = local.formats.of(call.outputs[0].dtype)
    return lambda left, right: ((left * right).to(dtype),)


@kernel.register
def _add(kind: Add, call: Call, local: Local) -> Kernel:
    left, right = call.inputs
    lay, sign = laid_out(right.dims, left.dims), kind.sign
    return lambda x, y: (torch.add(x, lay(y), alpha=sign),)


@kernel.register
def _reduce(kind: Reduce, call: Call, local: Local) -> Kernel:
    dims = call.inputs[0].dims
    axes = [dims.index(dim) for dim in kind.over]
    if kind.function == "sum":
        return lambda x: (x.sum(axes) if axes else x,)
    shape = shape_of(call, call.outputs[0].dims)
    dtype = local.formats.of(call.outputs[0].dtype)

    def largest(x: torch.Tensor) -> tuple[torch.Tensor]:
        if not x.numel():  # a rank that holds nothing of a dim knows no number at all
            return (x.new_full(shape, -torch.inf, dtype=dtype),)
        return (x.amax(axes),)

    return largest


@kernel.register
def _repeat(kind: Repeat, call: Call, local: Local) -> Kernel:
    lay, shape = laid_out(call.inputs[0].dims, kind.dims), shape_of(call, kind.dims)
    return lambda x: (lay(x).expand(shape),)


@kernel.register
def _cast(kind: Cast, call: Call, local: Local) -> Kernel:
    dtype = local.formats.of(kind.dtype)
    return lambda x: (x.to(dtype),)
