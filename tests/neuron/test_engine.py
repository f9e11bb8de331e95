"""The engine with the real NxD on a CPU: the numbers of one process and of the torch engine, feature by feature."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from autoshard.graph.evaluate import StepResult
from autoshard.plan.plan import Plan
from autoshard.spec.workload import Precision
from tests.neuron.cases import RankFound, nxd_plan, run_nxd, whole
from tests.ranks.cases import LEARNING_RATE, Arrays, Task, gpt, llama, run_steps
from tests.ranks.spawn import on_ranks

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
PATIENCE_S = 300.0
RELATIVE = 2e-6  # of FP32 sums of some hundred terms, beside doubles


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan to run, and on which platform's order of ranks."""

    text: str
    platform: str = "trn1"
    model: Callable[..., Any] = llama
    options: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> Plan:
        options = {"vocab": 32, **self.options} if self.model is llama else self.options
        return nxd_plan(self.text, self.model(**options), self.platform, **self.workload)


COPIED = {"num_heads": 4, "num_kv_heads": 2}
CASES = {
    "tp": Case(text="tp=2,pp=1,dp=1,sp=false"),
    "tp + sp": Case(text="tp=2,pp=1,dp=1"),
    "odd vocabulary": Case(text="tp=2,pp=1,dp=1", options={"vocab": 31}),
    "learned positions, biases, tied embeddings": Case(text="tp=2,pp=1,dp=2", model=gpt),
    "queries and keys normed": Case(text="tp=4,pp=1,dp=1", options={**COPIED, "qk_norm": True}),
    "copies of keys, trn1": Case(text="tp=4,pp=1,dp=1", options=COPIED),
    "copies of keys, trn2": Case(text="tp=4,pp=1,dp=1", options=COPIED, platform="trn2"),
    "copies of keys without sp": Case(text="tp=4,pp=1,dp=2,sp=false", options=COPIED, platform="trn2"),
    "one KV head": Case(text="tp=2,pp=1,dp=2", options={"num_heads": 4, "num_kv_heads": 1}),
    "zero=0": Case(text="tp=2,pp=1,dp=2,zero=0"),
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
    "core attention, computed again": Case(text="tp=2,pp=1,dp=1,kernels=nxd_core,recompute=selective[CoreAttention]"),
}


def ran(task: Task, platform: str, **changes: Any) -> list[RankFound]:
    return on_ranks(task.plan.mesh.num_ranks, run_nxd, task, platform, changes, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("name", list(CASES))
def test_nxd_agrees_with_one_process_and_with_the_torch_engine(name: str) -> None:
    case = CASES[name]
    task = Task.of(case.plan(), 2)
    found = ran(task, case.platform)
    # The torch engine executes the same plan on as many ranks in double, where it equals one process (tests/ranks).
    shares = on_ranks(task.plan.mesh.num_ranks, run_steps, task, timeout_s=PATIENCE_S)
    one = task.reference()
    np.testing.assert_allclose(shares[0][0].norm, one.norm, rtol=1e-12)
    compare_gradients(one, [rank.gradients[0] for rank in found])
    for step in range(2):
        expected = shares[0][step]
        for rank in found:
            np.testing.assert_allclose(rank.losses[step], expected.loss, rtol=RELATIVE)
            np.testing.assert_allclose(rank.norms[step], expected.norm, rtol=RELATIVE)
    zero = {name for name, gradient in one.gradients.items() if np.abs(gradient).max() < 1e-12}
    compare_weights(task, [dict(rank[-1].weights) for rank in shares], found, zero)


def compare_gradients(expected: StepResult, parts: Sequence[Any]) -> None:
    """Every gradient, relative to the largest of the model; tied weights have one, that of the owner."""
    gradients = whole(expected.gradients, parts)
    assert set(gradients) == set(expected.gradients)
    largest = max(np.abs(gradient).max() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=RELATIVE * largest, err_msg=name)


def compare_weights(task: Task, shares: Sequence[Any], found: Sequence[RankFound], zero: set[str]) -> None:
    """Two updates: AdamW divides gradients by themselves, so small ones show noise; ``zero`` ones are nothing else."""
    from autoshard.engine.place import assemble

    weights: Arrays = whole(task.weights, [rank.weights for rank in found])
    assert set(weights) >= {name for name in task.weights if not name.startswith("head.0.unembed")}
    for name, array in ((name, array) for name, array in weights.items() if name not in zero):
        parts = [share[name] for share in shares if name in share]
        expected = assemble(array.shape, parts)
        np.testing.assert_allclose(array, expected, rtol=0, atol=0.02 * LEARNING_RATE, err_msg=name)
        assert np.abs(expected - task.weights[name]).max() > 0.5 * LEARNING_RATE, f"{name} has not moved"


def test_bf16_with_masters_stays_near_fp32() -> None:
    # Without a reduce_dtype of the weights' format NxD drops the sum of a column layer's gradient: norm off by half.
    for sp in ("true", "false"):
        plan = nxd_plan(f"tp=2,pp=1,dp=2,sp={sp}", llama(vocab=32), precision=Precision.named("bf16"))
        task = Task.of(plan, 1)
        expected = task.reference()
        for rank in ran(task, "trn1"):
            np.testing.assert_allclose([rank.losses[0], rank.norms[0]], [expected.loss, expected.norm], rtol=2e-2)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("tp + sp", "marks"),  # fused queries, keys and values lose theirs, so that the norm counts a part of them
        ("copies of keys, trn1", "marks"),  # copies count as often as they are held
        ("tp + sp", "max_norm"),  # ZeRO-1 clips at 1.0, whatever the trainer was told
        ("copies of keys, trn2", "weights"),  # NxD repeats rows of keys, not heads
    ],
)
def test_every_measure_against_a_defect_is_needed(name: str, without: str) -> None:
    case = CASES[name]
    task = Task.of(case.plan(), 1)
    expected, found = task.reference(), ran(task, case.platform, without=without)
    close = np.allclose([rank.norms[0] for rank in found], expected.norm, rtol=1e-3)
    assert close == (without == "max_norm")
    if without == "max_norm":
        with pytest.raises(AssertionError):
            compare_gradients(expected, [rank.gradients[0] for rank in found])


def test_what_is_computed_again_is_wrapped() -> None:
    counts = {"none": 0, "full": 2, "selective[LlamaMLP]": 2, "selective[LlamaRMSNorm]": 4}
    for recompute, count in counts.items():
        task = Task.of(nxd_plan(f"tp=1,pp=1,dp=1,recompute={recompute}", llama(vocab=32)), 1)
        (rank,) = ran(task, "trn1")
        assert rank.num_wrapped == count, recompute


def test_a_rank_tells_what_it_holds() -> None:
    task = Task.of(nxd_plan("tp=2,pp=1,dp=2", llama(vocab=32), precision=Precision.named("bf16")), 1)
    held = ran(task, "trn1")[0].memory_bytes
    assert held["gradients"] == 2 * held["weights"] and held["optimizer"] == 2 * held["masters"]
    assert held["masters"] >= held["weights"]  # FP32 halves of BF16 weights, padded to two equal pieces
