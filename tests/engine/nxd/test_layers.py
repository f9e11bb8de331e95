"""Layers around NxD's kernels, with functions in the place of the kernels: no NxD is needed for that."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autoshard.engine.nxd.blocks import attend
from autoshard.engine.nxd.layers import flash_attend, ring_attend


def mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of [batch, head, seq, head_dim], as many keys as queries."""
    assert query.shape == key.shape == value.shape
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def flash(query: Tensor, key: Tensor, value: Tensor, lnc: int, **options: bool) -> Tensor:
    assert lnc == 2 and options == {"mixed_precision": True, "transpose_nki_inputs": False}
    return mixed(query, key, value)


def ring(query: Tensor, key: Tensor, value: Tensor, rank_id: int, pairs: Any, *, mixed_precision: bool) -> Tensor:
    assert rank_id == 5 and pairs == [[5, 5]] and mixed_precision
    return mixed(query, key, value)


@pytest.mark.parametrize("layer", [partial(flash_attend, flash, 2), partial(ring_attend, ring, 5, [[5, 5]])])
def test_a_kernel_gets_every_head_and_gives_them_back_in_our_order(layer: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 6, 3, 4, 8, dtype=torch.double, requires_grad=True)  # 3 KV heads, 4 queries for each
    key, value = (torch.randn(2, 6, 3, 8, dtype=torch.double, requires_grad=True) for _ in range(2))
    upstream = torch.randn_like(query)
    found, expected = layer(query, key, value), attend(query, key, value)
    torch.testing.assert_close(found, expected)
    inputs = (query, key, value)
    gradients = (torch.autograd.grad(made, inputs, upstream) for made in (found, expected))
    torch.testing.assert_close(*gradients)
