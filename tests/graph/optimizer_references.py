"""What torch's optimizers and its clipping say of one step."""

from typing import Any

import pytest

from autoshard.graph.kinds.optimizer import AdamW
from tests.graph.attention_references import Sizes

torch: Any = pytest.importorskip("torch")


def reference_adamw(weight: Any, first: Any, second: Any, gradient: Any, *scalars: Any) -> tuple[Any, ...]:
    """Let torch's optimizer take one step from this very state."""
    clip, rate, step, _ = scalars
    kind, leaf = AdamW(), weight.clone().requires_grad_()
    betas = (kind.beta1, kind.beta2)
    optimizer = torch.optim.AdamW([leaf], lr=float(rate), betas=betas, eps=kind.eps, weight_decay=kind.decay)
    before = torch.tensor(float(step) - 1, dtype=torch.float64)
    optimizer.state[leaf] = {"step": before, "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
    leaf.grad = gradient * clip
    optimizer.step()
    state = optimizer.state[leaf]
    return leaf.detach(), state["exp_avg"], state["exp_avg_sq"]


def reference_sgd(weight: Any, gradient: Any, clip: Any, rate: Any, _: Sizes) -> Any:
    leaf = weight.clone().requires_grad_()
    leaf.grad = gradient * clip
    torch.optim.SGD([leaf], lr=float(rate)).step()
    return leaf.detach()


def reference_clip(first: Any, second: Any, _: Sizes) -> tuple[Any, Any]:
    """Clip two parameters whose gradients have these squares."""
    roots = (first.sqrt(), second.sqrt())
    parameters = [torch.nn.Parameter(torch.zeros_like(root)) for root in roots]
    for parameter, root in zip(parameters, roots, strict=True):
        parameter.grad = root.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    return parameters[0].grad / roots[0], norm
