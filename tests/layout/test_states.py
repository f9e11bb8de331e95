from hypothesis import given, strategies as st

from autoshard.layout.layout import Layout
from autoshard.layout.redistribute import bytes_price, redistribute
from autoshard.layout.states import LayoutStates, Pending, all_layouts, each

ATOMS = {"dp": 2, "tp": 4}
DIMS = ("batch", "seq", "hidden")
PRICE = bytes_price(4096.0, ATOMS)
STATES: dict[Pending, LayoutStates] = {
    pending: LayoutStates.of(DIMS, tuple(ATOMS), each(PRICE), pending) for pending in ("sums", "maxima")
}


def waits(layout: Layout) -> set[str]:
    return {*layout.sums, *layout.maxima}


def test_every_layout_is_there_once() -> None:
    # Each of two atoms cuts one of three dims, is pending, or does nothing; two atoms of one dim come in two orders.
    assert len(set(all_layouts(DIMS, tuple(ATOMS)))) == len(list(all_layouts(DIMS, tuple(ATOMS)))) == 5 * 5 + 3


@given(pending=st.sampled_from(["sums", "maxima"]), first=st.integers(0, 27), second=st.integers(0, 27))
def test_the_price_is_that_of_the_cheapest_redistribution(pending: Pending, first: int, second: int) -> None:
    states = STATES[pending]
    before, after = states.layouts[first], states.layouts[second]
    if waits(after) <= waits(before):
        changes = redistribute(before, after, ATOMS, PRICE)
        assert abs(states.price[first, second] - sum(PRICE(change) for change in changes)) < 1e-6
    else:
        assert states.price[first, second] == float("inf")
