"""BF16 weights without masters on ranks: each update is rounded to a neighbour, and replicas to the same."""

from typing import Any

import numpy as np
import pytest

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
    llama,
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
    "copies of keys": ("tp=4,pp=1,dp=1", llama(num_kv_heads=2, vocab=32), COPIED),
}


def rounding_task(text: str, model: Any, pins: Any = NOTHING, num_steps: int = 1) -> Task:
    return Task.of(plan_of(text, model, pins, precision=Precision.named("bf16-sr")), num_steps)


def whole_weights(task: Task, shares: list[StepShare]) -> dict[str, Any]:
    return {name: whole(name, weight, shares, "weights") for name, weight in task.weights.items()}


def exact_update(task: Task, name: str, share: StepShare, gradient: Any) -> Any:
    """The first step of AdamW in double, from the gradient that the ranks found."""
    graph, (kind, _, parameter) = graph_of(task.plan), name.split(".", 2)
    op = graph.block(kind).op(f"{parameter}.update")
    assert isinstance(op.kind, AdamW)
    zero, clip = np.zeros_like(gradient), min(1.0, CLIP_NORM / (share.norm + 1e-6))
    given = (task.weights[name], zero, zero, gradient, *map(np.asarray, (clip, LEARNING_RATE, 1)))
    return op.kind.evaluate(graph.block(kind).call(op, graph.sizes), *given)[0]


@pytest.mark.parametrize(("text", "model", "pins"), rest_is_slow(CASES.values()))
def test_replicas_round_alike_and_each_weight_to_a_neighbour(text, model, pins):
    task = rounding_task(text, model, pins)
    shares = [share for (share,) in on_ranks(task.plan.mesh.num_ranks, run_steps, task, AS_PLANNED)]
    found, distances = whole_weights(task, shares), []
    for name in {name for share in shares for name in share.gradients}:
        exact = exact_update(task, name, shares[0], whole(name, task.weights[name], shares, "gradients"))
        digit = 2.0 ** (np.floor(np.log2(np.abs(exact) + 1e-30)) - 7)
        distances.append(((found[name] - exact) / digit).reshape(-1))
    off = np.concatenate(distances)
    assert np.abs(off).max() < 1 + 1e-3  # FP32 is as near to double
    assert abs(off.mean()) < 5 * off.std() / len(off) ** 0.5 < 0.1 and off.std() > 0.2
    for other, owner in graph_of(task.plan).tied.items():
        np.testing.assert_array_equal(found[other.replace(".", ".0.", 1)], found[owner.replace(".", ".0.", 1)])


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


@pytest.mark.parametrize("text", rest_is_slow(["tp=1,pp=1,dp=2,zero=3", "tp=1,pp=1,dp=2"]))
def test_a_run_that_goes_on_rounds_as_one_that_was_never_stopped(text):
    task = rounding_task(text, llama(), num_steps=4)
    answers = on_ranks(2, run_interrupted, task, 2)
    for step in range(2):
        straight, again = ([share[kind][step] for share in answers] for kind in (0, 1))
        assert {share.loss for share in straight} == {share.loss for share in again}
        for name, weight in whole_weights(task, straight).items():
            np.testing.assert_array_equal(weight, whole_weights(task, again)[name], err_msg=name)
