"""Probing: it finds what may be cut of operations that have no rule, and is not misled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from autoshard.modules.probing import PartCut, found_cuts
from tests.modules.comparing import largest_error, run_to_compare
from tests.modules.modules import Own, numbers


class Normalised(torch.autograd.Function):
    """The identity, whose gradient is divided by its norm."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] / gradients[0].norm()


def cuts(function: Callable[..., Any], *shapes: tuple[int, ...], constants: tuple[int, ...] = ()) -> set[PartCut]:
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    result = function(*inputs)
    return set(found_cuts(lambda given: (function(*given),), inputs, [result], constants))


BATCH = PartCut((0,), (0,))


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: x.exp(), {BATCH, PartCut((1,), (1,))}),
        (lambda x: torch.cumsum(x, 1), {BATCH}),
        (lambda x: torch.sort(x, 1)[0], {BATCH}),
        (lambda x: torch.softmax(x, 1), {BATCH}),
        (lambda x: x.sum(0), {PartCut((1,), (0,)), PartCut((0,), (None,))}),
        (lambda x: x.mean(1), {BATCH}),  # parts have another count
        (lambda x: x * (x > 0.9 * x.max()), set()),
        (lambda x: x.clamp(max=10 * x.detach().abs().mean()), set()),  # which normal numbers seldom show
        (lambda x: x.clamp(max=100 * x.detach().abs().max()), {BATCH, PartCut((1,), (1,))}),  # the identity
        (lambda x: x.view(-1, 2, 12).mean(1).repeat_interleave(2, 0) if len(x) % 2 == 0 else x, set()),
        (lambda x: x * x.shape[0], {PartCut((1,), (1,))}),
        (lambda x: x if x.shape[0] > 5 else 2 * x, {PartCut((1,), (1,))}),
        (Normalised.apply, set()),
        (lambda x: x + x.detach().mean(0), {PartCut((1,), (1,))}),
        (lambda x: x.new_zeros(()) + x.norm(), set()),
    ],
)  # fmt: skip
def test_traps_are_seen(function: Callable[..., Any], found: set[PartCut]):
    assert cuts(function, (8, 12)) == found


def test_several_inputs_are_cut_together_and_parts_of_products_are_summed():
    assert cuts(lambda x, y: x @ y, (4, 6, 8), (8, 10)) == {
        PartCut((0, None), (0,)), PartCut((1, None), (1,)), PartCut((None, 1), (2,)), PartCut((2, 0), (None,)),
    }  # fmt: skip
    assert cuts(torch.linalg.solve, (4, 6, 6), (4, 6, 8)) == {PartCut((0, 0), (0,)), PartCut((None, 2), (2,))}


def test_an_operation_whose_arguments_may_be_lengths_is_not_run_in_other_sizes():
    assert cuts(lambda x: torch.triu(x, 7), (8, 12)) == set()
    assert cuts(lambda x: torch.roll(x, 700, 1), (512, 1024), constants=(700, 1)) == set()  # too large to be run
    assert cuts(lambda x: torch.flip(x, (1,)), (512, 1024), constants=(1,)) == {BATCH}


def unruly(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Operations without a rule: of matrices, of distances, of channels."""
    y = own.a(x)
    mixed = torch.linalg.solve(torch.eye(6, dtype=y.dtype) + y @ y.transpose(1, 2), y)
    near = F.cosine_similarity(y, mixed, dim=-1)[..., None]
    return own.b(near * F.instance_norm(y) + torch.cross(y[..., :3], mixed[..., :3], dim=-1).repeat(1, 1, 3)[..., :8])


def test_a_module_of_operations_without_rules_keeps_its_batch_cut():
    torch.manual_seed(0)
    module, inputs = Own(unruly).double(), [numbers(4, 6, 8).requires_grad_()]
    run = run_to_compare(module, inputs)
    program = run.captured.program
    assert not program.kept_whole
    batch = program.values[-1].dims[0]
    assert not any(batch in step.whole_leaves() for step in program.steps)
    assert largest_error(run, 8) < 1e-12
