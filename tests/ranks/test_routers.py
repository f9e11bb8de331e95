"""Losses of routers on several ranks: every layout computes what one process does, and all ranks report the same."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from autoshard.graph.router import BALANCE, Z
from autoshard.plan.plan import Plan
from tests.kit import NOTHING
from tests.ranks.cases import (
    CORRECTION,
    MIXTRAL,
    StepShare,
    Task,
    by_one_process,
    compare,
    glm,
    hold,
    llama,
    plan_of,
    run_dropping,
    run_steps,
    whole,
)
from tests.ranks.spawn import on_ranks
from tests.ranks.test_experts import OWN_TOKENS, to_one_rank
from tests.reference_step import StepResult
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks

# So large that a loss which is wrong on any rank shows in the gradients of all layers before it.
LOSSES: Mapping[str, Any] = {"router_balance_loss": 2.0, "router_z_loss": 0.3}
BY_SEQUENCE = {**LOSSES, "router_balance_over": "sequence"}
LAYOUTS: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, Any]]] = {
    "sequences cut, experts apart": ("tp=1,pp=1,cp=2,dp=2,ep=2", NOTHING, LOSSES),
    "halves of a backward": ("tp=1,pp=2,dp=2,ep=2,schedule=zb_h1", NOTHING, LOSSES),
    "sequences cut in zigzag, each balanced": ("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag", NOTHING, BY_SEQUENCE),
    "own tokens on each rank of tp, recompute": ("tp=2,pp=1,dp=2,ep=2,recompute=full", OWN_TOKENS, LOSSES),
    "the same tokens on all ranks of tp": ("tp=2,pp=1,dp=2,sp=false", NOTHING, BY_SEQUENCE),
    "states in pieces, recompute in a layer": ("tp=1,pp=1,dp=4,ep=2,zero=3,recompute=full:1", NOTHING, BY_SEQUENCE),
    "stages in turns": ("tp=1,pp=2,dp=1,vp=2,schedule=interleaved,mbs=2", NOTHING, BY_SEQUENCE),
    "two sequences of each rank": ("tp=2,pp=1,dp=2,ep=2,mbs=2", NOTHING, BY_SEQUENCE),
    "one process": ("tp=1,pp=1,dp=1,mbs=2", NOTHING, LOSSES),
}


def plan_with(text: str, pins: Mapping[str, str] = NOTHING, **changes: Any) -> Plan:
    layers = 4 if "vp=2" in text else 2
    return plan_of(text, llama(qk_norm=True, num_layers=layers, **MIXTRAL), pins, **{"global_batch": 8, **changes})


@pytest.mark.parametrize("case", rest_is_slow(LAYOUTS, 0))
def test_gradients_and_losses_of_every_layout_are_those_of_one_process(case: str) -> None:
    """And both modes agree to the last bit, and as many bytes are kept and sent as were predicted."""
    text, pins, losses = LAYOUTS[case]
    task = Task.of(plan_with(text, pins, **losses))
    expected, shares = hold(task, joins=True)
    (exact,) = on_ranks(task.plan.mesh.num_ranks, run_steps, task)[0]
    assert exact.router.balance_loss == pytest.approx(expected.router[BALANCE], rel=1e-12)
    assert exact.router.z_loss == pytest.approx(expected.router[Z], rel=1e-12)
    assert len({share.router for share in shares}) == 1


def figures(task: Task) -> Mapping[str, float]:
    (share,), *_ = on_ranks(task.plan.mesh.num_ranks, run_steps, task)
    return share.router.figures


@pytest.mark.parametrize(
    ("texts", "pins"),
    rest_is_slow([
        (("tp=1,pp=1,dp=1,mbs=4", "tp=1,pp=1,cp=2,dp=2,ep=2,mbs=2"), NOTHING),
        (("tp=1,pp=1,dp=1,mbs=2", "tp=2,pp=2,dp=1,mbs=2,sp=false"), NOTHING),
        (("tp=1,pp=1,dp=1,mbs=4", "tp=2,pp=1,dp=2,ep=2,mbs=2,recompute=full"), OWN_TOKENS),
    ]),
)  # fmt: skip
def test_a_report_counts_each_token_once_whoever_has_it(texts: Sequence[str], pins: Mapping[str, str]) -> None:
    """Without any loss: whether experts collapse is seen where nothing keeps them from it."""
    alone, spread = texts
    one, several = figures(Task.of(plan_with(alone))), figures(Task.of(plan_with(spread, pins)))
    assert one.keys() == {"busiest", "entropy", "dropped"} and 1 < one["busiest"] < 2 and one["dropped"] == 0
    assert several == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("text", ["tp=1,pp=1,dp=1,mbs=2", "tp=1,pp=1,dp=2,ep=2"])
def test_a_report_says_what_found_no_slot(text: str) -> None:
    """A router that knows no difference: all tokens choose the first two of four experts, half of whose share fits."""
    found = figures(to_one_rank(Task.of(plan_with(text, expert_capacity=0.5))))
    assert found == pytest.approx({"busiest": 2.0, "entropy": math.log(4), "dropped": 0.75})


# Steps of several micro-batches, whose tokens must all be counted before a bias moves.
BIASED: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, Any]]] = {
    "experts apart, beside them a part of the shared one": ("tp=2,pp=1,dp=2,ep=2", OWN_TOKENS, NOTHING),
    "sequences cut, halves of a backward": ("tp=1,pp=2,cp=2,dp=1,schedule=zb_h1,stages=1/2", NOTHING, NOTHING),
    "states in pieces, recompute": ("tp=1,pp=1,dp=4,ep=2,zero=3,recompute=full", NOTHING, BY_SEQUENCE),
    "optimizer in pieces, the same tokens on two ranks": ("tp=2,pp=1,dp=2,zero=1,sp=false", NOTHING, LOSSES),
    "one process": ("tp=1,pp=1,dp=1,mbs=2", NOTHING, LOSSES),
}


@pytest.mark.parametrize("case", rest_is_slow(BIASED, 0, 1))
def test_biases_of_routers_move_as_in_one_process(case: str) -> None:
    """Five steps, in each of which a bias decides who is chosen: one that moved otherwise shows in all gradients."""
    text, pins, losses = BIASED[case]
    changes: Mapping[str, Any] = {"global_batch": 8, "router_bias_speed": 0.05, **losses}
    task = Task.of(plan_of(text, glm(), pins, **changes), num_steps=5)
    biases = [name for name in task.weights if name.endswith(CORRECTION)]
    (expected, moved), *_ = by_one_process(task)
    assert len(biases) == 2 and all((moved[name] != task.weights[name]).any() for name in biases)
    assert expected.norm < 100 < max(abs(expected.gradients[name]).max() for name in biases)  # counts are no part of it
    hold(task, joins=True)


@pytest.mark.slow
def test_a_bias_that_does_not_move_is_a_weight_like_others() -> None:
    task = Task.of(plan_of("tp=1,pp=1,dp=2", glm()), num_steps=2)
    *_, (_, moved) = by_one_process(task)
    assert all((moved[name] == weight).all() for name, weight in task.weights.items() if name.endswith(CORRECTION))
    hold(task)


@pytest.mark.slow
def test_counts_that_are_not_summed_over_the_parts_of_a_sequence_are_caught() -> None:
    """Each message that sums a load, left out once; each rank then balances its own tokens, and reports nothing odd."""
    plan = plan_with("tp=1,pp=1,cp=2,dp=1", global_batch=2, **LOSSES)
    task = Task.of(plan)
    sums = sum("router_load" in entry for entry, line in plan.strategies["layer"].items() if "all_reduce /cp" in line)
    assert sums == 1
    answers = on_ranks(2, run_dropping, task, "all_reduce")
    expected = task.reference()
    assert len(answers[0]) >= plan.model.num_layers * plan.schedule.num_micro_batches
    for shares in zip(*answers, strict=True):
        with pytest.raises(AssertionError):
            compare(expected, shares)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "name"),
    rest_is_slow([
        ("tp=1,pp=1,dp=2,zero=0", "all_reduce"),
        ("tp=1,pp=1,dp=2,zero=1", "reduce_scatter_single"),
        ("tp=1,pp=1,cp=2,dp=1,zero=3", "reduce_scatter_single"),
        ("tp=2,pp=1,dp=1,sp=true", "all_reduce"),
    ]),
)  # fmt: skip
def test_a_message_of_counts_that_is_left_out_is_caught(text: str, name: str) -> None:
    """Each message that sums gradients or counts, left out once: whoever lacks the counts of others moves otherwise."""
    task = Task.of(plan_of(text, glm(), OWN_TOKENS if "tp=2" in text else NOTHING, router_bias_speed=0.05))
    answers, (expected, *_) = on_ranks(2, run_dropping, task, name), by_one_process(task)
    spoiled = [wrong(expected[0], shares) for shares in zip(*answers, strict=True)]
    assert all(spoiled)
    assert any(all(gradient.endswith(CORRECTION) for gradient in names) for names in spoiled)


def wrong(expected: StepResult, shares: Sequence[StepShare]) -> list[str]:
    """Return the gradients that are not those of one process, and "loss or norm" if these are not."""
    names: list[str] = []
    for name, gradient in expected.gradients.items():
        try:
            np.testing.assert_allclose(whole(name, gradient, shares, "gradients"), gradient, rtol=0, atol=1e-10)
        except AssertionError:
            names.append(name)
    found = [number for share in shares for number in (share.loss, share.norm)]
    agrees = np.allclose(found, [expected.loss, expected.norm] * len(shares), rtol=1e-10)
    return names if agrees else [*names, "loss or norm"]
