"""Every pair of features on real processes equals one process, in double, in FP32 and in BF16.

One process is the graph evaluated with numpy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from autoshard.engine.placement import MeshRank, sequence_order
from autoshard.engine.programs import programs_of
from autoshard.engine.torch import block
from autoshard.engine.torch.collectives import Change, communication
from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.world import RankGroup, World
from autoshard.layout.layout import Collective
from autoshard.layout.program import Communicate, Compute, Given
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_programs
from tests.ranks import matrix
from tests.ranks.cases import (
    AS_PLANNED,
    CLIP_NORM,
    StepShare,
    Task,
    compare,
    compare_weights,
    run_steps,
    torch_adamw,
)
from tests.ranks.matrix import IMPOSSIBLE, Row
from tests.ranks.shares import assemble
from tests.ranks.spawn import on_ranks
from tests.reference_step import StepResult

pytestmark = pytest.mark.ranks

ROWS = matrix.rows()
QUICK = matrix.quick(ROWS)
BF16 = 2.0**-8  # unit roundoff


def named(row: Row) -> str:
    return f"{ROWS.index(row):02}: {matrix.candidate_of(row)}"


with_quick_rows = pytest.mark.parametrize(
    "row", [pytest.param(row, id=named(row), marks=[] if row in QUICK else [pytest.mark.slow]) for row in ROWS]
)


@pytest.fixture(autouse=True)
def one_thread():
    """The model is too small for threads, which wait for each other in a loop when cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def task_of(row: Row, precision: str = "bf16", num_steps: int = 1) -> Task:
    return Task.of(matrix.plan_for(row, precision), num_steps, masked=row["mask"] == "yes")


# -- the rows themselves -------------------------------------------------------------------------------


@pytest.mark.slow
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


@with_quick_rows
def test_two_steps_in_double_are_those_of_one_process(row):
    task = task_of(row, num_steps=2)
    answers = on_ranks(task.plan.mesh.num_ranks, run_steps, task)
    tensors, optimizer = torch_adamw(task.weights)
    for step in range(2):
        before = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        expected = task.reference(before, step)
        assert (expected.norm > task.plan.workload.clip_norm) == (row["clip"] == "yes")
        for name, gradient in expected.gradients.items():
            tensors[name].grad = torch.from_numpy(gradient.copy())
        torch.nn.utils.clip_grad_norm_([tensors[name] for name in expected.gradients], task.plan.workload.clip_norm)
        optimizer.step()
        weights = {name: tensor.numpy() for name, tensor in tensors.items()}
        shares = [found[step] for found in answers]
        compare(expected, shares, weights=weights)


def distances(expected: StepResult, shares: Sequence[StepShare]) -> Mapping[str, float]:
    """How far loss and norm are, relative to themselves, and every gradient, relative to the largest."""
    found = {"loss": 0.0, "norm": 0.0}
    for share in shares:
        found["loss"] = max(found["loss"], abs(share.loss / expected.loss - 1))
        found["norm"] = max(found["norm"], abs(share.norm / expected.norm - 1))
    largest = max(np.abs(gradient).max() for gradient in expected.gradients.values())
    assert {name for share in shares for name in share.gradients} == set(expected.gradients)
    for name, gradient in expected.gradients.items():
        whole = assemble(gradient.shape, [share.gradients[name] for share in shares if name in share.gradients])
        found[name] = float(np.abs(whole - gradient).max() / largest)
    return found


def near(expected: StepResult, shares: Sequence[StepShare], most: float) -> None:
    """Hold loss, norm and every gradient within a distance."""
    assert not {name: distance for name, distance in distances(expected, shares).items() if not distance <= most}


def by_sgd(row: Row, precision: str) -> Task:
    """Two steps that move the weights by about as much as they are, so that what is wrong with them shows."""
    task = task_of(row, precision, num_steps=2)
    rate = 0.5 / CLIP_NORM if row["clip"] == "yes" else 0.1
    workload = replace(task.plan.workload, optimizer="sgd")
    return replace(task, plan=replace(task.plan, workload=workload), learning_rate=rate)


def run_both(exact: Task, single: Task) -> tuple[list[StepShare], list[StepShare]]:
    """The steps of one task in double, those of another as it is planned."""
    return run_steps(exact), run_steps(single, AS_PLANNED)


@pytest.mark.slow
@with_quick_rows
def test_two_steps_of_sgd_are_those_of_one_process_in_double_and_near_them_in_fp32(row):
    task, single = by_sgd(row, "bf16"), by_sgd(row, "fp32")
    answers = on_ranks(task.plan.mesh.num_ranks, run_both, task, single)
    weights = task.weights
    for step in range(2):
        expected = task.reference(weights, step)
        compare(expected, [found[step] for found, _ in answers])
        shares = [found[step] for _, found in answers]
        near(expected, shares, 1e-5)
        compare_weights(expected.weights, shares, 1e-5)
        weights = task.after(expected)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row["experts"] == "dense"], ids=named)
