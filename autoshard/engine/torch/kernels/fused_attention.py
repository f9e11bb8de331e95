"""Kernels of attention that devices bring: which one a device has, and what it is called with.

A faster kernel is tried before it is used: where its numbers differ from those of the usual one, the usual one stays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from autoshard.engine.torch.formats import NOWHERE, slow_halves
from autoshard.run.protocol import HOST

Part = tuple[torch.Tensor, torch.Tensor]  # mixed values [batch, head, query, head_dim], log of the denominators
Heads = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # of queries, keys and values: [batch, head, position, head_dim]

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """A device's kernel: attention of [batch, head, position, head_dim], query heads in groups that share keys."""

    dtypes: tuple[torch.dtype, ...]
    head_dims: range
    forward: Callable[[Sequence[torch.Tensor], bool, float], Part]  # of query, key, value; causal or not; scale
    backward: Callable[[Sequence[torch.Tensor], bool, float], Heads]  # of upstream, query, key, value, result, lse


def _on_gpu_back(tensors: Sequence[torch.Tensor], causal: bool, scale: float) -> Heads:
    *arguments, lse = tensors
    _, query, key, *_ = arguments
    lengths = (None, None, query.shape[2], key.shape[2])  # all sequences are as long
    seeds = [torch.empty(size, dtype=torch.uint64, device=query.device) for size in (2, 0)]  # of a dropout
    rows = lse.contiguous()  # the kernel reads it without its strides
    back = _aten._scaled_dot_product_flash_attention_backward
    return back(*arguments, rows, *lengths, 0.0, causal, *seeds, scale=scale)


def _on_host_back(tensors: Sequence[torch.Tensor], causal: bool, scale: float) -> Heads:
    back = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    upstream, *others = tensors
    if upstream.dtype not in slow_halves(torch.device(HOST)):
        return back(*tensors, 0.0, causal, scale=scale)
    gradients = back(*(tensor.float() for tensor in (upstream, *others)), 0.0, causal, scale=scale)
    query, key, value = (gradient.to(upstream.dtype) for gradient in gradients)
    return query, key, value


_HOST = FusedAttention(
    dtypes=(torch.float32, torch.float64, *_HALF),
    head_dims=range(1, 2**16),
    forward=lambda heads, causal, scale: _aten._scaled_dot_product_flash_attention_for_cpu(
        *heads, 0.0, causal, scale=scale
    ),
    backward=_on_host_back,
)
GPU = FusedAttention(
    dtypes=_HALF,
    head_dims=range(8, 257, 8),
    forward=lambda heads, causal, scale: _aten._scaled_dot_product_flash_attention(*heads, 0.0, causal, scale=scale)[
        :2
    ],
    backward=_on_gpu_back,
)


def _by_cudnn(heads: Sequence[torch.Tensor], causal: bool, scale: float) -> Part:
    mixed, lse, *_ = _aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, causal, scale=scale)
    return mixed, lse.reshape(lse.shape[:3])


def _by_cudnn_back(tensors: Sequence[torch.Tensor], causal: bool, scale: float) -> Heads:
    *arguments, lse = tensors
    _, query, key, *_ = arguments
    seeds = [torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2)]  # of a dropout
    lengths = (None, None, query.shape[2], key.shape[2])  # all sequences are as long
    back = _aten._scaled_dot_product_cudnn_attention_backward
    return back(*arguments, lse.contiguous().unsqueeze(-1), *seeds, None, *lengths, 0.0, causal, scale=scale)


# Since Hopper faster than flash attention, as torch has it: 507 TFLOP/s forward and backward instead of 302, at 8,192
# tokens and heads of 128. measured: benchmarks/gpu/constants.py, H200, torch 2.11, cuDNN 9.19, 2026-11-27. It plans
# each length anew, so that it is not for documents; shorter ones were not tried.
CUDNN = FusedAttention(dtypes=_HALF, head_dims=range(8, 129, 8), forward=_by_cudnn, backward=_by_cudnn_back)
_SHORTEST = 128
KERNELS: Mapping[str, FusedAttention] = {HOST: _HOST, NOWHERE.type: _HOST, "cuda": GPU}


def fused(device: torch.device, dtype: torch.dtype, head_dim: int, length: int = 0) -> FusedAttention | None:
    """Return the kernel for these tensors, if there is one; GPUs have it since Ampere.

    ``length`` is that of all sequences on the rank, 0 where documents have lengths of their own.
    """
    if device.type == "cuda":
        generation = torch.cuda.get_device_capability()
        if generation < (8, 0):
            return None
        suits = dtype in CUDNN.dtypes and head_dim in CUDNN.head_dims and length >= _SHORTEST
        if generation >= (9, 0) and suits and agree(CUDNN, GPU, device, dtype):
            return CUDNN
    kernel = KERNELS.get(device.type)
    return kernel if kernel and dtype in kernel.dtypes and head_dim in kernel.head_dims else None


@cache
def agree(kernel: FusedAttention, usual: FusedAttention, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel computes what the usual one does, with heads that share keys: small tensors are tried."""
    drawn = torch.Generator().manual_seed(0)
    query, key, value, up = (
        torch.randn(1, 128, heads, 64, generator=drawn).to(device, dtype).transpose(1, 2) for heads in (4, 2, 2, 4)
    )
    for causal in (True, False):
        results: list[Sequence[torch.Tensor]] = []
        for tried in (kernel, usual):
            try:
                mixed, lse = tried.forward((query, key, value), causal, 0.125)
                results.append((mixed, lse, *tried.backward((up, query, key, value, mixed, lse), causal, 0.125)))
            except (RuntimeError, NotImplementedError):  # as torch says that it has none
                return False
        for first, second in zip(*results, strict=True):
            if first.shape != second.shape or not torch.allclose(first.float(), second.float(), 0.05, 0.02):
                return False
    return True
