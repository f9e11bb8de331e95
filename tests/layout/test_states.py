import numpy as np
from hypothesis import given, strategies as st

from autoshard.layout.layout import Layout
from autoshard.layout.redistribute import (
    Change,
    ChangePrices,
    LayoutGraph,
    Matrix,
    Pending,
    all_layouts,
    bytes_price,
    redistribute,
)

ATOMS = {"dp": 2, "tp": 4}
DIMS = ("batch", "seq", "hidden")
PRICE = bytes_price(4096.0, ATOMS)
LAYOUTS = {pending: list(all_layouts(DIMS, tuple(ATOMS), pending)) for pending in ("sums", "maxima")}


def price_all(graph: LayoutGraph) -> Matrix:
    found = np.full((graph.size, graph.size), np.inf)
    for collective, befores, afters in graph.groups:
        for before, after in zip(befores, afters, strict=True):
            change = Change(collective=collective, before=graph.layouts[before], after=graph.layouts[after])
            found[before, after] = min(found[before, after], PRICE(change))
    return found


PRICES = {pending: ChangePrices(DIMS, ATOMS, PRICE, price_all, pending) for pending in ("sums", "maxima")}


def waits(layout: Layout) -> set[str]:
    return {*layout.sums, *layout.maxima}


def test_every_layout_is_there_once() -> None:
    # Each of two atoms cuts one of three dims, is pending, or does nothing; two atoms of one dim come in two orders.
    assert len(set(LAYOUTS["sums"])) == len(LAYOUTS["sums"]) == 5 * 5 + 3


@given(
    pending=st.sampled_from(["sums", "maxima"]),
    first=st.integers(0, 27),
    seconds=st.lists(st.integers(0, 27), min_size=1, max_size=3),
)
def test_the_price_is_that_of_the_cheapest_redistribution(pending: Pending, first: int, seconds: list[int]) -> None:
    before, afters = LAYOUTS[pending][first], [LAYOUTS[pending][number] for number in seconds]
    (found,) = PRICES[pending].between([before], afters)
    for after, price in zip(afters, found, strict=True):
        if waits(after) <= waits(before):
            changes = redistribute(before, after, ATOMS, PRICE)
            assert abs(price - sum(PRICE(change) for change in changes)) < 1e-6
        else:
            assert price == float("inf")
