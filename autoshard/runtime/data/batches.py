"""The micro-batches of a step, cut from consecutive samples."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.engine.base import Batch
from autoshard.plan.plan import Plan
from autoshard.runtime.data.source import Samples, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How a step cuts its samples."""

    num_micro_batches: int
    micro_batch: int  # samples, over all data-parallel ranks
    separate: bool = False  # attention and positions stop at documents, so batches say where these start

    @classmethod
    def of(cls, plan: Plan) -> "StepShape":
        """Return what a plan eats in a step."""
        return cls(
            num_micro_batches=plan.schedule.num_micro_batches,
            micro_batch=plan.micro_batch * plan.mesh.size("dp"),
            separate=plan.workload.documents == "separate",
        )

    @property
    def num_samples(self) -> int:
        """Samples of one step."""
        return self.num_micro_batches * self.micro_batch


def batches(source: Source, first_sample: int, shape: StepShape) -> tuple[Batch, ...]:
    """Return the micro-batches of the step that begins with this sample.

    All counted tokens of the step weigh the same, and together one: a mean of the means of micro-batches would favour
    those that count few. A step without any counted label weighs nothing, so its loss is zero.
    """
    return tuple(_micro_batches(source.samples(first_sample, shape.num_samples), shape))


def _micro_batches(samples: Samples, shape: StepShape) -> Iterator[Batch]:
    along = np.arange(samples.counted.shape[1])
    weights = samples.counted / max(1, int(samples.counted.sum()))
    for start in range(0, shape.num_samples, shape.micro_batch):
        rows = slice(start, start + shape.micro_batch)
        batch = {
            "tokens": samples.tokens[rows, :-1],
            "labels": samples.tokens[rows, 1:],
            "positions": along,
            "key_positions": along,
            "token_weight": weights[rows],
        }
        yield batch | ({"document_starts": samples.document_starts[rows]} if shape.separate else {})
