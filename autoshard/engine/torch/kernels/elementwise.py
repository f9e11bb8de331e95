"""Operations element by element or along one dim, changes of the order of dims, and optimizers' steps, in place.

Statistics of norms and softmax are FP32 at least.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.optim.adamw import adamw

from autoshard.engine.torch.formats import sum_of_squares, wide
from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, laid_out, register_kernels, shape_of
from autoshard.graph.kinds.attention import Join, JoinGradient, Rotary
from autoshard.graph.kinds.norm import (
    MeanSquare,
    MeanSquareGradient,
    Norm,
    NormGradient,
    NormWeightGradient,
    Rescale,
    RescaleSquareGradient,
    RescaleWeightGradient,
    Softmax,
    SoftmaxGradient,
)
from autoshard.graph.kinds.optimizer import Accumulate, AdamW, Sgd, SquareSum
from autoshard.graph.kinds.pointwise import (
    Add,
    Cast,
    ClampedGlu,
    ClampedGluGradient,
    Function,
    Multiply,
    Reduce,
    Repeat,
    ScaleBy,
    SoftCap,
    SoftCapGradient,
    Unary,
    UnaryGradient,
)
from autoshard.graph.op import Call

_aten = torch.ops.aten
_VALUES: Mapping[Function, Callable[..., torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "log": torch.log,
    "negate": torch.neg,
}
_GRADIENTS: Mapping[Function, Callable[..., torch.Tensor]] = {
    "silu": _aten.silu_backward,
    "gelu": _aten.gelu_backward,
    "gelu_tanh": partial(_aten.gelu_backward, approximate="tanh"),
    "relu": lambda upstream, x: _aten.threshold_backward(upstream, x, 0),
    "relu2": lambda upstream, x: 2 * torch.relu(x) * upstream,
    "sigmoid": lambda upstream, x: _aten.sigmoid_backward(upstream, x.sigmoid()),
    "exp": lambda upstream, x: upstream * x.exp(),
    "log": torch.div,
    "negate": lambda upstream, _: -upstream,
}


def _multiply(kind: Multiply, call: Call, context: KernelContext) -> Kernel:
    left, right = call.inputs
    dtype, lay = context.formats.of(call.outputs[0].dtype), laid_out(right.dims, left.dims)
    return lambda x, y: ((x * lay(y)).to(dtype),)


def _soft_cap(kind: SoftCap, call: Call, context: KernelContext) -> Kernel:
    dtype = context.formats.of(kind.dtype)
    return lambda x: ((wide(x) / kind.cap).tanh_().mul_(kind.cap).to(dtype),)


def _soft_cap_gradient(kind: SoftCapGradient, call: Call, context: KernelContext) -> Kernel:
    dtype = context.formats.of(kind.dtype)
    return lambda upstream, result: ((upstream * (1 - (wide(result) / kind.cap).square_())).to(dtype),)


def _clamped_glu(kind: ClampedGlu, call: Call, context: KernelContext) -> Kernel:
    dtype, limit, slope = context.formats.of(call.outputs[0].dtype), kind.limit, kind.slope

    def run(stated_gate: torch.Tensor, stated_up: torch.Tensor) -> tuple[torch.Tensor]:
        gate, up = wide(stated_gate).clamp(max=limit), wide(stated_up).clamp(-limit, limit)
        return (((up + 1) * gate * torch.sigmoid(gate * slope)).to(dtype),)

    return run


def _clamped_glu_gradient(kind: ClampedGluGradient, call: Call, context: KernelContext) -> Kernel:
    dtype, limit, slope = context.formats.of(call.outputs[0].dtype), kind.limit, kind.slope

    def run(upstream: torch.Tensor, stated_gate: torch.Tensor, stated_up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = wide(stated_gate).clamp(max=limit), wide(stated_up).clamp(-limit, limit)
        share = torch.sigmoid(gate * slope)
        slope_of_gate = share * (1 + gate * slope * (1 - share))
        d_gate = wide(upstream) * (up + 1) * slope_of_gate * (stated_gate <= limit)
        d_up = wide(upstream) * gate * share * (stated_up.abs() <= limit)
        return d_gate.to(dtype), d_up.to(dtype)

    return run


def _add(kind: Add, call: Call, context: KernelContext) -> Kernel:
    left, right = call.inputs
    lay, sign = laid_out(right.dims, left.dims), kind.sign
    return lambda x, y: (torch.add(x, lay(y), alpha=sign),)


def _reduce(kind: Reduce, call: Call, context: KernelContext) -> Kernel:
    dims, output = call.inputs[0].dims, call.outputs[0]
    axes = [dims.index(dim) for dim in kind.over]
    if kind.function == "sum":
        return lambda x: (x.sum(axes) if axes else x,)
    shape, dtype = shape_of(call, output.dims), context.formats.of(output.dtype)
    # A rank that holds nothing of a dim knows no number at all.
    return lambda x: (x.amax(axes) if x.numel() else x.new_full(shape, -torch.inf, dtype=dtype),)


def _repeat(kind: Repeat, call: Call, context: KernelContext) -> Kernel:
    lay, shape = laid_out(call.inputs[0].dims, kind.dims), shape_of(call, kind.dims)
    return lambda x: (lay(x).expand(shape),)


def _centred(x: torch.Tensor, function: str) -> torch.Tensor:
    values = wide(x)
    return values - values.mean(-1, keepdim=True) if function == "layer" else values


def _with_offset(kind: Norm | NormGradient) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that adds the offset of a norm to its weight, in FP32 at least."""
    return (lambda weight: wide(weight) + kind.offset) if kind.offset else lambda weight: weight


