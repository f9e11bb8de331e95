"""The gated delta rule in chunks of tokens (arXiv:2412.06464, section 3.3), and the causal convolution before it.

Within a chunk a triangular system says what each token writes to the state; from chunk to chunk goes the state alone.
What chunks need of their tokens is made for a few chunks at a time. Numbers are FP32 at least.
"""

import math
from collections.abc import Sequence

import torch
from einops import rearrange, repeat
from torch.nn import functional

from autoshard.engine.torch.formats import wide
from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, register_kernels
from autoshard.graph.kinds.delta import (
    CHUNK,
    LENGTH_EPS,
    CausalConv,
    CausalConvWeightGradient,
    Decay,
    DecayGradient,
    GatedDelta,
    GatedDeltaGradient,
)
from autoshard.graph.op import Call

_TOGETHER = 8  # chunks
_BY_HEAD = "batch (count chunk) heads width -> (batch heads group) count chunk width"
_BY_STATE = "batch (count chunk) heads group width -> (batch heads group) count chunk width"
_BY_TOKEN = "count (batch heads group) chunk width -> batch (count chunk) heads group width"
Part = tuple[torch.Tensor, torch.Tensor]  # what queries read, and the state behind the last token


def _causal_conv(kind: CausalConv, call: Call, context: KernelContext) -> Kernel:
    taps, length = call.sizes["taps"], call.sizes["seq"]

    def run(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        total = x * weight[..., taps - 1]
        for distance in range(1, min(taps, length)):
            later, earlier = total[:, distance:], total[:, : length - distance]
            into, start = (earlier, distance) if kind.backward else (later, 0)
            into.addcmul_(x.narrow(1, start, length - distance), weight[..., taps - 1 - distance])
        return (total,)

    return run


def _conv_weight_gradient(kind: CausalConvWeightGradient, call: Call, context: KernelContext) -> Kernel:
    taps, length = call.sizes["taps"], call.sizes["seq"]

    def run(upstream: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        distances = range(min(taps, length))
        sums = [(wide(upstream[:, d:]) * x[:, : length - d]).sum((0, 1)) for d in reversed(distances)]
        unused = [torch.zeros_like(sums[0])] * (taps - len(sums))
        return (torch.stack([*unused, *sums], -1).to(x.dtype),)

    return run


def _decay(kind: Decay, call: Call, context: KernelContext) -> Kernel:
    return lambda x, rate, shift: (functional.softplus(wide(x) + shift).mul_(-wide(rate).exp()),)


def _decay_gradient(kind: DecayGradient, call: Call, context: KernelContext) -> Kernel:
    def run(
        upstream: torch.Tensor, x: torch.Tensor, rate: torch.Tensor, shift: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        scaled, moved = upstream * -wide(rate).exp(), wide(x) + shift
        number = scaled * moved.sigmoid()
        of_rate = (scaled * functional.softplus(moved)).sum((0, 1))
        return number.to(x.dtype), of_rate.to(rate.dtype), number.sum((0, 1)).to(shift.dtype)

    return run


def _gated_delta(kind: GatedDelta, call: Call, context: KernelContext) -> Kernel:
    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor]:
        read = [part for part, _ in _read(inputs)]
        return (torch.cat(read, 1),)

    return run


def _gated_delta_gradient(kind: GatedDeltaGradient, call: Call, context: KernelContext) -> Kernel:
    """Go through the parts of a sequence in reverse; each is made again from the state before it."""

    def run(upstream: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = [_no_state(inputs), *(state for _, state in _read(inputs))]
        d_state, parts = torch.zeros_like(states[0]), list[Sequence[torch.Tensor]]()
        length = CHUNK * _TOGETHER
        for start in reversed(range(0, inputs[0].shape[1], length)):
            part = [x[:, start : start + length].detach().requires_grad_() for x in inputs]
            before = states[start // length].detach().requires_grad_()
            with torch.enable_grad():
                results = _part(part, before)
            *gradients, d_state = torch.autograd.grad(
                results, (*part, before), (upstream[:, start : start + length], d_state)
            )
            parts.insert(0, gradients)
        return tuple(torch.cat(pieces, 1) for pieces in zip(*parts, strict=True))

    return run


def _read(inputs: Sequence[torch.Tensor]) -> list[Part]:
    """Go through a sequence in parts of a few chunks; return what queries read in each, and the state behind it."""
    parts, length = [(inputs[2][:, :0], _no_state(inputs))], CHUNK * _TOGETHER
    for start in range(0, inputs[0].shape[1], length):
        parts.append(_part([x[:, start : start + length] for x in inputs], parts[-1][1]))
    return parts[1:]


def _no_state(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    _, key, value, *_ = inputs
    batch, _, heads, group, width = value.shape
    return wide(value).new_zeros(batch * heads * group, key.shape[-1], width)


def _part(inputs: Sequence[torch.Tensor], state: torch.Tensor) -> Part:
    """Return what the queries of some chunks read, given the state before them, and the state behind them."""
    (batch, length, heads, group, _), dtype = inputs[2].shape, inputs[2].dtype
    chunk = min(CHUNK, length)
    padding = -length % chunk
    query, key, value, decay, move = (functional.pad(wide(x), (*(0, 0) * (x.dim() - 2), 0, padding)) for x in inputs)
    query, key = (repeat(_unit(x), _BY_HEAD, chunk=chunk, group=group) for x in (query, key))
    value, decay, move = (
        rearrange(x, _BY_STATE, chunk=chunk) for x in (value, decay.unsqueeze(-1), move.unsqueeze(-1))
    )
    total = decay.cumsum(2)
    from_start, to_end, over_all = total.exp(), (total[:, :, -1:] - total).exp(), total[:, :, -1:].exp()
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).triu(1)
    between = (total - total.mT).masked_fill(later, -math.inf).exp()
    moving = key * move
    system, sides = moving @ key.mT * between, torch.cat([value * move, moving * from_start], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split([value.shape[-1], key.shape[-1]], -1)
    query = query * key.shape[-1] ** -0.5
    scores, reading, writing = query @ key.mT * between, query * from_start, (key * to_end).mT
    read = list[torch.Tensor]()
    for number in range(total.shape[1]):
        errors = torch.baddbmm(values[:, number], keys[:, number], state, alpha=-1)
        read.append(torch.baddbmm(reading[:, number] @ state, scores[:, number], errors))
        state = torch.baddbmm(state * over_all[:, number], writing[:, number], errors)
    by_token = rearrange(read, _BY_TOKEN, batch=batch, heads=heads)
    return by_token[:, :length].to(dtype), state


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return vectors of length one."""
    return x * (x.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()


register_kernels(
    {
        CausalConv: _causal_conv,
        CausalConvWeightGradient: _conv_weight_gradient,
        Decay: _decay,
        DecayGradient: _decay_gradient,
        GatedDelta: _gated_delta,
        GatedDeltaGradient: _gated_delta_gradient,
    }
)
