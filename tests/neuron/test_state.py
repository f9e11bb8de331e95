"""The state of the real NxD as boxes of our tensors: saved once, taken up bit by bit, and by the other engine."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoshard.engine.programs import graph_of
from autoshard.graph.kinds.optimizer import AdamW
from autoshard.spec.training import AdamWConstants
from autoshard.spec.workload import Precision
from tests.neuron.cases import Declined, Resumed, run_declined, run_going_on, run_groups, together
from tests.neuron.features import COPIED, DROPPING, EXPERTS, PATIENCE_S, Case
from tests.ranks.cases import Arrays, Task, gpt
from tests.ranks.spawn import on_ranks

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
PLANS = {
    "tp x dp": Case(text="tp=2,pp=1,dp=2"),
    "tp x dp, rows that do not divide": Case(text="tp=2,pp=1,dp=2", options={"vocab": 31, "hidden": 10}),
    "tp x pp": Case(text="tp=2,pp=2,dp=1"),
    "cp x dp": Case(text="tp=1,pp=1,cp=2,dp=2"),
    "cp x pp": Case(text="tp=1,pp=2,cp=2,dp=1"),
    "copies of keys, trn1": Case(text="tp=4,pp=1,dp=1", options=COPIED),
    "copies of keys, trn2": Case(text="tp=4,pp=1,dp=1", options=COPIED, platform="trn2"),
    "without ZeRO-1": Case(text="tp=2,pp=1,dp=2,zero=0"),
    "learned positions, biases, tied embeddings": Case(text="tp=2,pp=1,dp=2", model=gpt),
    "tied embeddings": Case(text="tp=2,pp=1,dp=2", options={"tied_embeddings": True}),
    "SGD": Case(text="tp=2,pp=1,dp=2", workload={"optimizer": "sgd"}),
    "experts": Case(text="tp=2,pp=1,dp=2", options=EXPERTS),
    "experts that drop tokens": Case(text="tp=2,pp=1,dp=2", options=EXPERTS, workload=DROPPING),
}
ONLY_FP32 = {
    "without ZeRO-1": "BF16 weights have FP32 masters, which NxD keeps in ZeRO-1",
    "learned positions, biases, tied embeddings": "the best table for BF16 has an entry that no layer of NxD sends",
}


def task_of(case: Case, precision: str = "fp32", num_steps: int = 3) -> Task:
    return Task.of(replace(case, workload={**case.workload, "precision": Precision.named(precision)}).plan(), num_steps)


def ran(case: Case, task: Task, state: Arrays | None = None, **how: Any) -> list[Resumed]:
    given = {"platform": case.platform, **how}
    return on_ranks(task.plan.mesh.num_ranks, run_going_on, task, state, given, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(PLANS))
def test_a_run_goes_on_from_its_pieces_bit_by_bit(name: str, precision: str) -> None:
    if precision == "bf16" and name in ONLY_FP32:
        pytest.skip(ONLY_FP32[name])
    case = PLANS[name]
    task = task_of(case, precision)
    went_on = ran(case, task)
    state = together([rank.before for rank in went_on])
    resumed = ran(case, task, state, apart=name == "tp x dp")
    assert_alike(went_on, resumed)
    after = together([rank.after for rank in went_on])
    assert all((array != after[name]).any() for name, array in state.items() if "bias" not in name)


def assert_alike(first: list[Resumed], second: list[Resumed]) -> None:
    for one, other in zip(first, second, strict=True):
        assert (one.loss, one.norm, one.weights) == (other.loss, other.norm, other.weights)
        for mine, its in ((one.before, other.before), (one.after, other.after)):
            assert [piece.name for piece in mine] == [piece.name for piece in its]
            assert all(np.array_equal(a.array, b.array) for a, b in zip(mine, its, strict=True))


@pytest.mark.parametrize("name", list(PLANS))
def test_both_engines_hold_the_same_state_and_take_up_that_of_the_other(name: str) -> None:
    case = PLANS[name]
    task = task_of(case)
    by_nxd, by_torch = ran(case, task), ran(case, task, engine="torch")
    states = [together([rank.before for rank in found]) for found in (by_nxd, by_torch)]
    assert shapes(states[0]) == shapes(states[1])
    for taken, state, expected in (("torch", states[0], by_nxd), ("nxd", states[1], by_torch)):
        found = ran(case, task, state, engine=taken)
        for rank in found:
            np.testing.assert_allclose([rank.loss, rank.norm], [expected[0].loss, expected[0].norm], rtol=2e-6)
        after = [together([rank.after for rank in ranks]) for ranks in (found, expected)]
        assert distance(*after) < 0.02


def shapes(state: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in state.items()}


def distance(found: Arrays, expected: Arrays) -> float:
    """Relative to the largest of the same part: gradients that should be zero leave noise in their moments."""
    parts = {name: name.partition("/")[0] for name in expected}
    largest = {
        part: max(np.abs(expected[name]).max() for name in parts if parts[name] == part) for part in parts.values()
    }
    return max(float(np.abs(found[name] - expected[name]).max() / largest[parts[name]]) for name in parts)


def test_pieces_of_first_weights_are_those_of_the_torch_engine() -> None:
    for name in ("copies of keys, trn1", "copies of keys, trn2", "tp x dp, rows that do not divide"):
        task = task_of(PLANS[name], num_steps=1)
        found = [together([rank.before for rank in ran(PLANS[name], task, engine=one)]) for one in ("nxd", "torch")]
        assert shapes(found[0]) == shapes(found[1])
        assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
        for name, weight in task.weights.items():
            np.testing.assert_array_equal(found[0][f"weight/{name}"], weight.astype(np.float32))


STOPPED = {
    "ZeRO-1": Case(text="tp=2,pp=1,dp=2"),
    "ZeRO-1, BF16": Case(text="tp=2,pp=1,dp=2", workload={"precision": Precision.named("bf16")}),
    "without ZeRO-1": Case(text="tp=1,pp=1,dp=2,zero=0"),
    "pipeline": Case(text="tp=1,pp=2,dp=2"),
    "SGD": Case(text="tp=1,pp=1,cp=2,dp=1", workload={"optimizer": "sgd"}),
}


def declined(task: Task, **how: str) -> list[Declined]:
    return on_ranks(task.plan.mesh.num_ranks, run_declined, task, how, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("name", list(STOPPED))
def test_a_step_that_is_not_allowed_leaves_no_trace(name: str) -> None:
    task = Task.of(STOPPED[name].plan(), 3)
    found, without = declined(task), declined(task, only="the others")
    assert {rank.asked for rank in found} == {found[0].asked}
    assert len(found[0].asked) == 1 and found[0].asked[0].finite and found[0].asked[0].updated
    for rank, other in zip(found, without, strict=True):
        assert rank.same and rank.report == replace(rank.asked[0], updated=False)
        assert rank.learning_rates == {1.0} and other.learning_rates == {task.learning_rate}
        assert rank.after == other.after


@pytest.mark.parametrize("name", list(STOPPED))
def test_a_weight_that_is_no_number_stops_all_ranks_before_the_update(name: str) -> None:
    case = STOPPED[name]
    task = Task.of(case.plan(), 3)
    found = declined(task, poison="weight/layer.1.down.weight")
    assert len({rank.report.suspects for rank in found}) == 1
    for rank in found:
        assert rank.same and not rank.report.updated and not rank.report.finite
        assert [one.partition(":")[0] for one in rank.report.suspects] == [f"rank {at}" for at in range(len(found))]


@pytest.mark.parametrize(("name", "ranks"), [("ZeRO-1", [2, 3]), ("pipeline", [1, 3])])
def test_only_the_ranks_with_bad_samples_are_suspects(name: str, ranks: list[int]) -> None:
    task = Task.of(STOPPED[name].plan(), 3)
    batches = [dict(batch) for batch in task.steps[1]]
    batches[-1]["token_weight"] = batches[-1]["token_weight"].copy()
    batches[-1]["token_weight"][-1, -1] = np.nan  # of the last sequence, which is the last replica's
    task = replace(task, steps=(task.steps[0], tuple(batches), task.steps[2]))
    found = declined(task)
    for rank in found:
        assert [one.partition(":")[0] for one in rank.report.suspects] == [f"rank {at}" for at in ranks]
        assert rank.same and not rank.report.finite
    if name == "ZeRO-1":
        assert f"loss of micro-batch {len(batches) - 1}, gradient of" in found[0].report.suspects[0]


def test_constants_reach_the_optimizer_and_weights_decay_as_the_graph_says() -> None:
    constants = AdamWConstants(beta1=0.7, beta2=0.8, eps=1e-5, weight_decay=0.3)
    case = Case(text="tp=2,pp=1,dp=1", model=gpt)
    task = Task.of(case.plan(), 1)
    graph = graph_of(task.plan)
    for found in on_ranks(2, run_groups, task, constants, timeout_s=PATIENCE_S):
        assert {name for name, *_ in found} == {name for name in task.weights if "unembed" not in name}
        for name, decay, betas, eps in found:
            kind, _, parameter = name.split(".", 2)
            update = graph.block(kind).op(f"{parameter}.update").kind
            assert isinstance(update, AdamW)
            assert (decay, betas, eps) == (0.3 if update.decay else 0.0, (0.7, 0.8), 1e-5)
