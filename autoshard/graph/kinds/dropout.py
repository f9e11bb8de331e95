"""Dropout by random numbers that follow from where a number stands, so that every layout drops the same numbers.

Each sequence of a batch has a key in each block of the model, of the run's seed and of the sequence's number among all
that the run reads: neither ranks, nor micro-batches, nor a resumed run change it. Under that key the generator
Philox4x32-10 gives a random number to every place. Nothing is saved for the backward pass, which draws again.

cited: Salmon, Moraes, Dror, Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autoshard.graph.op import Array, Call, Differentiable, GradientStep, Output, Tensor

Words: TypeAlias = NDArray[np.uint64]  # each below 2**32

DROPOUT_KEYS = "dropout_keys"  # the input [batch] that holds the keys of a block's sequences
PHILOX_FLOPS = 25  # derived: 10 rounds of 2 products, 4 exclusive ors and 4 halves for 4 numbers, and a comparison
WORDS = 4  # of a counter, and of the random words that it gives
_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD_BITS = np.uint64(32)
_MASK = np.uint64(2**32 - 1)
_MIX_STEP = 0x9E3779B97F4A7C15  # cited: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014
_MIX_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_MIX_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def dropout_keys(seed: int, samples: Array, block: str) -> Array:
    """Return the keys of some samples, by their numbers in a run of this seed, in a block such as ``layer.3``.

    >>> dropout_keys(0, np.array([0, 1]), "layer.0").tolist()
    [1385983162136407731, 1807793863616816228]
    """
    keys = np.zeros(samples.shape, dtype=np.uint64)
    for part in (np.asarray([seed % 2**64], dtype=np.uint64), zlib.crc32(block.encode()), samples):
        keys = _mixed(keys ^ np.asarray(part).astype(np.uint64))
    return (keys >> np.uint64(1)).astype(np.int64)


def _mixed(numbers: Words) -> Words:
    words = np.asarray(numbers + np.uint64(_MIX_STEP))
    for shift, factor in zip(_MIX_SHIFTS, _MIX_FACTORS, strict=False):
        words = (words ^ (words >> shift)) * factor
    return words ^ (words >> _MIX_SHIFTS[-1])


def philox(counter: Sequence[Array], key: Sequence[Array]) -> tuple[Words, ...]:
    """Return four random words for every counter of four words, under a key of two."""
    first, second, third, fourth = (np.asarray(word).astype(np.uint64) for word in counter)
    first_key, second_key = (np.asarray(word).astype(np.uint64) for word in key)
    for number in range(_ROUNDS):
        keys = [
            (word + np.uint64(number * step % 2**32)) & _MASK
            for word, step in zip((first_key, second_key), _KEY_STEPS, strict=True)
        ]
        first_product, second_product = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second = (second_product >> _WORD_BITS) ^ second ^ keys[0], second_product & _MASK
        third, fourth = (first_product >> _WORD_BITS) ^ fourth ^ keys[1], first_product & _MASK
    return first, second, third, fourth


def dropped_below(dropped: float) -> int:
    """Return the threshold of dropout: a number is dropped if its random word is below it."""
    return min(round(dropped * 2**32), 2**32 - 1)


def keeps(dropped: float, keys: Array, place: tuple[Array, Array, Array], stream: int) -> Array:
    """Return which numbers are kept, with the shape of all arrays together.

    ``place`` holds columns, rows and heads; four columns that follow each other share a counter. ``stream`` tells
    apart what a block drops in different operations.
    """
    columns, rows, heads = place
    words = philox((columns // WORDS, rows, heads, np.asarray(stream)), (keys & int(_MASK), keys >> 32))
    word = np.choose(columns % WORDS, np.broadcast_arrays(*words))
    return np.asarray(word >= np.uint64(dropped_below(dropped)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Differentiable):
    """Drop each number of a hidden state with a probability, and enlarge the others, so that the mean stays.

    Inputs: the hidden state, the keys of its sequences, the positions of its tokens, the numbers of its columns.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    flops_per_element: ClassVar[int] = PHILOX_FLOPS

    dropped: float
    stream: int

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        x, *where = inputs
        assert [(dim,) for dim in x.dims] == [tensor.dims for tensor in where], f"{where} do not say where {x} stands"
        return (Output(dims=x.dims, dtype=x.dtype),)

    def drops(self) -> bool:
        return True

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        x, keys, rows, columns = arrays
        place = columns, rows[:, None], np.zeros((), dtype=np.int64)
        return (x * keeps(self.dropped, keys[:, None, None], place, self.stream) / (1 - self.dropped),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """The gradient is dropped where the number was."""
        where = (f"in{number}" for number in range(1, len(inputs)))
        return (GradientStep(kind=self, reads=("d0", *where), gives=(0,)),)
