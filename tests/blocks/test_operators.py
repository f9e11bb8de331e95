from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from autoshard.blocks.operators import solve
from autoshard.errors import InputError
from autoshard.layout.layout import Cuts
from autoshard.layout.legal import faults
from tests.blocks.operator_cases import (
    BOUNDARIES,
    SEEDS,
    SMALL_SIZES,
    TWO,
    assess,
    collectives,
    compare_limited,
    every_cut,
    lowered,
    model_problems,
    pinned,
    random_block,
    small_problem,
)

MESH = {"dp": 8, "tp": 8}
SEQUENCE: Cuts = {"batch": ("dp",), "seq": ("tp",)}


@given(seed=SEEDS, boundary=BOUNDARIES, gathered=st.booleans())
def test_the_cost_is_that_of_the_program_that_is_lowered(seed: int, boundary: Cuts, gathered: bool) -> None:
    problem = small_problem(random_block(seed), TWO, boundary, keeps_gathered=gathered)
    found = solve(problem)
    assert assess(problem, lowered(problem, found.cuts)) == pytest.approx(found.cost_s, rel=1e-9)


@settings(max_examples=10)
@given(seed=SEEDS, size=st.integers(2, 4), gathered=st.booleans(), share=st.floats(0, 1))
def test_no_cut_of_a_small_block_is_cheaper(seed: int, size: int, gathered: bool, share: float) -> None:
    options = {"keeps_gathered": gathered, "state_bytes_per_weight": 18.0}
    problem = small_problem(random_block(seed), {"a": size}, {"batch": ("a",)}, **options)
    compare_limited(problem, every_cut(problem), share)


@pytest.mark.parametrize(
    ("model", "boundary", "gathered"),
    [
        ("llama3-8b", SEQUENCE, False),
        ("mixtral-8x7b", SEQUENCE, True),
        ("gpt-neox-20b", SEQUENCE, True),
        ("llama3-8b", {"batch": ("dp",)}, False),
    ],
)
def test_real_blocks_cost_what_their_programs_cost_and_are_legal(model: str, boundary: Cuts, gathered: bool) -> None:
    for problem in model_problems(model, MESH, boundary, keeps_gathered=gathered).values():
        found = solve(problem)
        assert not faults(problem.block, found.cuts, tuple(MESH))
        assert assess(problem, lowered(problem, found.cuts)) == pytest.approx(found.cost_s, rel=1e-9)


@pytest.mark.parametrize("capacity", [None, 2.0])
def test_gradients_that_are_summed_at_once_are_priced_as_they_are_sent(capacity: float | None) -> None:
    for boundary in (SEQUENCE, {"batch": ("dp",)}):
        options = {"keeps_gathered": False, "capacity": capacity, "platform": "nxd"}
        problem = model_problems("mixtral-8x7b", MESH, boundary, **options)["layer"]
        fixed = pinned(problem, {name: {"slots": ("dp",), "ffn": ("tp",)} for name in ("gate", "up")})
        for asked in (problem, fixed):
            found = solve(asked)
            assert assess(asked, lowered(asked, found.cuts)) == pytest.approx(found.cost_s, rel=1e-9)
        sent = collectives(problem, solve(fixed).cuts)
        assert any(line.startswith("I mlp_in all_reduce") for line in sent) == (capacity is None)
        assert any(line.startswith("I expert_in all_reduce") for line in sent) == (capacity is not None)


def test_numbers_of_slots_are_read_as_they_were_counted() -> None:
    problem = model_problems("mixtral-8x7b", MESH, {"batch": ("dp",)})["layer"]
    found = solve(pinned(problem, {"queue": {"batch": ("tp",)}}))
    for name in ("dispatch", "combine"):
        tokens = {dim: found.cuts[name].get(dim, ()) for dim in ("batch", "seq")}
        assert tokens == {"batch": ("tp",), "seq": ()}


@pytest.mark.parametrize(
    ("model", "pins", "readers"),
    [
        ("llama3-8b", {"q": {"seq": ("tp",)}, "k": {}, "v": {"batch": ("tp",)}}, "q, k, v read attn_in"),
        (
            "mixtral-8x7b",
            {"queue": {"batch": ("tp",)}, "dispatch": {"batch": ("dp",)}},
            "queue, dispatch, combine read choose_expert_out",
        ),
    ],
)
def test_pins_that_contradict_each_other_are_refused(model: str, pins: Mapping[str, Cuts], readers: str) -> None:
    with pytest.raises(InputError, match=f"{readers} in different layouts; pin them to one, or fewer of them"):
        solve(model_problems(model, MESH, SEQUENCE, pins=pins)["layer"])


def test_numbers_that_make_no_sense_are_all_refused_at_once() -> None:
    wrong = {"num_micro_batches": 0, "memory_limit_bytes": 0.0, "allowed": {"p": ()}}
    with pytest.raises(InputError, match=r"(?s)allowed.p: .* has no such operation.*num_micro_batches.*memory_limit"):
        model_problems("llama3-8b", MESH, SEQUENCE, **wrong)


@given(seed=SEEDS, boundary=BOUNDARIES)
def test_renaming_dims_and_operations_changes_no_cost(seed: int, boundary: Cuts) -> None:
    names = {"batch": "z", "seq": "y", "hidden": "x", "ffn": "w"}
    here = small_problem(random_block(seed, adds=True), TWO, boundary)
    sizes = {names[dim]: size for dim, size in SMALL_SIZES.items()}
    block = random_block(seed, adds=True, dims=tuple(names.values()), prefix="a")
    there = small_problem(block, TWO, {names[dim]: cut for dim, cut in boundary.items()}, sizes=sizes)
    assert solve(there).cost_s == pytest.approx(solve(here).cost_s, rel=1e-12)


def test_the_names_of_atoms_mean_nothing() -> None:
    one = model_problems("llama3-8b", {"dp": 8, "tp": 4}, {})["layer"]
    other = model_problems("llama3-8b", {"u": 8, "v": 4}, {})["layer"]
    assert solve(one).cost_s == pytest.approx(solve(other).cost_s, rel=1e-12)


def test_an_atom_of_size_one_changes_nothing() -> None:
    small = solve(model_problems("llama3-8b", MESH, SEQUENCE)["layer"])
    large = solve(model_problems("llama3-8b", {**MESH, "cp": 1}, SEQUENCE)["layer"])
    assert (small.cuts, small.cost_s) == (large.cuts, large.cost_s)


def test_what_does_not_fit_is_said_with_the_least_it_needs() -> None:
    problem = model_problems("llama3-8b", MESH, SEQUENCE, memory_limit_bytes=1.0)["layer"]
    found = solve(problem)
    assert not found.fits and found.kept_bytes > 1


def test_the_more_memory_the_faster() -> None:
    problem = model_problems("llama3-8b", MESH, SEQUENCE, state_bytes_per_weight=18.0, cuts_rest=True)["layer"]
    most = solve(problem).kept_bytes
    found = [solve(replace(problem, memory_limit_bytes=most * share)) for share in (0.3, 0.7, 1.0)]
    assert all(one.fits and one.gap <= 0.005 for one in found)
    costs = [one.cost_s for one in found]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]
