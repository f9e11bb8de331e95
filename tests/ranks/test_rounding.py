"""Weights and moments in BF16 on ranks: each update is rounded to a neighbour, and replicas to the same."""

from typing import Any

import numpy as np
import pytest
import torch

from autoshard.engine.programs import graph_of
from autoshard.graph.kinds.optimizer import AdamW
from autoshard.spec.workload import Precision
from tests.ranks.cases import (
    AS_PLANNED,
    CLIP_NORM,
    COPIED,
    LEARNING_RATE,
    NOTHING,
    StepShare,
    Task,
    engine_of,
    gpt,
    hold,
    llama,
    near,
    plan_of,
    run_steps,
    share_of,
    whole,
)
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks

CASES = {
    "dp, ZeRO-1": ("tp=1,pp=1,dp=2", llama(vocab=31), NOTHING),
    "tied embeddings on two stages": ("tp=1,pp=2,dp=2", gpt(), NOTHING),
    "dp, ZeRO-0, and norms copied over tp": ("tp=2,pp=1,dp=2,zero=0", llama(), NOTHING),
    "dp, ZeRO-3": ("tp=1,pp=1,dp=2,zero=3", llama(vocab=31), NOTHING),
    "dp, ZeRO-3, weights over fewer ranks": ("tp=1,pp=1,dp=4,zero=3,weight_group=2", llama(vocab=31), NOTHING),
    "copies of keys": ("tp=4,pp=1,dp=1", llama(num_kv_heads=2, vocab=32), COPIED),
}


NO_MASTERS, SMALL = "bf16-sr", "bf16,gradients=bf16,moments=bf16"
NOTHING_WIDE = "bf16-sr,gradients=bf16,moments=bf16"


def rounding_task(text: str, model: Any, pins: Any = NOTHING, num_steps: int = 1, precision: str = NO_MASTERS) -> Task:
    return Task.of(plan_of(text, model, pins, precision=Precision.named(precision)), num_steps)


def whole_weights(task: Task, shares: list[StepShare]) -> dict[str, Any]:
    return {name: whole(name, weight, shares, "weights") for name, weight in task.weights.items()}


def exact_update(task: Task, name: str, share: StepShare, gradient: Any) -> tuple[Any, ...]:
    """The first step of AdamW in double, from the gradient that the ranks found: the weight and its moments."""
    graph, (kind, _, parameter) = graph_of(task.plan), name.split(".", 2)
    op = graph.block(kind).op(f"{parameter}.update")
    assert isinstance(op.kind, AdamW)
    zero, clip = np.zeros_like(gradient), min(1.0, CLIP_NORM / (share.norm + 1e-6))
    given = (task.weights[name], zero, zero, gradient, *map(np.asarray, (clip, LEARNING_RATE, 1)))
    return op.kind.evaluate(graph.block(kind).call(op, graph.sizes), *given)


def digits_off(numbers: Any, exact: Any) -> Any:
    """How many of BF16's last digits numbers lie from exact ones."""
    digit = 2.0 ** (np.floor(np.log2(np.abs(exact) + 1e-30)) - 7)
    return ((numbers - exact) / digit).reshape(-1)


def hold_rounding(distances: list[Any]) -> None:
    """Hold numbers to the nearest two that BF16 has, and their mean to the exact one."""
    off = np.concatenate(distances)
    assert np.abs(off).max() < 1 + 1e-3  # FP32 is as near to double
    assert abs(off.mean()) < 5 * off.std() / len(off) ** 0.5 < 0.1 and off.std() > 0.2


@pytest.mark.parametrize(("text", "model", "pins"), rest_is_slow(CASES.values()))
def test_replicas_round_alike_and_each_weight_to_a_neighbour(text, model, pins):
    task = rounding_task(text, model, pins)
    shares = [share for (share,) in on_ranks(task.plan.mesh.num_ranks, run_steps, task, AS_PLANNED)]
    found, distances = whole_weights(task, shares), []
    for name in {name for share in shares for name in share.gradients}:
        exact = exact_update(task, name, shares[0], whole(name, task.weights[name], shares, "gradients"))[0]
        distances.append(digits_off(found[name], exact))
    hold_rounding(distances)
    for other, owner in graph_of(task.plan).tied.items():
        np.testing.assert_array_equal(found[other.replace(".", ".0.", 1)], found[owner.replace(".", ".0.", 1)])


