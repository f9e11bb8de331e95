"""Stand-ins for NxD's kernels for NeuronCores: ring attention, and experts that drop no token."""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests.neuron.gloo_xla import all_gather, group_of, reduce_scatter


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rank_id: int,
    src_tgt_pairs: Sequence[Sequence[int]],
    *,
    mixed_precision: bool = True,
) -> Tensor:
    """Mix the values that each query may see: [batch, head, seq, head_dim], of this rank's part of the sequence.

    Its place it tells from the number of its rank and the pairs of the ring.
    """
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


# Tokens lie behind each other, the last one zero: places that no token takes read it. Each block belongs to one expert.


def put_in_place() -> None:
    """Let NxD call the kernels of experts in this process, and believe that they can run."""
    for module, functions in REPLACED.items():
        for name, function in functions.items():
            setattr(import_module(f"neuronx_distributed.modules.moe.{module}"), name, function)


def forward(**given: Any) -> None:
    """Add every block's results to its tokens, and keep what the products made."""
    tokens, output = given["hidden_states"], given["output"]
    shares = given["expert_affinities_masked"].view(len(tokens), -1)
    for block, expert, rows in _blocks(given["block_to_expert"], given["token_position_to_id"]):
        gate, up = torch.einsum("th,hsi->sit", tokens[rows], given["gate_up_proj_weight"][expert])
        made = (functional.silu(gate) * up).T @ given["down_proj_weight"][expert]
        given["gate_up_activations_T"][block], given["down_activations"][block] = torch.stack((gate, up)), made
        output.index_add_(0, rows, made * shares[rows, expert, None])


def backward(*given: Tensor, block_size: int, is_tensor_update_accumulating: bool) -> None:
    """Add every block's gradients to those of tokens, shares and weights."""
    tokens, d_tokens, shares, d_shares, weight, d_weight, kept, down, d_down, made, places, experts, upstream = given
    assert is_tensor_update_accumulating and len(places) == len(experts) * block_size
    shares, d_shares = shares.view(len(tokens), -1), d_shares.view(len(tokens), -1)
    for block, expert, rows in _blocks(experts, places):
        d_made = upstream[rows] * shares[rows, expert, None]
        d_shares[:, expert].index_add_(0, rows, (upstream[rows] * made[block]).sum(-1))
        with torch.enable_grad():
            halves = kept[block].detach().requires_grad_()
            inner = functional.silu(halves[0]) * halves[1]
        (d_halves,) = torch.autograd.grad(inner, halves, (d_made @ down[expert].T).T)
        d_down[expert] += inner.detach() @ d_made
        d_weight[expert] += torch.einsum("th,sit->hsi", tokens[rows], d_halves)
        d_tokens.index_add_(0, rows, torch.einsum("sit,hsi->th", d_halves, weight[expert]))


def _blocks(experts: Tensor, places: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield each block with its expert and the rows that it holds."""
    for block, (expert, rows) in enumerate(zip(experts.tolist(), places.long().chunk(len(experts)), strict=True)):
        yield block, expert, rows


# What these stand in the place of, in NxD; docs/developers/trainium.md names each.
REPLACED: Mapping[str, Mapping[str, Any]] = {
    "blockwise": {"_blockwise_mm_training_nki_call": forward, "_blockwise_mm_nki_bwd_call": backward},
    "expert_mlps_v2": {"can_use_blockwise_matmul_nki": lambda **_: True},
}
