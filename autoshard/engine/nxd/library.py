"""What the engine uses of NxD: the only place that imports it, and only when it is asked to.

Type checkers and machines without Trainium do not have it, so everything from there is ``Any``.
"""

import importlib
from typing import Any

from autoshard.errors import require

_MODULES = {
    "ColumnParallelLinear": "parallel_layers.layers",
    "RowParallelLinear": "parallel_layers.layers",
    "ParallelEmbedding": "parallel_layers.layers",
    "GQAQKVColumnParallelLinear": "modules.qkv_linear",
    "parallel_cross_entropy": "parallel_layers.loss_functions",
    "MoE": "modules.moe.model",
    "RouterTopK": "modules.moe.routing",
    "ExpertMLPs": "modules.moe.expert_mlps",
    "nki_flash_attn_func": "kernels.flash_attn",
    "nki_ring_attn_func": "kernels.ring_attention_kernel",
    "cpu_mode": "utils",
    "mark_step": "utils",
}


def named(name: str) -> Any:
    """Return a layer or function of NxD by its name."""
    return getattr(importlib.import_module(f"neuronx_distributed.{_MODULES[name]}"), name)


def ring_kernel() -> Any:
    """Return NxD's ring attention."""
    message = "NxD's ring attention is a kernel for NeuronCores, and there are none here. Use cp=1"
    require((not named("cpu_mode")(), "cp", message))
    return named("nki_ring_attn_func")


def trainer() -> Any:
    """Return NxD itself: its functions for configurations, models and optimizers."""
    return importlib.import_module("neuronx_distributed")


def register_xla() -> None:
    """Make torch's world of Neuron devices known by its name, ``xla``."""
    importlib.import_module("torch_xla.distributed.xla_backend")


def groups() -> Any:
    """Return what knows this rank's place in NxD's groups."""
    return importlib.import_module("neuronx_distributed.parallel_layers.parallel_state")
