"""Routers by torch's own functions, and what stands in the place of a correction's gradient."""

from collections.abc import Mapping
from typing import Any

import pytest

from autoshard.spec.model_parts import Router

torch: Any = pytest.importorskip("torch")
Sizes = Mapping[str, int]

GREEDY = Router(scores="softmax", normalised=False, scale=1.5)
CORRECTED = Router(scores="sigmoid", scale=2.5, correction=True)
UNCORRECTED = Router(scores="sigmoid", scale=0.5)


class Counted(torch.autograd.Function):
    """Hands weights on; the gradient of a correction is by how much its expert was chosen too often."""

    @staticmethod
    def forward(ctx: Any, weight: Any, correction: Any, expert: Any) -> Any:
        ctx.save_for_backward(correction, expert)
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Any, Any, None]:
        correction, expert = ctx.saved_tensors
        return upstream[0], excess_of(expert, len(correction)).to(correction), None


def excess_of(expert: Any, num_experts: int) -> Any:
    """Count whole numbers: choices of an expert times the experts, less all choices."""
    return num_experts * torch.bincount(expert.flatten(), minlength=num_experts) - expert.numel()


def reference_choose(router: Router) -> Any:
    """Scores, the best of them with their correction, and the weights of these."""

    def choose(logits: Any, *rest: Any) -> tuple[Any, Any]:
        *correction, sizes = rest
        scores = logits.sigmoid() if router.scores == "sigmoid" else logits.softmax(-1)
        expert = (scores + correction[0] if correction else scores).topk(sizes["choices"]).indices
        weight = scores.gather(-1, expert)
        if router.normalised:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        weight = weight * router.scale
        return (Counted.apply(weight, correction[0], expert) if correction else weight), expert

    return choose


def reference_sigmoid_balance(logits: Any, load: Any, sizes: Sizes) -> Any:
    """The balance loss of DeepSeek-V3 for each sequence, but for the number of choices: scores over their sum."""
    scores = logits.sigmoid()
    mean = (scores / scores.sum(-1, keepdim=True)).sum(1) / sizes["seq"]
    return sizes["experts"] * (load.double() / sizes["seq"] * mean).sum()
