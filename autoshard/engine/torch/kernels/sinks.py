"""Sinks of attention: what a kernel made without them is rescaled, once for all keys."""

from collections.abc import Sequence

import torch

from autoshard.engine.torch.formats import wide
from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, kernel_of, register_kernels
from autoshard.graph.kinds.sinks import SinkAttend, SinkAttendGradient, without_sinks
from autoshard.graph.op import Call, OpKind


def join_sinks(part: Sequence[torch.Tensor], sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let sinks join the denominators of an attention; a query without keys keeps its zeros."""
    mixed, lse = part
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    return (mixed * (lse - total).exp_().unsqueeze(-1)).to(mixed.dtype), total


def gradient_of_sinks(
    upstream: torch.Tensor, result: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the sinks of an attention whose result and denominators count them."""
    shares = (sink.to(lse.dtype) - lse).exp_()
    return -(wide(upstream) * result).sum(-1).mul_(shares).sum((0, 1)).to(sink.dtype)


def counting_sinks(kind: OpKind, attend: Kernel) -> Kernel:
    """Return an attention, or its gradient, that counts the sinks of a kind, if it has any, made of one without."""

    def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *rest, sink = tensors
        return join_sinks(attend(*rest), sink)

    def backward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *rest, sink = tensors
        upstream, result, lse = (tensors[place] for place in (0, 6, 7))
        return *attend(*rest), gradient_of_sinks(upstream, result, lse, sink)

    return forward if isinstance(kind, SinkAttend) else backward if isinstance(kind, SinkAttendGradient) else attend


def _with_sinks(kind: OpKind, call: Call, context: KernelContext) -> Kernel:
    return counting_sinks(kind, kernel_of(without_sinks(kind), call, context))


register_kernels({SinkAttend: _with_sinks, SinkAttendGradient: _with_sinks})
