"""What is reported of routers follows from the notes of ranks, which are added place by place."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from autoshard.engine.observing import Observation, RouterNotes
from autoshard.engine.programs import graph_of
from autoshard.engine.torch.kernels.router import observing
from autoshard.plan.plan import Plan
from autoshard.run.reports import RouterReport
from tests.kit import local_plan, tiny

WORK: dict[str, Any] = {"seq_len": 8, "global_batch": 8}


def mixture(**changes: Any) -> tuple[Plan, RouterNotes]:
    """Two layers of four experts, two of which a token chooses, and four micro-batches of two sequences."""
    plan = local_plan("tp=1,pp=1,dp=1,mbs=2", tiny("mixtral"), **WORK, **changes)
    return plan, RouterNotes.of(plan, graph_of(plan))


def test_notes_of_ranks_lie_in_the_same_places_and_are_added() -> None:
    """Of two stages, each with its own layer, and two ranks that share the tokens of the first."""
    _, notes = mixture(router_balance_loss=0.5, router_z_loss=0.5)
    ranks = [
        {("layer.0", "choices"): [8.0, 0.0, 4.0, 4.0, 3.0], ("layer.0", "router_balance"): [3.0]},
        {("layer.0", "choices"): [4.0, 4.0, 4.0, 4.0, 5.0], ("layer.0", "router_balance"): [1.0]},
        {
            ("layer.1", "choices"): [16.0, 16.0, 0.0, 0.0, 24.0], ("layer.1", "router_balance"): [12.0],
            ("layer.1", "router_z"): [128.0], ("layer.1", "dropped"): [16.0],
        },
    ]  # fmt: skip
    row = np.sum([notes.row(rank) for rank in ranks], axis=0).tolist()
    assert notes.report(row) == RouterReport(
        busiest=2.0, entropy=1.0, dropped=0.25, balance_loss=(4 + 12) / 2 / 4, z_loss=128 / 2 / 4 / 16
    )


def test_nothing_is_reported_without_routers_and_of_a_rank_that_rehearses_alone() -> None:
    plan = local_plan("tp=1,pp=1,dp=1,mbs=2", tiny(), **WORK)
    dense = RouterNotes.of(plan, graph_of(plan))
    assert dense.row({}) == [] and dense.report([]) is None
    _, notes = mixture()
    row = notes.row({("layer.0", "choices"): [1.0] * 5})
    assert notes.report(row) is None and len(row) == 2 * (4 + 1 + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_noted_of_choices_and_of_places(dtype: torch.dtype) -> None:
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [0.0, -1e4, -1e4, 0.0]]], dtype=dtype)
    chosen = torch.tensor([[[0, 1], [3, 0]]])
    (row,) = observing(Observation(noted="choices", reads=(), writes="noted"), 4)(logits, chosen)
    assert row.tolist() == pytest.approx([2, 1, 0, 1, math.log(4) + math.log(2)])
    by_sigmoids = Observation(noted="choices", reads=(), writes="noted", probabilities="sigmoid")
    assert observing(by_sigmoids, 4)(logits, chosen)[0].tolist() == pytest.approx(row.tolist())
    (large,) = observing(by_sigmoids, 4)(torch.tensor([[[1e4, 1e4, 0.0, -1e4]]], dtype=dtype), chosen[:, :1])
    assert large[4] == pytest.approx(-sum(share * math.log(share) for share in (0.4, 0.4, 0.2)))
    (dropped,) = observing(Observation(noted="dropped", reads=(), writes="noted"), 4)(
        torch.tensor([[[0, -1], [-1, 2]]])
    )
    assert dropped.tolist() == [2.0]
