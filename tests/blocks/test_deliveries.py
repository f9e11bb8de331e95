"""Each reader takes a tensor as it was made or as it is delivered: nothing that obeys is cheaper than the solver."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from autoshard.blocks.choices import OpChoice, made_layout
from autoshard.blocks.operators import solve
from autoshard.blocks.problem import OperatorProblem
from autoshard.blocks.tensor_edge import TensorEdge
from autoshard.errors import InputError
from autoshard.graph.block import Block
from autoshard.graph.builder import BlockBuilder
from autoshard.graph.kinds.linear import Deliver, Einsum
from autoshard.graph.kinds.norm import Softmax
from autoshard.graph.kinds.pointwise import Add
from autoshard.layout.layout import Cuts, Layout
from autoshard.layout.legal import cut_operations
from autoshard.spec.workload import Precision
from tests.blocks.operator_cases import (
    BOUNDARIES,
    RATES,
    SEEDS,
    TWO,
    assess,
    branched_block,
    closed_block,
    collectives,
    compare_limited,
    every_cut,
    lowered,
    model_problems,
    seconds_of,
    small_problem,
)

FEWER = settings(max_examples=min(settings().max_examples, 100))  # each is solved and lowered


def obeys(problem: OperatorProblem, cuts: Mapping[str, Cuts]) -> bool:
    """Whether readers take every tensor as it was made, if nothing is pending in it, or in one other layout."""
    block = problem.block
    makers = {name: op for op in cut_operations(block) for name in op.outputs}
    for deliver in block.select("micro_batch", "F"):
        if isinstance(deliver.kind, Deliver):
            source, tensor = deliver.inputs[0], deliver.outputs[0]
            dims = block.tensors[tensor].dims
            readers = [op for op in cut_operations(block) if tensor in op.inputs]
            wanted = {OpChoice(cuts=cuts[op.name]).layout(dims) for op in readers}
            if len(wanted - {_made(problem, makers.get(source), source, cuts)}) > 1:
                return False
    return True


def _made(problem, maker, tensor: str, cuts: Mapping[str, Cuts]) -> Layout:
    tensors = problem.block.tensors
    if maker is None:
        return OpChoice(cuts=problem.boundary).layout(tensors[tensor].dims)
    return made_layout(maker, tensors, tensor, OpChoice(cuts=cuts[maker.name]))


@FEWER
@given(seed=SEEDS, boundary=BOUNDARIES, gathered=st.booleans(), branches=st.integers(2, 3))
def test_a_solution_costs_what_its_program_costs(seed: int, boundary: Cuts, gathered: bool, branches: int) -> None:
    problem = small_problem(branched_block(seed, branches), TWO, boundary, keeps_gathered=gathered)
    found = solve(problem)
    assert obeys(problem, found.cuts)
    assert assess(problem, lowered(problem, found.cuts)) == pytest.approx(found.cost_s, rel=1e-9)


@FEWER
@given(seed=SEEDS, boundary=BOUNDARIES, branches=st.integers(2, 3))
def test_an_addition_shares_a_change_at_most(seed: int, boundary: Cuts, branches: int) -> None:
    problem = small_problem(branched_block(seed, branches, adds=True), TWO, boundary)
    found = solve(problem)
    assert obeys(problem, found.cuts)
    assert assess(problem, lowered(problem, found.cuts)) <= found.cost_s * (1 + 1e-9)


@settings(max_examples=4)
@given(seed=SEEDS, size=st.integers(2, 4), gathered=st.booleans(), share=st.floats(0, 1))
def test_no_cuts_that_obey_are_cheaper(seed: int, size: int, gathered: bool, share: float) -> None:
    problem = small_problem(branched_block(seed, 2), {"a": size}, {"batch": ("a",)}, state_bytes_per_weight=18.0)
    ways = [cuts for cuts in every_cut(problem) if obeys(problem, cuts)]
    compare_limited(replace(problem, keeps_gathered=gathered), ways, share)


def parallel_block() -> Block:
    """A product with a large weight and a softmax, both of the block's input, added."""
    b = BlockBuilder(Precision.named("bf16"))
    x = b.add("x", ("batch", "seq", "hidden"))
    up = b.emit("up", Einsum(dims=("batch", "seq", "ffn")), x, b.weight("up.weight", "ffn", "hidden"))
    down = b.emit("down", Einsum(dims=("batch", "seq", "hidden")), up, b.weight("down.weight", "hidden", "ffn"))
    share = b.emit("share", Softmax(over="hidden"), x)
    return closed_block(b, x, b.emit("both", Add(), down, share))


def test_one_reader_takes_its_share_while_another_needs_all_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    atoms, along = {"tp": 8}, {"seq": ("tp",)}
    problem = OperatorProblem(
        block=parallel_block(), sizes={"batch": 1, "seq": 4096, "hidden": 4096, "ffn": 16384}, atoms=atoms,
        boundary=along, rates=RATES, seconds=seconds_of(atoms),
    )  # fmt: skip
    found = solve(problem)
    assert found.cuts == {"up": {"ffn": ("tp",)}, "down": {"ffn": ("tp",)}, "share": along, "both": along}
    assert sorted(collectives(problem, found.cuts)) == [
        "F down_out reduce_scatter seq/tp",
        "F x_out all_gather seq/tp",
        "I down_out all_gather seq/tp",
        "I x_out reduce_scatter seq/tp",
    ]
    assert assess(problem, lowered(problem, found.cuts)) == pytest.approx(found.cost_s, rel=1e-9)
    monkeypatch.setattr(TensorEdge, "_as_made_groups", lambda edge: ())  # all readers take it alike
    assert solve(problem).cost_s > found.cost_s * 1.01


def test_a_router_reads_its_tokens_where_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    along: Cuts = {"seq": ("tp",)}
    pins: dict[str, Cuts] = {"mlp_norm": along, "router": along, "dispatch": {}}
    problem = model_problems("mixtral-8x7b", {"tp": 8}, along, batch=1, pins=pins)["layer"]
    found = solve(problem)
    assert "F mlp_in all_gather seq/tp" in collectives(problem, found.cuts)
    assert assess(problem, lowered(problem, found.cuts)) == pytest.approx(found.cost_s, rel=1e-9)
    monkeypatch.setattr(TensorEdge, "_as_made_groups", lambda edge: ())
    with pytest.raises(InputError, match="router, dispatch read mlp_in in different layouts"):
        solve(problem)
