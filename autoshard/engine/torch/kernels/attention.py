"""Causal attention in pieces. The queries of a piece see all of its keys, the keys up to the diagonal, or none.

A piece is computed by the kernel that torch has for the device, which writes no scores; some devices have none, or none
for FP32. No mask is ever as large as the scores of a sequence: only without a kernel, where probabilities are dropped
(a device's kernel would draw numbers of its own), where a tanh caps scores, and at the edge of a window, are a few rows
masked at a time.
Documents that do not see each other need none: each is attended to on its own.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import cast

import torch
from einops import einsum, rearrange
from torch.nn import functional

from autoshard.engine.torch.formats import wide
from autoshard.engine.torch.kernels.dropout import keeps
from autoshard.engine.torch.kernels.fused_attention import FusedAttention, Heads, Part, fused
from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, register_kernels
from autoshard.graph.kinds.attention import MOST_GROUPED, Attend, AttendGradient, scale_of, where_and_draws
from autoshard.graph.op import Call

_NUM_INPUTS = {Attend: 5, AttendGradient: 8}  # without dropout; one more says where documents start
_ROWS = 128  # queries that are masked together
# Of attention in single operations: how query heads are numbered, keys or values that a group of them shares, and the
# gradients of these, which are sums over the group.
_IN_GROUPS = "batch (kv_heads q_group) ... -> batch kv_heads q_group ..."
_OUT_OF_GROUPS = "batch kv_heads q_group ... -> batch (kv_heads q_group) ..."
_SHARED = "batch kv_heads kv_seq head_dim -> batch kv_heads 1 kv_seq head_dim"
_SHARED_COLUMNS = "batch kv_heads kv_seq head_dim -> batch kv_heads 1 head_dim kv_seq"
_OVER_QUERIES = (
    "batch kv_heads q_group seq kv_seq, batch kv_heads q_group seq head_dim -> batch kv_heads kv_seq head_dim"
)


@dataclass(frozen=True, slots=True)
class PositionRun:
    """Tokens that are neighbours in memory and in the sequence: where they start in memory, and their positions."""

    start: int
    positions: range

    @property
    def slice(self) -> slice:
        """The slice of memory of these tokens."""
        return slice(self.start, self.start + len(self.positions))

    def part(self, first: int, stop: int) -> "PositionRun":
        """Return the part between two positions; it may be empty."""
        inside = range(max(first, self.positions.start), min(stop, self.positions.stop))
        return PositionRun(self.start + inside.start - self.positions.start, inside)


def runs(positions: torch.Tensor, starts: torch.Tensor | None = None) -> Iterator[tuple[int, PositionRun]]:
    """Yield the runs of a sequence, each within one document, with its start (0 if ``starts`` are not given).

    Most ranks have one run; with zig-zag they have two.
    """
    first, count = int(positions[0]), len(positions)
    if starts is None and int(positions[-1]) - first == count - 1:
        yield 0, PositionRun(0, range(first, first + count))
        return
    breaks = torch.diff(positions) != 1
    if starts is not None:
        breaks |= torch.diff(starts) != 0
    begins: list[int] = [0, *breaks.nonzero().flatten().add_(1).tolist()]
    documents = [0] * len(begins) if starts is None else starts[begins].tolist()
    ends = pairwise((*begins, count))
    for (start, stop), first, document in zip(ends, positions[begins].tolist(), documents, strict=True):
        yield document, PositionRun(start, range(first, first + stop - start))


@dataclass(frozen=True, slots=True)
class VisiblePair:
    """Queries and keys of some sequences of the batch; a query sees all keys, those up to itself, or some."""

    queries: PositionRun
    keys: PositionRun
    sees: str  # all, causal or masked
    rows: tuple[int, int]  # the first sequence, and the one behind the last


def visible_pairs(
    positions: torch.Tensor, key_positions: torch.Tensor, starts: torch.Tensor, window: int | None, *, in_rows: bool
) -> Iterator[VisiblePair]:
    """Yield the pairs of queries and keys that see each other, document by document of the queries.

    ``starts`` holds where the documents of the queries start; if it has no column, documents see each other. Sequences
    that follow each other and are cut alike go together.
    """
    keys, joined = [run for _, run in runs(key_positions)], not starts.shape[1]
    cuts: list[int] = [] if joined else (starts[1:] != starts[:-1]).any(1).nonzero().flatten().add_(1).tolist()
    for rows in pairwise((0, *cuts, len(starts))):
        documents: dict[int, list[PositionRun]] = {}
        for start, run in runs(positions, None if joined else starts[rows[0]]):
            documents.setdefault(start, []).append(run)
        for start, queries in documents.items():
            last = max(run.positions.stop for run in queries)
            keys_before = [part for run in keys if (part := run.part(start, last)).positions]
            for pair in _pairs(queries, keys_before, window, in_rows=in_rows) if keys_before else ():
                yield VisiblePair(*pair, rows)


def _pairs(
    queries: list[PositionRun], keys: list[PositionRun], window: int | None, *, in_rows: bool
) -> Iterator[tuple[PositionRun, PositionRun, str]]:
    """Yield all pairs of runs that see each other, cut so that positions are equal or disjoint, or ``in_rows``."""
    edges = sorted({edge for run in (*queries, *keys) for edge in (run.positions.start, run.positions.stop)})
    if in_rows or (window and edges[-1] - min(run.positions.start for run in keys) > window):
        for query, key in product(queries, keys):
            for first in query.positions[::_ROWS]:
                rows = query.part(first, first + _ROWS)
                near = key.part(first - (window or sys.maxsize) + 1, rows.positions.stop)
                if near.positions:
                    yield rows, near, "masked"
        return
    parts = [
        [part for run in side_runs for ends in pairwise(edges) if (part := run.part(*ends)).positions]
        for side_runs in (queries, keys)
    ]
    for query, key in product(*parts):
        if key.positions.start <= query.positions.start:
            yield query, key, "causal" if key.positions == query.positions else "all"


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with contiguous rows: the fused kernel reads others wrongly, without an error (torch 2.13)."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# Attention over documents, or around a ring, turns its tensors for every batch: einops would take 3 microseconds more
# for each, 8 % of the attention of 2 x 64 tokens and 4 heads of 8. measured: a core of an Intel Xeon, 2026-11-25.


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """Turn [batch, seq, kv_heads, q_group, ...] into [batch, head, seq, ...]."""
    return _rows(tensor).flatten(2, 3).transpose(1, 2)


def _heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Heads:
    return _by_head(query), _rows(key).transpose(1, 2), _rows(value).transpose(1, 2)


def _cut(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor without zeros behind the numbers of a head, with which nothing of their memory stays."""
    width = like.shape[-1]
    return tensor if tensor.shape[-1] == width else tensor[..., :width].contiguous()


