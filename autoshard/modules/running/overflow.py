"""Gradients in FP16 that overflow on one rank: all ranks are told, since torch's GradScaler decides on each alone."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist


def spread_overflow(parts: Sequence[torch.Tensor], device: torch.device) -> None:
    """Let the gradients of this rank overflow where those of any rank do; every rank calls it with its parts.

    GradScaler asks other ranks only if the first gradient of a group is cut: the rank that has seen an overflow would
    leave a step out, and others would take it.
    """
    filled = [part for part in parts if part.numel()]
    finite = [part.isfinite().all() for part in filled]
    number = torch.zeros((), device=device)
    if finite:
        number = torch.where(torch.stack(finite).all(), number, math.inf)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    if filled:
        filled[0][(0,) * filled[0].dim()].add_(number)
