"""The solver finds the cheapest cuts that obey, and says what their program costs.

Each reader takes a tensor as it was made or as it is delivered, in one layout for all that do not take it as made.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from autoshard.blocks import tensor_edge
from autoshard.blocks.choices import OpChoice, made_layout
from autoshard.blocks.operators import solve
from autoshard.blocks.problem import OperatorProblem
from autoshard.blocks.tensor_edge import TensorEdge
from autoshard.errors import InputError
from autoshard.graph.block import Block
from autoshard.graph.builder import BlockBuilder
from autoshard.graph.kinds.linear import Deliver, Einsum
from autoshard.graph.kinds.norm import Softmax
from autoshard.graph.kinds.pointwise import Add, Unary
from autoshard.layout.layout import Cuts, Layout
from autoshard.layout.legal import cut_operations, faults
from autoshard.spec.workload import Precision
from tests.blocks.operator_cases import (
    BOUNDARIES,
    RATES,
    SEEDS,
    SMALL_SIZES,
    TWO,
    assess,
    branched_block,
    closed_block,
    collectives,
    compare_limited,
    every_cut,
    lowered,
    model_problems,
    pinned,
    random_block,
    seconds_of,
    small_problem,
)
from tests.slower import rest_is_slow

MESH = {"dp": 8, "tp": 8}
SEQUENCE: Cuts = {"batch": ("dp",), "seq": ("tp",)}


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


@given(seed=SEEDS, boundary=BOUNDARIES, gathered=st.booleans(), branches=st.integers(1, 3))
def test_the_cost_is_that_of_the_program_that_is_lowered(seed: int, boundary: Cuts, gathered: bool, branches: int):
    block = random_block(seed) if branches == 1 else branched_block(seed, branches)
    problem = small_problem(block, TWO, boundary, keeps_gathered=gathered)
    found = solve(problem)
    assert obeys(problem, found.cuts)
    assert assess(problem, lowered(problem, found.cuts)) == pytest.approx(found.cost_s, rel=1e-9)


@given(seed=SEEDS, boundary=BOUNDARIES, branches=st.integers(2, 3))
def test_an_addition_shares_a_change_at_most(seed: int, boundary: Cuts, branches: int):
    problem = small_problem(branched_block(seed, branches, adds=True), TWO, boundary)
    found = solve(problem)
    assert obeys(problem, found.cuts)
    assert assess(problem, lowered(problem, found.cuts)) <= found.cost_s * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=max(3, settings().max_examples // 3))
@given(seed=SEEDS, size=st.integers(2, 4), gathered=st.booleans(), share=st.floats(0, 1), branched=st.booleans())
def test_no_cut_of_a_small_block_is_cheaper(seed: int, size: int, gathered: bool, share: float, branched: bool):
    block = branched_block(seed, 2) if branched else random_block(seed)
    options = {"keeps_gathered": gathered, "state_bytes_per_weight": 18.0}
    problem = small_problem(block, {"a": size}, {"batch": ("a",)}, **options)
    compare_limited(problem, [cuts for cuts in every_cut(problem) if obeys(problem, cuts)], share)


@pytest.mark.parametrize(
    ("model", "boundary", "gathered"),
    rest_is_slow(
        [
            ("llama3-8b", SEQUENCE, False),
            ("mixtral-8x7b", SEQUENCE, True),
            ("gpt-neox-20b", SEQUENCE, True),
            ("llama3-8b", {"batch": ("dp",)}, False),
        ],
        2,
        2,
    ),
)
def test_real_blocks_cost_what_their_programs_cost_and_are_legal(model: str, boundary: Cuts, gathered: bool) -> None:
    for problem in model_problems(model, MESH, boundary, keeps_gathered=gathered).values():
        found = solve(problem)
        assert not faults(problem.block, found.cuts, tuple(MESH))
        assert assess(problem, lowered(problem, found.cuts)) == pytest.approx(found.cost_s, rel=1e-9)


@pytest.mark.parametrize("capacity", rest_is_slow([2.0, None]))
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
        ("llama3-8b", {"q": {"seq": ("tp",)}, "k": {}, "v": {"batch": ("tp",)}}, r"\(q, k, v\) read attn_in"),
        (
            "mixtral-8x7b",
            {"queue": {"batch": ("tp",)}, "dispatch": {"batch": ("dp",)}},
            r"\(queue, dispatch, combine\) read choose_expert_out",
        ),
    ],
)
def test_pins_that_contradict_each_other_are_refused(model: str, pins: Mapping[str, Cuts], readers: str) -> None:
    with pytest.raises(InputError, match=f"{readers}, and no layout of it suits all. Leave out a pin"):
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


def test_what_does_not_fit_is_said_with_the_least_it_needs() -> None:
    problem = model_problems("llama3-8b", MESH, SEQUENCE, memory_limit_bytes=1.0)["layer"]
    found = solve(problem)
    assert not found.fits and found.kept_bytes > 1


@pytest.mark.slow
def test_the_more_memory_the_faster() -> None:
    problem = model_problems("llama3-8b", MESH, SEQUENCE, state_bytes_per_weight=18.0, cuts_rest=True)["layer"]
    most = solve(problem).kept_bytes
    found = [solve(replace(problem, memory_limit_bytes=most * share)) for share in (0.3, 0.7, 1.0)]
    assert all(one.fits and one.gap <= 0.005 for one in found)
    costs = [one.cost_s for one in found]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]


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


@pytest.mark.parametrize("atoms", [{}, {"tp": 2}], ids=["whole", "cut"])
def test_dozens_of_readers_of_a_tensor_are_no_dozens_of_axes(atoms: Mapping[str, int]) -> None:
    b = BlockBuilder(Precision.named("bf16"))  # experts in a list, which all read the tokens
    x = total = b.add("x", ("batch", "seq", "hidden"))
    for number in range(24):
        up = b.emit(
            f"up{number}", Einsum(dims=("batch", "seq", "ffn")), x, b.weight(f"up{number}.weight", "ffn", "hidden")
        )
        down = b.weight(f"down{number}.weight", "hidden", "ffn")
        total = b.emit(
            f"add{number}", Add(), b.emit(f"down{number}", Einsum(dims=("batch", "seq", "hidden")), up, down), total
        )
    problem = OperatorProblem(
        block=closed_block(b, x, total), sizes={"batch": 1, "seq": 4096, "hidden": 1024, "ffn": 1024}, atoms=atoms,
        boundary={}, rates=RATES, seconds=seconds_of(atoms),
    )  # fmt: skip
    found = solve(problem)
    assert found.gap == 0 and all(found.cuts[f"up{number}"].get("ffn", ()) == tuple(atoms) for number in range(24))


def test_dozens_of_readers_that_no_layout_suits_take_it_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    b = BlockBuilder(Precision.named("bf16"))
    x = total = b.add("x", ("batch", "seq", "hidden"))
    allowed: dict[str, tuple[Cuts, ...]] = {}
    for number in range(4):
        weight = b.weight(f"up{number}.weight", "ffn", "hidden")
        act = b.emit(f"act{number}", Unary(function="silu"), x)
        up = b.emit(f"up{number}", Einsum(dims=("batch", "seq", "ffn")), x, weight)
        back = b.emit(
            f"down{number}", Einsum(dims=("batch", "seq", "hidden")), up,
            b.weight(f"down{number}.weight", "hidden", "ffn"),
        )  # fmt: skip
        total = b.emit(f"add{number}", Add(), b.emit(f"sum{number}", Add(), act, back), total)
        allowed |= {f"act{number}": ({"seq": ("tp",)},), f"up{number}": ({"ffn": ("tp",)},)}
    problem = OperatorProblem(
        block=closed_block(b, x, total), sizes={"batch": 1, "seq": 16, "hidden": 16, "ffn": 16}, atoms={"tp": 2},
        boundary={"seq": ("tp",)}, rates=RATES, seconds=seconds_of({"tp": 2}), allowed=allowed,
    )  # fmt: skip
    apart = solve(problem)  # by a variable for each reader
    monkeypatch.setattr(tensor_edge, "_MOST_READERS", 3)
    in_classes = solve(problem)
    assert in_classes.gap == 0 and obeys(problem, in_classes.cuts)
    assert (in_classes.cuts, in_classes.cost_s) == (apart.cuts, pytest.approx(apart.cost_s, rel=1e-12))


def test_a_router_reads_its_tokens_where_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    along: Cuts = {"seq": ("tp",)}
    pins: dict[str, Cuts] = {"mlp_norm": along, "router": along, "dispatch": {}}
    problem = model_problems("mixtral-8x7b", {"tp": 8}, along, batch=1, pins=pins)["layer"]
    found = solve(problem)
    assert "F mlp_in all_gather seq/tp" in collectives(problem, found.cuts)
    assert assess(problem, lowered(problem, found.cuts)) == pytest.approx(found.cost_s, rel=1e-9)
    monkeypatch.setattr(TensorEdge, "_as_made_groups", lambda edge: ())
    with pytest.raises(
        InputError, match=r"^layer: 2 operations \(router, dispatch\) read mlp_in, and no layout of it suits all"
    ):
        solve(problem)
