import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from autoshard.layout.change_prices import ChangePrices, LayoutGraph, Matrix, Pending, Prices, all_layouts
from autoshard.layout.layout import Layout
from autoshard.layout.redistribute import Change, bytes_price, redistribute, single_changes
from autoshard.layout.shards import Executor
from autoshard.spec.mesh import Mesh

DIMS = ("seq", "hidden", "ffn")
TENSOR_BYTES = 1e6


@st.composite
def layouts(draw, names, *, pending):
    """Any layout of the dims over some of the atoms; sums are pending only where that is asked for."""
    places = {name: draw(st.sampled_from([*DIMS, "+" if pending else None, None])) for name in names}
    order = draw(st.permutations(names))
    cuts = tuple((dim, tuple(name for name in order if places[name] == dim)) for dim in DIMS)
    return Layout(dims=cuts, sums=tuple(name for name in order if places[name] == "+"))


@st.composite
def journeys(draw):
    """A mesh, sizes of the dims, and a layout before and after."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    assume(math.prod(sizes) <= 16)
    mesh = Mesh.virtual(**dict(zip(("edp", "cp", "kv"), sizes, strict=False)))
    names = [name for name, _ in mesh.axes]
    shape = {dim: draw(st.sampled_from([1, 2, 5, 6, 7, 12, 24])) for dim in DIMS}
    return mesh, shape, draw(layouts(names, pending=True)), draw(layouts(names, pending=False))


def _random_price(seed):
    """A price of its own for every collective: positive, and the same whenever it is asked for."""
    return lambda change: random.Random(f"{seed} {change.collective} {change.before}").uniform(0.1, 10)


@settings(max_examples=max(settings().max_examples, 50))
@given(journeys(), st.integers(0, 2**32))
def test_on_virtual_ranks_the_result_is_the_same_tensor(journey, seed):
    mesh, shape, before, after = journey
    atoms = dict(mesh.axes)
    price = _random_price(seed) if seed % 2 else bytes_price(TENSOR_BYTES, atoms)
    executor = Executor(mesh=mesh, sizes=shape)
    array = np.random.default_rng(seed).normal(size=[shape[dim] for dim in DIMS])
    shards = executor.scatter(array, DIMS, before)
    for change in redistribute(before, after, atoms, price):
        shards = executor.run(change.collective, shards, DIMS)
        executor.check(shards, change.after)
    assert np.allclose(executor.gather(shards, DIMS, after), array, rtol=1e-12)


@given(journeys(), st.integers(0, 2**32))
def test_the_same_question_has_the_same_answer(journey, seed):
    mesh, _, before, after = journey
    atoms = dict(mesh.axes)
    forwards = redistribute(before, after, atoms, _random_price(seed))
    assert forwards == redistribute(before, after, dict(reversed(atoms.items())), _random_price(seed))
    assert redistribute(after, after, atoms, _random_price(seed)) == (), "to stay is free"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("[seq, hidden] +tp", "[seq/tp, hidden]", ["reduce_scatter seq/tp"]),
        ("[seq, hidden] +tp", "[seq, hidden]", ["all_reduce /tp"]),
        ("[seq, hidden] +tp", "[seq/kv, hidden] +rep", ["reduce_scatter seq/kv"]),
        ("[seq, hidden] ^tp", "[seq, hidden]", ["all_reduce_max /tp"]),
        ("[seq/tp, hidden]", "[seq, hidden]", ["all_gather seq/tp"]),
        ("[seq/tp, hidden]", "[seq/kv, hidden]", ["all_gather seq/rep"]),
        ("[seq/tp, hidden]", "[seq, hidden/tp]", ["all_to_all seq>hidden/tp"]),
        ("[seq/cp, hidden]", "[seq/cp, hidden/tp]", ["slice hidden/kv", "slice hidden/rep"]),
        ("[seq, hidden] +kv.one", "[seq/kv, hidden/one]", ["reduce_scatter seq/kv"]),
    ],
)
def test_well_known_changes_are_one_collective(before, after, expected):
    atoms = {"cp": 2, "kv": 2, "rep": 2, "one": 1}
    price = bytes_price(TENSOR_BYTES, atoms)
    path = redistribute(Layout.parse(before), Layout.parse(after), atoms, price)
    assert [str(change.collective) for change in path] == expected


def test_a_slice_is_free_and_an_all_reduce_sends_twice_what_a_gather_does():
    atoms = {"tp": 4}
    price = bytes_price(4000, atoms)
    whole = Layout(dims=(("seq", ()),), sums=("tp",))
    made = {str(change.collective): price(change) for change in single_changes(whole, {"tp"})}
    assert made == {"all_reduce /tp": 6000, "reduce_scatter seq/tp": 3000}
    (cut,) = single_changes(Layout(dims=(("seq", ()),)), {"tp"})
    assert price(cut) == 0


# -- all changes at once ---------------------------------------------------------------------------------

TWO = {"dp": 2, "tp": 4}
PRICE = bytes_price(4096.0, TWO)
EVERY = {pending: list(all_layouts(DIMS, tuple(TWO), pending)) for pending in ("sums", "maxima")}


DEARER = np.array([1.0, 3.0, 2.0])  # three meshes, of which the first two look for ways


def prices(columns: slice | None) -> Callable[[LayoutGraph], Matrix]:
    """The prices of all changes in a graph, in some columns of meshes or on one."""

    def price_all(graph: LayoutGraph) -> Matrix:
        one = np.array([PRICE(graph.change(step)) for step in range(len(graph.before))])
        return one if columns is None else one[:, None] * DEARER[columns]

    return price_all


ONE = Prices(of_change=PRICE, of_graph=prices(None))
COLUMNS = Prices(
    of_change=lambda change: PRICE(change) * DEARER, of_graph=prices(slice(3)), few=prices(slice(2)), shape=(3,)
)
PRICES, IN_COLUMNS = (
    {pending: ChangePrices(DIMS, tuple(TWO), own, pending) for pending in ("sums", "maxima")} for own in (ONE, COLUMNS)
)


def test_every_layout_is_there_once():
    # Each of two atoms cuts one of three dims, is pending, or does nothing; two atoms of one dim come in two orders.
    assert len(set(EVERY["sums"])) == len(EVERY["sums"]) == 5 * 5 + 3


@given(
    pending=st.sampled_from(["sums", "maxima"]),
    first=st.integers(0, 27),
    seconds=st.lists(st.integers(0, 27), min_size=1, max_size=3),
)
def test_the_price_is_that_of_the_cheapest_redistribution(pending: Pending, first: int, seconds: list[int]):
    before, afters = EVERY[pending][first], [EVERY[pending][number] for number in seconds]
    (found,) = PRICES[pending].between([before], afters)
    assert np.allclose(IN_COLUMNS[pending].between([before], afters), found[:, None] * DEARER)
    for after, price in zip(afters, found, strict=True):
        if {*after.sums, *after.maxima} <= {*before.sums, *before.maxima}:
            changes = redistribute(before, after, TWO, PRICE)
            assert abs(price - sum(PRICE(change) for change in changes)) < 1e-6
        else:
            assert price == float("inf")


@given(seed=st.integers(0, 2**32), pending=st.sampled_from(["sums", "maxima"]))
def test_ways_end_where_prices_are_lost_in_rounding(seed: int, pending: Pending):
    """A price that leaves a sum as it was can join layouts in a circle of ways that are all the shortest."""
    some, amounts = random.Random(seed), (0.0, 1e-17, 1e-16, 0.1, 0.3, 1 / 3)
    price_of = {str(number): some.choice(amounts) * some.uniform(0.5, 1) for number in range(8)}

    def price(change: Change) -> float:
        return price_of[str(random.Random(f"{seed} {change.collective} {change.before}").randrange(8))]

    def in_graph(graph: LayoutGraph) -> Matrix:
        return np.array([price(graph.change(step)) for step in range(len(graph.before))])

    whole = Prices(of_change=price, of_graph=in_graph)
    columns = Prices(
        of_change=lambda change: price(change) * DEARER,
        of_graph=lambda graph: in_graph(graph)[:, None] * DEARER,
        few=lambda graph: in_graph(graph)[:, None] * DEARER,
        shape=(3,),
    )
    every = EVERY[pending]
    (at_once, by_column) = (
        ChangePrices(DIMS, tuple(TWO), own, pending).between(every, every) for own in (whole, columns)
    )
    assert np.allclose(by_column, at_once[:, :, None] * DEARER, rtol=1e-9)