def run_with_moments(task: Task) -> tuple[StepShare, list[tuple[str, Any, Any]]]:
    """A step, and the moments on this rank: which, where they lie in the whole, and their numbers."""
    engine = engine_of(task, AS_PLANNED)
    share, moments = share_of(engine, task), list[tuple[str, Any, Any]]()
    for piece in engine.pieces():
        if piece.part != "weight":
            assert piece.memory.dtype == torch.bfloat16
            bounds = zip(piece.offsets, piece.memory.shape, strict=True)
            where = tuple(slice(offset, offset + length) for offset, length in bounds)
            moments.append((f"{piece.weight} {piece.part}", where, piece.memory.double().numpy()))
    return share, moments


@pytest.mark.parametrize("precision", [SMALL, NOTHING_WIDE])
@pytest.mark.parametrize(("text", "model", "pins"), rest_is_slow(CASES.values()))
def test_moments_in_bf16_are_rounded_to_a_neighbour_and_alike_on_replicas(text, model, pins, precision):
    task = rounding_task(text, model, pins, precision=precision)
    answers = on_ranks(task.plan.mesh.num_ranks, run_with_moments, task)
    shares, distances = [share for share, _ in answers], {"moment1": list[Any](), "moment2": list[Any]()}
    names = {name for share in shares for name in share.gradients}
    found = {f"{name} {part}": np.full_like(task.weights[name], np.nan) for name in names for part in distances}
    for name, where, numbers in (moment for _, moments in answers for moment in moments if moment[0] in found):
        before = found[name][where]
        assert np.array_equal(before[~np.isnan(before)], numbers[~np.isnan(before)]), "replicas differ"
        found[name][where] = numbers
    for name in names:
        exact = exact_update(task, name, shares[0], whole(name, task.weights[name], shares, "gradients"))
        for part, moment in zip(distances, exact[1:], strict=True):
            distances[part].append(digits_off(found[f"{name} {part}"], moment))
    hold_rounding(distances["moment1"])
    hold_rounding(distances["moment2"])


@pytest.mark.parametrize("precision", rest_is_slow([SMALL, NOTHING_WIDE]))
@pytest.mark.parametrize(("text", "model", "pins"), rest_is_slow(CASES.values()))
def test_gradients_summed_in_bf16_are_near_those_of_one_process_and_take_half_the_bytes(text, model, pins, precision):
    expected, shares = hold(rounding_task(text, model, pins, precision=precision))
    near(expected, shares, 0.03)


def run_interrupted(task: Task, after: int) -> tuple[list[StepShare], list[StepShare]]:
    """All steps at once; and again, with another rank's memory in between."""
    straight = run_steps(task, AS_PLANNED)
    first, second = (engine_of(task, AS_PLANNED) for _ in range(2))
    for step in range(after):
        share_of(first, task, step)
    for old, new in zip(first.pieces(), second.pieces(), strict=True):
        assert (old.name, old.offsets) == (new.name, new.offsets)
        new.memory.copy_(old.memory)
    second.restored(after)
    return straight[after:], [share_of(second, task, step) for step in range(after, len(task.steps))]


@pytest.mark.parametrize("precision", rest_is_slow([NOTHING_WIDE, NO_MASTERS, SMALL]))
@pytest.mark.parametrize("text", rest_is_slow(["tp=1,pp=1,dp=2,zero=3", "tp=1,pp=1,dp=2"]))
def test_a_run_that_goes_on_rounds_as_one_that_was_never_stopped(text, precision):
    task = rounding_task(text, llama(), num_steps=4, precision=precision)
    answers = on_ranks(2, run_interrupted, task, 2)
    for step in range(2):
        straight, again = ([share[kind][step] for share in answers] for kind in (0, 1))
        assert {share.loss for share in straight} == {share.loss for share in again}
        for name, weight in whole_weights(task, straight).items():
            np.testing.assert_array_equal(weight, whole_weights(task, again)[name], err_msg=name)
