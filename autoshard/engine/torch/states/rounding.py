"""Stochastic rounding: BF16 weights without masters take updates that are smaller than their last digit.

A number is rounded up with a probability equal to the fraction that is cut off, so that its mean does not change. The
random bits of an element follow from the run's seed, the update's number, the weight's name, and the element's place in
the whole weight. So replicas round alike, and so does a run that goes on, on any ranks.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autoshard.run.placement import Bounds, placed_boxes

CHUNK = 2**22  # elements whose exact values are alive at a time
_BITS = 0xFFFF  # that BF16 cuts off an FP32 number
# cited: Chris Wellons, Prospecting for Hash Functions, nullprogram.com/blog/2018/07/31: lowbias32
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingBits:
    """The random bits of one weight in one update; ``low`` and ``high`` count in a block of it, in storage order.

    >>> rounding = RoundingBits(seed=1, update=1, weight="layer.0.up.weight", whole=(2, 3))
    >>> every = rounding.bits(((0, 2), (0, 3)), 0, 6).reshape(2, 3)
    >>> bool((every[:, 1:].reshape(-1)[1:3] == rounding.bits(((0, 2), (1, 3)), 1, 3)).all())
    True
    """

    seed: int
    update: int
    weight: str
    whole: tuple[int, ...]  # its shape; beyond 2**32 elements the bits begin again

    def bits(self, bounds: Bounds, low: int, high: int, device: torch.device | None = None) -> torch.Tensor:
        """Return 16 bits for every element of a range of a block."""
        key = hashlib.blake2b(f"{self.seed}/{self.update}/{self.weight}".encode(), digest_size=8).digest()
        # An odd factor of its own for each key: no weight or update has the bits of another, only shifted.
        start, factor = int.from_bytes(key[:4]), int.from_bytes(key[4:]) | 1
        strides = [factor * math.prod(self.whole[axis + 1 :]) for axis in range(len(self.whole))]
        counters = torch.empty(high - low, dtype=torch.int32, device=device)
        for offsets, lengths, where in placed_boxes(bounds, low, high):
            begin = start + sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
            box = counters[where].view(lengths).fill_(_signed(begin))
            for axis, (length, stride) in enumerate(zip(lengths, strides, strict=True)):
                along = torch.arange(length, dtype=torch.int32, device=device).mul_(_signed(stride))
                box.add_(along.view(-1, *(1 for _ in lengths[axis + 1 :])))
        _fold(_fold(counters, 16).mul_(_FIRST), 15).mul_(_signed(_SECOND))
        return _fold(counters, 16).bitwise_and_(_BITS)


def round_into(rounded: torch.Tensor, exact: torch.Tensor, bits: torch.Tensor) -> None:
    """Write FP32 numbers into BF16 memory, up or down as the bits say; ``exact`` is used up."""
    exact.view(torch.int32).add_(bits).bitwise_and_(~_BITS)
    rounded.copy_(exact)


def chunks(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Cut a range into parts of at most ``CHUNK``."""
    return ((start, min(start + CHUNK, high)) for start in range(low, high, CHUNK))


def _signed(number: int) -> int:
    """Return the last 32 bits of a number as torch holds them.

    >>> _signed(2**32 - 1), _signed(2**32 + 5)
    (-1, 5)
    """
    return (number + 2**31) % 2**32 - 2**31


def _fold(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Mix the upper bits into the lower ones, in place."""
    return bits.bitwise_xor_(bits.bitwise_right_shift(count).bitwise_and_((1 << (32 - count)) - 1))
