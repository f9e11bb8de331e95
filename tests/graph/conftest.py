"""Small models with every option, every kernel table, and graphs of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autoshard.graph.decoder import decoder_graph
from autoshard.graph.op import Array
from autoshard.spec.kernels import Kernels, kernels_names, load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload
from tests.kit import TINY, tiny


@pytest.fixture(params=TINY)
def model(request: pytest.FixtureRequest) -> ModelSpec:
    """A small model; all of them together have every option."""
    return tiny(request.param)


@pytest.fixture
def llama() -> ModelSpec:
    """A small Llama."""
    return tiny()


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
        weight = np.full(shape, 1 / (count * shape[0] * shape[1]))
        fixed = {"positions": where, "key_positions": where, "token_weight": weight}
        tokens = [[rng.integers(0, sizes["vocab"], shape) for _ in range(2)] for _ in range(count)]
        return [{"tokens": first, "labels": second, **fixed} for first, second in tokens]

    return draw
