"""Complex numbers in modules, as rotary positions have them: pairs of real ones stand for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import InputError
from tests.slower import rest_is_slow


class Rotated(nn.Module):
    """Attention whose queries and keys are turned by a function of complex numbers and a table of rotations."""

    table: torch.Tensor

    def __init__(self, turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        angles = torch.outer(torch.arange(16.0), 0.1 ** torch.arange(0, 1, 0.25)).double()
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))
        self.turn = turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, 4, 8) for part in (self.q, self.k, self.v))
        q, k = (self.turned(value).transpose(1, 2) for value in (q, k))
        seen = nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return self.o(seen.transpose(1, 2).reshape(batch, length, 32))

    def turned(self, value: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(value.reshape(*value.shape[:-1], -1, 2))
        return torch.view_as_real(self.turn(pairs, self.table[: value.shape[1]])).flatten(3)


def in_other_order(pairs: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    turned = pairs.transpose(1, 2) * table
    return turned.permute(0, -2, -3, -1).contiguous().view(*pairs.shape[:2], -1).unflatten(-1, pairs.shape[2:])


TURNS = {
    "as Llama 4 and torchtitan do": lambda pairs, table: pairs * table[:, None],
    "conjugates, sums and scales": lambda pairs, table: (
        (pairs.conj() * table.unsqueeze(-2) - 0.5 * pairs) * 2.0 + pairs
    ),
    "dims in other orders": in_other_order,
    "by real numbers": lambda pairs, table: pairs * table.real[None, :, None] + (-pairs).to(torch.complex128),
    "by a conjugate table, parts of it": lambda pairs, table: torch.cat(
        [(pairs * table.conj()[:, None]).select(dim=-2, index=0).unsqueeze(dim=-2), pairs[:, :, 1:]], dim=-2
    ),
    "heads one by one": lambda pairs, table: torch.stack([pairs[:, :, head] * table for head in range(4)], dim=2),
}


@pytest.mark.parametrize("turn", rest_is_slow(TURNS.values(), 2, len(TURNS)))
def test_modules_with_complex_numbers_are_proven(turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
    module, x = Rotated(turn).double(), torch.randn(4, 16, 32, dtype=torch.float64, requires_grad=True)
    found = autoshard.shard_module(module, [x], "h100-80", "dp=2,tp=4")
    assert max(part.error for part in found.prove(module, [x])) < 1e-12
    assert not found.kept_whole


UNKNOWN = {
    "fft": lambda pairs, table: torch.fft.fft(pairs, dim=1) * table[:, None],
    "add": lambda pairs, table: torch.add(pairs, table[:, None], alpha=2),
    "add of a real number": lambda pairs, table: pairs + 1.0,
    "mul": lambda pairs, table: pairs * 2j,
}


@pytest.mark.parametrize("turn", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_of_complex_numbers_is_refused_by_name(turn: Callable[[torch.Tensor, torch.Tensor], Any]):
    module = Rotated(turn).double()
    with pytest.raises(InputError, match="gives complex numbers, which are not supported"):
        autoshard.shard_module(module, [torch.randn(4, 16, 32, dtype=torch.float64)], "h100-80", "dp=2,tp=4")
