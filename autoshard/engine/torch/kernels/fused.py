"""Attention by the kernel that torch has for a device: it writes no scores. Some devices have none, or not for FP32."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.engine.base import HOST
from autoshard.engine.torch.formats import NOWHERE

Part = tuple[torch.Tensor, torch.Tensor]  # mixed values [batch, head, query, head_dim], log of the denominators
Slopes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of queries, keys and values

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_NO_DROPOUT = 0.0
_LEAST_CAPABILITY = (8, 0)  # of a GPU, for torch's flash attention: Ampere


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """Attention of [batch, head, position, head_dim], query heads in groups that share keys."""

    dtypes: tuple[torch.dtype, ...]
    head_dims: range
    forward: Callable[[Sequence[torch.Tensor], bool], Part]  # of query, key, value; causal or not
    backward: Callable[[Sequence[torch.Tensor], bool], Slopes]  # of upstream, query, key, value, result, lse


def fused(device: torch.device, dtype: torch.dtype, head_dim: int) -> FusedAttention | None:
    """Return the kernel for these tensors, if there is one."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        return None
    found = KERNELS.get(device.type)
    return found if found and dtype in found.dtypes and head_dim in found.head_dims else None


def _on_host(tensors: Sequence[torch.Tensor], causal: bool) -> Part:
    return _aten._scaled_dot_product_flash_attention_for_cpu(*tensors, _NO_DROPOUT, causal)


def _on_host_back(tensors: Sequence[torch.Tensor], causal: bool) -> Slopes:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, _NO_DROPOUT, causal)


def _on_gpu(tensors: Sequence[torch.Tensor], causal: bool) -> Part:
    mixed, lse, *_ = _aten._scaled_dot_product_flash_attention(*tensors, _NO_DROPOUT, causal)
    return mixed, lse


def _on_gpu_back(tensors: Sequence[torch.Tensor], causal: bool) -> Slopes:
    *given, lse = tensors
    _, query, key, *_ = given
    lengths = (None, None, query.shape[2], key.shape[2])  # all sequences are as long
    seeds = [torch.empty(size, dtype=torch.uint64, device=query.device) for size in (2, 0)]  # of a dropout
    rows = lse.contiguous()  # the kernel reads it without its strides
    return _aten._scaled_dot_product_flash_attention_backward(*given, rows, *lengths, _NO_DROPOUT, causal, *seeds)


_HOST = FusedAttention(
    dtypes=(torch.float32, torch.float64, *_HALF), head_dims=range(1, 2**16), forward=_on_host, backward=_on_host_back
)
GPU = FusedAttention(dtypes=_HALF, head_dims=range(8, 257, 8), forward=_on_gpu, backward=_on_gpu_back)
KERNELS: Mapping[str, FusedAttention] = {HOST: _HOST, NOWHERE.type: _HOST, "cuda": GPU}
