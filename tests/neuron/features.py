"""Features of plans to hold against the real NxD, and how far its numbers are from one process and the torch engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoshard.plan.plan import Plan
from tests.neuron.cases import RankFound, nxd_plan, run_nxd, whole
from tests.ranks.cases import Arrays, Task, gpt, llama, run_steps
from tests.ranks.shares import assemble
from tests.ranks.spawn import on_ranks
from tests.reference_step import StepResult

PATIENCE_S = 300.0
SGD_RATE = 5.0
NOISE = 1e-12  # gradients below it are zero but for rounding: those of key biases


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan to run, and on which platform's order of ranks."""

    text: str
    platform: str = "trn1"
    model: Callable[..., Any] = llama
    options: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    padded: bool = False  # the second half of every sequence counts for nothing

    def plan(self) -> Plan:
        options = {"vocab": 32, **self.options} if self.model is llama else self.options
        return nxd_plan(self.text, self.model(**options), self.platform, **self.workload)

    def task(self) -> Task:
        """Two steps; SGD makes as large ones as AdamW does."""
        task = Task.of(self.plan(), 2)
        if self.padded:
            task = replace(task, steps=tuple(tuple(_padded(batch) for batch in step) for step in task.steps))
        return replace(task, learning_rate=SGD_RATE) if self.workload.get("optimizer") == "sgd" else task


