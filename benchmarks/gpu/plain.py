"""The step of plain PyTorch on a GPU: BF16 weights, FP32 masters, fused AdamW, all of the module compiled."""

# pyright: basic
# torch's own signatures are only partly typed.

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from autoshard.run.protocol import Batch
from autoshard.spec.model import ModelSpec
from benchmarks import plain_llama


class ExpertLayer(plain_llama.Layer):
    """A layer whose MLP is a mixture of experts that drops nothing, as grouped products compute it."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__(replace(model, ffn=1))
        del self.gate, self.up, self.down
        self.router = nn.Linear(model.hidden, model.num_experts, bias=False)
        wide, narrow = (model.num_experts, model.hidden, model.ffn), (model.num_experts, model.ffn, model.hidden)
        self.gates, self.ups = (nn.Parameter(torch.randn(wide) * 0.02) for _ in range(2))
        self.downs = nn.Parameter(torch.randn(narrow) * 0.02)
        self.chosen = model.experts_per_token

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Send every token to its best experts, and add what they make by their weights."""
        flat = x.flatten(0, 1)
        weights, experts = self.router(flat).float().softmax(-1).topk(self.chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = experts.flatten().argsort(stable=True)
        numbers = torch.arange(self.router.out_features, device=x.device)
        ends = (experts.flatten() == numbers[:, None]).sum(1).cumsum(0).int()
        rows = flat[order // self.chosen]
        gate, up = (functional.grouped_mm(rows, one, offs=ends) for one in (self.gates, self.ups))
        made = functional.grouped_mm(functional.silu(gate) * up, self.downs, offs=ends)
        weighted = made * weights.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, order // self.chosen, weighted).view_as(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """A module in BF16 with masters."""

    module: Any
    compiled: Any
    masters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    device: torch.device

    def step(self, batches: Sequence[Batch]) -> None:
        """Add up the gradients of the micro-batches, clip, update masters, and copy them to the weights."""
        weights = list(self.module.parameters())
        for batch in batches:
            tokens, labels = (torch.from_numpy(batch[name]).to(self.device) for name in ("tokens", "labels"))
            (self.compiled(tokens, labels) / len(batches)).backward()
        for weight, master in zip(weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, plain_llama.CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, list(self.masters))  # pyright: ignore[reportPrivateImportUsage]

    def numbers(self) -> list[torch.Tensor]:
        """Return the weights and masters."""
        return [*self.module.parameters(), *self.masters]

    def moments(self) -> list[torch.Tensor]:
        """Return both moments of every weight, which exist after the first step."""
        return [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def plain_step(model: ModelSpec, seq_len: int, device: torch.device, backend: str) -> PlainRun:
    """Return plain PyTorch's step of a model."""
    with device:
        layer = ExpertLayer if model.num_experts else plain_llama.Layer
        module = plain_llama.PlainLlama(model, seq_len, layer=layer).to(torch.bfloat16)
    cos, sin = module.turns
    module.turns = (cos.bfloat16(), sin.bfloat16())

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return plain_llama.loss(module(tokens).float(), labels)

    masters = [nn.Parameter(one.detach().float()) for one in module.parameters()]
    optimizer = torch.optim.AdamW(masters, 1e-3, (0.9, 0.95), 1e-8, 0.1, fused=True)
    compiled = torch.compile(loss, backend=backend)
    return PlainRun(module=module, compiled=compiled, masters=masters, optimizer=optimizer, device=device)
