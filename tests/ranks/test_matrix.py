"""Every pair of features on real processes equals one process, in double, in FP32 and in BF16.

One process is the graph evaluated with numpy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from autoshard.engine.programs import programs_of
from autoshard.engine.torch import steps
from autoshard.engine.torch.collectives import Change, communication
from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.world import Arrival, RankGroup, World
from autoshard.layout.layout import Collective
from autoshard.layout.program import Communicate, Compute, Given
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_programs
from autoshard.run.placement import MeshRank, sequence_order
from tests.ranks import matrix
from tests.ranks.cases import AS_PLANNED, CLIP_NORM, StepShare, Task, compare, hold, near, run_steps, whole
from tests.ranks.matrix import IMPOSSIBLE, Row
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks

ROWS = matrix.rows()
QUICK = matrix.quick([row for row in ROWS if matrix.num_ranks(row) <= 4])
BF16 = 2.0**-8  # unit roundoff


def named(row: Row) -> str:
    return f"{ROWS.index(row):02}: {matrix.candidate_of(row)}"


@pytest.fixture(autouse=True)
def one_thread():
    """The model is too small for threads, which wait for each other in a loop when cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def task_of(row: Row, num_steps: int = 1, **changes: str) -> Task:
    return Task.of(matrix.plan_for(row, **changes), num_steps, masked=row["mask"] == "yes")


# -- the rows themselves -------------------------------------------------------------------------------


@pytest.mark.thorough
def test_every_possible_pair_is_in_some_row():
    assert matrix.possible_pairs() <= set(chain.from_iterable(map(matrix.pairs_of, ROWS)))


def test_every_row_may_run():
    assert all(matrix.is_legal(row) for row in ROWS)
    assert not [reason for row in ROWS for reason, excludes in IMPOSSIBLE.items() if excludes(row)]


def test_copied_keys_are_on_every_rank_of_a_group():
    row = next(row for row in QUICK if row["kv"] == "copied")
    for name, program in plan_programs(matrix.plan_for(row)).items():
        if name.startswith("layer"):
            given = [entry.value for entry in program.instructions if isinstance(entry, Given)]
            keys = [one.layout.dims for one in given if one.tensor in ("k.weight", "v.weight")]
            assert len(keys) == 2
            assert "rep" not in {atom for dims in keys for _, atoms in dims for atom in atoms}


# -- the rows run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rest_is_slow([*QUICK, *(row for row in ROWS if row not in QUICK)], 1, 3), ids=named)
def test_two_steps_are_those_of_one_process_and_hold_and_send_what_was_promised(row):
    """In double; and in BF16 one step is as near as its roundings let it be.

    Each rounding to BF16 moves a number by up to 2^-8 of itself; n of them, up and down as it comes, sqrt(n) as far.
    n counts what a micro-batch passes: every operation that writes BF16, and in every sum over ranks one addition for
    each rank but the first. So it grows with the depth and with tp. Nothing else is lost: gradients are added up in
    FP32. Routers choose otherwise when rounded, so experts are left out.
    """
    task = task_of(row, num_steps=2)
    expected, shares = hold(task, joins=True)
    assert (expected.norm > task.plan.workload.clip_norm) == (row["clip"] == "yes")
    if row["experts"] == "dense":
        most = BF16 * roundings(task.plan) ** 0.5
        assert most < 0.1, "a part that is missing would not be seen"
        near(expected, shares, most)


def roundings(plan: Plan) -> int:
    """How often numbers of one micro-batch are rounded to BF16 on their way through all blocks and back."""
    total = 0
    for parts in (parts for blocks in programs_of(plan).stages for parts in blocks.values()):
        for entry in parts.program.instructions:
            match entry:
                case Compute(op=op):
                    total += any(parts.block.tensors[name].dtype == "bf16" for name in op.outputs)
                case Communicate(collective=Collective(kind="all_reduce" | "reduce_scatter", atoms=atoms)):
                    total += math.prod(plan.mesh.size(atom) for atom in atoms) - 1
                case _:
                    pass
    return total


