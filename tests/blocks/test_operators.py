import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from autoshard.blocks.chain import ReducedBlock, SharedWeight, solve_chain
from autoshard.blocks.operators import OperatorProblem, assess, solve
from autoshard.errors import InputError
from autoshard.layout.layout import Cuts
from autoshard.layout.legal import faults
from tests.blocks.operator_cases import (
    SMALL_SIZES,
    collectives,
    lowered,
    model_problems,
    random_block,
)
from tests.search.small_cases import BOUNDARIES, SEEDS, TWO, compare_limited, every_cut, small_problem

MESH = {"dp": 8, "tp": 8}
SEQUENCE: Cuts = {"batch": ("dp",), "seq": ("tp",)}


@given(seed=SEEDS, boundary=BOUNDARIES, gathered=st.booleans())
def test_the_cost_is_that_of_the_program_that_is_lowered(seed: int, boundary: Cuts, gathered: bool) -> None:
    problem = small_problem(random_block(seed), TWO, boundary, keeps_gathered=gathered)
    found = solve(problem)
    assert assess(problem, lowered(problem, found.cuts)) == pytest.approx(found.cost_s, rel=1e-9)


@settings(max_examples=15)
@given(seed=SEEDS, size=st.integers(2, 5), gathered=st.booleans())
def test_no_cut_of_a_small_block_is_cheaper(seed: int, size: int, gathered: bool) -> None:
    problem = small_problem(random_block(seed), {"a": size}, {"batch": ("a",)}, keeps_gathered=gathered)
    best = min(assess(problem, lowered(problem, cuts)) for cuts in every_cut(problem))
    assert solve(problem).cost_s == pytest.approx(best, rel=1e-9)


@settings(max_examples=15)
@given(seed=SEEDS, size=st.integers(2, 4), share=st.floats(0, 1))
def test_no_cut_that_keeps_to_a_limit_is_cheaper(seed: int, size: int, share: float) -> None:
    problem = small_problem(random_block(seed), {"a": size}, {"batch": ("a",)}, state_bytes_per_weight=18.0)
    compare_limited(problem, every_cut(problem), share)


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(
    ("model", "boundary"),
    [
        ("llama3-8b", SEQUENCE),
        ("mixtral-8x7b", SEQUENCE),
        ("gpt-neox-20b", SEQUENCE),
        ("llama3-8b", {"batch": ("dp",)}),
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
        pinned = replace(problem, pins={name: {"slots": ("dp",), "ffn": ("tp",)} for name in ("gate", "up")})
        for asked in (problem, pinned):
            found = solve(asked)
            assert assess(asked, lowered(asked, found.cuts)) == pytest.approx(found.cost_s, rel=1e-9)
        sent = collectives(problem, solve(pinned).cuts)
        assert any(line.startswith("I mlp_in all_reduce") for line in sent) == (capacity is None)
        assert any(line.startswith("I expert_in all_reduce") for line in sent) == (capacity is not None)


def test_numbers_of_slots_are_read_as_they_were_counted() -> None:
    problem = model_problems("mixtral-8x7b", MESH, {"batch": ("dp",)})["layer"]
    problem = replace(problem, pins={"queue": {"batch": ("tp",)}})
    found = solve(problem)
    for name in ("dispatch", "combine"):
        tokens = {dim: found.cuts[name].get(dim, ()) for dim in ("batch", "seq")}
        assert tokens == {"batch": ("tp",), "seq": ()}


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"p": {}}, "pins.p: layer has no such operation"),
        (
            {"attn_norm": {"hidden": ("tp",)}},
            r"pins.attn_norm: \[hidden/tp\] is not a choice here. Cut batch, seq over dp, tp",
        ),
        ({"o": {"seq": ("tp", "dp")}}, "in the mesh's order"),
        ({"q": {"seq": ("tp",)}, "k": {}, "v": {"batch": ("tp",)}}, "q, k, v read attn_in in different layouts"),
    ],
)
def test_a_pin_that_cannot_be_is_refused_with_what_can(pins: Mapping[str, Cuts], message: str) -> None:
    with pytest.raises(InputError, match=message):
        solve(model_problems("llama3-8b", MESH, SEQUENCE, pins=pins)["layer"])


def test_pins_that_contradict_each_other_are_refused() -> None:
    pins = {"queue": {"batch": ("tp",)}, "dispatch": {"batch": ("dp",)}}
    with pytest.raises(InputError, match="queue, dispatch, combine read choose_expert_out in different layouts"):
        solve(model_problems("mixtral-8x7b", MESH, SEQUENCE, pins=pins)["layer"])


def test_numbers_that_make_no_sense_are_all_refused_at_once() -> None:
    with pytest.raises(InputError, match=r"(?s)num_micro_batches.*memory_limit_bytes"):
        model_problems("llama3-8b", MESH, SEQUENCE, num_micro_batches=0, memory_limit_bytes=0.0)


