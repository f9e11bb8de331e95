"""Runs a function for a few tokens at a time, and writes its results into tensors for all tokens."""

from collections.abc import Callable, Sequence

import torch

from autoshard.run.protocol import HOST

# Numbers of one tensor that are alive at a time. On a host what its caches hold: measured on 2 cores of an AMD EPYC
# with torch 2.13, 2026-11-22. On a device enough to keep all of it busy: estimated, nobody has measured it.
_HOST_NUMBERS, _DEVICE_NUMBERS = 2**19, 2**26
_ALIGNED = 64  # rows, so that parts begin where compilers may expect it


def num_rows(count: int, width: int, device: torch.device) -> int:
    """Return how many rows of a width are computed at a time, of a total.

    >>> num_rows(8192, 128_256, torch.device("cuda")), num_rows(100, 32_000, torch.device("cpu"))
    (512, 16)
    """
    most = max(1, (_HOST_NUMBERS if device.type == HOST else _DEVICE_NUMBERS) // max(1, width))
    return min(count, most - most % _ALIGNED if most > _ALIGNED else most)


def by_rows(function: Callable[[list[torch.Tensor]], object], tensors: Sequence[torch.Tensor], rows: int) -> None:
    """Call a function with a few rows of each [batch, position, ...] at a time; the last rows overlap the others."""
    whole = [rows_of(one) for one in tensors]
    count = whole[0].shape[1]
    for first in range(0, count, rows or 1):
        start = min(first, count - rows)
        function([one.narrow(1, start, rows) for one in whole])


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return [batch, position, ...] as one sequence."""
    return tensor.reshape(1, -1, *tensor.shape[2:])
