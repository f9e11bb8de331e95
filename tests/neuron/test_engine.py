"""The engine with the real NxD on a CPU: the numbers of one process and of the torch engine, feature by feature."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.spec.workload import Precision
from tests.neuron.cases import nxd_plan, run_train
from tests.neuron.features import CASES, DROPPING, EXPERTS, errors_of, gradient_error, ran
from tests.ranks.cases import Task, llama
from tests.ranks.spawn import on_ranks

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
RELATIVE = 2e-6  # of FP32 sums of some hundred terms, beside doubles
OF_A_STEP = 0.02  # AdamW divides gradients by themselves, so that noise shows in small ones


@pytest.mark.parametrize("name", list(CASES))
def test_nxd_agrees_with_one_process_and_with_the_torch_engine(name: str) -> None:
    errors = errors_of(CASES[name])
    assert max(errors.loss, errors.gradients, errors.norm) < RELATIVE, errors
    assert errors.weights < (RELATIVE if "SGD" in name else OF_A_STEP), errors


def test_bf16_with_masters_stays_near_fp32() -> None:
    # Without a reduce_dtype of the weights' format NxD drops the sum of a column layer's gradient: norm off by half.
    for sp, options in (("true", {}), ("false", {}), ("true", EXPERTS)):
        plan = nxd_plan(f"tp=2,pp=1,dp=2,sp={sp}", llama(vocab=32, **options), precision=Precision.named("bf16"))
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
        assert gradient_error(expected, [rank.gradients[0] for rank in found]) > 0.1


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("tp=2,pp=1,dp=1,mbs=2", 0.75),  # Rule nxd-expert-order: NxD queues [seq, batch], a plan [batch, seq]
        ("tp=1,pp=1,dp=2", 0.8),  # Rule nxd-expert-slots: NxD has 4 slots on each of two ranks, a plan 7
    ],
)
def test_what_rules_refuse_of_experts_drops_other_tokens(text: str, capacity: float) -> None:
    case = replace(CASES["experts that drop tokens"], text=text, workload={"expert_capacity": capacity})
    task = Task.of(case.plan(), 1)
    expected, found = task.reference(), ran(task, case.platform)
    assert gradient_error(expected, [rank.gradients[0] for rank in found]) > 1e-2


def test_shares_are_not_normalised_after_tokens_were_dropped() -> None:
    # As recipes of the vendor have it, what is left of a token weighs more; a plan's shares are those of its choices.
    case = CASES["experts that drop tokens"]
    task = Task.of(case.plan(), 1)
    expected, found = task.reference(), ran(task, case.platform, without="shares")
    assert gradient_error(expected, [rank.gradients[0] for rank in found]) > 1e-2


def test_what_is_computed_again_is_wrapped() -> None:
    counts = {"none": 0, "full": 2, "selective[LlamaMLP]": 2, "selective[LlamaRMSNorm]": 4}
    for options, capacity in (({}, None), (EXPERTS, DROPPING["expert_capacity"])):
        for recompute, count in counts.items():
            text, model = f"tp=1,pp=1,dp=1,recompute={recompute}", llama(vocab=32, **options)
            task = Task.of(nxd_plan(text, model, expert_capacity=capacity), 1)
            (rank,) = ran(task, "trn1")
            assert rank.num_wrapped == count, recompute


def test_the_loop_of_a_run_trains_with_it(tmp_path: Path) -> None:
    plan = nxd_plan("tp=2,pp=2,dp=1", llama(vocab=32), seq_len=16)
    reports = on_ranks(4, run_train, plan, tmp_path, timeout_s=300.0)
    assert all(report.steps[-1].loss < report.steps[0].loss for report in reports)
    assert len({report.steps[-1].loss for report in reports}) == 1 and len(reports[0].ranks) == 4


def test_a_rank_tells_what_it_holds() -> None:
    task = Task.of(nxd_plan("tp=2,pp=1,dp=2", llama(vocab=32), precision=Precision.named("bf16")), 1)
    held = ran(task, "trn1")[0].memory_bytes
    assert held["gradients"] == 2 * held["weights"] and held["optimizer"] == 2 * held["masters"]
    assert held["masters"] >= held["weights"]  # FP32 halves of BF16 weights, padded to two equal pieces
