"""Bounds leave out nothing that is better: without any, the same plan is found."""

from dataclasses import replace

import pytest

from autoshard.plan.codec import dump
from autoshard.search.planner import search
from autoshard.search.request import Request
from autoshard.search.stage_filling import EVERYTHING
from tests.search.brute_force import ask


def same_without_bounds(request: Request) -> None:
    pruned = search(replace(request, effort=EVERYTHING))
    whole = search(replace(request, effort=replace(EVERYTHING, exhaustive=True)))
    assert dump(whole.plans[0]) == dump(pruned.plans[0])
    assert whole.certificate.num_legal == pruned.certificate.num_legal
    assert (whole.certificate.num_too_large, whole.certificate.num_bounded) == (0, 0)
    assert whole.certificate.gap < 1e-9 and pruned.certificate.gap < 1e-9
    assert pruned.certificate.num_solved < whole.certificate.num_solved


@pytest.mark.parametrize(
    "request_",
    [
        ask("llama3-8b", "trn1.32xlarge", pins="cp=1"),
        ask("tiny-llama", global_batch=8),
        replace(ask("tiny-mixtral", global_batch=8, pins="kernels=torch_cuda,cp=1"), memory_bytes=1.12e9),
    ],
    ids=["llama3-8b", "tiny-llama", "little memory"],
)
def test_small_questions(request_: Request):
    same_without_bounds(request_)


@pytest.mark.slow
def test_llama3_70b_on_16_nodes():
    same_without_bounds(ask("llama3-70b", "trn1.32xlarge", 16))
