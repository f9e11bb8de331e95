"""The engine with the real NxD on a CPU: the numbers of one process and of the torch engine, feature by feature."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.spec.training import AdamWConstants
from autoshard.spec.workload import Precision
from tests.neuron.cases import CASES, DROPPING, errors_of, gradient_error, nxd_plan, ran
from tests.ranks.cases import MIXTRAL, Task, llama

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
RELATIVE = 2e-6  # of FP32 sums of some hundred terms, beside doubles
OF_A_STEP = 0.02  # AdamW divides gradients by themselves, so that noise shows in small ones


@pytest.mark.parametrize("name", list(CASES))
def test_nxd_agrees_with_one_process_and_with_the_torch_engine(name: str) -> None:
    errors = errors_of(CASES[name])
    assert max(errors.loss, errors.gradients, errors.norm) < RELATIVE, errors
    assert errors.weights < (RELATIVE if "SGD" in name else OF_A_STEP), errors


def test_constants_reach_the_optimizer_and_weights_decay_as_the_graph_says() -> None:
    own = AdamWConstants(beta1=0.7, beta2=0.8, eps=1e-3, weight_decay=3.0)  # an eps beside which noise is small
    assert errors_of(CASES["learned positions, biases, tied embeddings"], own).weights < 1e-4


def test_bf16_with_masters_stays_near_fp32() -> None:
    # Without a reduce_dtype of the weights' format NxD drops the sum of a column layer's gradient: norm off by half.
    for sp, options in (("true", {}), ("false", {}), ("true", MIXTRAL)):
        plan = nxd_plan(f"tp=2,pp=1,dp=2,sp={sp}", llama(vocab=32, **options), precision=Precision.named("bf16"))
        task = Task.of(plan)
        expected = task.reference()
        for rank in ran(task):
            np.testing.assert_allclose([rank.losses[0], rank.norms[0]], [expected.loss, expected.norm], rtol=2e-2)
            held = rank.memory_bytes
            assert held["gradients"] == 2 * held["weights"] and held["optimizer"] == 2 * held["masters"]
            assert held["masters"] >= held["weights"]  # FP32 halves of BF16 weights, padded to two equal pieces


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("tp + sp", "mark"),  # fused queries, keys and values lose theirs, so that the norm counts a part of them
        ("copies of keys, trn1", "mark"),  # copies count as often as they are held
        ("tp + sp", "max_norm"),  # ZeRO-1 clips at 1.0, whatever the trainer was told
        ("copies of keys, trn2", "fill"),  # NxD repeats rows of keys, not heads
        # As recipes of the vendor have it, what is left of a token weighs more; a plan's shares are of its choices.
        ("experts that drop tokens", "shares"),
    ],
)
def test_every_measure_against_a_defect_is_needed(name: str, without: str) -> None:
    task = Task.of(CASES[name].plan())
    expected, found = task.reference(), ran(task, CASES[name].platform, without)
    if without in ("max_norm", "shares"):
        assert gradient_error(expected, found) > (0.1 if without == "max_norm" else 1e-2)
    else:
        assert not np.allclose([rank.norms[0] for rank in found], expected.norm, rtol=1e-3)


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("tp=2,pp=1,dp=1,mbs=2", 0.75),  # Rule nxd-expert-order: NxD queues [seq, batch], a plan [batch, seq]
        ("tp=1,pp=1,dp=2", 0.8),  # Rule nxd-expert-slots: NxD has 4 slots on each of two ranks, a plan 7
    ],
)
def test_what_rules_refuse_of_experts_drops_other_tokens(text: str, capacity: float) -> None:
    case = replace(CASES["experts that drop tokens"], text=text, workload={"expert_capacity": capacity})
    task = Task.of(case.plan())
    assert gradient_error(task.reference(), ran(task)) > 1e-2


def test_what_is_computed_again_is_wrapped() -> None:
    counts = {"none": 0, "full": 2, "selective[LlamaMLP]": 2, "selective[LlamaRMSNorm]": 4}
    for options, capacity in (({}, None), (MIXTRAL, DROPPING["expert_capacity"])):
        for recompute, count in counts.items():
            text, model = f"tp=1,pp=1,dp=1,recompute={recompute}", llama(vocab=32, **options)
            (rank,) = ran(Task.of(nxd_plan(text, model, expert_capacity=capacity)))
            assert rank.num_wrapped == count, recompute