@given(seed=SEEDS, boundary=BOUNDARIES)
def test_renaming_dims_and_operations_changes_no_cost(seed: int, boundary: Cuts) -> None:
    names = {"batch": "z", "seq": "y", "hidden": "x", "ffn": "w"}
    here = small_problem(random_block(seed, adds=True), TWO, boundary)
    sizes = {names[dim]: size for dim, size in SMALL_SIZES.items()}
    block = random_block(seed, adds=True, dims=tuple(names.values()), prefix="a")
    there = small_problem(block, TWO, {names[dim]: cut for dim, cut in boundary.items()}, sizes=sizes)
    assert solve(there).cost_s == pytest.approx(solve(here).cost_s, rel=1e-12)


def test_a_pin_holds_and_never_makes_it_cheaper() -> None:
    problem = model_problems("llama3-8b", MESH, SEQUENCE)["layer"]
    free, pinned = solve(problem), solve(replace(problem, pins={"q": {"hidden": ("tp",), "batch": ("dp",)}}))
    assert pinned.cuts["q"] == {"batch": ("dp",), "hidden": ("tp",)}
    assert pinned.cost_s > free.cost_s


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
    assert "does not fit" in str(found)
    assert "gap 0.00%" in str(solve(replace(problem, memory_limit_bytes=math.inf)))


def test_a_price_of_bytes_buys_memory_with_time() -> None:
    problem = model_problems("llama3-8b", MESH, SEQUENCE, state_bytes_per_weight=18.0)["layer"]
    cheap, dear = solve(problem), solve(replace(problem, second_per_byte=1e-11))
    assert dear.kept_bytes < cheap.kept_bytes


def test_the_more_memory_the_faster() -> None:
    problem = model_problems("llama3-8b", MESH, SEQUENCE, state_bytes_per_weight=18.0, cuts_rest=True)["layer"]
    most = solve(problem).kept_bytes
    found = [solve(replace(problem, memory_limit_bytes=most * share)) for share in (0.3, 0.5, 0.7, 0.9, 1.0)]
    assert all(one.fits and one.gap <= 0.005 for one in found)
    costs = [one.cost_s for one in found]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]


@pytest.fixture(scope="module")
def llama() -> tuple[dict[str, OperatorProblem], dict[str, ReducedBlock]]:
    problems = model_problems("llama3-8b", MESH, {})
    return problems, {kind: ReducedBlock(problem) for kind, problem in problems.items()}


def test_tied_layers_cost_what_the_repeated_solve_costs(
    llama: tuple[dict[str, OperatorProblem], dict[str, ReducedBlock]],
) -> None:
    problems, blocks = llama
    chain = [blocks["embed"], *[blocks["layer"]] * 4, blocks["head"]]
    tied = solve_chain(chain, layers_tied=True)
    assert len(set(tied.boundaries)) == 1 and len(tied.boundaries) == 5
    every: list[float] = []
    for layout in blocks["layer"].boundaries:
        alone = {k: solve(replace(problem, boundary=dict(layout.dims))).cost_s for k, problem in problems.items()}
        every.append(alone["embed"] + 4 * alone["layer"] + alone["head"])
    assert tied.cost_s == pytest.approx(min(every), rel=1e-9)
    assert solve_chain(chain).cost_s <= tied.cost_s * (1 + 1e-12)


def test_a_chain_costs_what_its_blocks_cost_between_its_boundaries(
    llama: tuple[dict[str, OperatorProblem], dict[str, ReducedBlock]],
) -> None:
    _, blocks = llama
    found = solve_chain([blocks["embed"], *[blocks["layer"]] * 3, blocks["head"]])
    assert found.cost_s == pytest.approx(sum(block.cost_s for block in found.blocks))
    assert len(found.blocks) == 5 and len(found.boundaries) == 4


def test_a_shared_weight_is_cut_alike_and_vocabulary_parallel(
    llama: tuple[dict[str, OperatorProblem], dict[str, ReducedBlock]],
) -> None:
    _, blocks = llama
    chain = [blocks["embed"], blocks["layer"], blocks["head"]]
    free = solve_chain(chain)
    shared = solve_chain(chain, shared=SharedWeight(first=(0, "embed.weight"), second=(2, "unembed.weight")))
    ends = (shared.blocks[0].cuts["embed"], shared.blocks[-1].cuts["unembed"])
    assert [cuts.get("vocab") for cuts in ends] == [("tp",), ("tp",)]
    assert [cuts.get("hidden") for cuts in ends] == [None, None]
    assert free.blocks[0].cuts["embed"] == {"hidden": ("dp", "tp")}
    assert shared.cost_s >= free.cost_s


def test_vocabulary_is_never_gathered_in_the_loss() -> None:
    problem = model_problems("llama3-8b", MESH, SEQUENCE)["head"]
    found = solve(problem)
    assert found.cuts["unembed"] == {"batch": ("dp",), "vocab": ("tp",)}
    assert not [text for text in collectives(problem, found.cuts) if "vocab" in text]