def _padded(batch: Arrays) -> Arrays:
    weight = batch["token_weight"].copy()
    weight[:, weight.shape[1] // 2 :] = 0
    return {**batch, "token_weight": weight}


COPIED = {"num_heads": 4, "num_kv_heads": 2}
EXPERTS = {"num_experts": 4, "experts_per_token": 2}
DROPPING = {"expert_capacity": 0.75}
CASES = {
    "tp": Case(text="tp=2,pp=1,dp=1,sp=false"),
    "tp + sp": Case(text="tp=2,pp=1,dp=1"),
    "tp + sp, several sequences": Case(text="tp=2,pp=1,dp=2,mbs=2"),
    "odd vocabulary": Case(text="tp=2,pp=1,dp=1", options={"vocab": 31}),
    "learned positions, biases, tied embeddings": Case(text="tp=2,pp=1,dp=2", model=gpt),
    "parallel residual": Case(text="tp=2,pp=1,dp=1", options={"parallel_residual": True}),
    "queries and keys normed": Case(text="tp=4,pp=1,dp=1", options={**COPIED, "qk_norm": True}),
    "copies of keys, trn1": Case(text="tp=4,pp=1,dp=1", options=COPIED),
    "copies of keys, trn2": Case(text="tp=4,pp=1,dp=1", options=COPIED, platform="trn2"),
    "copies of keys without sp": Case(text="tp=4,pp=1,dp=2,sp=false", options=COPIED, platform="trn2"),
    "one KV head": Case(text="tp=2,pp=1,dp=2", options={"num_heads": 4, "num_kv_heads": 1}),
    "zero=0": Case(text="tp=2,pp=1,dp=2,zero=0"),
    "SGD": Case(text="tp=2,pp=1,dp=2", workload={"optimizer": "sgd"}),
    "SGD, copies of keys, pp": Case(
        text="tp=4,pp=2,dp=1", options=COPIED, platform="trn2", workload={"optimizer": "sgd"}
    ),
    "dp, ZeRO-1": Case(text="tp=1,pp=1,dp=4"),
    "1f1b": Case(text="tp=1,pp=4,dp=1,mbs=1", options={"num_layers": 4}),
    "1f1b, as many micro-batches as stages": Case(text="tp=1,pp=4,dp=1,mbs=2", options={"num_layers": 4}),
    "interleaved": Case(text="tp=2,pp=2,dp=1,vp=2,schedule=interleaved,mbs=1", options={"num_layers": 4}),
    "uneven cuts": Case(text="tp=1,pp=4,dp=1,stages=1/2/3/2", options={"num_layers": 8}),
    "tp x pp x dp, ZeRO-1": Case(text="tp=2,pp=2,dp=2"),
    "full recompute": Case(text="tp=2,pp=1,dp=1,recompute=full"),
    "full recompute of some layers, pp": Case(text="tp=2,pp=2,dp=1,recompute=full:1", options={"num_layers": 4}),
    "selective recompute": Case(text="tp=2,pp=1,dp=1,recompute=selective[LlamaRMSNorm,ActivationMultiplyMLP]"),
    "selective recompute of MLPs": Case(text="tp=2,pp=1,dp=1,recompute=selective[LlamaMLP]"),
    "context parallelism": Case(text="tp=1,pp=1,cp=2,dp=1"),
    "context parallelism, one rank with padding only": Case(text="tp=1,pp=1,cp=2,dp=1", padded=True),
    "context parallelism, dp, ZeRO-1, SGD": Case(text="tp=1,pp=1,cp=2,dp=2", workload={"optimizer": "sgd"}),
    "context parallelism, tp, shared KV heads": Case(
        text="tp=2,pp=1,cp=2,dp=1", options={"num_heads": 8, "num_kv_heads": 2}
    ),
    "context parallelism, learned positions": Case(text="tp=2,pp=1,cp=2,dp=1", model=gpt),
    "context parallelism, pp, all computed again": Case(text="tp=1,pp=2,cp=2,dp=1,mbs=2,recompute=full"),
    "experts": Case(text="tp=2,pp=1,dp=1,mbs=2", options=EXPERTS),
    "experts without sp": Case(text="tp=2,pp=1,dp=1,sp=false,mbs=2", options=EXPERTS),
    "experts, tp x pp": Case(text="tp=2,pp=2,dp=1,recompute=full:1", options={**EXPERTS, "num_layers": 4}),
    "experts, copies of keys": Case(text="tp=4,pp=1,dp=1", options={**EXPERTS, **COPIED}),
    "experts without tp": Case(text="tp=1,pp=1,dp=2", options=EXPERTS),
    "experts that drop tokens": Case(text="tp=2,pp=1,dp=1", options=EXPERTS, workload=DROPPING),
    "experts that drop tokens, tp x dp, ZeRO-1": Case(text="tp=2,pp=1,dp=2", options=EXPERTS, workload=DROPPING),
    "experts that drop tokens, without sp": Case(
        text="tp=2,pp=1,dp=2,sp=false,mbs=2", options=EXPERTS, workload=DROPPING
    ),
    "experts that drop tokens, context parallelism": Case(
        text="tp=2,pp=1,cp=2,dp=1", options=EXPERTS, workload=DROPPING | {"seq_len": 16}
    ),
    "experts that drop tokens, computed again": Case(
        text="tp=2,pp=1,dp=1,recompute=selective[LlamaMLP]", options=EXPERTS, workload=DROPPING
    ),
    "core attention, computed again": Case(text="tp=2,pp=1,dp=1,kernels=nxd_core,recompute=selective[CoreAttention]"),
}


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The largest distances in two steps, relative; gradients to the largest, weights to the largest change of any."""

    loss: float
    gradients: float
    norm: float
    weights: float


def ran(task: Task, platform: str, **changes: Any) -> list[RankFound]:
    """Run a task with the real NxD on as many processes as it has ranks."""
    return on_ranks(task.plan.mesh.num_ranks, run_nxd, task, platform, changes, timeout_s=PATIENCE_S)


def errors_of(case: Case) -> Errors:
    """Run a case twice over: with NxD, and with the torch engine in double, which is held against one process here."""
    task = case.task()
    found = ran(task, case.platform)
    shares = on_ranks(task.plan.mesh.num_ranks, run_steps, task, timeout_s=PATIENCE_S)
    one = task.reference()
    np.testing.assert_allclose([shares[0][0].loss, shares[0][0].norm], [one.loss, one.norm], rtol=1e-12)
    losses = [_relative(rank.losses[step], shares[0][step].loss) for rank in found for step in range(2)]
    norms = [_relative(rank.norms[step], shares[0][step].norm) for rank in found for step in range(2)]
    return Errors(
        loss=max(losses),
        gradients=gradient_error(one, [rank.gradients[0] for rank in found]),
        norm=max(norms),
        weights=_weight_error(task, one, [dict(rank[-1].weights) for rank in shares], found),
    )


def gradient_error(expected: StepResult, parts: Sequence[Any]) -> float:
    """Every gradient, relative to the largest of the model."""
    gradients = whole(expected.gradients, parts)
    assert set(gradients) == set(expected.gradients)
    largest = max(np.abs(gradient).max() for gradient in expected.gradients.values())
    return max(np.abs(gradients[name] - gradient).max() / largest for name, gradient in expected.gradients.items())


def _weight_error(task: Task, one: StepResult, shares: Sequence[Any], found: Sequence[RankFound]) -> float:
    """Every weight after two updates but those without a gradient; each has moved, or nothing would be compared."""
    weights, errors, moves = whole(task.weights, [rank.weights for rank in found]), list[float](), list[float]()
    tied = {name for name in task.weights if name not in one.gradients}
    assert set(weights) | tied == set(task.weights)
    for name in one.gradients:
        if np.abs(one.gradients[name]).max() > NOISE:
            expected = assemble(weights[name].shape, [share[name] for share in shares if name in share])
            errors.append(float(np.abs(weights[name] - expected).max()))
            moves.append(float(np.abs(expected - task.weights[name]).max()))
    assert min(moves) > 0
    return max(errors) / max(moves)


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)
