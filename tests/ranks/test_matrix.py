"""Every pair of features on real processes equals one process, in double, in FP32 and in BF16.

One process is the graph evaluated with numpy, and beside it the decoder with PyTorch's own gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from autoshard.engine.decoder.model import Decoder, graph_name, state_of
from autoshard.engine.place import assemble
from autoshard.engine.programs import programs_of
from autoshard.engine.torch.executor import Executor
from autoshard.errors import InputError
from autoshard.graph.evaluate import StepResult
from tests.ranks import matrix
from tests.ranks.cases import Arrays, StepShare, Task, compare, run_steps, share_of, torch_adamw
from tests.ranks.matrix import ABSENT, FEATURES, IMPOSSIBLE, Row
from tests.ranks.spawn import on_ranks

pytestmark = pytest.mark.ranks

ROWS = matrix.rows()
QUICK = matrix.quick(ROWS)
NAMES = [f"{number:02}: {matrix.candidate_of(row)}" for number, row in enumerate(ROWS)]


def task_of(row: Row, precision: str = "bf16", num_steps: int = 1) -> Task:
    return Task.of(matrix.plan_for(row, precision), num_steps, masked=row["mask"] == "yes")


# -- the rows themselves -------------------------------------------------------------------------------


def test_the_table_is_what_the_search_for_rows_finds():
    assert matrix.TABLE.strip() == matrix.table_of(matrix.covering())


def test_every_possible_pair_is_in_some_row():
    assert matrix.possible_pairs() <= set(chain.from_iterable(map(matrix.pairs_of, ROWS)))


def test_no_value_is_missing_but_those_that_are_not_there_yet():
    met = {(name, row[name]) for row in ROWS for name in FEATURES}
    assert met == {(name, value) for name, values in FEATURES.items() for value in values} - set(ABSENT)
    assert met == {(name, row[name]) for row in QUICK for name in FEATURES}


def test_every_row_may_run():
    assert all(matrix.is_legal(row) for row in ROWS)
    assert not [reason for row in ROWS for reason, excludes in IMPOSSIBLE.items() if excludes(row)]


@pytest.mark.parametrize(("name", "value"), ABSENT, ids=" ".join)
def test_what_is_not_there_yet_is_refused(name, value):
    row = next(row for row in ROWS if row["dp"] == "2" and row["experts"] != "dense") | {name: value}
    if matrix.is_legal(row):
        with pytest.raises(InputError, match="not executed yet"):
            programs_of(matrix.plan_for(row))


# -- the rows run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_two_steps_in_double_are_those_of_one_process(row):
    task = task_of(row, num_steps=2)
    answers = on_ranks(task.plan.mesh.num_ranks, run_steps, task)
    tensors, optimizer = torch_adamw(task.weights)
    for step in range(2):
        before = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        expected = task.reference(before, step)
        assert (expected.norm > task.plan.workload.clip_norm) == (row["clip"] == "yes")
        loss, gradients = of_decoder(task, before, step)
        for name, gradient in expected.gradients.items():
            tensors[name].grad = torch.from_numpy(gradient.copy())
        torch.nn.utils.clip_grad_norm_([tensors[name] for name in expected.gradients], task.plan.workload.clip_norm)
        optimizer.step()
        weights = {name: tensor.numpy() for name, tensor in tensors.items()}
        shares = [found[step] for found in answers]
        compare(expected, shares, weights=weights)
        near(replace(expected, loss=loss, gradients=gradients), shares, 1e-9)


def of_decoder(task: Task, weights: Arrays, step: int) -> tuple[float, Arrays]:
    """Loss and gradients of a step by PyTorch's autograd on the plain module."""
    module, loss = Decoder(task.plan.model, dtype=torch.float64), 0.0
    module.load_state_dict(state_of(weights))
    for batch in task.steps[step]:
        part = module(*(torch.from_numpy(batch[name]) for name in ("tokens", "labels", "token_weight")))
        part.backward()
        loss += part.item()
    parameters = {graph_name(name): parameter for name, parameter in module.named_parameters()}
    return loss, {name: parameter.grad.numpy() for name, parameter in parameters.items() if parameter.grad is not None}


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


def run_planned(task: Task) -> StepShare:
    """One step in the formats of the plan."""
    return share_of(Executor(task.plan, task.weights.__getitem__), task.steps[0])


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_a_step_in_fp32_is_near_one_process_in_double(row):
    task = task_of(row, "fp32")
    near(task.reference(), on_ranks(task.plan.mesh.num_ranks, run_planned, task), 1e-5)
