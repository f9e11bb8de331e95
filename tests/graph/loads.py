"""How often experts are chosen, and the balance loss that follows, by torch's own functions."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from autoshard.graph.op import Array

torch: Any = pytest.importorskip("torch")
Sizes = Mapping[str, int]


def load_of_sequences(expert: Any, sizes: Sizes) -> Any:
    """Count the choices of each sequence by expert."""
    return torch.nn.functional.one_hot(expert, sizes["experts"]).sum((1, 2)).double()


def draw_loaded(*, by_sequence: bool) -> Callable[[Sizes, np.random.Generator], list[Array]]:
    """Draw logits, and count how often each expert is chosen by them: a whole number, to which nothing flows back."""

    def draw(sizes: Sizes, rng: np.random.Generator) -> list[Array]:
        logits = rng.normal(size=[sizes[dim] for dim in ("batch", "seq", "experts")])
        load = load_of_sequences(torch.tensor(logits).topk(sizes["choices"]).indices, sizes).long().numpy()
        return [logits, load if by_sequence else load.sum(0)]

    return draw


def reference_balance(logits: Any, load: Any, sizes: Sizes) -> Any:
    """Shares of tokens that chose an expert times mean probabilities of it; by sequence if loads are."""
    load, num_tokens = load.double(), sizes["seq"] * (1 if load.ndim > 1 else sizes["batch"])
    mean = logits.softmax(-1).sum(1 if load.ndim > 1 else (0, 1)) / num_tokens
    return sizes["experts"] * (load / num_tokens * mean).sum()
