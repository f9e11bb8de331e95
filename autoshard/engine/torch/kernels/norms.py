"""Normalisation over the last dim, softmax, and their gradients; statistics are FP32 at least."""

import torch

from autoshard.engine.torch.formats import wide
from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, kernel_of
from autoshard.graph.kinds.norm import Norm, NormGradient, NormWeightGradient, Softmax, SoftmaxGradient
from autoshard.graph.op import Call, Tensor


def _is_last(tensor: Tensor, over: str) -> None:
    assert tensor.dims[-1] == over, f"{tensor} is not normalised over its last dim"


def _centred(x: torch.Tensor, function: str) -> torch.Tensor:
    found = wide(x)
    return found - found.mean(-1, keepdim=True) if function == "layer" else found


@kernel_of.register
def _norm(kind: Norm, call: Call, context: KernelContext) -> Kernel:
    _is_last(call.inputs[0], kind.over)
    size, dtype = call.sizes[kind.over], context.formats.of(call.outputs[0].dtype)

    def run(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        centred = _centred(x, kind.function)
        length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
        stat = length.square_().mul_(1 / size).add_(kind.eps).rsqrt_()
        result = (centred * stat).mul_(weight)
        if bias:
            result.add_(bias[0])
        return result.to(dtype), stat.squeeze(-1)

    return run


@kernel_of.register
def _norm_gradient(kind: NormGradient, call: Call, context: KernelContext) -> Kernel:
    _is_last(call.inputs[1], kind.over)
    dtype = context.formats.of(call.outputs[0].dtype)

    def run(
        upstream: torch.Tensor, x: torch.Tensor, stat: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        scale = stat.unsqueeze(-1)
        normalised = _centred(x, kind.function) * scale
        slope = wide(upstream) * weight
        mean = (slope * normalised).mean(-1, keepdim=True)
        projected = slope - normalised.mul_(mean)
        if kind.function == "layer":
            projected.sub_(slope.mean(-1, keepdim=True))
        return (projected.mul_(scale).to(dtype),)

    return run


@kernel_of.register
def _norm_weight_gradient(kind: NormWeightGradient, call: Call, context: KernelContext) -> Kernel:
    dims = call.inputs[1].dims
    _is_last(call.inputs[1], kind.over)
    rest, dtype = list(range(len(dims) - 1)), context.formats.of(call.outputs[0].dtype)

    def run(upstream: torch.Tensor, x: torch.Tensor, stat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normalised = _centred(x, kind.function) * stat.unsqueeze(-1)
        return (normalised.mul_(upstream).sum(rest).to(dtype),)

    return run


@kernel_of.register
def _softmax(kind: Softmax, call: Call, context: KernelContext) -> Kernel:
    axis, dtype = call.inputs[0].dims.index(kind.over), context.formats.of(call.outputs[0].dtype)
    return lambda x: (torch.softmax(wide(x), axis).to(dtype),)


@kernel_of.register
def _softmax_gradient(kind: SoftmaxGradient, call: Call, context: KernelContext) -> Kernel:
    axis, dtype = call.inputs[1].dims.index(kind.over), context.formats.of(call.outputs[0].dtype)

    def run(upstream: torch.Tensor, probability: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weighted = wide(upstream) * probability
        return ((weighted - probability * weighted.sum(axis, keepdim=True)).to(dtype),)

    return run