@pytest.mark.parametrize("row", rest_is_slow(QUICK, 0, 3), ids=named)
def test_two_steps_of_sgd_in_fp32_are_near_those_of_one_process(row):
    """They move the weights by about as much as they are, so that what is wrong with them shows."""
    task = replace(
        task_of(row, 2, precision="fp32", optimizer="sgd"),
        learning_rate=0.5 / CLIP_NORM if row["clip"] == "yes" else 0.1,
    )
    answers = on_ranks(task.plan.mesh.num_ranks, run_steps, task, AS_PLANNED)
    weights = task.weights
    for step in range(2):
        expected, shares = task.reference(weights, step), [found[step] for found in answers]
        near(expected, shares, 1e-5)
        for name, weight in expected.weights.items():
            found = whole(name, weight, shares, "weights")
            np.testing.assert_allclose(found, weight, rtol=0, atol=1e-5, err_msg=name)
        updated = {id(weights[name]): array for name, array in expected.weights.items()}
        weights = {name: updated[id(array)] for name, array in weights.items()}  # tied ones as the one updated


# -- seeded faults -------------------------------------------------------------------------------------


def per_micro_batch(step: Sequence[Any]) -> Any:
    """Divide by the tokens that count in a micro-batch: a mean of means."""
    totals = [len(step) * batch["token_weight"].sum() for batch in step]
    return [{**one, "token_weight": one["token_weight"] / total} for one, total in zip(step, totals, strict=True)]


def of_another(name: str) -> Any:
    """Give micro-batches something of each other."""
    return lambda step: [{**one, name: other[name]} for one, other in zip(step, step[::-1], strict=True)]


def in_order(name: str) -> Any:
    """Undo the zig-zag over two ranks beforehand, for one input alone."""

    def undone(step: Sequence[Any]) -> Any:
        back = np.argsort(sequence_order(matrix.plan_for(first_row({"cp": "zigzag"}))))
        return [{**batch, name: batch[name][:, back]} for batch in step]

    return undone


def own_part(group: RankGroup, whole: torch.Tensor, *, overlaps: bool = True) -> Arrival:
    """A reduce-scatter without the reduction."""
    mine = whole.contiguous().chunk(len(group.ranks))[group.number].clone()
    return lambda: mine


def without_copies(world: World, place: MeshRank, change: Communicate) -> Change:
    """Leave out every sum over the ranks that hold the same keys."""
    if change.collective.atoms == ("rep",) and change.collective.kind == "all_reduce":
        return torch.clone
    return communication(world, place, change)


def first_row(wanted: Mapping[str, str]) -> Row:
    return min((row for row in ROWS if wanted.items() <= row.items()), key=matrix.num_ranks)


GIVEN = {
    "a mean of means": (per_micro_batch, {"mask": "yes", "micro": "4"}),
    "labels of another micro-batch": (of_another("labels"), {"micro": "4"}),
    "labels in another order than tokens": (in_order("labels"), {"cp": "zigzag"}),
    "documents of another micro-batch": (of_another("document_starts"), {"micro": "4", "documents": "separate"}),
}
REPLACED = {
    "a reduce-scatter that does not sum": ((RankGroup, "begin_reduce_scatter", own_part), {"tp": "1", "zero": "1"}),
    "reduce-scatters of activations": ((RankGroup, "begin_reduce_scatter", own_part), {"sp": "yes", "zero": "0"}),
    "gradients of copied keys": ((steps, "communication", without_copies), {"kv": "copied", "sp": "no"}),
    "gradients of tied weights": (
        (TorchEngine, "_tie_gradients", lambda one: None), {"tied": "yes", "pipe": "gpipe"},
    ),
}  # fmt: skip


def caught(task: Task, answers: Sequence[Sequence[StepShare]]) -> None:
    with pytest.raises(AssertionError):
        compare(task.reference(), [share for (share,) in answers])


@pytest.mark.parametrize(("change", "wanted"), rest_is_slow(GIVEN.values(), 0, 2), ids=GIVEN)
def test_a_wrong_batch_is_caught(change, wanted):
    task = task_of(first_row(wanted))
    wrong = replace(task, steps=(tuple(change(task.steps[0])),))
    caught(task, on_ranks(task.plan.mesh.num_ranks, run_steps, wrong))


@pytest.mark.parametrize(("replaced", "wanted"), rest_is_slow(REPLACED.values()))
def test_a_wrong_rank_is_caught(replaced, wanted):
    task = task_of(first_row(wanted))
    caught(task, on_ranks(task.plan.mesh.num_ranks, run_steps, task, replaced=[replaced]))
