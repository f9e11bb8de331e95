"""Mixture of experts: choose experts per token, send tokens to their slots, bring the results back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autoshard.graph.op import Array, Call, Differentiable, Dims, GradientStep, OpKind, Output, Tensor
from autoshard.spec.model_parts import RouterScores

_TOKENS = ("batch", "seq")
CHOICES = ("batch", "seq", "choices")
_SLOTS = ("experts", "slots", "hidden")


class Routed:
    """Base of the kinds that read a token's choice of experts."""

    __slots__ = ()

    def whole_dims(self) -> Dims:
        """A token may choose any expert."""
        return ("experts", "choices")


class Choosing(Routed):
    """Base of the kinds that choose experts by logits: results are a number for each choice, and the experts."""

    __slots__ = ()

    @property
    def probabilities(self) -> RouterScores:
        """What makes probabilities of all experts of the logits; those of a sigmoid are divided by their sum."""
        return "softmax"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return Output(dims=CHOICES, dtype=inputs[0].dtype), Output(dims=CHOICES, dtype="int64", suffix="expert")


class _Slotted(Routed):
    """Base of the kinds that read the slots of experts as well."""

    __slots__ = ()

    def tied_dims(self) -> tuple[tuple[str, Dims], ...]:
        """Each rank has its own slots for its own tokens."""
        return (("slots", _TOKENS),)


class _Fetching(_Slotted):
    """Base of the kinds that fetch rows of slots (the first input) back to their tokens."""

    __slots__ = ()

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=(*_TOKENS, "hidden"), dtype=inputs[0].dtype),)

    def linear_through(self) -> Mapping[int, tuple[int, ...]]:
        """Fetching and adding rows is linear in the rows."""
        return {0: (0,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Choosing, Differentiable):
    """The largest router logits of each token and the experts they belong to; ties go to the lower number."""

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Sort and take the first."""
        expert = np.argsort(-arrays[0], axis=-1, kind="stable")[..., : call.sizes["choices"]]
        return np.take_along_axis(arrays[0], expert, axis=-1), expert

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Only the selected logits get a gradient."""
        return (GradientStep(kind=TopKGradient(), reads=("d0", "out1"), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKGradient(Routed, OpKind):
    """The gradient of the router logits: zero except at the selected experts."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    flops_per_element: ClassVar[int] = 0

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=(*_TOKENS, "experts"), dtype=inputs[0].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        result = np.zeros([call.sizes[dim] for dim in (*_TOKENS, "experts")], dtype=arrays[0].dtype)
        np.put_along_axis(result, arrays[1], arrays[0], axis=-1)
        return (result,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGroup:
    """Tokens that form one queue, and the slots of every expert that belong to them; each as (start, stop)."""

    batch: tuple[int, int]
    seq: tuple[int, int]
    slots: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(_Slotted, Differentiable):
    """The place of each (token, choice) in its expert's queue, in token order; -1 where the queue is full.

    Where tokens are cut, those of each rank form one queue. ``groups`` states the queues of tokens that are not cut;
    without any, all of them form one.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")

    groups: tuple[TokenGroup, ...] = ()

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=CHOICES, dtype="int64"),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Count the tokens of the group that came before to the same expert."""
        whole = {dim: (0, call.sizes[dim]) for dim in (*_TOKENS, "slots")}
        place = np.full(arrays[0].shape, -1)
        for group in self.groups or (TokenGroup(**whole),):
            tokens = slice(*group.batch), slice(*group.seq)
            place[tokens] = _queued(arrays[0][tokens], call.sizes["experts"], *group.slots)
        return (place,)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """A place is a whole number."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch(_Slotted, Differentiable):
    """Tokens copied to the slots of their experts: inputs are tokens, experts, places."""

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")
    flops_per_element: ClassVar[int] = 0

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=_SLOTS, dtype=inputs[0].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Copy; a slot that nobody takes stays zero."""
        tokens, expert, place = arrays
        slots = np.zeros([call.sizes[dim] for dim in _SLOTS], dtype=tokens.dtype)
        has_slot = place >= 0
        copies = np.broadcast_to(tokens[..., None, :], (*place.shape, tokens.shape[-1]))
        slots[expert[has_slot], place[has_slot]] = copies[has_slot]
        return (slots,)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """A token's gradient is the sum over its copies."""
        return (GradientStep(kind=DispatchGradient(), reads=("d0", "in1", "in2"), gives=(0,)),)


def _queued(expert: Array, num_experts: int, start: int, stop: int) -> Array:
    """Return the slots of tokens that form one queue for the slots from start to stop of every expert."""
    picked = expert.reshape(-1)
    chosen = np.arange(num_experts) == picked[:, None]
    place = start + (np.cumsum(chosen, axis=0) - 1)[np.arange(picked.size), picked]
    return np.where(place < stop, place, -1).reshape(expert.shape)


def _fetch(slots: Array, expert: Array, place: Array) -> Array:
    """Return what lies in each (token, choice)'s slot, zero where it was dropped."""
    rows = np.zeros((*place.shape, slots.shape[-1]), dtype=slots.dtype)
    has_slot = place >= 0
    rows[has_slot] = slots[expert[has_slot], place[has_slot]]
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchGradient(_Fetching, OpKind):
    """The gradient of tokens that were copied to slots."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (_fetch(*arrays).sum(axis=2),)

    def vector_flops(self, call: Call) -> int:
        """A sum per choice."""
        return call.elements((*CHOICES, "hidden"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Combine(_Fetching, Differentiable):
    """Expert results brought back to their tokens and mixed: inputs are slots, weights, experts, places."""

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        slots, weight, expert, place = arrays
        return ((_fetch(slots, expert, place) * weight[..., None]).sum(axis=2),)

    def vector_flops(self, call: Call) -> int:
        """A product and a sum per choice."""
        return 2 * call.elements((*CHOICES, "hidden"))

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Slots get the weighted gradient of their token; weights get the product with the fetched row."""
        reads = ("d0", "in0", "in1", "in2", "in3")
        return (GradientStep(kind=CombineGradient(), reads=reads, gives=(0, 1)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineGradient(_Slotted, OpKind):
    """The gradients of expert results and of their weights."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        slots, weight = inputs[1], inputs[2]
        return (
            Output(dims=slots.dims, dtype=slots.dtype, suffix="slots"),
            Output(dims=weight.dims, dtype=weight.dtype, suffix="weight"),
        )

    def linear_through(self) -> Mapping[int, tuple[int, ...]]:
        """The gradient of the weights is linear in the rows; that of the rows does not read them."""
        return {1: (1,)}

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Scatter the weighted gradient; multiply with what was fetched."""
        upstream, slots, weight, expert, place = arrays
        d_weight = (_fetch(slots, expert, place) * upstream[..., None, :]).sum(axis=-1)
        d_slots = np.zeros_like(slots)
        has_slot = place >= 0
        weighted = upstream[..., None, :] * weight[..., None]
        d_slots[expert[has_slot], place[has_slot]] = weighted[has_slot]
        return d_slots, d_weight

    def vector_flops(self, call: Call) -> int:
        """For each choice a product for the slot, and a product and a sum for the weight."""
        return 3 * call.elements((*CHOICES, "hidden"))
