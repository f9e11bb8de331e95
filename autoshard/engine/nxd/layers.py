"""Modules that take the place of operations of the graph: layers of NxD, behind the graph's order of dims.

Between its layers NxD keeps [seq, batch, hidden] where the sequence is cut over tp, else [batch, seq, hidden]. Inside
attention, MLP and loss the graph's order holds: batch, seq, then the dims of the operation.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.engine.nxd.blocks import at_least_fp32


class ColumnProducts(nn.Module):
    """Products of one input, cut along what they make: one layer for all of them.

    ``made`` are the shapes of what each weight makes, without batch and seq.
    """

    def __init__(self, layer: nn.Module, made: Sequence[tuple[int, ...]], *, sequence_first: bool) -> None:
        super().__init__()
        self.layer = layer
        self._made, self._sequence_first = made, sequence_first

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Multiply; return one tensor for each weight."""
        product = self.layer(x)
        products: Sequence[Tensor] = product if isinstance(product, tuple) else (product,)
        for one in products:
            if one.requires_grad:
                one.register_hook(torch.Tensor.contiguous)  # NxD's products ask that of gradients on a CPU
        parts = products if isinstance(product, tuple) else product.chunk(len(self._made), dim=-1)
        ordered = [part.transpose(0, 1) if self._sequence_first else part for part in parts]
        shaped = tuple(part.unflatten(-1, shape) for part, shape in zip(ordered, self._made, strict=True))
        first, *others = shaped
        return shaped if others else first


class RowProduct(nn.Module):
    """A product cut along what it sums over, whose sums the layer completes."""

    def __init__(self, layer: nn.Module, num_read: int, *, sequence_first: bool) -> None:
        super().__init__()
        self.layer = layer
        self._num_read, self._sequence_first = num_read, sequence_first

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        flat = x.flatten(-self._num_read) if self._num_read > 1 else x
        return self.layer(flat.transpose(0, 1).contiguous() if self._sequence_first else flat)


class ExpertsLayer(nn.Module):
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


class Recomputed(nn.Module):
    """Marks a module whose result is computed again for backward: NxD wraps every module of this class."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        """Compute."""
        return self.module(*inputs)


def flash_attend(kernel: Any, lnc: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend in NxD's kernel, which takes as many keys as queries: [batch, seq, kv_heads, q_group, head_dim].

    Over the cores of a logical one it shares whole heads, ``heads // lnc`` for each, and what is left over is never
    computed. Without sharing (``lnc`` 1) its grid has all heads.
    """
    cores = 1 if query.shape[2] * query.shape[3] % lnc else lnc
    heads = _by_heads(query, key, value)
    mixed = kernel(*heads, cores, mixed_precision=_in_bf16(query), transpose_nki_inputs=False)
    return mixed.transpose(1, 2).unflatten(2, query.shape[2:4])


def ring_attend(
    kernel: Any, rank: int, ring: Sequence[Sequence[int]], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attend with a part of every sequence in NxD's kernel, which passes keys and values around a ring of ranks.

    It takes as many keys as queries, and finds from the number of this rank which part is its own.
    """
    mixed = kernel(*_by_heads(query, key, value), rank, ring, mixed_precision=_in_bf16(query))
    return mixed.transpose(1, 2).unflatten(2, query.shape[2:4])


def _by_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return them as kernels take them, a key and a value for every query head: [batch, head, seq, head_dim]."""
    keys, values = (x.repeat_interleave(query.shape[3], dim=2).transpose(1, 2) for x in (key, value))
    return query.flatten(2, 3).transpose(1, 2), keys, values


def _in_bf16(query: Tensor) -> bool:
    """Say whether kernels may multiply in BF16, which they do by default, FP32 included."""
    return query.dtype != torch.float32
