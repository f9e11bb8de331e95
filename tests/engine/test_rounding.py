"""Stochastic rounding: right on average, and the same bits for an element wherever it lies."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

torch: Any = pytest.importorskip("torch")
rounding: Any = pytest.importorskip("autoshard.engine.torch.states.rounding")

DRAWS = 1 << 16
SIGMAS = 5


def dice(**changes: Any) -> Any:
    return rounding.RoundingBits(
        **({"seed": 3, "update": 7, "weight": "layer.0.up.weight", "whole": (256, 256)} | changes)
    )


def all_bits(**changes: Any) -> Any:
    """The bits of a whole weight, in storage order."""
    one = dice(**changes)
    bounds = tuple((0, size) for size in one.whole)
    return one.bits(bounds, 0, int(np.prod(one.whole))).numpy()


@given(data=st.data())
def test_an_element_has_the_same_bits_in_every_cut_of_its_weight(data: st.DataObject):
    whole = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    bounds = tuple(tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in whole)
    block = all_bits(whole=whole).reshape(whole)[tuple(slice(*one) for one in bounds)].reshape(-1)
    low, high = sorted(data.draw(st.tuples(st.integers(0, block.size), st.integers(0, block.size))))
    found = dice(whole=whole).bits(bounds, low, high)
    assert found.tolist() == block[low:high].tolist()


@pytest.mark.parametrize("other", [{"seed": 4}, {"update": 8}, {"weight": "layer.1.up.weight"}])
def test_other_bits_have_nothing_to_do_with_these(other: dict[str, Any]):
    one, two = all_bits(), all_bits(**other)
    for shift in (0, 1, 256, DRAWS // 2):  # neither with those of neighbours
        for twin in (two, one) if shift else (two,):
            assert abs(np.corrcoef(one, np.roll(twin, shift))[0, 1]) < SIGMAS / DRAWS**0.5


def test_every_16_bits_come_as_often():
    bits = all_bits()
    assert bits.min() >= 0 and bits.max() < 1 << 16
    for place in range(16):
        assert abs((bits >> place & 1).mean() - 0.5) < SIGMAS * 0.5 / DRAWS**0.5
    for place in range(0, 16, 8):  # 256 classes: the mean of chi squared is 255, its deviation the root of twice that
        counts = np.bincount(bits >> place & 0xFF, minlength=256)
        assert abs((counts - DRAWS / 256) ** 2 / (DRAWS / 256)).sum() < 255 + SIGMAS * (2 * 255) ** 0.5


def rounded(number: float) -> Any:
    """Round a number once with every bit pattern of a weight."""
    into = torch.zeros(DRAWS, dtype=torch.bfloat16)
    rounding.round_into(into, torch.full((DRAWS,), number), torch.from_numpy(all_bits()))
    return into.double()


@given(st.floats(2.0**-100, 2.0**100), st.sampled_from([1, -1]))
def test_a_number_stays_where_it_is_on_average_between_its_two_neighbours(size: float, sign: int):
    number = float(torch.tensor(sign * size, dtype=torch.float32))
    found = rounded(number)
    digit = 2.0 ** (np.floor(np.log2(abs(number))) - 7)  # of BF16's 8 significant bits the last
    assert set((found / digit).unique().tolist()) <= {np.floor(number / digit), np.ceil(number / digit)}
    share = abs(number / digit) % 1
    assert abs(found.mean() - number) / digit < SIGMAS * max(share * (1 - share) / DRAWS, 2.0**-40) ** 0.5 + 2.0**-16


@pytest.mark.parametrize("number", [0.0, -1.5, 2.0**-133, float("inf"), float("-inf"), float("nan")])
def test_what_bf16_holds_is_kept(number: float):
    assert torch.equal(rounded(number).nan_to_num(nan=7.0), torch.full((DRAWS,), number).double().nan_to_num(nan=7.0))
