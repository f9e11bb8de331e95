"""What dropout draws: the authors' numbers, the right share, and no likeness between places, samples, blocks, seeds."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.graph.kinds.dropout import Drop, dropout_keys, dropped_below, keeps, philox
from autoshard.graph.op import Array, Call, Tensor

# cited: kat_vectors of Random123 1.14 (D. E. Shaw Research), philox4x32 with 10 rounds: counter, key, words.
KNOWN = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}  # fmt: skip
SAMPLES, ROWS, COLUMNS = 16, 64, 128
NUMBER = SAMPLES * ROWS * COLUMNS
SIGMAS = 5.0  # one right test in a million fails


def kept(dropped: float = 0.5, seed: int = 0, block: str = "layer.0", stream: int = 1, first: int = 0) -> Array:
    """Which numbers of some samples are kept, [samples, rows, columns]."""
    keys = dropout_keys(seed, np.arange(first, first + SAMPLES), block)[:, None, None]
    place = np.arange(COLUMNS), np.arange(ROWS)[:, None], np.zeros((), np.int64)
    return keeps(dropped, keys, place, stream)


def alike(one: Array, other: Array, dropped: float) -> float:
    """How far the share of places where both are kept is from chance, in standard deviations."""
    share = (1 - dropped) ** 2
    return abs(float((one & other).mean()) - share) / np.sqrt(share * (1 - share) / one.size)


@pytest.mark.parametrize("name", KNOWN)
def test_the_generator_gives_the_numbers_of_its_authors(name: str):
    counter, key, words = KNOWN[name]
    assert (
        tuple(int(word) for word in philox([np.array(one) for one in counter], [np.array(one) for one in key])) == words
    )


@pytest.mark.parametrize("dropped", [1e-3, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_should_be(dropped: float):
    deviation = np.sqrt(dropped * (1 - dropped) / NUMBER)
    assert abs(1 - float(kept(dropped).mean()) - dropped) < SIGMAS * deviation


@pytest.mark.parametrize("dropped", [0.1, 0.5])
def test_no_two_places_samples_blocks_streams_or_seeds_are_alike(dropped: float):
    base = kept(dropped)
    others = {
        "another seed": kept(dropped, seed=1),
        "another block": kept(dropped, block="layer.1"),
        "a block whose name is longer": kept(dropped, block="layer.10"),
        "another operation": kept(dropped, stream=2),
        "other samples": kept(dropped, first=SAMPLES),
        "far samples": kept(dropped, first=2**32),
        "the sample after": np.roll(base, 1, 0),
        "the row after": np.roll(base, 1, 1),
        "the column after": np.roll(base, 1, 2),
        "the counter after": np.roll(base, 4, 2),
    }
    found = {name: alike(base, other, dropped) for name, other in others.items()}
    assert max(found.values()) < SIGMAS, found
    pairs = combinations([kept(dropped, block=f"layer.{number}") for number in range(12)], 2)
    assert max(alike(one, other, dropped) for one, other in pairs) < SIGMAS


def test_words_are_even_over_their_range():
    """By Kolmogorov and Smirnov: the largest distance of the distribution from an even one, for this many numbers."""
    keys = dropout_keys(3, np.arange(SAMPLES), "layer.7")[:, None, None]
    counter = [np.arange(COLUMNS), np.arange(ROWS)[:, None], np.array(0), np.array(0)]
    words = np.sort(np.stack(np.broadcast_arrays(*philox(counter, [keys & 0xFFFFFFFF, keys >> 32]))).ravel()) / 2**32
    steps = np.arange(1, len(words) + 1) / len(words)
    assert np.abs(words - steps).max() < 2.2 / np.sqrt(len(words))


@given(seed=st.integers(0, 2**70), first=st.integers(0, 2**48), count=st.integers(1, 8), part=st.integers(0, 7))
def test_the_key_of_a_sample_depends_on_seed_number_and_block_alone(seed: int, first: int, count: int, part: int):
    numbers = np.arange(first, first + count)
    keys = dropout_keys(seed, numbers, "layer.2")
    assert keys.dtype == np.int64 and (keys >= 0).all() and len(set(keys.tolist())) == count
    number = min(part, count - 1)
    assert dropout_keys(seed, numbers[number : number + 1], "layer.2")[0] == keys[number]
    assert dropout_keys(seed, numbers, "layer.3").tolist() != keys.tolist()


def test_the_mean_stays_and_what_is_kept_grows():
    sizes = {"batch": SAMPLES, "seq": ROWS, "hidden": COLUMNS}
    x = Tensor(name="x", dims=(*sizes,), dtype="fp64")
    call = Call(inputs=(x,), outputs=(x,), sizes=sizes)
    arrays = np.ones((SAMPLES, ROWS, COLUMNS)), dropout_keys(0, np.arange(SAMPLES), "embed.0")
    (found,) = Drop(dropped=0.25, stream=0).evaluate(call, *arrays, np.arange(ROWS), np.arange(COLUMNS))
    assert set(np.unique(found)) == {0.0, 1 / 0.75}
    assert abs(found.mean() - 1) < SIGMAS * np.sqrt(0.25 / 0.75 / NUMBER)


def test_a_share_is_never_all():
    assert dropped_below(1 - 1e-12) == 2**32 - 1
