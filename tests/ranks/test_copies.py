"""ZeRO over a part of the ranks, which holds a copy of the states or weights: a step is that of one process."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autoshard.spec.model import ModelSpec
from tests.ranks.cases import MIXTRAL, Task, compare, engine_of, glm, gpt, hold, llama, plan_of, run_dropping
from tests.ranks.spawn import on_ranks
from tests.ranks.test_torchrun import run_agreeing
from tests.ranks.torchrun import on_torchrun
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks

TWICE: Mapping[str, Any] = {"global_batch": 8}
BALANCED: Mapping[str, Any] = {"global_batch": 8, "router_balance_loss": 2.0}
CASES: Mapping[str, tuple[str, ModelSpec, Mapping[str, Any]]] = {
    "states in pieces, two micro-batches": ("tp=1,pp=1,dp=4,zero=3,zero_group=2", llama(), TWICE),
    "optimizer in pieces, sequences cut": ("tp=1,pp=1,cp=2,dp=4,zero=1,zero_group=4,cp_order=zigzag", gpt(), TWICE),
    "every rank has a copy": ("tp=2,pp=1,dp=2,zero=1,zero_group=1", llama(), TWICE),
    "experts without another of their kind in a copy": ("tp=1,pp=1,dp=4,ep=2,zero=3,zero_group=2", glm(), BALANCED),
    "experts in pieces": ("tp=1,pp=1,dp=8,ep=2,zero=1,zero_group=4", llama(**MIXTRAL), BALANCED),
    "stages that share a table": ("tp=1,pp=2,dp=4,zero=1,zero_group=2,schedule=zb_h1", gpt(), TWICE),
    "stages in turns, recompute": (
        "tp=1,pp=2,dp=4,vp=2,schedule=interleaved,zero=3,zero_group=2,recompute=full", llama(num_layers=4), TWICE,
    ),
    "weights over fewer ranks": ("tp=1,pp=1,dp=4,zero=3,weight_group=2", llama(), TWICE),
    "weights over fewer ranks of a copy": ("tp=1,pp=1,dp=8,zero=3,zero_group=4,weight_group=2", llama(), TWICE),
    "whole weights": ("tp=1,pp=1,dp=4,zero=3,weight_group=1", gpt(), TWICE),
    "experts whole on each of their ranks": ("tp=1,pp=1,dp=4,ep=2,zero=3,weight_group=2", glm(), BALANCED),
    "experts over fewer ranks": ("tp=1,pp=1,dp=8,ep=2,zero=3,weight_group=4", llama(**MIXTRAL), BALANCED),
    "weights over fewer ranks, halves of a backward": (
        "tp=1,pp=2,dp=4,zero=3,weight_group=2,schedule=zb_h1", gpt(num_layers=4), TWICE,
    ),
    "weights over cp": ("tp=1,pp=1,cp=2,dp=4,zero=3,weight_group=4,cp_order=zigzag", gpt(), TWICE),
    "weights over fewer ranks, stages in turns": (
        "tp=1,pp=2,dp=4,vp=2,schedule=interleaved,zero=3,weight_group=2,recompute=full", llama(num_layers=4), TWICE,
    ),
    "weights over fewer ranks, tied": ("tp=2,pp=1,dp=4,zero=3,weight_group=2", llama(tied_embeddings=True), TWICE),
}  # fmt: skip


STARTED = ("states in pieces, two micro-batches", "stages that share a table", "weights over fewer ranks of a copy")


@pytest.mark.parametrize("case", rest_is_slow(CASES, 0, 2))
def test_a_step_is_that_of_one_process_and_holds_and_sends_what_was_promised(case: str) -> None:
    text, model, work = CASES[case]
    hold(Task.of(plan_of(text, model, **work), num_steps=2))


@pytest.mark.parametrize("case", rest_is_slow(STARTED, 0, 0))
def test_ranks_of_torchrun_compute_what_one_process_computes(case: str, tmp_path: Path) -> None:
    """Each with a hash seed of its own; the collectives of all ranks are compared with those that were announced."""
    text, model, work = CASES[case]
    task = Task.of(plan_of(text, model, **work))
    compare(task.reference(), on_torchrun(tmp_path, task.plan.mesh.num_ranks, run_agreeing, task))


@pytest.mark.slow
def test_pieces_that_copies_do_not_add_up_are_caught() -> None:
    """Each all-reduce, left out once: that of a piece between copies is among them, without which copies differ."""
    task = Task.of(plan_of("tp=1,pp=1,dp=4,zero=3,zero_group=2", llama()))
    answers = on_ranks(4, run_dropping, task, "all_reduce")
    assert len(answers[0]) > 1
    for shares in zip(*answers, strict=True):
        with pytest.raises(AssertionError):
            compare(task.reference(), shares)


def saved(task: Task) -> list[tuple[str, tuple[int, ...], int]]:
    return [(piece.name, piece.offsets, piece.memory.numel()) for piece in engine_of(task).pieces() if piece.saves]


@pytest.mark.parametrize("keys", ["zero=1,zero_group=2", "zero=3,zero_group=2", "zero=3,weight_group=2"])
def test_one_copy_of_each_number_is_saved(keys: str) -> None:
    task = Task.of(plan_of(f"tp=1,pp=1,dp=4,{keys}", llama()))
    boxes = [box for of_rank in on_ranks(4, saved, task) for box in of_rank]
    assert len({box[:2] for box in boxes}) == len(boxes)
    counts = Counter[str]()
    for name, _, count in boxes:
        counts[name] += count
    parts = ("weight", "moment1", "moment2")
    assert counts == {f"{part}/{name}": array.size for part in parts for name, array in task.weights.items()}
