"""Random numbers that follow from a key and from where a number stands: Philox4x32-10, in integers of torch.

Whoever computes a part of a tensor draws the numbers of that part alone, and draws the same ones as whoever computes
all of it. cited: Salmon, Moraes, Dror, Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch

from autoshard.run.protocol import HOST

Distribution = Literal["uniform", "normal"]
Word = torch.Tensor | int  # of 32 bits

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)  # of the key from round to round
MASK = 2**32 - 1
_WORDS = 4  # of a counter
_HOST_COUNTERS = 2**15  # at a time: what fits into a cache takes a quarter of the time
_FRACTION_BITS = 24  # of a number in FP32 between 0 and 1


def philox(counter: Sequence[Word], key: Sequence[Word]) -> tuple[torch.Tensor, ...]:
    """Return four random words for each counter of four words; tensors hold whole numbers of 64 bits.

    Products wrap at 64 bits, which leaves their lower and upper halves right.
    """
    first, second, third, fourth = counter
    for number in range(_ROUNDS):
        left, right = (word + number * step & MASK for word, step in zip(key, _STEPS, strict=True))
        product, other_product = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second = (other_product >> 32 & MASK) ^ second ^ left, other_product & MASK
        third, fourth = (product >> 32 & MASK) ^ fourth ^ right, product & MASK
    return tuple(word for word in (first, second, third, fourth) if isinstance(word, torch.Tensor))


def random_part(
    distribution: Distribution,
    sizes: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    stream: int,
    key: torch.Tensor,
) -> torch.Tensor:
    """Return the random numbers in FP32 of a part of a tensor of these sizes, on the device of the key.

    ``key`` is one whole number below 2**63. Tensors of one key have streams of their own. Four numbers that follow each
    other in memory share a counter.
    """
    shape, start, stop = [high - low for low, high in bounds], *(bounds[-1] if bounds else (1, 1))
    if not any(place % _WORDS for place in (start, stop, sizes[-1] if sizes else 1)):
        counters = places_in(
            [*sizes[:-1], sizes[-1] // _WORDS], [*bounds[:-1], (start // _WORDS, stop // _WORDS)], key.device
        )
        return _drawn(distribution, counters, stream, key).reshape(shape)
    places = places_in(sizes, bounds, key.device)
    fours = _drawn(distribution, places // _WORDS, stream, key)
    return fours.gather(-1, (places % _WORDS).unsqueeze(-1)).squeeze(-1)


def _drawn(distribution: Distribution, counters: torch.Tensor, stream: int, key: torch.Tensor) -> torch.Tensor:
    """Return four random numbers for each counter, along a new last dim."""
    if counters.device.type == HOST and counters.numel() > _HOST_COUNTERS:
        parts = counters.reshape(-1).split(_HOST_COUNTERS)
        whole = torch.cat([_drawn(distribution, part, stream, key) for part in parts])
        return whole.reshape(*counters.shape, _WORDS)
    counter = (counters & MASK, counters >> 32, torch.full_like(counters, stream), torch.zeros_like(counters))
    words = torch.stack(philox(counter, (key & MASK, key >> 32)), -1)
    if distribution == "uniform":
        return (words >> 32 - _FRACTION_BITS).to(torch.float32) * 2.0**-_FRACTION_BITS
    pairs = (words.to(torch.float64) + 0.5) * 2.0**-32  # cited: Box and Muller, 1958
    radius, turn = torch.sqrt(-2 * torch.log(pairs[..., ::2])), 2 * math.pi * pairs[..., 1::2]
    return torch.cat([radius * torch.cos(turn), radius * torch.sin(turn)], -1).to(torch.float32)


def places_in(sizes: Sequence[int], bounds: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return where the numbers of a part stand in a tensor of these sizes, row by row."""
    places, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for size, (start, stop) in zip(reversed(sizes), reversed(bounds), strict=True):
        axis = torch.arange(start, stop, device=device) * stride
        places = axis.reshape(-1, *[1] * places.dim()) + places
        stride *= size
    return places
