"""What so many layers take at least, against all ways in which they may compute again."""

import numpy as np
from hypothesis import given, strategies as st

from autoshard.plan.recompute import Recompute
from autoshard.schedule.waves import Floats
from autoshard.search.bound.bounds import mixed_layers_s
from autoshard.search.bound.held_layers import HeldLayers, mixed_moments
from autoshard.search.bound.whole_layers import layers_of_rank_s

KINDS = (Recompute(), Recompute(kind="selective", ops=("norms",)), Recompute(kind="full"))
CAPACITY = 100.0
columns = st.lists(st.integers(1, 40), min_size=3, max_size=3)


def enumerated_s(pass_s: Floats, besides: Floats, layer_bytes: Floats, number: int) -> float:
    """Return the least time of so many layers: of one kind, or of layers that compute nothing again, and all."""
    ways = [[number if kind == chosen else 0 for kind in range(3)] for chosen in range(3)]
    ways += [[number - again, 0, again] for again in range(1, number)]
    fits = (way for way in ways if max(besides[np.array(way) > 0]) + way @ layer_bytes <= CAPACITY)
    return min((float(way @ pass_s) for way in fits), default=np.inf)


@given(seconds=columns, besides=columns, layer_bytes=columns, number=st.integers(1, 8))
def test_layers_of_a_rank_take_no_less_than_is_said(
    seconds: list[int], besides: list[int], layer_bytes: list[int], number: int
):
    """With as much beside the layers whatever these compute again, they take just that."""
    pass_s, plain_s = np.array(seconds, dtype=np.float64), float(min(seconds))
    pass_s[0] = plain_s  # to compute again takes time
    for beside in (np.array(besides), np.full(3, besides[0])):
        held = HeldLayers(
            besides_bytes=beside[None, :, None],
            layer_bytes=np.array(layer_bytes)[None, :, None],
            share=0.0,
            runtime_bytes=0.0,
        )
        least = layers_of_rank_s(pass_s[:, None], held, CAPACITY, np.array([number]), KINDS)[0, 0, 0]
        exact = enumerated_s(pass_s, beside, np.array(layer_bytes), number)
        assert least <= exact * (1 + 1e-9)
        if len(set(beside.tolist())) == 1:
            assert least == exact


@given(columns, st.lists(columns, min_size=1, max_size=3), st.lists(columns, min_size=3, max_size=3))
def test_no_mixture_of_layers_takes_less_than_is_said(
    seconds: list[int], rooms: list[list[int]], shares: list[list[int]]
):
    """Any shares of a rank's memory may be filled by layers of each kind; the best price gives the best bound."""
    room, pass_s = np.array(rooms) / 4, np.array(seconds, dtype=np.float64)
    layers = room * (np.array(shares) / np.sum(shares, axis=1, keepdims=True))[: len(room)]
    bound_s = mixed_layers_s(room[:, :, None], pass_s[:, None], layers.sum())[0]
    assert bound_s <= (layers @ pass_s).sum() * (1 + 1e-9)
    differences = room[:, :, None] - room[:, None] + 1e-30  # ranks change kind at a price where both gain alike
    prices = ((room * pass_s)[:, :, None] - (room * pass_s)[:, None]) / differences
    gains = room * np.maximum(0.0, prices.reshape(-1, 1, 1) - pass_s)
    best_s = (prices.reshape(-1) * layers.sum() - gains.max(axis=2).sum(axis=1)).max()
    fits = room[:, pass_s.argmin()].sum() >= layers.sum()
    assert fits or 0.9 * best_s <= bound_s <= best_s * (1 + 1e-9)


@given(columns, columns, st.integers(1, 6), st.integers(1, 6), st.integers(0, 4))
def test_a_mixture_holds_no_less_than_is_said(
    moments: list[int], saved: list[int], again: int, plain: int, flight: int
):
    """Layers that keep all lie behind, and have freed what they kept when the others are at work."""
    saved_bytes = np.array(sorted(saved, reverse=True), dtype=np.float64)[:, None]
    moment_bytes = np.array(moments, dtype=np.float64)[:, None]
    least = mixed_moments(moment_bytes, saved_bytes, np.array([[flight]]))[0]
    for kind in (1, 2):
        kept = flight * (plain * saved_bytes[0] + again * saved_bytes[kind])
        at_work = max(moment_bytes[0], moment_bytes[kind] - plain * saved_bytes[0])
        assert (plain + again) * flight * saved_bytes[kind] + least[kind] <= kept + at_work + 1e-9
