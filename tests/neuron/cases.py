"""Plans of the nxd engine for small models and few ranks, and what ranks of the real NxD find."""

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from autoshard.graph.op import Array
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.training import AdamWConstants, Training
from autoshard.spec.workload import Precision, Workload
from tests.neuron import kernels, standins
from tests.neuron.nxd_ranks import on_nxd_ranks
from tests.ranks.cases import CLIP_NORM, MIXTRAL, Arrays, Task, gpt, llama, run_steps
from tests.ranks.shares import Held, assemble
from tests.reference_step import StepResult
from tests.tabled import tabled

PATIENCE_S = 300.0
NOISE = 1e-12  # gradients below it are zero but for rounding: those of key biases
USUAL = AdamWConstants()
COPIED = {"num_heads": 4, "num_kv_heads": 2}
DROPPING = {"expert_capacity": 0.75}


def few_ranks(platform: str, num_ranks: int) -> Cluster:
    """A node of just so many ranks, otherwise like the platform's."""
    whole = load_cluster({"trn1": "trn1.32xlarge", "trn2": "trn2.48xlarge"}[platform])
    links = tuple(replace(link, ranks_per_port=1) for link in whole.links if link.domain in ("chip", "node"))
    return replace(whole, chips_per_node=num_ranks, ranks_per_chip=1, links=links, placements=())


def nxd_plan(text: str, model: ModelSpec, platform: str = "trn1", **changes: Any) -> Plan:
    """The plan of a candidate, with the best table for it; Rules about real nodes are not asked."""
    candidate = Candidate.parse(text)
    usual: dict[str, Any] = {"seq_len": 8, "global_batch": 8, "precision": Precision.named("fp32")}
    workload = Workload(**({**usual, "clip_norm": CLIP_NORM} | changes))
    return tabled(build_plan(candidate, model, few_ranks(platform, candidate.num_ranks), workload, "nxd"))


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
        for batch in (batch for step in task.steps for batch in step if self.padded):
            batch["token_weight"][:, batch["token_weight"].shape[1] // 2 :] = 0
        return replace(task, learning_rate=5.0) if self.workload.get("optimizer") == "sgd" else task


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
    "experts": Case(text="tp=2,pp=1,dp=1,mbs=2", options=MIXTRAL),
    "experts without sp": Case(text="tp=2,pp=1,dp=1,sp=false,mbs=2", options=MIXTRAL),
    "experts, tp x pp": Case(text="tp=2,pp=2,dp=1,recompute=full:1", options={**MIXTRAL, "num_layers": 4}),
    "experts, copies of keys": Case(text="tp=4,pp=1,dp=1", options={**MIXTRAL, **COPIED}),
    "experts without tp": Case(text="tp=1,pp=1,dp=2", options=MIXTRAL),
    "experts that drop tokens": Case(text="tp=2,pp=1,dp=1", options=MIXTRAL, workload=DROPPING),
    "experts that drop tokens, tp x dp, ZeRO-1": Case(text="tp=2,pp=1,dp=2", options=MIXTRAL, workload=DROPPING),
    "experts that drop tokens, without sp": Case(
        text="tp=2,pp=1,dp=2,sp=false,mbs=2", options=MIXTRAL, workload=DROPPING
    ),
    "experts that drop tokens, context parallelism": Case(
        text="tp=2,pp=1,cp=2,dp=1", options=MIXTRAL, workload=DROPPING | {"seq_len": 16}
    ),
    "experts that drop tokens, computed again": Case(
        text="tp=2,pp=1,dp=1,recompute=selective[LlamaMLP]", options=MIXTRAL, workload=DROPPING
    ),
    "core attention, computed again": Case(text="tp=2,pp=1,dp=1,kernels=nxd_core,recompute=selective[CoreAttention]"),
}


# -- what ranks run ------------------------------------------------------------------------------------


@contextmanager
def as_started(num_local: int, platform: str = "trn1") -> Iterator[None]:
    """Be a rank as this platform starts it; of a whole node's ranks, else tp 4 on trn1 takes every second one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ |= {standins.PLATFORM: platform, "LOCAL_WORLD_SIZE": str(num_local)}
        kernels.put_in_place()
        model: Any = importlib.import_module("autoshard.engine.nxd.model")
        model.ring_kernel = lambda: kernels.ring_attention
        yield


@dataclass(frozen=True, kw_only=True)
class RankFound:
    """What one rank has of every step: loss, norm, its parts of the gradients, and of the weights in the end."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[tuple[tuple[str, Held], ...], ...]
    weights: tuple[tuple[str, Held], ...]  # that the model computes with, which are not those that are updated
    num_wrapped: int  # modules that are computed again
    memory_bytes: Mapping[str, int]


class Noting(torch.optim.Optimizer):
    """An optimizer that notes the gradients it is given."""

    def step(self, closure: Any = None) -> Any:
        self.noted = [one.grad.clone() for group in self.param_groups for one in group["params"]]
        return super().step(closure)


class NotingAdamW(Noting, torch.optim.AdamW):
    """The same with the name that torch gives it."""


class NotingSgd(Noting, torch.optim.SGD):
    """The same without moments."""


