"""Attention with a sink for each query head: a learned number that joins the denominator of its softmax.

A sink takes weight from all keys and brings no value. So attention may run without it, in parts, and be rescaled once;
from the rescaled result and denominator its gradients follow as without a sink.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autoshard.graph.kinds.attention import Attend, AttendGradient, attention_options
from autoshard.graph.op import Array, Call, GradientStep, OpKind, Output, Tensor

_RESCALE_FLOPS = 1  # derived: a product for each number of the result
_SINK_GRADIENT_FLOPS = 2  # derived: a product and a sum for each number of the result


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkAttend(Attend):
    """Attention whose last input is a sink for each query head; the logs of the denominators count it."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    @property
    def label(self) -> str:
        return "sink_attend_dropping" if self.dropped else "sink_attend"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        query, sink = inputs[0], inputs[-1]
        assert sink.dims == query.dims[2:4], f"{sink} is no number for each head of {query}"
        return Attend.infer(self, inputs)

    def starts_at(self, index: int) -> float | None:
        """A sink starts at zero, as one key of which nothing is known."""
        return 0.0

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        *rest, sink = arrays
        mixed, lse = Attend.evaluate(self, call, *rest)
        return with_sinks(mixed, lse, sink)

    def vector_flops(self, call: Call) -> int:
        return Attend.vector_flops(self, call) + _RESCALE_FLOPS * call.elements(call.outputs[0].dims)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """The operation that gives the gradients of queries, keys and values gives that of the sinks as well."""
        (step,) = Attend.gradient(self, inputs, needed)
        return (
            GradientStep(
                kind=SinkAttendGradient(**attention_options(self)),
                reads=step.reads,
                gives=(*step.gives, len(inputs) - 1),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkAttendGradient(AttendGradient):
    """The gradients of queries, keys, values and sinks; the last input is the sinks."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        sink = inputs[-1]
        return (*AttendGradient.infer(self, inputs), Output(dims=sink.dims, dtype=sink.dtype, suffix="sink"))

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        *rest, sink = arrays
        upstream, result, lse = (arrays[place] for place in (0, 6, 7))
        return *AttendGradient.evaluate(self, call, *rest), sink_gradient(upstream, result, lse, sink)

    def vector_flops(self, call: Call) -> int:
        return AttendGradient.vector_flops(self, call) + _SINK_GRADIENT_FLOPS * call.elements(call.inputs[0].dims)


def without_sinks(kind: OpKind) -> OpKind:
    """Return the attention, or the gradient, that lacks the sinks of this one; other kinds as they are."""
    if isinstance(kind, SinkAttend):
        return Attend(**attention_options(kind))
    return AttendGradient(**attention_options(kind)) if isinstance(kind, SinkAttendGradient) else kind


def with_sinks(mixed: Array, lse: Array, sink: Array) -> tuple[Array, Array]:
    """Let sinks join the denominators of an attention that ran without them; a query without keys keeps its zeros."""
    total = np.logaddexp(lse, sink)
    return mixed * np.exp(lse - total)[..., None], total


def sink_gradient(upstream: Array, result: Array, lse: Array, sink: Array) -> Array:
    """Return the gradient of sinks: each query gives a sink's share of its softmax times what the result stands for."""
    share = np.exp(sink - lse)
    return -(share * (upstream * result).sum(axis=-1)).sum(axis=(0, 1))
