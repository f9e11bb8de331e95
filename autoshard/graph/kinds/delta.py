"""Linear attention by the gated delta rule (arXiv:2412.06464): a causal convolution, decays, and the rule itself.

A head has a state, a matrix from keys to values. At each token it decays, what it gives for the token's key moves
towards the token's value, and the token's query reads it. Keys and queries have length one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autoshard.graph.op import Array, Call, Differentiable, Dims, GradientStep, OpKind, Output, Tensor

CHUNK = 64  # cited: tokens that transformers (torch_chunk_gated_delta_rule) and flash-linear-attention take together
LENGTH_EPS = 1e-6  # cited: added to the square of a length there
# Derived: by how much states decay at the start, between what remembers a hundred tokens and what remembers none.
_FIRST_RATES = math.log(0.01), math.log(16.0)
_DECAY_FLOPS, _DECAY_GRADIENT_FLOPS = 5, 9  # derived: sum, softplus (3), product; these, a sigmoid (2), two products
_SCORE_FLOPS = 4  # derived: difference, exponential, and the product with each of two scores
_LENGTH_FLOPS = 4  # derived: square, accumulate, scale by the length, scale by the decay
_QUERY: Dims = ("batch", "seq", "delta_heads", "delta_key")
_VALUE: Dims = ("batch", "seq", "delta_heads", "delta_group", "delta_value")
_STATES: Dims = _VALUE[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalConv(Differentiable):
    """A sum over the last tokens, with weights for each channel; ``backward`` sums over the next ones.

    Inputs: the tensor, [batch, seq, channels ...], and the weights, [channels ..., taps], the last of the token itself.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True

    backward: bool = False

    @property
    def label(self) -> str:
        return "causal_conv_back" if self.backward else "causal_conv"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        tensor, weight = inputs
        assert weight.dims == (*tensor.dims[2:], "taps"), f"{weight} has no weights for the channels of {tensor}"
        return (Output(dims=tensor.dims, dtype=tensor.dtype),)

    def whole_dims(self) -> Dims:
        return ("seq", "taps")

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        x, weight = arrays
        total, length, taps = np.zeros_like(x), x.shape[1], weight.shape[-1]
        for distance in range(min(taps, length)):
            share = weight[..., taps - 1 - distance]
            later, earlier = slice(distance, None), slice(0, length - distance)
            into, read = (earlier, later) if self.backward else (later, earlier)
            total[:, into] += share * x[:, read]
        return (total,)

    def vector_flops(self, call: Call) -> int:
        """A product and a sum for each tap."""
        return 2 * call.sizes["taps"] * call.elements(call.inputs[0].dims)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        steps = (
            GradientStep(kind=CausalConv(backward=not self.backward), reads=("d0", "in1"), gives=(0,)),
            GradientStep(kind=CausalConvWeightGradient(), reads=("d0", "in0"), gives=(1,)),
        )
        return tuple(steps[index] for index in needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalConvWeightGradient(OpKind):
    """The gradient of the weights of a causal convolution: inputs are that of its result, and its tensor."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=(*inputs[1].dims[2:], "taps"), dtype=inputs[1].dtype),)

    def whole_dims(self) -> Dims:
        return ("seq", "taps")

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, x = arrays
        length, taps = x.shape[1], call.sizes["taps"]
        total = np.zeros((*x.shape[2:], taps))
        for distance in range(min(taps, length)):
            total[..., taps - 1 - distance] = (upstream[:, distance:] * x[:, : length - distance]).sum(axis=(0, 1))
        return (total,)

    def vector_flops(self, call: Call) -> int:
        return 2 * call.sizes["taps"] * call.elements(call.inputs[0].dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay(Differentiable):
    """The log of what a state keeps at a token, in FP32: - exp(rate) * softplus(x + shift).

    Inputs: a number for each token and state, and the rate and the shift of each state.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    by_token: ClassVar[bool | None] = True
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = _DECAY_FLOPS

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=inputs[0].dims, dtype="fp32"),)

    def starts_at(self, index: int) -> float | tuple[float, float] | None:
        """Shifts start at one, and rates lie evenly between small and large ones, so that states differ."""
        return _FIRST_RATES if index == 1 else 1.0

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        x, rate, shift = arrays
        return (-np.exp(rate) * np.logaddexp(0, x + shift),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        return (GradientStep(kind=DecayGradient(), reads=("d0", "in0", "in1", "in2"), gives=(0, 1, 2)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayGradient(OpKind):
    """The gradients of a decay's number, rate and shift: inputs are that of its result, and these three."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    flops_per_element: ClassVar[int] = _DECAY_GRADIENT_FLOPS

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        _, x, rate, shift = inputs
        return (
            Output(dims=x.dims, dtype=x.dtype, suffix="number"),
            Output(dims=rate.dims, dtype=rate.dtype, suffix="rate"),
            Output(dims=shift.dims, dtype=shift.dtype, suffix="shift"),
        )

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, x, rate, shift = arrays
        scale = -np.exp(rate)
        number = upstream * scale * 0.5 * (1 + np.tanh((x + shift) / 2))  # the slope of softplus is a sigmoid
        return number, (upstream * scale * np.logaddexp(0, x + shift)).sum(axis=(0, 1)), number.sum(axis=(0, 1))


class _DeltaRule(OpKind):
    """What the rule and its gradient share."""

    in_turns: ClassVar[bool] = True

    def whole_dims(self) -> Dims:
        return ("seq", "delta_key", "delta_value")

    def flops_of_products(self, call: Call) -> int:
        """Return the FLOPs of one pass forward, in chunks.

        Within a chunk keys meet keys and queries, the solved system meets keys and values, and scores meet values. Per
        token a state is read by a key and by a query, and a key changes it.
        """
        keys, values, chunk = call.sizes["delta_key"], call.sizes["delta_value"], min(CHUNK, call.sizes["seq"])
        return 2 * call.elements(_STATES) * (chunk * (3 * keys + 2 * values) + 3 * keys * values)

    def flops_of_numbers(self, call: Call) -> int:
        """Return the FLOPs of one pass forward that are no products: decays of scores, and lengths."""
        chunk = min(CHUNK, call.sizes["seq"])
        of_scores = _SCORE_FLOPS * chunk * call.elements(_STATES)
        return of_scores + 2 * _LENGTH_FLOPS * call.elements(_QUERY)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(_DeltaRule, Differentiable):
    """What queries read of states; inputs: queries, keys, values, the logs of decays, and how far states move.

    >>> import numpy as np
    >>> ones = np.ones((1, 2, 1, 1, 1))
    >>> rule, none = GatedDelta(), np.zeros((1, 2, 1, 1))
    >>> (read,) = rule.evaluate(None, ones[..., 0], ones[..., 0], 3 * ones, none, none + 0.5)
    >>> read.ravel().round(3).tolist()
    [1.5, 2.25]
    """

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        dims = tuple(tensor.dims for tensor in inputs)
        assert dims == (_QUERY, _QUERY, _VALUE, _STATES, _STATES), f"gated_delta{dims}"
        return (Output(dims=_VALUE, dtype=inputs[2].dtype),)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (np.stack([read for _, read, *_ in _states(*arrays)], axis=1),)

    def matrix_flops(self, call: Call) -> int:
        return self.flops_of_products(call)

    def vector_flops(self, call: Call) -> int:
        return self.flops_of_numbers(call)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        reads = ("d0", *(f"in{number}" for number in range(len(inputs))))
        return (GradientStep(kind=GatedDeltaGradient(), reads=reads, gives=tuple(range(len(inputs)))),)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaGradient(_DeltaRule):
    """The gradients of queries, keys, values, decays and moves: inputs are that of what was read, and these five."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        names = ("query", "key", "value", "decay", "move")
        return tuple(
            Output(dims=tensor.dims, dtype=tensor.dtype, suffix=name)
            for tensor, name in zip(inputs[1:], names, strict=True)
        )

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Go through the tokens in reverse, with the gradient of the state."""
        upstream, query, key, value, decay, move = arrays
        tokens = list(_states(query, key, value, decay, move))
        d_state: Array = np.zeros_like(tokens[0][0])
        gradients: list[list[Array]] = [[] for _ in range(5)]
        unit_query, unit_key = _unit(query)[0] / math.sqrt(query.shape[-1]), _unit(key)[0]
        for token in reversed(range(len(tokens))):
            state, _, decayed, error = tokens[token]
            reading, writing, d_read = unit_query[:, token], unit_key[:, token], upstream[:, token]
            d_state = d_state + np.einsum("bhd,bhge->bhgde", reading, d_read)
            d_moved = np.einsum("bhd,bhgde->bhge", writing, d_state)
            d_error = move[:, token][..., None] * d_moved
            d_key = np.einsum("bhgde,bhge->bhd", d_state, move[:, token][..., None] * error)
            d_key -= np.einsum("bhgde,bhge->bhd", decayed, d_error)
            d_query = np.einsum("bhgde,bhge->bhd", state, d_read)
            d_decayed = d_state - np.einsum("bhd,bhge->bhgde", writing, d_error)
            d_decay = (d_decayed * decayed).sum(axis=(-2, -1))
            d_state = d_decayed * np.exp(decay[:, token])[..., None, None]
            results = d_query, d_key, d_error, d_decay, (d_moved * error).sum(axis=-1)
            for gradient, result in zip(gradients, results, strict=True):
                gradient.insert(0, result)
        d_query, d_key, *rest = (np.stack(gradient, axis=1) for gradient in gradients)
        of_units = d_query / math.sqrt(query.shape[-1]), d_key
        return *(_of_lengths(x, slope) for x, slope in zip((query, key), of_units, strict=True)), *rest

    def matrix_flops(self, call: Call) -> int:
        return 2 * self.flops_of_products(call)

    def vector_flops(self, call: Call) -> int:
        return 2 * self.flops_of_numbers(call)


def _unit(x: Array) -> tuple[Array, Array]:
    """Return vectors of length one, and the reciprocals of the lengths."""
    scale = 1 / np.sqrt((x**2).sum(axis=-1, keepdims=True) + LENGTH_EPS)
    return x * scale, scale


def _of_lengths(x: Array, slope: Array) -> Array:
    """Return the gradient of vectors, given that of what they are when they have length one."""
    unit, scale = _unit(x)
    return scale * (slope - unit * (slope * unit).sum(axis=-1, keepdims=True))


def _states(
    query: Array, key: Array, value: Array, decay: Array, move: Array
) -> "list[tuple[Array, Array, Array, Array]]":
    """Return for each token the state behind it, what is read, the decayed state, and by how much its value differs."""
    reading, writing = _unit(query)[0] / math.sqrt(query.shape[-1]), _unit(key)[0]
    batch, length, heads, group, width = value.shape
    state: Array = np.zeros((batch, heads, group, query.shape[-1], width))
    tokens: list[tuple[Array, Array, Array, Array]] = []
    for token in range(length):
        decayed = state * np.exp(decay[:, token])[..., None, None]
        error = value[:, token] - np.einsum("bhd,bhgde->bhge", writing[:, token], decayed)
        moved = move[:, token][..., None] * error
        state = decayed + np.einsum("bhd,bhge->bhgde", writing[:, token], moved)
        tokens.append((state, np.einsum("bhd,bhgde->bhge", reading[:, token], state), decayed, error))
    return tokens