def run_nxd(task: Task, platform: str, without: str) -> RankFound:
    """What every rank runs: the steps of a task with the real NxD, perhaps without a measure against its defects."""
    with as_started(task.plan.mesh.size("tp"), platform):
        from autoshard.engine.nxd.engine import NxdEngine

        _leave_out(without)
        torch.optim.AdamW, torch.optim.SGD = NotingAdamW, NotingSgd  # pyright: ignore
        engine: Any = NxdEngine(task.plan, task.weights.__getitem__, task.training.adamw)
        reports, gradients = [], []
        for batches in task.steps:
            reports.append(engine.step(batches, task.learning_rate, lambda _: True))
            clip = min(1.0, task.plan.workload.clip_norm / (reports[-1].norm + 1e-6))
            noted = zip(engine.state.optimized, engine.state.stepping.noted, strict=True)
            gradients.append(tuple(held for one, made in noted for held in _ours(engine, one, made / clip, one.rows)))
        weights = tuple(
            held
            for one in engine.state.optimized
            for held in _ours(engine, one, one.parameter.detach().float(), (0, len(one.parameter)))
        )
    return RankFound(
        losses=tuple(one.loss for one in reports),
        norms=tuple(one.norm for one in reports),
        gradients=tuple(gradients),
        weights=weights,
        num_wrapped=sum(type(one).__name__ == "NxDCheckpointWrapper" for _, one in engine.model.named_modules()),
        memory_bytes=engine.measured().memory_bytes,
    )


def _leave_out(measure: str) -> None:
    """Forget, in this process, what the engine does about a defect of NxD."""
    from autoshard.engine.nxd import engine, model

    if measure in ("mark", "fill"):
        setattr(model.NxdModel, measure, lambda *_: None)
    elif measure == "shares":
        made = model.named
        usual = {"RouterTopK": {"apply_act_fn_over_topk": False}, "ExpertMLPs": {"normalize_top_k_affinities": True}}
        model.named = lambda name: (
            (lambda **given: made(name)(**(given | usual[name]))) if name in usual else made(name)
        )
    elif measure == "max_norm":
        lowering_of = engine.lowering_of
        engine.lowering_of = lambda plan: replace(lowering_of(plan), optimizer={})


def _ours(engine: Any, one: Any, rows: torch.Tensor, which: tuple[int, int]) -> Iterator[tuple[str, Held]]:
    """Yield what rows of a parameter hold of our tensors."""
    from autoshard.engine.nxd.shards import local_patches

    built = engine.built
    for whole in local_patches(one.contents.holds, built.rank, built.sizes, built.whole)[1]:
        for patch in whole.rows(*which):
            bounds = tuple((part.start, part.stop) for part in patch.place)
            yield f"{one.contents.instance}.{patch.tensor}", Held(bounds=bounds, array=patch.view(rows).numpy())


# -- what they found against one process and the torch engine ------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The largest distances in two steps, relative; gradients to the largest, weights to the largest change of any."""

    loss: float
    gradients: float
    norm: float
    weights: float


def ran(task: Task, platform: str = "trn1", without: str = "") -> list[RankFound]:
    """Run a task with the real NxD on as many processes as it has ranks."""
    return on_nxd_ranks(task.plan.mesh.num_ranks, run_nxd, task, platform, without, timeout_s=PATIENCE_S)


def errors_of(case: Case, constants: AdamWConstants = USUAL) -> Errors:
    """Run a case twice over: with NxD, and with the torch engine in double, which is held against one process here."""
    task = replace(case.task(), training=Training(adamw=constants))
    found = ran(task, case.platform)
    shares = on_nxd_ranks(task.plan.mesh.num_ranks, run_steps, task, timeout_s=PATIENCE_S)
    one, first = task.reference(), shares[0]
    np.testing.assert_allclose([first[0].loss, first[0].norm], [one.loss, one.norm], rtol=1e-12)
    steps = [(rank, step) for rank in found for step in range(2)]
    weights, moves, errors = whole(task.weights, [rank.weights for rank in found]), list[float](), list[float]()
    assert set(weights) | {name for name in task.weights if name not in one.gradients} == set(task.weights)
    for name in (name for name, gradient in one.gradients.items() if np.abs(gradient).max() > NOISE):
        held = [rank[-1].weights[name] for rank in shares if name in rank[-1].weights]
        expected = assemble(weights[name].shape, held)
        errors.append(float(np.abs(weights[name] - expected).max()))
        moves.append(float(np.abs(expected - task.weights[name]).max()))
    assert min(moves) > 0, "nothing would be compared"
    return Errors(
        loss=max(abs(rank.losses[step] / first[step].loss - 1) for rank, step in steps),
        gradients=gradient_error(one, found),
        norm=max(abs(rank.norms[step] / first[step].norm - 1) for rank, step in steps),
        weights=max(errors) / max(moves),
    )


def gradient_error(expected: StepResult, found: Sequence[RankFound]) -> float:
    """Every gradient of the first step, relative to the largest of the model."""
    gradients = whole(expected.gradients, [rank.gradients[0] for rank in found])
    assert set(gradients) == set(expected.gradients)
    largest = max(np.abs(gradient).max() for gradient in expected.gradients.values())
    return max(np.abs(gradients[name] - gradient).max() / largest for name, gradient in expected.gradients.items())


def whole(like: Mapping[str, Array], parts: Sequence[Sequence[tuple[str, Held]]]) -> Arrays:
    """Put tensors together from what all ranks have, but those that are tied to others; copies must be equal."""
    held = {name: [one for rank in parts for other, one in rank if other == name] for name in like}
    return {name: assemble(like[name].shape, found) for name, found in held.items() if found}
