"""What torch says of rotary positions, attention, and numbers that are dropped."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
philox: Any = pytest.importorskip("autoshard.engine.torch.kernels.philox").philox
F: Any = torch.nn.functional

Sizes = Mapping[str, int]
Reference = Callable[..., Any]  # torch tensors and the sizes of the dims in, a tensor or a tuple of them out


def reference_rotary(fraction: float, theta: float, over: str = "head_dim") -> Reference:
    """Turn complex numbers: the first half of the rotated part is real, the second imaginary."""

    def rotate(x: Any, positions: Any, *rest: Any) -> Any:
        *starts, sizes = rest
        rotated = int(sizes[over] * fraction)
        half = rotated // 2
        speeds = [theta ** (-2 * pair / rotated) for pair in range(half)]
        where = torch.stack([positions - row for row in starts[0]] if starts else [positions])
        angles = where.double()[..., None] * torch.tensor(speeds, dtype=torch.float64)
        angles = angles.reshape(len(where), sizes["seq"], *[1] * (x.ndim - 3), half)
        turned = torch.complex(x[..., :half], x[..., half:rotated]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag, x[..., rotated:]], dim=-1)

    return rotate


def reference_attention(window: int | None, *, sees_all: bool = False) -> Reference:
    """Torch's own attention, with keys and values copied for every query head."""

    def attend(q: Any, k: Any, v: Any, at: Any, key_at: Any, *rest: Any) -> tuple[Any, Any]:
        *starts, sizes = rest
        distance = at[:, None] - key_at[None, :]
        distance = distance.abs() if sees_all else distance
        seen = (distance >= 0) & (distance < (window or 10**9))
        if starts:
            rows = [torch.stack([key_at >= start for start in row]) for row in starts[0]]
            seen = torch.stack([seen & row for row in rows])[:, None]
        queries = q.permute(0, 2, 3, 1, 4).flatten(1, 2)
        keys, values = (x.permute(0, 2, 1, 3).repeat_interleave(sizes["q_group"], dim=1) for x in (k, v))
        heads = (sizes["kv_heads"], sizes["q_group"])
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen).unflatten(1, heads)
        scores = (queries @ keys.transpose(-1, -2) / math.sqrt(sizes["head_dim"])).masked_fill(~seen, -math.inf)
        sums = torch.logsumexp(scores, dim=-1).unflatten(1, heads)
        return mixed.permute(0, 3, 1, 2, 4), sums.permute(0, 3, 1, 2)

    return attend


def reference_scaled(scale: float) -> Reference:
    """Attention whose queries are scaled beforehand instead."""
    plain = reference_attention(None)
    return lambda query, *rest: plain(query * (scale * math.sqrt(rest[-1]["head_dim"])), *rest)


def reference_capped(cap: float) -> Reference:
    """Attention in steps, with scores between a number and its negative."""

    def attend(q: Any, k: Any, v: Any, at: Any, key_at: Any, sizes: Sizes) -> tuple[Any, Any]:
        scores = cap * torch.tanh(torch.einsum("bskgd,btkd->bskgt", q, k) / math.sqrt(sizes["head_dim"]) / cap)
        scores = scores.masked_fill((at[:, None] < key_at)[None, :, None, None], -math.inf)
        return torch.einsum("bskgt,btkd->bskgd", scores.softmax(-1), v), scores.logsumexp(-1)

    return attend


def reference_sinks(plain: Reference) -> Reference:
    """Let a sink join the sum of each query: what is mixed shrinks by the share of the keys."""

    def attend(*tensors: Any) -> tuple[Any, Any]:
        *rest, sink, sizes = tensors
        mixed, sums = plain(*rest, sizes)
        total = torch.logaddexp(sums, sink)
        return mixed * (sums - total).exp()[..., None], total

    return attend


def reference_words(keys: Any, columns: Any, rows: Any, heads: Any, stream: int) -> Any:
    """Draw one word for each place by the engine's own generator, as if no counter were shared."""
    words = philox((columns // 4, rows, heads, stream), (keys & (2**32 - 1), keys >> 32))
    return sum(torch.where(columns % 4 == place, word, 0) for place, word in enumerate(words))


def reference_drop(dropped: float, stream: int) -> Reference:
    """Zero what draws a word below the share that is dropped."""

    def drop(x: Any, keys: Any, at: Any, columns: Any, _: Sizes) -> Any:
        words = reference_words(keys[:, None, None], columns, at[:, None], 0, stream)
        return x * (words >= round(dropped * 2**32)) / (1 - dropped)

    return drop


def reference_dropping(dropped: float) -> Reference:
    """Attention in steps, with probabilities that are dropped."""

    def attend(q: Any, k: Any, v: Any, at: Any, key_at: Any, *rest: Any) -> tuple[Any, Any]:
        *starts, keys, heads, groups, sizes = rest
        _, sums = reference_attention(None)(q, k, v, at, key_at, *starts, sizes)
        scores = torch.einsum("bskgd,btkd->bkgst", q, k) / math.sqrt(sizes["head_dim"])
        seen = (at[:, None] >= key_at)[None]
        if starts:
            seen = seen & (key_at >= starts[0][:, :, None])
        probability = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
        numbered = (heads[:, None] * 2**16 + groups)[:, :, None, None]
        words = reference_words(keys[:, None, None, None, None], key_at, at[:, None], numbered, 0)
        kept = probability * (words >= round(dropped * 2**32)) / (1 - dropped)
        return torch.einsum("bkgst,btkd->bskgd", kept, v), sums

    return attend
