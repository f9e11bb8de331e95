"""Stand-ins for NxD's kernels for experts that drop no token: one block of tokens after another, on a CPU.

Tokens lie behind each other, the last one zero: places that no token takes read it. Each block belongs to one expert.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_MOE = "neuronx_distributed.modules.moe."


def put_in_place() -> None:
    """Let NxD call these kernels in this process, and believe that they can run."""
    blockwise: Any = import_module(_MOE + "blockwise")
    experts: Any = import_module(_MOE + "expert_mlps_v2")
    blockwise._blockwise_mm_training_nki_call = forward
    blockwise._blockwise_mm_nki_bwd_call = backward
    experts.can_use_blockwise_matmul_nki = lambda **_: True


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
