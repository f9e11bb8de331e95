"""Problems that are small enough to try every cut of every operation."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from autoshard.blocks.operators import OperatorProblem, assess, op_choices, solve
from autoshard.graph.block import Block
from autoshard.layout.layout import Cuts
from autoshard.layout.legal import cut_operations
from tests.blocks.operator_cases import RATES, SMALL_SIZES, kept_bytes, lowered, seconds_of

TWO = {"a": 2, "b": 3}
UNLIKE = {"a": 100e9, "b": 300e9}
BOUNDARIES = st.sampled_from([{}, {"batch": ("a",)}, {"seq": ("b",)}, {"batch": ("b",), "seq": ("a",)}])
SEEDS = st.integers(0, 2**32 - 1)


def small_problem(block: Block, atoms: Mapping[str, int], boundary: Cuts, **more: Any) -> OperatorProblem:
    common = {"sizes": SMALL_SIZES, "rates": RATES, "seconds": seconds_of(atoms, UNLIKE), **more}
    return OperatorProblem(block=block, atoms=atoms, boundary=boundary, **common)


def every_cut(problem: OperatorProblem) -> list[dict[str, Cuts]]:
    ops = cut_operations(problem.block)
    ways = itertools.product(*(op_choices(problem.block, op, tuple(problem.atoms)) for op in ops))
    return [dict(zip((op.name for op in ops), way, strict=True)) for way in ways]


def compare_limited(problem: OperatorProblem, ways: Sequence[Mapping[str, Cuts]], share: float) -> None:
    """Hold the solver against all ways, under a limit between the least memory and that of the cheapest way."""
    programs = [lowered(problem, cuts) for cuts in ways]
    worth = [(assess(problem, program), kept_bytes(problem, program)) for program in programs]
    least, cheapest = min(kept for _, kept in worth), min(worth)[1]
    limited = replace(problem, memory_limit_bytes=least + share * (cheapest - least))
    found = solve(limited)
    best = min(cost for cost, kept in worth if kept <= limited.memory_limit_bytes * (1 + 1e-9))
    assert found.fits and found.gap == 0
    assert found.cost_s == pytest.approx(best, rel=1e-9)
    assert kept_bytes(problem, lowered(problem, found.cuts)) == pytest.approx(found.kept_bytes)
