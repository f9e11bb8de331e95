"""Rotary positions, keys of which all heads share a part, and attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from autoshard.graph.kinds.dropout import DROPOUT_KEYS, PHILOX_FLOPS, keeps
from autoshard.graph.kinds.indexing import document_positions
from autoshard.graph.kinds.pointwise import CAP_FLOPS, CAP_SLOPE_FLOPS
from autoshard.graph.op import Array, Call, Differentiable, Dims, GradientStep, OpKind, Output, Tensor, aligned
from autoshard.spec.model_parts import RotaryScaling

T = TypeVar("T")
Windows: TypeAlias = tuple[tuple[int | None, int], ...]  # how many layers have which window
_QUERY: Dims = ("batch", "seq", "kv_heads", "q_group", "head_dim")
_KEY: Dims = ("batch", "kv_seq", "kv_heads", "head_dim")
_PARTS = ("rotary_dim", "plain_dim")  # of a head, in this order: those of keys that all heads share, and their own
KEYS_DIM = "kv_seq"  # along which keys and values lie
SCORES: Dims = ("batch", "kv_heads", "q_group", "seq", KEYS_DIM)
MOST_GROUPED = 2**16  # queries that may share a key/value head where heads are numbered for dropout
_DRAWS = len((DROPOUT_KEYS, "kv_numbers", "group_numbers"))
_SOFTMAX_FLOPS = 5  # derived: scale, mask, subtract the maximum, exponentiate, accumulate
# Derived: scale, mask, subtract the saved log, exponentiate; subtract the row's sum, multiply by the probability, scale
# back. AWS's kernel does as much otherwise (aws-neuron/nki-samples 8370e11, src/nki_samples/reference/attention.py,
# _flash_attn_bwd_core): mask, exponentiate, copy, subtract, multiply and a transposed copy of every pair, and three
# copies of 128 numbers for every 512 pairs of a query (its gradients in and out, and itself), are 6.75.
_SOFTMAX_GRADIENT_FLOPS = 7


def fraction_of(rotated: int, head_dim: int) -> float:
    """Return the fraction of a head with which a ``Rotary`` turns exactly so many of its numbers.

    >>> int(49 * (1 / 49)), int(49 * fraction_of(1, 49))
    (0, 1)
    """
    fraction = rotated / head_dim
    return fraction if int(head_dim * fraction) == rotated else math.nextafter(fraction, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary(Differentiable):
    """Rotate the two halves of the first part of each head by an angle that grows with the position.

    ``over`` is the dim along which the numbers of a head lie.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")

    fraction: float
    theta: float
    scaling: RotaryScaling | None = None
    backward: bool = False
    over: str = "head_dim"

    @property
    def label(self) -> str:
        return "rotary_back" if self.backward else "rotary"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Keep dims and dtype; the second input holds the positions, a third where each token's document starts."""
        assert inputs[0].dims[-1] == self.over, f"{inputs[0]} does not end in the dim that is turned"
        return (Output(dims=inputs[0].dims, dtype=inputs[0].dtype),)

    def rotated(self, head_dim: int) -> int:
        """Return how many numbers of a head are turned."""
        return int(head_dim * self.fraction)

    def frequencies(self, head_dim: int) -> Array:
        """Return the angle per position of every rotated pair."""
        rotated = self.rotated(head_dim)
        base = self.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
        if self.scaling is None:
            return base
        share = self._kept_share(self.scaling, base)
        return (1 - share) * base / self.scaling.factor + share * base

    def _kept_share(self, scaling: RotaryScaling, base: Array) -> Array:
        """Return how far each frequency keeps its speed, from 0 to 1: scaling slows those of long wavelength down."""
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        if scaling.kind == "linear":
            return np.zeros_like(base)
        if scaling.kind == "llama3":
            turns = scaling.original_positions * base / (2 * math.pi)
            return np.clip((turns - low) / (high - low), 0, 1)
        # YaRN (arXiv:2309.00071) interpolates along the numbers of the pairs, between those with so many turns.
        rotated = 2 * len(base)
        fast, slow = (
            rotated * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            for turns in (high, low)
        )
        if scaling.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        first, last = max(fast, 0), min(slow, rotated - 1)
        width = last - first or 0.001  # as transformers keeps it from zero
        return 1 - np.clip((np.arange(len(base)) - first) / width, 0, 1)

    def whole_dims(self) -> Dims:
        """Return the head, whose halves are rotated against each other."""
        return (self.over,)

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Rotate; the gradient rotates back."""
        x, *where = arrays
        tensor = call.inputs[0]
        frequencies = self.frequencies(call.sizes[self.over])
        angles = aligned(document_positions(*where), call.inputs[-1].dims, tensor.dims) * frequencies
        half = len(frequencies)
        cos, sin = np.cos(angles), np.sin(angles) * (-1 if self.backward else 1)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return (np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1),)

    def vector_flops(self, call: Call) -> int:
        """Two products and a sum per rotated element."""
        return 3 * self.rotated(call.sizes[self.over]) * call.elements(call.inputs[0].dims[:-1])

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        kind = replace(self, backward=not self.backward)
        where = (f"in{number}" for number in range(1, len(inputs)))
        return (GradientStep(kind=kind, reads=("d0", *where), gives=(0,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Differentiable):
    """Heads made of two parts: first that which all heads share (the first input), then that of each head."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)
    owns_result: ClassVar[bool] = True
    flops_per_element: ClassVar[int] = 0

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        shared, own = inputs
        fits = (shared.dims[-1], own.dims[-1]) == _PARTS and {*shared.dims[:-1]} <= {*own.dims}
        assert fits, f"{shared} and {own} are no parts of heads"
        return (Output(dims=(*own.dims[:-1], "head_dim"), dtype=own.dtype),)

    def whole_dims(self) -> Dims:
        return (*_PARTS, "head_dim")

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        shared, own = arrays
        first, second = (tensor.dims for tensor in call.inputs)
        dims = (*second[:-1], first[-1])
        spread = np.broadcast_to(aligned(shared, first, dims), [call.sizes[dim] for dim in dims])
        return (np.concatenate([spread, own], axis=-1),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Cut the gradient in two; where ranks hold different heads, that of the shared part awaits a sum."""
        shared, own = inputs
        return (GradientStep(kind=JoinGradient(shared=shared.dims, own=own.dims), reads=("d0",), gives=(0, 1)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinGradient(OpKind):
    """The gradients of the part that all heads share, which is a sum over them, and of the part of each head."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    shared: Dims
    own: Dims

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        dtype = inputs[0].dtype
        return (
            Output(dims=self.shared, dtype=dtype, suffix="shared"),
            Output(dims=self.own, dtype=dtype, suffix="own"),
        )

    def summed(self, call: Call) -> tuple[int, ...]:
        """Return the axes that the shared part lacks."""
        return tuple(axis for axis, dim in enumerate(call.inputs[0].dims[:-1]) if dim not in self.shared)

    def whole_dims(self) -> Dims:
        return (*_PARTS, "head_dim")

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        width = call.sizes["rotary_dim"]
        return arrays[0][..., :width].sum(axis=self.summed(call)), arrays[0][..., width:]

    def vector_flops(self, call: Call) -> int:
        """One addition for every number of the part that is summed."""
        return call.elements((*self.own[:-1], "rotary_dim"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendOptions(OpKind):
    """What an attention and its gradient share.

    ``window`` limits how far a query looks. If an attention stands for layers that look differently far, ``windows``
    says how many layers have which window, and time is that of their mean; numbers are those of ``window``. ``scale``
    is the factor of the scores, by default 1 over the root of the width of a head; a tanh squeezes them between ``cap``
    and its negative, if it is given. ``value_width`` is the dim along which the numbers of a value lie. What is
    ``biased`` or ``unfused`` skips no pair; a module's own code has the numbers, which are no input here.
    """

    ring_dim: ClassVar[str] = KEYS_DIM

    window: int | None = None
    windows: Windows = ()
    dropped: float = 0.0
    scale: float | None = None
    value_width: str = "head_dim"
    sees_all: bool = False  # what comes after a token as well, as far as the window
    biased: bool = False  # by a tensor with a number for each pair
    unfused: bool = False  # two products around a softmax, which hold all scores
    cap: float | None = None

    def drops(self) -> bool:
        return bool(self.dropped)

    def adds_bias(self) -> bool:
        return self.biased

    def holds_scores(self) -> bool:
        return self.unfused

    def caps_scores(self) -> bool:
        return self.cap is not None

    def whole_dims(self) -> Dims:
        """Scores sum over the whole head, and their gradients over the whole value."""
        return tuple(dict.fromkeys(("head_dim", self.value_width)))

    def tied_dims(self) -> tuple[tuple[str, Dims], ...]:
        """Keys lie on the ranks as queries do, and travel around the ring."""
        return (("kv_seq", ("seq",)),)

    def scores(self, call: Call, query: Array, key: Array) -> Array:
        """Return the scores of all pairs, seen or not."""
        scaled = np.einsum("bskgd,btkd->bkgst", query, key, optimize=True) * scale_of(self, call)
        return scaled if self.cap is None else self.cap * np.tanh(scaled / self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend(AttendOptions, Differentiable):
    """Causal attention, unless it ``sees_all``; heads of queries are those of keys times group, so none is copied.

    Inputs: queries, keys, values, positions of the queries and of the keys, and, if documents that share a sequence do
    not see each other, where the document of each query starts. FLOPs are counted as if documents saw each other, which
    overstates them where they do not.

    If probabilities are ``dropped``, three more inputs come last: the keys of the sequences, and the numbers of the
    key/value heads and of the queries of their groups.
    """

    engines: ClassVar[tuple[str, ...]] = ("torch", "nxd")

    @property
    def label(self) -> str:
        return "attend_dropping" if self.dropped else "attend"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Give the attended values and, in FP32, the log of the softmax's denominator."""
        query, key, value = inputs[:3]
        dims = query.dims, key.dims, value.dims
        assert dims == (_QUERY, _KEY, _values(_KEY, self)), f"attend({query}, {key}, {value})"
        mixed = _values(_QUERY, self)
        return (Output(dims=mixed, dtype=query.dtype), Output(dims=_QUERY[:-1], dtype="fp32", suffix="lse"))

    def visible(self, query_positions: Array, key_positions: Array, *document_starts: Array) -> Array:
        """Return which keys each query may see, along the dims of scores: the last two, or all with documents."""
        distance = query_positions[:, None] - key_positions[None, :]
        distance = np.abs(distance) if self.sees_all else distance
        seen = (distance >= 0) & (distance < self.window) if self.window else distance >= 0
        for starts in document_starts:
            seen = seen & (key_positions >= starts[:, None, None, :, None])
        return seen

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Score, mask, normalise, mix the values; a query that sees no key gives zero, with the log of nothing."""
        query, key, value, *where = arrays
        where, drawn = where_and_draws(where, self.dropped)
        visible = self.visible(*where)
        scores = np.where(visible, self.scores(call, query, key), -np.inf)
        sees_any: Array = np.any(visible, axis=-1, keepdims=True)
        top = np.where(sees_any, scores.max(axis=-1, keepdims=True, initial=-np.inf), 0)
        powers = np.exp(scores - top)
        total = np.where(sees_any, powers.sum(axis=-1, keepdims=True), 1)
        probability = powers / total * kept_scores(self.dropped, where[:2], drawn)
        result = np.einsum("bkgst,btkd->bskgd", probability, value, optimize=True)
        lse = np.where(sees_any, np.log(total) + top, -np.inf)
        return result, lse[..., 0].transpose(0, 3, 1, 2)

    def matrix_flops(self, call: Call) -> int:
        """Two products over every (query, key) pair, seen or not: the convention of published model FLOPs."""
        return 2 * call.elements(SCORES) * _width(call, self)

    def vector_flops(self, call: Call) -> int:
        capped = CAP_FLOPS * self.caps_scores()
        return (_SOFTMAX_FLOPS + capped + _dropout_flops(self.dropped)) * call.elements(SCORES)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """One operation gives all three, from the inputs, the result and the saved denominator."""
        more = (f"in{number}" for number in range(len(("query", "key", "value", "positions", "keys")), len(inputs)))
        reads = ("d0", "in0", "in1", "in2", "in3", "in4", "out0", "out1", *more)
        return (GradientStep(kind=AttendGradient(**attention_options(self)), reads=reads, gives=(0, 1, 2)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendGradient(AttendOptions):
    """The gradients of queries, keys and values."""

    engines: ClassVar[tuple[str, ...]] = ("torch",)

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        dtype = inputs[1].dtype
        return (
            Output(dims=_QUERY, dtype=dtype, suffix="query"),
            Output(dims=_KEY, dtype=dtype, suffix="key"),
            Output(dims=_values(_KEY, self), dtype=dtype, suffix="value"),
        )

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Rebuild the probabilities from the denominator, then apply the chain rule."""
        upstream, query, key, value, query_positions, key_positions, result, lse, *more = arrays
        starts, drawn = where_and_draws(more, self.dropped)
        visible = Attend(window=self.window, sees_all=self.sees_all).visible(query_positions, key_positions, *starts)
        mask = kept_scores(self.dropped, (query_positions, key_positions), drawn)
        scores = self.scores(call, query, key)
        probability = np.exp(np.where(visible, scores - lse.transpose(0, 2, 3, 1)[..., None], -np.inf))
        d_value = np.einsum("bkgst,bskgd->btkd", probability * mask, upstream, optimize=True)
        d_probability = np.einsum("bskgd,btkd->bkgst", upstream, value, optimize=True) * mask
        mean = (upstream * result).sum(axis=-1).transpose(0, 2, 3, 1)[..., None]
        slope = 1.0 if self.cap is None else 1 - (scores / self.cap) ** 2
        d_scores = probability * (d_probability - mean) * slope * scale_of(self, call)
        d_query = np.einsum("bkgst,btkd->bskgd", d_scores, key, optimize=True)
        d_key = np.einsum("bkgst,bskgd->btkd", d_scores, query, optimize=True)
        return d_query, d_key, d_value

    def matrix_flops(self, call: Call) -> int:
        """Four products over every pair: twice the forward (a kernel may rebuild the scores with a fifth)."""
        return 2 * 2 * call.elements(SCORES) * _width(call, self)

    def vector_flops(self, call: Call) -> int:
        """The softmax again, from what was saved of it, and its slope."""
        capped = (CAP_FLOPS + CAP_SLOPE_FLOPS) * self.caps_scores()
        return (_SOFTMAX_GRADIENT_FLOPS + capped + _dropout_flops(self.dropped)) * call.elements(SCORES)


def attention_options(kind: AttendOptions) -> dict[str, Any]:
    """Return the options of an attention, by name."""
    return {option.name: getattr(kind, option.name) for option in fields(AttendOptions)}


def _values(dims: Dims, kind: AttendOptions) -> Dims:
    """Return the dims of a query or a key with the width of values in the place of that of heads."""
    return (*dims[:-1], kind.value_width)


def _width(call: Call, kind: AttendOptions) -> int:
    """Return how many numbers of a head two products sum over, or give: those of a key, and those of a value."""
    return call.sizes["head_dim"] + call.sizes[kind.value_width]


def scale_of(kind: AttendOptions, call: Call) -> float:
    """Return the factor of the scores of an attention."""
    return 1 / math.sqrt(call.sizes["head_dim"]) if kind.scale is None else kind.scale


def where_and_draws(more: Sequence[T], dropped: float) -> tuple[Sequence[T], Sequence[T]]:
    """Split the last inputs of an attention: positions of queries and keys, and the numbers that dropout draws by."""
    count = len(more) - (_DRAWS if dropped else 0)
    return more[:count], more[count:]


def kept_scores(dropped: float, where: Sequence[Array], drawn: Sequence[Array]) -> Array | float:
    """Return a factor for every probability, along the dims of scores: 0 if dropped, else what keeps the mean."""
    if not dropped:
        return 1.0
    query_positions, key_positions = where
    keys, heads, groups = drawn
    numbers = heads[:, None] * MOST_GROUPED + groups
    place = key_positions, query_positions[:, None], numbers[:, :, None, None]
    return keeps(dropped, keys[:, None, None, None, None], place, stream=0) / (1 - dropped)


def _dropout_flops(dropped: float) -> int:
    return PHILOX_FLOPS + 1 if dropped else 0