def _by_position(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Turn [batch, head, seq, ...] into [batch, seq, kv_heads, q_group, ...], as a query has them."""
    return tensor.transpose(1, 2).reshape(*like.shape[:4], *tensor.shape[3:])


@dataclass(frozen=True, slots=True)
class _Attention:
    """How an operation attends: with the device's own kernel, or a few rows of scores at a time; within a window.

    If probabilities are ``dropped``, it is told by which ``drawn`` numbers: keys of sequences, heads, and their groups.
    Devices' kernels take heads of one ``width``: zeros behind narrower keys or values change nothing.
    """

    fused: FusedAttention | None
    window: int | None
    dropped: float
    scale: float
    width: int
    cap: float | None

    @classmethod
    def of(cls, call: Call, context: KernelContext, kind: Attend | AttendGradient) -> "_Attention":
        assert not kind.sees_all, "what sees all tokens is a module's own code, which runs in the place of these lines"
        formats, width = context.formats, max(call.sizes["head_dim"], call.sizes[kind.value_width])
        dtype, length = formats.of(call.inputs[0].dtype), min(call.sizes["seq"], call.sizes["kv_seq"])
        if len(call.inputs) > _NUM_INPUTS[type(kind)]:
            length = 0
        kernel = None if kind.dropped or kind.cap else fused(formats.device, dtype, width, length)
        return cls(kernel, kind.window, kind.dropped, scale_of(kind, call), width, kind.cap)

    def padded(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return tensors by head with zeros behind the numbers of each head, where a device's kernel asks for them."""
        missing = (self.width - tensor.shape[-1] if self.fused else 0 for tensor in tensors)
        return tuple(
            functional.pad(tensor, (0, count)) if count else tensor
            for tensor, count in zip(tensors, missing, strict=True)
        )

    def pairs(self, heads: Heads, where: Sequence[torch.Tensor], *starts: torch.Tensor) -> list[VisiblePair]:
        """Return the visible pairs; ``starts`` are those of the queries' documents, if these do not see each other."""
        if not heads[0].numel() or not heads[1].numel():
            return []
        (begins,) = starts or (where[0].new_empty((len(heads[0]), 0)),)
        return list(visible_pairs(where[0], where[1], begins, self.window, in_rows=self.fused is None))

    def forward(self, heads: Heads, seen: VisiblePair, drawn: Sequence[torch.Tensor]) -> Part:
        """Return the attention of a pair's queries to its keys."""
        query, key, value = _of_pair(heads, seen)
        if self.fused and seen.sees != "masked":
            return self.fused.forward((query, key, value), seen.sees == "causal", self.scale)
        scores = self._scores(query, key, seen)
        lse = scores.logsumexp(-1)
        probability = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
        probability = self._dropout(seen, drawn)(probability)
        mixed = probability @ rearrange(wide(value), _SHARED)
        return rearrange(mixed, _OUT_OF_GROUPS).to(value.dtype), rearrange(lse, _OUT_OF_GROUPS)

    def backward(
        self, heads: Heads, seen: VisiblePair, by_head: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor]
    ) -> Heads:
        """Return the gradients of a pair's queries, keys and values."""
        query, key, value = _of_pair(heads, seen)
        upstream, result, lse = (tensor[slice(*seen.rows), :, seen.queries.slice] for tensor in by_head)
        if self.fused and seen.sees != "masked":
            tensors = upstream, query, key, value, result, lse
            return self.fused.backward(tensors, seen.sees == "causal", self.scale)
        up, out, rows, denominators = (
            rearrange(tensor, _IN_GROUPS, kv_heads=key.shape[1])
            for tensor in (wide(upstream), wide(result), wide(query), lse)
        )
        scores = self._scores(query, key, seen)
        probability = (scores - denominators.unsqueeze(-1)).exp()
        drop = self._dropout(seen, drawn)
        d_value = einsum(drop(probability), up, _OVER_QUERIES)
        d_probability = drop(up @ rearrange(wide(value), _SHARED_COLUMNS))
        d_scores = probability * (d_probability - (up * out).sum(-1, keepdim=True)) * self.scale
        if self.cap:
            d_scores *= 1 - (scores.clamp_(min=-self.cap) / self.cap).square_()  # of what is masked it is 0
        d_query = rearrange(d_scores @ rearrange(wide(key), _SHARED), _OUT_OF_GROUPS)
        d_key = einsum(d_scores, rows, _OVER_QUERIES)
        return d_query.to(query.dtype), d_key.to(query.dtype), d_value.to(query.dtype)

    def _dropout(self, seen: VisiblePair, drawn: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that drops some numbers of [batch, kv_head, group, query, key] and enlarges the rest."""
        if not self.dropped:
            return lambda pairs: pairs
        keys, heads, groups = drawn
        numbers = (heads[:, None] * MOST_GROUPED + groups).to(keys.device)[:, :, None, None]
        queries = seen.queries.positions
        rows = torch.arange(queries.start, queries.stop, device=keys.device).unsqueeze(-1)
        here = keys[slice(*seen.rows)][:, None, None, None, None]
        stays = keeps(self.dropped, here, seen.keys.positions, (rows, numbers), stream=0)
        return lambda pairs: torch.where(stays, pairs * (1 / (1 - self.dropped)), 0.0)

    def _scores(self, query: torch.Tensor, key: torch.Tensor, seen: VisiblePair) -> torch.Tensor:
        """Return scores by KV head and query of its group: [batch, kv_head, group, query, key]."""
        grouped = rearrange(wide(query), _IN_GROUPS, kv_heads=key.shape[1])
        scores = grouped @ rearrange(wide(key), _SHARED_COLUMNS) * (self.scale / (self.cap or 1))
        scores = scores.tanh_().mul_(self.cap) if self.cap else scores
        rows, columns = (
            torch.arange(run.positions.start, run.positions.stop, device=query.device)
            for run in (seen.queries, seen.keys)
        )
        distance = rows[:, None] - columns
        return scores.masked_fill((distance < 0) | (distance >= (self.window or math.inf)), -torch.inf)


def _of_pair(heads: Heads, seen: VisiblePair) -> Heads:
    query, key, value = heads
    rows, keys = slice(*seen.rows), seen.keys.slice
    return query[rows, :, seen.queries.slice], key[rows, :, keys], value[rows, :, keys]


def _attend(kind: Attend, call: Call, context: KernelContext) -> Kernel:
    attention = _Attention.of(call, context, kind)
    formats = [context.formats.of(output.dtype) for output in call.outputs]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, *more = tensors
        where, drawn = where_and_draws(more, kind.dropped)
        heads = cast(Heads, attention.padded(*_heads(query, key, value)))
        parts: dict[tuple[tuple[int, int], PositionRun], Part] = {}
        for seen in attention.pairs(heads, where[:2], *where[2:]):
            place = seen.rows, seen.queries
            parts[place] = join_parts(parts.get(place), attention.forward(heads, seen, drawn))
        whole = (0, len(query)), query.shape[1]
        if [(rows, len(queries.positions)) for rows, queries in parts] == [whole]:
            mixed, lse = next(iter(parts.values()))
        else:
            mixed = heads[0].new_zeros((*heads[0].shape[:3], heads[2].shape[3]))
            lse = torch.full(mixed.shape[:3], -torch.inf, dtype=formats[1], device=mixed.device)
            for (rows, queries), (part, weight) in parts.items():
                there = slice(*rows), slice(None), queries.slice
                mixed[there], lse[there] = part, weight
        return _by_position(_cut(mixed, value), query).to(formats[0]), _by_position(lse, query).to(formats[1])

    return run


def _attend_gradient(kind: AttendGradient, call: Call, context: KernelContext) -> Kernel:
    attention = _Attention.of(call, context, kind)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        upstream, query, key, value, positions, key_positions, result, lse, *more = tensors
        starts, drawn = where_and_draws(more, kind.dropped)
        heads = cast(Heads, attention.padded(*_heads(query, key, value)))
        of_results = attention.padded(_by_head(upstream), _by_head(result))
        by_head = (*of_results, lse.flatten(2, 3).transpose(1, 2))
        pairs = attention.pairs(heads, (positions, key_positions), *starts)
        whole = (0, len(query)), query.shape[1], key.shape[1]
        if [(seen.rows, len(seen.queries.positions), len(seen.keys.positions)) for seen in pairs] == [whole]:
            gradients = attention.backward(heads, pairs[0], by_head, drawn)
        else:
            gradients = torch.zeros_like(heads[0]), torch.zeros_like(heads[1]), torch.zeros_like(heads[2])
            for seen in pairs:
                parts = attention.backward(heads, seen, by_head, drawn)
                for total, tokens, part in zip(gradients, (seen.queries, seen.keys, seen.keys), parts, strict=True):
                    total[slice(*seen.rows), :, tokens.slice] += part
        d_query, d_key, d_value = (
            _cut(gradient, tensor) for gradient, tensor in zip(gradients, (query, key, value), strict=True)
        )
        return _by_position(d_query, query), d_key.transpose(1, 2), d_value.transpose(1, 2)

    return run


def join_parts(first: Part | None, second: Part) -> Part:
    """Join two parts of an attention, each normalised on its own; a part without keys has weight 0."""
    if first is None:
        return second
    (mixed, lse), (part, weight) = first, second
    total = torch.logaddexp(lse, weight)
    reference = total.nan_to_num(neginf=0.0)
    shares = (lse - reference).exp().unsqueeze(-1), (weight - reference).exp().unsqueeze(-1)
    return (mixed * shares[0] + part * shares[1]).to(mixed.dtype), total


register_kernels({Attend: _attend, AttendGradient: _attend_gradient})
