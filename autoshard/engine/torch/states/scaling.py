"""Gradients in FP16, which holds no number below 2**-24: a backward pass begins with a loss that is larger.

Every counted token weighs one over all tokens of the step, so that gradients shrink as batches grow, down to zero. The
pass of a step begins as if the heaviest token weighed about one. The factor is a power of two, the same on all ranks,
and sums of gradients are divided by it exactly, before their norm.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from autoshard.engine.torch.states.flat import Flat
from autoshard.run.protocol import Batch
from autoshard.spec.workload import Precision


def gradient_scale(precision: Precision, micro_batches: Sequence[Batch]) -> float:
    """Return the factor of a step's gradients until they are summed: 1 where their format has the range of FP32.

    >>> import numpy as np
    >>> batch = {"token_weight": np.full((2, 8), 1 / 48)}
    >>> gradient_scale(Precision.named("fp16"), [batch]), gradient_scale(Precision.named("bf16"), [batch])
    (64.0, 1.0)
    """
    if precision.activations != "fp16":
        return 1.0
    largest = max((float(batch["token_weight"].max(initial=0.0)) for batch in micro_batches), default=0.0)
    return 2.0 ** -round(math.log2(largest)) if largest > 0 else 1.0


def unscale(flats: Iterable[Flat], gradients: Iterable[torch.Tensor], scale: float) -> None:
    """Divide sums of gradients by their factor, in place. Corrections of routers come from counts, which have none."""
    for flat, piece in zip(flats, gradients, strict=True):
        if scale != 1.0 and flat.weights[0].optimizer.clipped:
            piece.div_(scale)
