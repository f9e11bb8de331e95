"""Element-wise operations, sums over dims, what is only laid out otherwise, and the optimizer's steps, in place."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.optim.adamw import adamw

from autoshard.engine.torch.formats import wide
from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, kernel_of, laid_out, shape_of
from autoshard.graph.kinds.optimizer import Accumulate, AdamW, Sgd, SquareSum
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


@kernel_of.register
def _unary(kind: Unary, call: Call, context: KernelContext) -> Kernel:
    value = _VALUES[kind.function]
    return lambda x: (value(x),)


@kernel_of.register
def _unary_gradient(kind: UnaryGradient, call: Call, context: KernelContext) -> Kernel:
    gradient = _GRADIENTS[kind.function]
    return lambda upstream, x: (gradient(upstream, x),)


@kernel_of.register
def _multiply(kind: Multiply, call: Call, context: KernelContext) -> Kernel:
    dtype = context.formats.of(call.outputs[0].dtype)
    return lambda left, right: ((left * right).to(dtype),)


@kernel_of.register
def _add(kind: Add, call: Call, context: KernelContext) -> Kernel:
    left, right = call.inputs
    lay, sign = laid_out(right.dims, left.dims), kind.sign
    return lambda x, y: (torch.add(x, lay(y), alpha=sign),)


@kernel_of.register
def _reduce(kind: Reduce, call: Call, context: KernelContext) -> Kernel:
    dims = call.inputs[0].dims
    axes = [dims.index(dim) for dim in kind.over]
    if kind.function == "sum":
        return lambda x: (x.sum(axes) if axes else x,)
    shape = shape_of(call, call.outputs[0].dims)
    dtype = context.formats.of(call.outputs[0].dtype)

    def largest(x: torch.Tensor) -> tuple[torch.Tensor]:
        if not x.numel():  # a rank that holds nothing of a dim knows no number at all
            return (x.new_full(shape, -torch.inf, dtype=dtype),)
        return (x.amax(axes),)

    return largest


@kernel_of.register
def _repeat(kind: Repeat, call: Call, context: KernelContext) -> Kernel:
    lay, shape = laid_out(call.inputs[0].dims, kind.dims), shape_of(call, kind.dims)
    return lambda x: (lay(x).expand(shape),)


@kernel_of.register
def _cast(kind: Cast, call: Call, context: KernelContext) -> Kernel:
    dtype = context.formats.of(kind.dtype)
    return lambda x: (x.to(dtype),)


@kernel_of.register
def _accumulate(kind: Accumulate, call: Call, context: KernelContext) -> Kernel:
    return lambda total, gradient: (total.add_(gradient),)


@kernel_of.register
def _square_sum(kind: SquareSum, call: Call, context: KernelContext) -> Kernel:
    def run(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = wide(gradient).reshape(-1)
        return (torch.dot(flat, flat),)

    return run


@kernel_of.register
def _adamw(kind: AdamW, call: Call, context: KernelContext) -> Kernel:
    def run(*given: Any) -> tuple[torch.Tensor, ...]:
        weight, first, second, gradient, clip, rate, step = given
        before = torch.tensor(step - 1.0, device=weight.device)
        adamw(
            [weight], [_clipped(gradient, clip)], [first], [second], [], [before],
            fused=weight.dtype == first.dtype, amsgrad=False, beta1=kind.beta1, beta2=kind.beta2,
            lr=rate, weight_decay=kind.decay, eps=kind.eps, maximize=False,
        )  # fmt: skip
        return weight, first, second

    return run


@kernel_of.register
def _sgd(kind: Sgd, call: Call, context: KernelContext) -> Kernel:
    def run(*given: Any) -> tuple[torch.Tensor, ...]:
        weight, gradient, clip, rate = given
        return (weight.add_(_clipped(gradient, clip), alpha=-rate),)

    return run


def _clipped(gradient: torch.Tensor, clip: float) -> torch.Tensor:
    """Bring a gradient down where it lies: memory of its own would cost more than the product."""
    return gradient.mul_(clip) if clip < 1.0 else gradient
