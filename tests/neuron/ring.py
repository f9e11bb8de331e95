"""A stand-in for NxD's ring attention, which is a kernel for NeuronCores: exact attention over keys of all ranks.

It takes what ``nki_ring_attn_func`` takes, and tells its place from the number of its rank and the pairs of the ring.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.neuron.gloo_xla import all_gather, group_of, reduce_scatter

Pairs = Sequence[Sequence[int]]


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, rank_id: int, src_tgt_pairs: Pairs, *, mixed_precision: bool = True
) -> Tensor:
    """Mix the values that each query may see: [batch, head, seq, head_dim], of this rank's part of the sequence."""
    assert query.shape == key.shape == value.shape, "the kernel takes as many keys as queries"
    assert mixed_precision == (query.dtype != torch.float32), "FP32 is not multiplied in BF16"
    assert rank_id == dist.get_rank(), "the kernel wants the number among all ranks"
    ring = sorted(source for source, _ in src_tgt_pairs)
    assert ring == sorted(target for _, target in src_tgt_pairs) and rank_id in ring, "who sends must also receive"
    return _Ring.apply(query, key, value, ring)  # pyright: ignore[reportReturnType]


class _Ring(torch.autograd.Function):
    """Keys and values of all ranks, gathered; their gradients, added up over the ranks whose queries met them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: list[int]) -> Tensor:
        ctx.ring = ring
        ctx.save_for_backward(query, key, value)
        return _mixed(query, _gathered(key, ring), _gathered(value, ring), _first(query, ring))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        ring, (query, key, value) = ctx.ring, ctx.saved_tensors
        leaves = [query.detach(), _gathered(key, ring), _gathered(value, ring)]
        with torch.enable_grad():
            ours = [leaf.requires_grad_() for leaf in leaves]
            mixed = _mixed(ours[0], ours[1], ours[2], _first(query, ring))
        to_query, *to_others = torch.autograd.grad(mixed, ours, upstream)
        share: dict[str, Any] = {"groups": ring, "scatter_dim": 2, "shard_count": len(ring)}
        return to_query, *(reduce_scatter("sum", one, 1.0, **share) for one in to_others), None


def _mixed(query: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
    """Causal attention of queries that begin at a place of the sequence, in double."""
    scores = query.double() @ keys.double().transpose(-1, -2) / query.shape[-1] ** 0.5
    places = torch.arange(query.shape[2])[:, None] + first
    hidden = places < torch.arange(keys.shape[2])[None, :]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return (weights @ values.double()).to(query.dtype)


def _gathered(one: Tensor, ring: list[int]) -> Tensor:
    return all_gather(one, dim=2, groups=ring)


def _first(query: Tensor, ring: list[int]) -> int:
    return dist.get_rank(group_of(ring)) * query.shape[2]
