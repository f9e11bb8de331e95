"""Dropout of cards on several ranks: what would draw other numbers in another layout is caught."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autoshard.engine.torch import pipeline
from autoshard.engine.torch.kernels import attention as attention_kernels, dropout as dropout_kernels
from autoshard.engine.torch.steps import RankContext
from autoshard.graph.kinds.dropout import dropout_keys
from autoshard.layout.layout import Layout
from autoshard.spec.model import ModelSpec
from tests.ranks.cases import EXACT, Task, compare, gpt, llama, plan_of, run_steps
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks

HIDDEN, ATTENTION = {"hidden_dropout": 0.3}, {"attention_dropout": 0.3}
right_keeps = dropout_kernels.keeps


def of_this_rank(context: RankContext, tensor: str, layout: Layout) -> torch.Tensor:
    """Number what a rank has from 0 on."""
    ((start, stop),) = context.mesh_rank.bounds(layout)
    return context.positions[start:stop] if "positions" in tensor else torch.arange(stop - start)


def from_zero(numbers: torch.Tensor) -> range:
    """Forget where the part of a rank begins."""
    return range(len(numbers))


def by_place_in_the_batch(seed: int, samples: Any, block: str) -> Any:
    """Forget which samples these are."""
    return dropout_keys(seed, np.arange(len(samples)), block)


def alike_in_every_layer(seed: int, samples: Any, block: str) -> Any:
    return dropout_keys(seed, samples, "layer.0")


def a_counter_too_far(
    dropped: float, keys: torch.Tensor, columns: range, place: Sequence[torch.Tensor | int], stream: int
) -> torch.Tensor:
    """Draw by the counter after the right one."""
    return right_keeps(dropped, keys, range(columns.start + 4, columns.stop + 4), place, stream)


def of_another_operation(
    dropped: float, keys: torch.Tensor, columns: range, place: Sequence[torch.Tensor | int], stream: int
) -> torch.Tensor:
    return right_keeps(dropped, keys, columns, place, 0)


FAULTS: dict[str, tuple[str, ModelSpec, tuple[Any, str, Any]]] = {
    "columns of a rank": (
        "tp=2,pp=1,dp=1", llama(**HIDDEN, hidden=18), (dropout_kernels, "consecutive", from_zero),
    ),
    "heads of a rank": ("tp=2,pp=1,dp=1", llama(**ATTENTION), (RankContext, "numbers", of_this_rank)),
    "samples of a rank": ("tp=1,pp=1,dp=2", llama(**HIDDEN), (pipeline, "dropout_keys", by_place_in_the_batch)),
    "samples of a micro-batch": (
        "tp=1,pp=1,dp=1,mbs=1", gpt(**ATTENTION), (pipeline, "dropout_keys", by_place_in_the_batch),
    ),
    "layers alike": ("tp=1,pp=2,dp=1", gpt(**HIDDEN), (pipeline, "dropout_keys", alike_in_every_layer)),
    "a counter off by one": ("tp=1,pp=1,dp=1", llama(**HIDDEN), (dropout_kernels, "keeps", a_counter_too_far)),
    "a counter off by one in attention": (
        "tp=1,pp=1,dp=1", llama(**ATTENTION), (attention_kernels, "keeps", a_counter_too_far),
    ),
    "operations alike": ("tp=1,pp=1,dp=1", llama(**HIDDEN), (dropout_kernels, "keeps", of_another_operation)),
}  # fmt: skip


CUT = {"layer.mlp_drop": "[batch/dp, seq, hidden/tp]"}  # in parts of 9: counters of four numbers are cut as well


@pytest.mark.parametrize("name", rest_is_slow(FAULTS, 1, 3))
def test_a_number_that_depends_on_the_layout_is_caught(name: str):
    text, model, replaced = FAULTS[name]
    task = Task.of(plan_of(text, model, CUT if "columns" in name else {}))
    compare(task.reference(), [share for (share,) in on_ranks(task.plan.mesh.num_ranks, run_steps, task)])
    with pytest.raises(AssertionError):
        wrong = on_ranks(task.plan.mesh.num_ranks, run_steps, task, replaced=[replaced])
        compare(task.reference(), [share for (share,) in wrong])


BOTH, ON_TWO = {**HIDDEN, **ATTENTION}, "tp=2,pp=1,dp=1,recompute=full:1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "text", "dropped"),
    [
        ("generated", ON_TWO, BOTH),
        ("literal", ON_TWO, BOTH),
        # A compiler takes a minute or two.
        pytest.param("compiled", "tp=1,pp=1,dp=1", ATTENTION, marks=pytest.mark.thorough),
        pytest.param("compiled", ON_TWO, BOTH, marks=pytest.mark.thorough),
    ],
)
def test_every_mode_drops_the_same(mode: Any, text: str, dropped: dict[str, float]):
    task = Task.of(plan_of(text, llama(**dropped)))
    answers = on_ranks(task.plan.mesh.num_ranks, run_steps, task, EXACT, mode, timeout_s=600)
    shares = [share for (share,) in answers]
    compare(task.reference(), shares)
    other = replace(task, training=replace(task.training, seed=1)).reference()
    with pytest.raises(AssertionError):
        compare(other, shares)
