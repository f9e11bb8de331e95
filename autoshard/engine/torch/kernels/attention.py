"""Rotary positions, and causal attention in pieces that are seen whole, up to the diagonal, or not at all.

No mask is ever as large as the scores of a sequence: only at the edge of a window are a few rows masked at a time.
Documents that do not see each other need none: each is attended to on its own.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

import torch

from autoshard.engine.torch.formats import Formats, wide
from autoshard.engine.torch.kernels.fused import FusedAttention, Part, Slopes, fused
from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, kernel_of
from autoshard.graph.kinds.attention import Attend, AttendGradient, Rotary
from autoshard.graph.op import Call

_ROWS = 128  # queries that are masked together


@kernel_of.register
def _rotary(kind: Rotary, call: Call, context: KernelContext) -> Kernel:
    dims, head_dim = call.inputs[0].dims, call.sizes["head_dim"]
    half, dtype = kind.rotated(head_dim) // 2, context.formats.of(call.outputs[0].dtype)
    turned = 2 * half
    after = len(dims) - dims.index(call.inputs[-1].dims[-1]) - 2  # dims between the positions and the head
    sign = -1 if kind.backward else 1

    def run(x: torch.Tensor, *where: torch.Tensor) -> tuple[torch.Tensor, ...]:
        exact = wide(x[..., :0])
        angles = context.rotations.of(kind, where, head_dim, exact)
        cos, sin = (one.reshape(*one.shape[:-1], *[1] * after, half) for one in angles)
        result = torch.empty_like(x, dtype=exact.dtype)
        first, second = x[..., :half], x[..., half:turned]
        torch.mul(first, cos, out=result[..., :half]).addcmul_(second, sin, value=-sign)
        torch.mul(second, cos, out=result[..., half:turned]).addcmul_(first, sin, value=sign)
        if turned < head_dim:
            result[..., turned:] = x[..., turned:]
        return (result.to(dtype),)

    return run


@dataclass(frozen=True, slots=True)
class _PositionRun:
    """Neighbours in memory whose positions follow each other: where they lie, and the first position."""

    start: int
    stop: int
    first: int

    @property
    def last(self) -> int:
        return self.first + self.stop - self.start - 1

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def covers(self, count: int) -> bool:
        return self.stop - self.start == count

    def cut(self, positions: set[int]) -> "Iterator[_PositionRun]":
        """Part it where any of these positions begins."""
        inside = sorted(self.start + one - self.first for one in positions if self.first < one <= self.last)
        for start, stop in pairwise((self.start, *inside, self.stop)):
            yield _PositionRun(start, stop, self.first + start - self.start)

    def within(self, first: int, last: int) -> "_PositionRun | None":
        """Return the part of it between two positions, both included."""
        low, high = max(first, self.first), min(last, self.last)
        at = self.start + low - self.first
        return _PositionRun(at, at + high - low + 1, low) if low <= high else None


def _spans(positions: torch.Tensor) -> list[_PositionRun]:
    """Return the runs of positions that follow each other; most ranks hold one, with zig-zag two."""
    count = len(positions)
    if count and int(positions[-1] - positions[0]) == count - 1:
        return [_PositionRun(0, count, int(positions[0]))]
    breaks: list[int] = (torch.diff(positions) != 1).nonzero().flatten().add_(1).tolist() if count else []
    ends = (0, *breaks, count)
    return [_PositionRun(start, stop, int(positions[start])) for start, stop in pairwise(ends) if start < stop]


@dataclass(frozen=True, slots=True)
class _VisiblePair:
    """Queries and keys of which each query sees all keys, those up to itself (``causal``), or some (``masked``).

    They are those of some sequences of the batch, from the first of ``rows`` to before the second, or of all.
    """

    queries: _PositionRun
    keys: _PositionRun
    causal: bool = False
    masked: bool = False
    rows: tuple[int, int] | None = None

    @property
    def batch(self) -> slice:
        return slice(*self.rows) if self.rows else slice(None)


def _seen_by_document(
    positions: torch.Tensor, keys: list[_PositionRun], starts: torch.Tensor, window: int | None, *, in_rows: bool
) -> Iterator[_VisiblePair]:
    """Yield what sees what where documents do not see each other: those of the queries, one after the other.

    Sequences that follow each other and are cut alike go together.
    """
    changes: list[int] = (starts[1:] != starts[:-1]).any(1).nonzero().flatten().add_(1).tolist()
    for rows in pairwise((0, *changes, len(starts))):
        documents: dict[int, list[_PositionRun]] = {}
        for start, span in _spans_of_documents(positions, starts[rows[0]]):
            documents.setdefault(start, []).append(span)
        for start, queries in documents.items():
            last = max(span.last for span in queries)
            own = [part for part in (span.within(start, last) for span in keys) if part]
            if own:
                yield from (replace(seen, rows=rows) for seen in _seen(queries, own, window, in_rows=in_rows))


def _spans_of_documents(positions: torch.Tensor, starts: torch.Tensor) -> Iterator[tuple[int, _PositionRun]]:
    """Yield the runs of positions of one document each, with where the document starts."""
    found: list[int] = ((torch.diff(positions) != 1) | (torch.diff(starts) != 0)).nonzero().flatten().add_(1).tolist()
    begins = (0, *found)
    firsts, documents = positions[list(begins)].tolist(), starts[list(begins)].tolist()
    for (start, stop), first, document in zip(pairwise((*begins, len(positions))), firsts, documents, strict=True):
        yield document, _PositionRun(start, stop, first)


def _seen(
    queries: list[_PositionRun], keys: list[_PositionRun], window: int | None, *, in_rows: bool
) -> Iterator[_VisiblePair]:
    """Yield all pairs of spans that see anything, cut so that a pair is the same positions or apart, or ``in_rows``."""
    if in_rows or (window and max(span.last for span in queries) - min(span.first for span in keys) >= window):
        yield from _within(queries, keys, window or sys.maxsize)
        return
    edges = {edge for span in (*queries, *keys) for edge in (span.first, span.last + 1)}
    parts = [[part for span in spans for part in span.cut(edges)] for spans in (queries, keys)]
    for query, key in product(*parts):
        if key.first <= query.last:
            yield _VisiblePair(query, key, causal=key.first == query.first)


def _within(queries: list[_PositionRun], keys: list[_PositionRun], window: int) -> Iterator[_VisiblePair]:
    """Yield a few queries at a time with the keys that any of them sees."""
    for query, key in product(queries, keys):
        for start in range(query.start, query.stop, _ROWS):
            rows = _PositionRun(start, min(start + _ROWS, query.stop), query.first + start - query.start)
            if near := key.within(rows.first - window + 1, rows.last):
                yield _VisiblePair(rows, near, masked=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """Tensors as kernels take them: [batch, head, position, head_dim], query heads in groups that share keys."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> "_Heads":
        return cls(query=_by_head(query), key=_rows(key).transpose(1, 2), value=_rows(value).transpose(1, 2))

    def of_pair(self, seen: _VisiblePair) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, keys = seen.batch, seen.keys.slice
        return self.query[rows, :, seen.queries.slice], self.key[rows, :, keys], self.value[rows, :, keys]

    def is_whole(self, seen: _VisiblePair) -> bool:
        """Whether a pair is about every query."""
        batch, _, count, _ = self.query.shape
        return seen.rows in (None, (0, batch)) and seen.queries.covers(count)


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """Turn [batch, seq, kv_heads, q_group, ...] into [batch, head, seq, ...]."""
    return _rows(tensor).flatten(2, 3).transpose(1, 2)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same with rows in one piece: the fused kernel reads others wrongly, without a word (torch 2.13)."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _by_position(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Turn [batch, head, seq, ...] back."""
    return tensor.transpose(1, 2).reshape(*like.shape[:4], *tensor.shape[3:])