def test_a_step_in_bf16_is_as_near_as_its_roundings_let_it_be(row):
    """Each rounding to BF16 moves a number by up to 2^-8 of itself; n of them, up and down as it comes, sqrt(n) as far.

    n counts what a micro-batch passes: every operation that writes BF16, and in every sum over ranks one addition for
    each rank but the first. So it grows with the depth and with tp. Nothing else is lost: gradients are added up in
    FP32, and the reference starts from weights that BF16 holds. Routers choose otherwise when rounded, so experts are
    left out.
    """
    task = with_rounded_weights(task_of(row))
    most = BF16 * roundings(task.plan) ** 0.5
    assert most < 0.1, "a part that is missing would not be seen"
    answers = on_ranks(task.plan.mesh.num_ranks, run_steps, task, AS_PLANNED)
    near(task.reference(), [share for (share,) in answers], most)


def with_rounded_weights(task: Task) -> Task:
    """The same task from weights that BF16 holds; tied ones stay the same array."""
    rounded = {id(array): torch.from_numpy(array).bfloat16().double().numpy() for array in task.weights.values()}
    return replace(task, weights={name: rounded[id(array)] for name, array in task.weights.items()})


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


# -- seeded faults -------------------------------------------------------------------------------------


def per_micro_batch(task: Task) -> Task:
    """Divide by the tokens that count in a micro-batch: a mean of means."""
    (step,) = task.steps
    share = len(step)
    divided = (
        {**batch, "token_weight": batch["token_weight"] / (share * batch["token_weight"].sum())} for batch in step
    )
    return replace(task, steps=(tuple(divided),))


def swapped(task: Task) -> Task:
    """Give micro-batches the labels of each other."""
    (step,) = task.steps
    return replace(task, steps=(tuple({**a, "labels": b["labels"]} for a, b in zip(step, step[::-1], strict=True)),))


def labels_in_order(task: Task) -> Task:
    """Undo the zig-zag beforehand, for labels alone."""
    back = np.argsort(sequence_order(task.plan))
    (step,) = task.steps
    return replace(task, steps=(tuple({**batch, "labels": batch["labels"][:, back]} for batch in step),))


def own_part(group: RankGroup, whole: torch.Tensor) -> torch.Tensor:
    """A reduce-scatter without the reduction."""
    return whole.contiguous().chunk(len(group.ranks))[group.number].clone()


def without_copies(world: World, place: MeshRank, change: Communicate) -> Change:
    """Leave out every sum over the ranks that hold the same keys."""
    if change.collective.atoms == ("rep",) and change.collective.kind == "all_reduce":
        return torch.clone
    return communication(world, place, change)


def not_added(one: TorchEngine) -> None:
    """Leave the gradients of tied weights where they are."""


GIVEN = {
    "a mean of means": (per_micro_batch, {"mask": "yes", "micro": "4"}),
    "labels of another micro-batch": (swapped, {"micro": "4"}),
    "labels in another order than tokens": (labels_in_order, {"cp": "zigzag"}),
}
REPLACED = {
    "a reduce-scatter that does not sum": ((RankGroup, "reduce_scatter", own_part), {"tp": "1", "zero": "1"}),
    "reduce-scatters of activations that do not sum": (
        (RankGroup, "reduce_scatter", own_part),
        {"sp": "yes", "zero": "0"},
    ),
    "gradients of copied keys": ((block, "communication", without_copies), {"kv": "copied", "sp": "no"}),
    "gradients of tied weights": ((TorchEngine, "_tie_gradients", not_added), {"tied": "yes", "pipe": "gpipe"}),
}


def first_row(wanted: Mapping[str, str]) -> Row:
    return min((row for row in ROWS if wanted.items() <= row.items()), key=matrix.num_ranks)


def caught(task: Task, answers: Sequence[Sequence[StepShare]]) -> None:
    with pytest.raises(AssertionError):
        compare(task.reference(), [share for (share,) in answers])


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "wanted"), GIVEN.values(), ids=GIVEN)
def test_a_wrong_batch_is_caught(seed, wanted):
    task = task_of(first_row(wanted))
    caught(task, on_ranks(task.plan.mesh.num_ranks, run_steps, seed(task)))


@pytest.mark.parametrize(
    ("replaced", "wanted"),
    [
        pytest.param(*case, id=name, marks=() if number < 2 else pytest.mark.slow)
        for number, (name, case) in enumerate(REPLACED.items())
    ],
)
def test_a_wrong_rank_is_caught(replaced, wanted, monkeypatch):
    task = task_of(first_row(wanted))
    monkeypatch.setattr(*replaced)  # ranks are forked, so they have it too
    caught(task, on_ranks(task.plan.mesh.num_ranks, run_steps, task))
