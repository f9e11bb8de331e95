"""The losses that train routers: experts equally busy, and logits that stay small.

Both are single numbers beside the result of a layer, and their gradients reach the logits of the router only. The
balance loss is the one of Switch Transformers as Mixtral has it in transformers: experts times the sum over experts of
the share of tokens that chose an expert and the mean probability of it. It is ``choices`` where experts are equally
busy. Of scores by a sigmoid, the probability is the score over the sum of all scores, as in DeepSeek-V3. What an expert
was chosen for is a count, and counts have no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autoshard.graph.kinds.choosing import scores_of
from autoshard.graph.op import Array, Call, Differentiable, Dims, GradientStep, OpKind, Output, Tensor
from autoshard.spec.model_parts import RouterScores
from autoshard.spec.workload import BalancedOver


class _OfLogits:
    """Base of the kinds that read the logits of all experts."""

    __slots__ = ()

    def whole_dims(self) -> Dims:
        """A probability is one among all experts."""
        return ("experts",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoad(Differentiable):
    """How often each expert is chosen: by the tokens of a micro-batch, or by those of each sequence."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True

    over: BalancedOver

    def whole_dims(self) -> Dims:
        """A token may choose any expert."""
        return ("experts", "choices")

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        (chosen,) = inputs
        return (Output(dims=(*(chosen.dims[:1] if self.over == "sequence" else ()), "experts"), dtype="fp32"),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        is_chosen = arrays[0][..., None] == np.arange(call.sizes["experts"])
        return (is_chosen.sum(axis=(1, 2) if self.over == "sequence" else (0, 1, 2)).astype(np.float64),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """A count is a whole number."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBalance(_OfLogits, Differentiable):
    """The balance loss, from logits and load; of loads by sequence it is the sum over sequences."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = 6  # derived: a softmax, and a product and a sum

    scores: RouterScores = "softmax"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=(), dtype="fp32"),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        logits, load = arrays
        probability, factor = _probability(logits, self.scores), _factor(call, load)
        return (np.asarray((probability * factor).sum()),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Only the logits get a gradient."""
        return (GradientStep(kind=RouterBalanceGradient(scores=self.scores), reads=("d0", "in0", "in1"), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBalanceGradient(_OfLogits, OpKind):
    """The gradient of the logits in the balance loss: inputs are the upstream gradient, logits and load."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = 8  # derived: a softmax, its mean of the factors, a difference, two products

    scores: RouterScores = "softmax"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=inputs[1].dims, dtype=inputs[1].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, logits, load = arrays
        probability, factor = _probability(logits, self.scores), _factor(call, load)
        mean = (probability * factor).sum(axis=-1, keepdims=True)
        slope = upstream * probability * (factor - mean)
        return (slope if self.scores == "softmax" else slope * (1 - scores_of("sigmoid", logits)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterZ(_OfLogits, Differentiable):
    """The sum over tokens of the square of the logarithm of the summed exponentials of its logits (ST-MoE)."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = 4  # derived: maximum, difference, exponential, sum

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=(), dtype="fp32"),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (np.asarray((_log_total(arrays[0]) ** 2).sum()),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        return (GradientStep(kind=RouterZGradient(), reads=("d0", "in0"), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterZGradient(_OfLogits, OpKind):
    """The gradient of the logits in that sum: inputs are the upstream gradient and the logits."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = 6  # derived: a softmax, and two products

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=inputs[1].dims, dtype=inputs[1].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, logits = arrays
        return (upstream * 2 * _log_total(logits)[..., None] * _probability(logits, "softmax"),)


def _probability(logits: Array, scores: RouterScores) -> Array:
    values = scores_of(scores, logits)
    return values if scores == "softmax" else values / values.sum(axis=-1, keepdims=True)


def _log_total(logits: Array) -> Array:
    top = logits.max(axis=-1, keepdims=True)
    return np.log(np.exp(logits - top).sum(axis=-1)) + top[..., 0]


def _factor(call: Call, load: Array) -> Array:
    """Return by what a load multiplies each probability of [batch, seq, experts].

    Every token chooses equally many experts, so a load says itself of how many tokens it is, wherever these lie.
    """
    num_tokens = load.sum(axis=-1, keepdims=True) / call.sizes["choices"]
    factor = call.sizes["experts"] * load / num_tokens**2
    return factor[:, None] if load.ndim > 1 else factor