@dataclass(frozen=True, slots=True)
class _Attention:
    """How an operation attends: with the device's own kernel, or a few rows of scores at a time; within a window."""

    fused: FusedAttention | None
    window: int | None

    @classmethod
    def of(cls, call: Call, context: KernelContext, window: int | None) -> "_Attention":
        formats: Formats = context.formats
        return cls(fused(formats.device, formats.of(call.inputs[0].dtype), call.sizes["head_dim"]), window)

    def pairs(
        self, heads: _Heads, positions: torch.Tensor, key_positions: torch.Tensor, *starts: torch.Tensor
    ) -> list[_VisiblePair]:
        """Return what sees what; ``starts``, if documents do not see each other, are those of the queries."""
        if not heads.query.numel() or not heads.key.numel():
            return []
        in_rows, keys = self.fused is None, _spans(key_positions)
        if starts:
            return list(_seen_by_document(positions, keys, starts[0], self.window, in_rows=in_rows))
        return list(_seen(_spans(positions), keys, self.window, in_rows=in_rows))

    def forward(self, heads: _Heads, seen: _VisiblePair) -> Part:
        """Attend to what a pair sees."""
        if seen.masked:
            return _masked(heads, seen, self.window)
        assert self.fused, "what nothing attends to at once is masked"
        return self.fused.forward(heads.of_pair(seen), seen.causal)

    def backward(self, heads: _Heads, seen: _VisiblePair, given: tuple[torch.Tensor, ...]) -> Slopes:
        """Return the gradients of a pair's queries, keys and values."""
        upstream, result, lse = (one[seen.batch, :, seen.queries.slice] for one in given)
        if seen.masked:
            return _masked_slopes(heads, seen, (upstream, result, lse), self.window)
        assert self.fused, "what nothing attends to at once is masked"
        return self.fused.backward((upstream, *heads.of_pair(seen), result, lse), seen.causal)