def _norm(kind: Norm, call: Call, context: KernelContext) -> Kernel:
    assert call.inputs[0].dims[-1] == kind.over, f"{kind} is not over the last dim"
    size, dtype = call.sizes[kind.over], context.formats.of(call.outputs[0].dtype)
    with_offset = _with_offset(kind)

    def run(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        centred = _centred(x, kind.function)
        length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
        stat = length.square_().mul_(1 / size).add_(kind.eps).rsqrt_()
        result = (centred * stat).mul_(with_offset(weight))
        if bias:
            result.add_(bias[0])
        return result.to(dtype), stat.squeeze(-1)

    return run


def _norm_gradient(kind: NormGradient, call: Call, context: KernelContext) -> Kernel:
    dtype, with_offset = context.formats.of(call.outputs[0].dtype), _with_offset(kind)

    def run(upstream: torch.Tensor, x: torch.Tensor, stat: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        scale = stat.unsqueeze(-1)
        normalised = _centred(x, kind.function) * scale
        slope = wide(upstream) * with_offset(weight)
        mean = (slope * normalised).mean(-1, keepdim=True)
        projected = slope - normalised.mul_(mean)
        if kind.function == "layer":
            projected.sub_(slope.mean(-1, keepdim=True))
        return (projected.mul_(scale).to(dtype),)

    return run


def _norm_weight_gradient(kind: NormWeightGradient, call: Call, context: KernelContext) -> Kernel:
    rest, dtype = list(range(len(call.inputs[1].dims) - 1)), context.formats.of(call.outputs[0].dtype)
    return lambda upstream, x, stat: (
        (_centred(x, kind.function) * stat.unsqueeze(-1)).mul_(upstream).sum(rest).to(dtype),
    )


def _mean_square(kind: MeanSquare, call: Call, context: KernelContext) -> Kernel:
    axes = [call.inputs[0].dims.index(dim) for dim in kind.over]
    return lambda x: (wide(x).square().sum(axes).div_(kind.count),)


def _mean_square_gradient(kind: MeanSquareGradient, call: Call, context: KernelContext) -> Kernel:
    upstream, x = call.inputs
    lay, dtype, factor = laid_out(upstream.dims, x.dims), context.formats.of(call.outputs[0].dtype), 2 / kind.count
    return lambda gradient, values: ((wide(values) * lay(gradient)).mul_(factor).to(dtype),)


def _rescale(kind: Rescale, call: Call, context: KernelContext) -> Kernel:
    x, *others = (tensor.dims for tensor in call.inputs)
    (lay_square, lay_weight), dtype = [laid_out(dims, x) for dims in others], context.formats.of(call.outputs[0].dtype)

    def run(values: torch.Tensor, square: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        scale = lay_square((square + kind.eps).rsqrt_())
        return ((wide(values) * scale).mul_(lay_weight(weight)).to(dtype),)

    return run


def _rescale_square_gradient(kind: RescaleSquareGradient, call: Call, context: KernelContext) -> Kernel:
    dims, rest, over_weight = (call.inputs[place].dims for place in (1, 2, 3))
    axes, lay = [axis for axis, dim in enumerate(dims) if dim not in rest], laid_out(over_weight, dims)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor]:
        upstream, x, square, weight = tensors
        slope = (wide(upstream) * x).mul_(lay(weight)).sum(axes)
        return (slope.mul_((square + kind.eps).pow_(-1.5)).mul_(-0.5),)

    return run


def _rescale_weight_gradient(kind: RescaleWeightGradient, call: Call, context: KernelContext) -> Kernel:
    dims, dtype = call.inputs[1].dims, context.formats.of(call.outputs[0].dtype)
    axes, lay = [axis for axis, dim in enumerate(dims) if dim not in kind.dims], laid_out(call.inputs[2].dims, dims)

    def run(upstream: torch.Tensor, x: torch.Tensor, square: torch.Tensor) -> tuple[torch.Tensor]:
        scale = lay((square + kind.eps).rsqrt_())
        return ((wide(upstream) * x).mul_(scale).sum(axes).to(dtype),)

    return run


def _softmax(kind: Softmax, call: Call, context: KernelContext) -> Kernel:
    axis, dtype = call.inputs[0].dims.index(kind.over), context.formats.of(call.outputs[0].dtype)
    return lambda x: (torch.softmax(wide(x), axis).to(dtype),)


def _softmax_gradient(kind: SoftmaxGradient, call: Call, context: KernelContext) -> Kernel:
    axis, dtype = call.inputs[1].dims.index(kind.over), context.formats.of(call.outputs[0].dtype)

    def run(upstream: torch.Tensor, probability: torch.Tensor) -> tuple[torch.Tensor]:
        weighted = wide(upstream) * probability
        return ((weighted - probability * weighted.sum(axis, keepdim=True)).to(dtype),)

    return run


def _rotary(kind: Rotary, call: Call, context: KernelContext) -> Kernel:
    dims, head_dim = call.inputs[0].dims, call.sizes[kind.over]
    half, dtype = kind.rotated(head_dim) // 2, context.formats.of(call.outputs[0].dtype)
    turned = 2 * half
    after = len(dims) - dims.index(call.inputs[-1].dims[-1]) - 2  # dims between the positions and the head
    sign = -1 if kind.backward else 1

    def run(x: torch.Tensor, *where: torch.Tensor) -> tuple[torch.Tensor]:
        angles = context.rotations.of(kind, where, head_dim, wide(x[..., :0]))
        cos, sin = (table.reshape(*table.shape[:-2], *[1] * after, *table.shape[-2:]) for table in angles)
        halves = x[..., :turned].unflatten(-1, (2, half))
        rotated = torch.addcmul(halves * cos, halves.flip(-2), sin, value=sign).flatten(-2).to(dtype)
        return (torch.cat([rotated, x[..., turned:]], -1) if turned < head_dim else rotated,)

    return run


def _join(kind: Join, call: Call, context: KernelContext) -> Kernel:
    shared, own = (tensor.dims for tensor in call.inputs)
    dims = (*own[:-1], shared[-1])
    lay, shape = laid_out(shared, dims), shape_of(call, dims)
    return lambda part, heads: (torch.cat([lay(part).expand(shape), heads], -1),)


def _join_gradient(kind: JoinGradient, call: Call, context: KernelContext) -> Kernel:
    width, axes = call.sizes["rotary_dim"], kind.summed(call)
    return lambda upstream: (upstream[..., :width].sum(axes), upstream[..., width:])


def _clipped(gradient: torch.Tensor, clip: float) -> torch.Tensor:
    """Scale a gradient down in place: a second tensor would cost more than the product."""
    return gradient.mul_(clip) if clip < 1.0 else gradient


def _adamw(kind: AdamW, call: Call, context: KernelContext) -> Kernel:
    def run(*state: Any) -> tuple[torch.Tensor, ...]:
        weight, first, second, gradient, clip, rate, step = state
        before = torch.tensor(step - 1.0, device=weight.device)
        adamw(
            [weight], [_clipped(gradient, clip)], [first], [second], [], [before],
            fused=weight.dtype == first.dtype, amsgrad=False, beta1=kind.beta1, beta2=kind.beta2,
            lr=rate, weight_decay=kind.decay, eps=kind.eps, maximize=False,
        )  # fmt: skip
        return weight, first, second

    return run


def _sgd(weight: torch.Tensor, gradient: torch.Tensor, clip: float, rate: float) -> tuple[torch.Tensor]:
    return (weight.add_(_clipped(gradient, clip), alpha=-rate),)


def _cast(kind: Cast, call: Call, context: KernelContext) -> Kernel:
    dtype = context.formats.of(kind.dtype)
    return lambda x: (x.to(dtype),)


register_kernels({
    Unary: lambda kind, call, context: lambda x: (_VALUES[kind.function](x),),
    UnaryGradient: lambda kind, call, context: lambda upstream, x: (_GRADIENTS[kind.function](upstream, x),),
    ScaleBy: lambda kind, call, context: lambda x: (x * kind.factor,),
    SoftCap: _soft_cap, SoftCapGradient: _soft_cap_gradient,
    Multiply: _multiply, Add: _add, Reduce: _reduce, Repeat: _repeat, Cast: _cast,
    Norm: _norm, NormGradient: _norm_gradient, NormWeightGradient: _norm_weight_gradient,
    MeanSquare: _mean_square, MeanSquareGradient: _mean_square_gradient, Rescale: _rescale,
    RescaleSquareGradient: _rescale_square_gradient, RescaleWeightGradient: _rescale_weight_gradient,
    Softmax: _softmax, SoftmaxGradient: _softmax_gradient, Rotary: _rotary, AdamW: _adamw,
    Join: _join, JoinGradient: _join_gradient, ClampedGlu: _clamped_glu, ClampedGluGradient: _clamped_glu_gradient,
    Accumulate: lambda kind, call, context: lambda total, gradient: (total.add_(gradient),),
    SquareSum: lambda kind, call, context: lambda gradient: (sum_of_squares(gradient),),
    Sgd: lambda kind, call, context: _sgd,
})  # fmt: skip
