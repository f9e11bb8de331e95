"""Small models with every option, every kernel table, and graphs of them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from autoshard.graph.decoder import decoder_graph
from autoshard.graph.op import Array
from autoshard.spec.kernels import Kernels, kernels_names, load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload

LLAMA: Mapping[str, Any] = {
    "name": "tiny",
    "source": "made for this test",
    "num_layers": 2,
    "hidden": 16,
    "ffn": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "vocab": 32,
    "max_positions": 64,
    "norm": "rms",
    "norm_eps": 1e-5,
    "activation": "silu",
    "gated_mlp": True,
    "positions": "rotary",
}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
PLAIN_MLP = {"norm": "layer", "gated_mlp": False, "activation": "gelu"}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mixtral": {"num_experts": 4, "experts_per_token": 2},
    "gpt": {**BIASES, **PLAIN_MLP, "positions": "learned", "tied_embeddings": True, "num_kv_heads": 4},
    "neox": {**BIASES, **PLAIN_MLP, "parallel_residual": True, "rotary_fraction": 0.5, "num_kv_heads": 1},
    "qwen": {"qk_norm": True, "qkv_bias": True, "window": 3},
}


@pytest.fixture(params=OPTIONS)
def model(request: pytest.FixtureRequest) -> ModelSpec:
    """A small model; all of them together have every option."""
    return ModelSpec(**{**LLAMA, **OPTIONS[request.param]})


@pytest.fixture
def llama() -> ModelSpec:
    """A small Llama."""
    return ModelSpec(**LLAMA)


@pytest.fixture(params=kernels_names())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each table that comes with autoshard."""
    return load_kernels(request.param)


@pytest.fixture(scope="session")
def graph_of() -> Callable[..., Any]:
    """``graph_of(model, "te", seq_len=8, micro_batch=2, precision="bf16")``."""

    def build(model: ModelSpec, table: str, seq_len: int = 8, micro_batch: int = 2, precision: str = "bf16") -> Any:
        workload = Workload(seq_len=seq_len, global_batch=4, precision=Precision.named(precision))
        return decoder_graph(model, workload, load_kernels(table), micro_batch=micro_batch)

    return build


@pytest.fixture(scope="session")
def micro_batches() -> Callable[..., Any]:
    """``micro_batches(graph, rng, 2)``: random tokens and labels, weighted so that the loss is a mean."""

    def draw(graph: Any, rng: np.random.Generator, count: int = 2) -> list[dict[str, Array]]:
        sizes = graph.sizes
        shape, where = (sizes["batch"], sizes["seq"]), np.arange(sizes["seq"])
        return [
            {
                "tokens": rng.integers(0, sizes["vocab"], shape),
                "labels": rng.integers(0, sizes["vocab"], shape),
                "positions": where,
                "key_positions": where,
                "token_weight": np.full(shape, 1 / (count * shape[0] * shape[1])),
            }
            for _ in range(count)
        ]

    return draw
