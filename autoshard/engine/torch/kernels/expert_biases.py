"""Biases of experts: those of rows, of which a last argument says where each expert's end, and those of tokens."""

from collections.abc import Callable

import torch

from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, register_kernels
from autoshard.graph.kinds.expert_biases import ChosenBias, ChosenBiasGradient, ShiftRows, SumRows
from autoshard.graph.op import Call


def _experts_of_rows(ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the number of the expert of each row."""
    return torch.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=num_rows)


def _shift_rows(kind: ShiftRows, call: Call, context: KernelContext) -> Kernel:
    if not context.packed:
        return lambda rows, bias: (rows + bias.unsqueeze(1),)
    return lambda rows, bias, ends: (rows + bias[_experts_of_rows(ends, rows.shape[1])],)


def _sum_rows(kind: SumRows, call: Call, context: KernelContext) -> Kernel:
    if not context.packed:
        return lambda rows: (rows.sum(1),)
    experts = call.sizes["experts"]

    def run(rows: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor]:
        """Multiply with who is whose: rows added one by one would be added in another order each time."""
        numbers = torch.arange(experts, device=ends.device).unsqueeze(1)
        is_of = (_experts_of_rows(ends, rows.shape[1]) == numbers).to(rows.dtype)
        return (is_of @ rows[0],)

    return run


def _shares(call: Call) -> Callable[..., torch.Tensor]:
    """Return a function that makes a matrix of the weights of choices: a row for each token, a column per expert."""
    experts = call.sizes["experts"]

    def run(weight: torch.Tensor, expert: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        counted = weight * (place[0] >= 0) if place else weight
        shares = counted.new_zeros((*weight.shape[:2], experts))
        return shares.scatter_(-1, expert, counted).flatten(0, 1)

    return run


def _chosen_bias(kind: ChosenBias, call: Call, context: KernelContext) -> Kernel:
    shares = _shares(call)

    def run(
        weight: torch.Tensor, expert: torch.Tensor, bias: torch.Tensor, *place: torch.Tensor
    ) -> tuple[torch.Tensor]:
        return ((shares(weight, expert, *place) @ bias).view(*weight.shape[:2], bias.shape[1]),)

    return run


def _chosen_bias_gradient(kind: ChosenBiasGradient, call: Call, context: KernelContext) -> Kernel:
    shares = _shares(call)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        upstream, weight, expert, bias, *place = tensors
        d_weight = (upstream @ bias.t()).gather(-1, expert)
        d_bias = shares(weight, expert, *place).t() @ upstream.flatten(0, 1)
        return d_weight * (place[0] >= 0) if place else d_weight, d_bias

    return run


register_kernels({
    ShiftRows: _shift_rows, SumRows: _sum_rows, ChosenBias: _chosen_bias, ChosenBiasGradient: _chosen_bias_gradient,
})  # fmt: skip
