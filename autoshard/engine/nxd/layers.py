"""Modules that take the place of operations of the graph: layers of NxD, behind the graph's order of dims.

Between its layers NxD keeps [seq, batch, hidden] where the sequence is cut over tp, else [batch, seq, hidden]. Inside
attention, MLP and loss the graph's order holds: batch, seq, then the dims of the operation.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoshard.engine.nxd.blocks import at_least_fp32

Shapes = Sequence[tuple[int, ...]]  # of what each weight makes, without batch and seq


class Columns(nn.Module):
    """Products of one input, cut along what they make: one layer for all of them."""

    def __init__(self, layer: nn.Module, made: Shapes, *, sequence_first: bool) -> None:
        super().__init__()
        self.layer = layer
        self._made, self._sequence_first = made, sequence_first

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Multiply; return one tensor for each weight."""
        product = self.layer(x)
        if isinstance(product, tuple):
            parts: Sequence[Any] = [WholeRows.apply(part) for part in product]
        else:
            parts = WholeRows.apply(product).chunk(len(self._made), dim=-1)  # pyright: ignore[reportOptionalMemberAccess]
        ordered = [part.transpose(0, 1) if self._sequence_first else part for part in parts]
        shaped = tuple(part.unflatten(-1, shape) for part, shape in zip(ordered, self._made, strict=True))
        first, *others = shaped
        return shaped if others else first


class WholeRows(torch.autograd.Function):
    """The identity; its gradient has no gaps in memory, which NxD's products ask of a CPU's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Hand on."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        """Close the gaps."""
        (gradient,) = upstream
        return gradient.contiguous()


class Rows(nn.Module):
    """A product cut along what it sums over, whose sums the layer completes."""

    def __init__(self, layer: nn.Module, num_read: int, *, sequence_first: bool) -> None:
        super().__init__()
        self.layer = layer
        self._num_read, self._sequence_first = num_read, sequence_first

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        flat = x.flatten(-self._num_read) if self._num_read > 1 else x
        return self.layer(flat.transpose(0, 1).contiguous() if self._sequence_first else flat)


class Mixture(nn.Module):
    """A router, its experts and what they send; takes and gives hidden states as they lie between layers."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes back from the experts; NxD gives a tuple."""
        return self.layer(x)[0]

    def recompute(self) -> None:
        """Mark the products of the experts and what lies between them."""
        experts = self.layer.expert_mlps
        experts.mlp_op = Recomputed(experts.mlp_op)


class TokenLosses(nn.Module):
    """The loss of every token of a cut vocabulary; entries of its padding never win anything."""

    def __init__(self, loss: Any, first: int, vocab: int) -> None:
        super().__init__()
        self._loss, self._first, self._vocab = loss, first, vocab

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return [batch, seq]; NxD works in place, on logits in FP32 without gaps in memory."""
        wide = at_least_fp32(logits).contiguous()
        entries = torch.arange(logits.shape[-1], device=logits.device) + self._first
        if self._first + logits.shape[-1] > self._vocab:
            wide = wide.masked_fill(entries >= self._vocab, torch.finfo(wide.dtype).min / 2)
        elif wide is logits:
            wide = logits.clone()
        return self._loss(wide, labels)


class FlashAttend(nn.Module):
    """Attention in NxD's kernel, which takes as many keys as queries.

    Over the cores of a logical one it shares whole heads, ``heads // lnc`` for each, and what is left over is never
    computed. Without sharing (``lnc`` 1) its grid has all heads.
    """

    def __init__(self, kernel: Any, lnc: int) -> None:
        super().__init__()
        self._kernel, self._lnc = kernel, lnc

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix the values that each query may see: [batch, seq, kv_heads, q_group, head_dim]."""
        lnc = 1 if query.shape[2] * query.shape[3] % self._lnc else self._lnc
        mixed = self._kernel(
            *_by_heads(query, key, value), lnc, mixed_precision=_in_bf16(query), transpose_nki_inputs=False
        )
        return mixed.transpose(1, 2).unflatten(2, query.shape[2:4])


class RingAttend(nn.Module):
    """Attention of a part of every sequence in NxD's kernel, which passes keys and values around a ring of ranks.

    It takes as many keys as queries, and tells from the number of this rank which part is its own.
    """

    def __init__(self, kernel: Any, rank: int, ring: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._kernel, self._rank, self._ring = kernel, rank, ring

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix the values that each query may see: [batch, seq, kv_heads, q_group, head_dim]."""
        mixed = self._kernel(*_by_heads(query, key, value), self._rank, self._ring, mixed_precision=_in_bf16(query))
        return mixed.transpose(1, 2).unflatten(2, query.shape[2:4])


def _by_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return them as kernels take them, a key and a value for every query head: [batch, head, seq, head_dim]."""
    keys, values = (x.repeat_interleave(query.shape[3], dim=2).transpose(1, 2) for x in (key, value))
    return query.flatten(2, 3).transpose(1, 2), keys, values


def _in_bf16(query: Tensor) -> bool:
    """Say whether kernels may multiply in BF16, which they do by default, FP32 included."""
    return query.dtype != torch.float32


class CoreAttend(nn.Module):
    """Causal attention in single operations; what is hidden is told from positions, not from a stored mask."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix the values that each query may see: [batch, seq, kv_heads, q_group, head_dim]."""
        queries, keys = query.permute(0, 2, 3, 1, 4), key.permute(0, 2, 1, 3).unsqueeze(2)
        scores = queries @ keys.transpose(-1, -2) / query.shape[-1] ** 0.5
        along = torch.arange(query.shape[1], device=query.device)
        scores = at_least_fp32(scores).masked_fill(along[:, None] < along[None, :], float("-inf"))
        weights = functional.softmax(scores, dim=-1).to(value.dtype)
        return (weights @ value.permute(0, 2, 1, 3).unsqueeze(2)).permute(0, 3, 1, 2, 4)


class Recomputed(nn.Module):
    """Marks a module whose result is computed again for backward: NxD wraps every module of this class."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        """Compute."""
        return self.module(*inputs)
