"""The losses of routers in torch, at least in FP32: probabilities of many experts are small."""

from collections.abc import Callable

import torch

from autoshard.engine.observing import Observation
from autoshard.engine.torch.formats import wide
from autoshard.engine.torch.kernels.indexing import is_chosen
from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, register_kernels, shape_of
from autoshard.graph.kinds.router import RouterBalance, RouterBalanceGradient, RouterLoad, RouterZ, RouterZGradient
from autoshard.graph.op import Call
from autoshard.spec.model_parts import RouterScores


def load_of(chosen: torch.Tensor, num_rows: int, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Count how often each expert is chosen in each of so many equal parts of [batch, seq, choices]."""
    if num_rows == 1:
        return is_chosen(chosen, num_experts).sum(0).to(dtype).unsqueeze(0)
    rows = chosen.reshape(num_rows, -1)
    ones = torch.ones(rows.shape, dtype=dtype, device=chosen.device)
    return torch.zeros((num_rows, num_experts), dtype=dtype, device=chosen.device).scatter_add_(1, rows, ones)


def _router_load(kind: RouterLoad, call: Call, context: KernelContext) -> Kernel:
    shape, dtype = shape_of(call, call.outputs[0].dims), context.formats.of("fp32")
    rows = shape[0] if kind.over == "sequence" else 1
    return lambda chosen: (load_of(chosen, rows, shape[-1], dtype).view(shape),)


def _factor(call: Call) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what turns a load into that by which it multiplies each probability."""
    experts, choices = call.sizes["experts"], call.sizes["choices"]

    def run(load: torch.Tensor) -> torch.Tensor:
        num_tokens = load.sum(-1, keepdim=True) / choices
        factor = experts * load / num_tokens.square()
        return factor.unsqueeze(1) if load.dim() > 1 else factor

    return run


def probabilities(scores: RouterScores) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes probabilities of all experts of logits, in FP32 at least."""
    if scores == "softmax":
        return lambda logits: wide(logits).softmax(-1)

    def run(logits: torch.Tensor) -> torch.Tensor:
        values = wide(logits).sigmoid()
        return values / values.sum(-1, keepdim=True)

    return run


def _router_balance(kind: RouterBalance, call: Call, context: KernelContext) -> Kernel:
    factor, probability_of = _factor(call), probabilities(kind.scores)
    return lambda logits, load: ((probability_of(logits) * factor(load)).sum(),)


def _router_balance_gradient(kind: RouterBalanceGradient, call: Call, context: KernelContext) -> Kernel:
    factor, probability_of = _factor(call), probabilities(kind.scores)

    def run(upstream: torch.Tensor, logits: torch.Tensor, load: torch.Tensor) -> tuple[torch.Tensor, ...]:
        probability, factors = probability_of(logits), factor(load)
        mean = (probability * factors).sum(-1, keepdim=True)
        slope = upstream * probability * (factors - mean)
        if kind.scores == "sigmoid":
            slope = slope * (1 - wide(logits).sigmoid())
        return (slope.to(logits.dtype),)

    return run


def _router_z(kind: RouterZ, call: Call, context: KernelContext) -> Kernel:
    return lambda logits: (wide(logits).logsumexp(-1).square().sum(),)


def _router_z_gradient(kind: RouterZGradient, call: Call, context: KernelContext) -> Kernel:
    def run(upstream: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide_logits = wide(logits)
        total = wide_logits.logsumexp(-1, keepdim=True)
        return ((2 * upstream * total * wide_logits.softmax(-1)).to(logits.dtype),)

    return run


def observing(seen: Observation, num_experts: int) -> Kernel:
    """Return the function that makes a row of numbers of what is noted."""
    if seen.noted == "dropped":
        return lambda place: ((place < 0).sum().float().view(1),)

    def run(logits: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        entropy = torch.special.entr(probabilities(seen.probabilities)(logits)).sum()
        return (torch.cat([load_of(chosen, 1, num_experts, entropy.dtype)[0], entropy.view(1)]),)

    return run


register_kernels({
    RouterLoad: _router_load, RouterBalance: _router_balance, RouterBalanceGradient: _router_balance_gradient,
    RouterZ: _router_z, RouterZGradient: _router_z_gradient,
})  # fmt: skip
