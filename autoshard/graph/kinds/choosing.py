"""Routers that choose by scores of all experts: limited to groups, corrected by a bias, weighted by the scores.

The bias acts on the choice alone and has no gradient. In the place of one stands by how much each expert was chosen too
often: it is summed over tokens, ranks and micro-batches as gradients are, and a step moves the bias against its sign.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autoshard.graph.kinds.experts import Choosing, Routed
from autoshard.graph.op import Array, Call, Differentiable, GradientStep, OpKind, Output, Tensor, Update
from autoshard.spec.model_parts import Router, RouterScores

TINY = 1e-20  # cited: transformers adds it to the sum of scores that it divides by


@dataclass(frozen=True, slots=True, kw_only=True)
class Choose(Choosing, Differentiable):
    """The experts of each token by a router, with their weights: inputs are logits, and the correction if it has one.

    Ties go to the lower number.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = 8  # derived: a score (4), the bias, a comparison with groups and with experts

    router: Router

    @property
    def probabilities(self) -> RouterScores:
        return self.router.scores

    def starts_at(self, index: int) -> float | None:
        """A correction starts at zero."""
        return 0.0

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        logits, *correction = arrays
        scores = scores_of(self.router.scores, logits)
        ranked = _within_groups(self.router, sum(correction, scores))
        expert = _best(ranked, call.sizes["choices"])
        weight = np.take_along_axis(scores, expert, axis=-1)
        if self.router.normalised:
            weight = weight / (weight.sum(axis=-1, keepdims=True) + TINY)
        return weight * self.router.scale, expert

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Scores of the chosen experts get a gradient; in the place of the correction's stands how often they were."""
        steps = [
            GradientStep(kind=ChooseGradient(router=self.router), reads=("d0", "in0", "out1"), gives=(0,)),
            GradientStep(kind=ExcessLoad(), reads=("out1",), gives=(1,)),
        ]
        return tuple(step for step in steps if step.gives[0] in needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseGradient(Routed, OpKind):
    """The gradient of the router logits: inputs are the gradient of the weights, logits, and experts."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = 8  # derived: a score (4), its slope (3), a product

    router: Router

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=inputs[1].dims, dtype=inputs[1].dtype),)

    def vector_flops(self, call: Call) -> int:
        """Logits of all experts get a gradient, or a zero."""
        return self.flops_per_element * call.elements(call.outputs[0].dims)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, logits, expert = arrays
        scores, slope = scores_of(self.router.scores, logits), upstream * self.router.scale
        if self.router.normalised:
            picked = np.take_along_axis(scores, expert, axis=-1)
            total = picked.sum(axis=-1, keepdims=True) + TINY
            slope = (slope - (slope * picked).sum(axis=-1, keepdims=True) / total) / total
        at_experts = np.zeros_like(scores)
        np.put_along_axis(at_experts, expert, slope, axis=-1)
        if self.router.scores == "sigmoid":
            return (at_experts * scores * (1 - scores),)
        return (scores * (at_experts - (at_experts * scores).sum(axis=-1, keepdims=True)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcessLoad(Routed, OpKind):
    """By how much each expert was chosen more often than the mean, times the number of experts: a whole number.

    Tokens of ranks and of micro-batches add up, and FP32 holds the sums exactly up to 2^24.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=("experts",), dtype="fp32"),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        num_experts = call.sizes["experts"]
        load = np.bincount(arrays[0].reshape(-1), minlength=num_experts)
        return ((num_experts * load - arrays[0].size).astype(np.float64),)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionStep(Update):
    """A step of the correction: down where an expert was chosen more often than the mean, up where less often.

    That is the balancing without a loss of DeepSeek-V3 (arXiv 2408.15664).
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    flops_per_element: ClassVar[int] = 3  # derived: a sign, a product, a difference
    num_moments: ClassVar[int] = 0
    scalars: ClassVar[tuple[str, ...]] = ()
    clipped: ClassVar[bool] = False

    speed: float

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        correction, excess = arrays
        return (correction - self.speed * np.sign(excess),)


def scores_of(scores: RouterScores, logits: Array) -> Array:
    """Return the scores of all experts."""
    if scores == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _best(ranked: Array, count: int) -> Array:
    return np.argsort(-ranked, axis=-1, kind="stable")[..., :count]


def _within_groups(router: Router, ranked: Array) -> Array:
    """Put the experts of all groups below the best ones behind those of the best."""
    if router.groups == 1:
        return ranked
    by_group = ranked.reshape(*ranked.shape[:-1], router.groups, -1)
    summed = 1 if router.group_score == "best" else 2
    group_scores = np.sort(by_group, axis=-1)[..., -summed:].sum(axis=-1)
    is_in = np.zeros(group_scores.shape, dtype=bool)
    np.put_along_axis(is_in, _best(group_scores, router.chosen_groups), True, axis=-1)
    return np.where(is_in[..., None], by_group, -np.inf).reshape(ranked.shape)
