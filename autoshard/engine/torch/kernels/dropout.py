"""Dropout on one rank: the random words of the places that it has, by the definition of ``graph.kinds.dropout``."""

from collections.abc import Sequence

import torch

from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, register_kernels
from autoshard.engine.torch.kernels.philox import MASK, philox
from autoshard.graph.kinds.dropout import WORDS, Drop, dropped_below
from autoshard.graph.op import Call


def keeps(
    dropped: float, keys: torch.Tensor, columns: range, place: Sequence[torch.Tensor | int], stream: int
) -> torch.Tensor:
    """Return which numbers are kept: the shape of all tensors together, and the columns behind their last dim.

    ``place`` holds the rows and the heads. Columns follow each other, so a rank draws a few more words than it needs
    at most, where its part begins or ends between the four of a counter.
    """
    first, stop = columns.start // WORDS, -(-columns.stop // WORDS)
    counters = torch.arange(first, stop, device=keys.device)
    words = philox((counters, *place, stream), (keys & MASK, keys >> 32))
    stays = torch.stack([word >= dropped_below(dropped) for word in words], -1).flatten(-2)
    return stays.narrow(-1, columns.start - WORDS * first, len(columns))


def _drop(kind: Drop, call: Call, context: KernelContext) -> Kernel:
    grows = 1 / (1 - kind.dropped)

    def run(x: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor]:
        if not x.numel():
            return (x,)
        here, rows = consecutive(columns), positions.to(x.device).unsqueeze(-1)
        stays = keeps(kind.dropped, keys[:, None, None], here, (rows, 0), kind.stream)
        return (torch.where(stays, x * grows, 0.0),)

    return run


def consecutive(numbers: torch.Tensor) -> range:
    """Return the range of numbers of the host that follow each other."""
    first = int(numbers[0])
    return range(first, first + len(numbers))


register_kernels({Drop: _drop})
