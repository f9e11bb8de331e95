"""Mixture of experts on one rank: the choice, the slots, and the way to them and back."""

import torch

from autoshard.engine.torch.kernels.kernel import Kernel, Local, kernel, shape_of
from autoshard.graph.kinds.experts import (
    Combine,
    CombineGradient,
    Dispatch,
    DispatchGradient,
    Slot,
    TopK,
    TopKGradient,
)
from autoshard.graph.op import Call


@kernel.register
def _top_k(kind: TopK, call: Call, local: Local) -> Kernel:
    count = call.sizes["choices"]

    def run(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found, order = torch.sort(logits, dim=-1, descending=True, stable=True)  # ties go to the lower number
        return found[..., :count].contiguous(), order[..., :count].contiguous()

    return run


@kernel.register
def _top_k_gradient(kind: TopKGradient, call: Call, local: Local) -> Kernel:
    shape = shape_of(call, call.outputs[0].dims)
    return lambda upstream, expert: (upstream.new_zeros(shape).scatter_(-1, expert, upstream),)


@kernel.register
def _slot(kind: Slot, call: Call, local: Local) -> Kernel:
    experts, slots = call.sizes["experts"], call.sizes["slots"]

    def run(expert: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = expert.reshape(-1)
        mine = torch.arange(experts, device=chosen.device) == chosen[:, None]
        place = (mine.cumsum(0) - 1).gather(1, chosen[:, None]).squeeze(1)
        return (torch.where(place < slots, place, -1).reshape(expert.shape),)

    return run


@kernel.register
def _dispatch(kind: Dispatch, call: Call, local: Local) -> Kernel:
    shape = shape_of(call, call.outputs[0].dims)
    return lambda tokens, expert, place: (_scattered(tokens.unsqueeze(-2), expert, place, shape),)


@kernel.register
def _dispatch_gradient(kind: DispatchGradient, call: Call, local: Local) -> Kernel:
    return lambda slots, expert, place: (_fetched(slots, expert, place).sum(2),)


@kernel.register
def _combine(kind: Combine, call: Call, local: Local) -> Kernel:
    def run(
        slots: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return ((_fetched(slots, expert, place) * weight.unsqueeze(-1)).sum(2),)

    return run


@kernel.register
def _combine_gradient(kind: CombineGradient, call: Call, local: Local) -> Kernel:
    shape = shape_of(call, call.inputs[1].dims)

    def run(
        upstream: torch.Tensor, slots: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rows = upstream.unsqueeze(-2)
        d_weight = (_fetched(slots, expert, place) * rows).sum(-1)
        return _scattered(rows * weight.unsqueeze(-1), expert, place, shape), d_weight

    return run


def _scattered(rows: torch.Tensor, expert: torch.Tensor, place: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Copy rows to their slots; what has no slot goes to one that is cut off again."""
    slots = rows.new_zeros((shape[0], shape[1] + 1, shape[2]))
    slots[expert, torch.where(place < 0, shape[1], place)] = rows.expand(*place.shape, shape[2])
    return slots[:, : shape[1]]


def _fetched(slots: torch.Tensor, expert: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return what lies in each choice's slot, zero where it was dropped."""
    if not slots.shape[1]:
        return slots.new_zeros((*place.shape, slots.shape[2]))
    return slots[expert, place.clamp(min=0)] * (place >= 0).unsqueeze(-1)
