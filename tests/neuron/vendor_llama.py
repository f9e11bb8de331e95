"""A Llama of NxD's own layers under the vendor's names, and what ranks of the real NxD load into it and save of it."""

import importlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.neuron import standins


def real(module: str, name: str) -> Any:
    """Something of NxD, imported when it is needed."""
    return getattr(importlib.import_module(f"neuronx_distributed.{module}"), name)


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


class Attention(nn.Module):
    """As in examples/training/llama/modeling_llama_nxd.py, without kernels."""

    def __init__(self, sizes: Mapping[str, int], qkv: str, copies: int) -> None:
        super().__init__()
        GQAQKVColumnParallelLinear = real("modules.qkv_linear", "GQAQKVColumnParallelLinear")
        ColumnParallelLinear = real("parallel_layers.layers", "ColumnParallelLinear")
        RowParallelLinear = real("parallel_layers.layers", "RowParallelLinear")

        self.head_dim, self.sizes = sizes["head_dim"], sizes
        query, keys = (sizes[name] * sizes["head_dim"] for name in ("num_heads", "num_kv_heads"))
        common = {"bias": False, "gather_output": False}
        if qkv == "plain":
            self.qkv_proj = ColumnParallelLinear(sizes["hidden"], 3 * query, stride=3, **common)
        else:
            self.qkv_proj = GQAQKVColumnParallelLinear(
                sizes["hidden"], [query, keys], kv_size_multiplier=copies, fuse_qkv=qkv == "fused", **common
            )
        self.o_proj = RowParallelLinear(query, sizes["hidden"], bias=False, input_is_parallel=True)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        made = self.qkv_proj(x)
        parts = made if isinstance(made, tuple) else made.chunk(3, dim=-1)
        query, key, value = (one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in parts)
        query, key = (one * turns[0] + _turned(one) * turns[1] for one in (query, key))
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        ColumnParallelLinear = real("parallel_layers.layers", "ColumnParallelLinear")
        RowParallelLinear = real("parallel_layers.layers", "RowParallelLinear")

        self.gate_up_proj = ColumnParallelLinear(
            sizes["hidden"], 2 * sizes["ffn"], stride=2, bias=False, gather_output=False
        )
        self.down_proj = RowParallelLinear(sizes["ffn"], sizes["hidden"], bias=False, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, sizes: Mapping[str, int], qkv: str, copies: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(sizes["hidden"]), Norm(sizes["hidden"])
        self.self_attn, self.mlp = Attention(sizes, qkv, copies), Mlp(sizes)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns)
        return x + self.mlp(self.post_attention_layernorm(x))


def stage_of(sizes: Mapping[str, int], qkv: str, copies: int, pp: tuple[int, int]) -> Any:
    """The modules of one of ``pp[1]`` stages, named as in the whole model."""
    ColumnParallelLinear = real("parallel_layers.layers", "ColumnParallelLinear")
    ParallelEmbedding = real("parallel_layers.layers", "ParallelEmbedding")

    count = sizes["num_layers"] // pp[1]
    layers = {str(number): Layer(sizes, qkv, copies) for number in range(pp[0] * count, (pp[0] + 1) * count)}
    inside: dict[str, nn.Module] = {"layers": nn.ModuleDict(layers)}
    whole: dict[str, nn.Module] = {"model": nn.ModuleDict(inside)}
    if pp[0] == 0:
        whole["model"]["embed_tokens"] = ParallelEmbedding(sizes["vocab"], sizes["hidden"])  # pyright: ignore
    if pp[0] == pp[1] - 1:
        whole["model"]["norm"] = Norm(sizes["hidden"])  # pyright: ignore
        whole["lm_head"] = ColumnParallelLinear(sizes["hidden"], sizes["vocab"], bias=False, gather_output=True)
    return nn.ModuleDict(whole)


def run_vendor(folder: Path, sizes: Mapping[str, int], how: Mapping[str, Any]) -> Tensor | None:
    """What every rank runs: load what we wrote, give logits where one stage has the whole model, save it again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ[standins.PLATFORM] = how["platform"]
        os.environ["LOCAL_WORLD_SIZE"] = str(how["tp"])
        torch_xla: Any = importlib.import_module("torch_xla")
        parallel_state = importlib.import_module("neuronx_distributed.parallel_layers.parallel_state")
        load_checkpoint = real("trainer.checkpoint", "load_checkpoint")
        save_checkpoint = real("trainer.checkpoint", "save_checkpoint")

        torch_xla._XLAC = type("Xlac", (), {"_xla_sync_multi": staticmethod(lambda *_, **__: None)})
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=how["tp"], pipeline_model_parallel_size=how["pp"]
        )
        pp = parallel_state.get_pipeline_model_parallel_rank(), how["pp"]
        module = stage_of(sizes, how["qkv"], how["copies"], pp)
        load_checkpoint(str(folder), tag="ours", model=module, strict=True)
        found = _logits(module, sizes, how["tokens"]) if how["pp"] == 1 else None
        for tag, xser in (("plain", False), ("xser", True)):
            save_checkpoint(str(folder / tag), tag="theirs", model=module, use_xser=xser)
        return found


def _logits(module: Any, sizes: Mapping[str, int], tokens: Tensor) -> Tensor:
    half = sizes["head_dim"] // 2
    angles = torch.arange(tokens.shape[1])[:, None] * 10000.0 ** -(torch.arange(half) / half)
    turns = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    with torch.no_grad():
        x = module["model"]["embed_tokens"](tokens)
        for layer in module["model"]["layers"].values():
            x = layer(x, turns)
        return module["lm_head"](module["model"]["norm"](x))


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
