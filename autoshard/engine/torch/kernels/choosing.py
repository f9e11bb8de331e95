"""Routers by scores of all experts in torch, at least in FP32: choices hang on differences of scores that are small."""

import torch

from autoshard.engine.torch.formats import wide
from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, register_kernels
from autoshard.engine.torch.kernels.router import load_of
from autoshard.graph.kinds.choosing import TINY, Choose, ChooseGradient, CorrectionStep, ExcessLoad
from autoshard.graph.op import Call
from autoshard.spec.model_parts import Router

Made = tuple[torch.Tensor, ...]


def _choose(kind: Choose, call: Call, context: KernelContext) -> Kernel:
    router, count = kind.router, call.sizes["choices"]
    dtype = context.formats.of(call.outputs[0].dtype)

    def run(logits: torch.Tensor, *correction: torch.Tensor) -> Made:
        scores = _scores(router, logits)
        expert = _best(_within_groups(router, scores + wide(correction[0]) if correction else scores), count)
        weight = scores.gather(-1, expert)
        if router.normalised:
            weight = weight / (weight.sum(-1, keepdim=True) + TINY)
        return (weight * router.scale).to(dtype), expert

    return run


def _choose_gradient(kind: ChooseGradient, call: Call, context: KernelContext) -> Kernel:
    router = kind.router

    def run(upstream: torch.Tensor, logits: torch.Tensor, expert: torch.Tensor) -> Made:
        scores, slope = _scores(router, logits), wide(upstream) * router.scale
        if router.normalised:
            picked = scores.gather(-1, expert)
            total = picked.sum(-1, keepdim=True) + TINY
            slope = (slope - (slope * picked).sum(-1, keepdim=True) / total) / total
        at_experts = torch.zeros_like(scores).scatter_(-1, expert, slope)
        if router.scores == "sigmoid":
            return ((at_experts * scores * (1 - scores)).to(logits.dtype),)
        return ((scores * (at_experts - (at_experts * scores).sum(-1, keepdim=True))).to(logits.dtype),)

    return run


def _excess_load(kind: ExcessLoad, call: Call, context: KernelContext) -> Kernel:
    num_experts, dtype = call.sizes["experts"], context.formats.of(call.outputs[0].dtype)
    return lambda expert: (load_of(expert, 1, num_experts, dtype)[0].mul_(num_experts).sub_(expert.numel()),)


def _correction_step(kind: CorrectionStep, call: Call, context: KernelContext) -> Kernel:
    return lambda correction, excess: (correction.sub_(excess.sign(), alpha=kind.speed),)


def _scores(router: Router, logits: torch.Tensor) -> torch.Tensor:
    return wide(logits).sigmoid() if router.scores == "sigmoid" else wide(logits).softmax(-1)


def _best(ranked: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the largest numbers; ties go to the lower place."""
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def _within_groups(router: Router, ranked: torch.Tensor) -> torch.Tensor:
    if router.groups == 1:
        return ranked
    by_group = ranked.unflatten(-1, (router.groups, -1))
    summed = 1 if router.group_score == "best" else 2
    groups = _best(by_group.topk(summed, dim=-1).values.sum(-1), router.chosen_groups)
    is_in = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=ranked.device).scatter_(-1, groups, True)
    return by_group.masked_fill(~is_in.unsqueeze(-1), float("-inf")).flatten(-2)


register_kernels({
    Choose: _choose, ChooseGradient: _choose_gradient, ExcessLoad: _excess_load, CorrectionStep: _correction_step,
})  # fmt: skip