@kernel_of.register
def _attend(kind: Attend, call: Call, context: KernelContext) -> Kernel:
    attention = _Attention.of(call, context, kind.window)
    formats = [context.formats.of(output.dtype) for output in call.outputs]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, *where = tensors
        heads = _Heads.of(query, key, value)
        parts: dict[_VisiblePair, Part] = {}
        for seen in attention.pairs(heads, *where):
            of_queries = _VisiblePair(seen.queries, seen.queries, rows=seen.rows)
            parts[of_queries] = joined(parts.get(of_queries), attention.forward(heads, seen))
        if len(parts) == 1 and heads.is_whole(next(iter(parts))):
            mixed, lse = next(iter(parts.values()))
        else:
            mixed = torch.zeros_like(heads.query)
            lse = torch.full(mixed.shape[:3], -torch.inf, dtype=formats[1], device=mixed.device)
            for seen, (part, weight) in parts.items():
                mixed[seen.batch, :, seen.queries.slice], lse[seen.batch, :, seen.queries.slice] = part, weight
        return _by_position(mixed, query).to(formats[0]), _by_position(lse, query).to(formats[1])

    return run


@kernel_of.register
def _attend_gradient(kind: AttendGradient, call: Call, context: KernelContext) -> Kernel:
    attention = _Attention.of(call, context, kind.window)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        upstream, query, key, value, positions, key_positions, result, lse, *starts = tensors
        heads = _Heads.of(query, key, value)
        given = (_by_head(upstream), _by_head(result), _by_head(lse))
        made = [torch.zeros_like(one) for one in (heads.query, heads.key, heads.value)]
        pairs = attention.pairs(heads, positions, key_positions, *starts)
        if len(pairs) == 1 and heads.is_whole(pairs[0]) and pairs[0].keys.covers(key.shape[1]):
            made = attention.backward(heads, pairs[0], given)
        else:
            for seen in pairs:
                places = (seen.queries.slice, seen.keys.slice, seen.keys.slice)
                for total, place, part in zip(made, places, attention.backward(heads, seen, given), strict=True):
                    total[seen.batch, :, place] += part
        return _by_position(made[0], query), made[1].transpose(1, 2), made[2].transpose(1, 2)

    return run


def _masked(heads: _Heads, seen: _VisiblePair, window: int | None) -> Part:
    """Attend with a few rows of scores at hand."""
    scores, value = _scores(heads, seen, window), heads.of_pair(seen)[2]
    lse = scores.logsumexp(-1)
    probability = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    mixed = probability @ wide(value).unsqueeze(2)
    return mixed.flatten(1, 2).to(value.dtype), lse.flatten(1, 2)


def _scores(heads: _Heads, seen: _VisiblePair, window: int | None) -> torch.Tensor:
    """Return scores by KV head and query of its group: [batch, kv_head, group, query, key]."""
    query, key, _ = heads.of_pair(seen)
    grouped = wide(query).unflatten(1, (key.shape[1], -1))
    scores = grouped @ wide(key).unsqueeze(2).transpose(-1, -2) / math.sqrt(query.shape[-1])
    rows = torch.arange(seen.queries.first, seen.queries.last + 1, device=query.device)
    columns = torch.arange(seen.keys.first, seen.keys.last + 1, device=query.device)
    distance = rows[:, None] - columns
    return scores.masked_fill((distance < 0) | (distance >= (window or math.inf)), -torch.inf)


def _masked_slopes(heads: _Heads, seen: _VisiblePair, given: tuple[torch.Tensor, ...], window: int | None) -> Slopes:
    """Return the gradients of a pair's queries, keys and values with a few rows of scores at hand."""
    upstream, result, lse = given
    query, key, value = heads.of_pair(seen)
    groups = (key.shape[1], -1)
    probability = (_scores(heads, seen, window) - lse.unflatten(1, groups).unsqueeze(-1)).exp()
    up, out, rows = (wide(one).unflatten(1, groups) for one in (upstream, result, query))
    d_value = (probability.transpose(-1, -2) @ up).sum(2)
    slope = up @ wide(value).unsqueeze(2).transpose(-1, -2) - (up * out).sum(-1, keepdim=True)
    d_scores = probability * slope / math.sqrt(query.shape[-1])
    d_query = (d_scores @ wide(key).unsqueeze(2)).flatten(1, 2)
    d_key = (d_scores.transpose(-1, -2) @ rows).sum(2)
    return d_query.to(query.dtype), d_key.to(query.dtype), d_value.to(query.dtype)


def joined(first: Part | None, second: Part) -> Part:
    """Join two parts of an attention, each normalised on its own; a part that saw no key weighs nothing."""
    if first is None:
        return second
    (mixed, lse), (part, weight) = first, second
    total = torch.logaddexp(lse, weight)
    reference = total.nan_to_num(neginf=0.0)
    shares = (lse - reference).exp().unsqueeze(-1), (weight - reference).exp().unsqueeze(-1)
    return (mixed * shares[0] + part * shares[1]).to(mixed.dtype), total
