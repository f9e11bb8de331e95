"""What the real functions around NxD's attention kernels launch: every head, in the plan's number format."""

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.engine.nxd.model import flash_attend, ring_attend
from autoshard.plan.rules.nxd_engine import ring_length_allows
from tests.neuron import standins

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
SEQ, HEAD_DIM = 2048, 2


class Launched:
    """In the place of a kernel: computes those heads that the launch grid has, and leaves the others as NaN.

    What it computes is no attention: forward is the identity of values, backward that of their gradients.
    """

    def __init__(self, compute: Callable[..., Sequence[Tensor]]) -> None:
        self._compute = compute
        self.named: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., Sequence[Tensor]]:
        def launch(*tensors: Any, **named: Any) -> Sequence[Tensor]:
            self.named.append(named)
            made = self._compute(*tensors)
            for one in made:
                assert one.shape[0] == grid[0], "one instance for each sequence"
                one[:, grid[1] :] = float("nan")
            return made

        return launch


def forward(query: Tensor, _: Tensor, value: Tensor, *__: Any) -> Sequence[Tensor]:
    made = value if value.shape[-1] == HEAD_DIM else value.transpose(-1, -2)
    return made.clone(), query.new_zeros(*query.shape[:2], 128, query.shape[-1] // 128)


def backward(query: Tensor, key: Tensor, _: Tensor, __: Tensor, upstream: Tensor, *___: Any) -> Sequence[Tensor]:
    return torch.zeros_like(query), torch.zeros_like(key), upstream.clone()


def kernels_of(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"neuronx_distributed.kernels.{name}")


def computes_every_head(attend: Callable[..., Tensor], heads: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Run a module forward and backward."""
    query, key, value = (torch.randn(2, SEQ, heads, 1, HEAD_DIM, dtype=dtype) for _ in range(3))
    key, value = key[:, :, :, 0], value[:, :, :, 0].requires_grad_()
    mixed = attend(query.requires_grad_(), key, value)
    upstream = torch.randn_like(mixed)
    (gradient,) = torch.autograd.grad(mixed, value, upstream)
    torch.testing.assert_close(mixed[:, :, :, 0], value.detach())
    torch.testing.assert_close(gradient, upstream[:, :, :, 0])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Sequence[Launched]:
    """The kernels that the real functions of flash and ring attention launch, forward and backward."""
    kernels, ring = (Launched(forward), Launched(backward)), kernels_of("ring_attention_kernel")
    for way, kernel in zip(("fwd", "bwd"), kernels, strict=True):
        flash = {"fwd": "flash_fwd", "bwd": "flash_attn_bwd"}[way]
        monkeypatch.setattr(f"neuronxcc.nki.kernels.{flash}", kernel)
        monkeypatch.setattr(ring, f"_ring_{way}_nki_call", kernel)
    monkeypatch.setattr("neuronxcc.nki.language.nc", lambda cores: cores)
    return kernels


@pytest.mark.parametrize("heads", range(1, 9))
@pytest.mark.parametrize(("platform", "lnc"), [("trn1", 1), ("trn2", 1), ("trn2", 2), ("trn1", 0)])
def test_attention_computes_every_head(
    launched: Any, monkeypatch: pytest.MonkeyPatch, platform: str, lnc: int, heads: int
) -> None:
    """In flash attention with so many cores of a logical one; 0: in ring attention."""
    monkeypatch.setenv(standins.PLATFORM, platform)
    computes_every_head(attend_of(lnc), heads)


def attend_of(lnc: int) -> Callable[..., Tensor]:
    if not lnc:
        return partial(ring_attend, kernels_of("ring_attention_kernel").nki_ring_attn_func, 0, [(0, 0)])
    return partial(flash_attend, kernels_of("flash_attn").nki_flash_attn_func, lnc)


def test_the_function_itself_leaves_heads_out(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, NxD computes odd numbers of heads, and flash_attend need not care."""
    monkeypatch.setenv(standins.PLATFORM, "trn2")
    query = torch.randn(1, 7, SEQ, HEAD_DIM)
    flash = kernels_of("flash_attn").nki_flash_attn_func
    assert flash(query, query, query, 2, transpose_nki_inputs=False)[:, 6].isnan().all()


@pytest.mark.parametrize("lnc", [1, 0])
@pytest.mark.parametrize(("dtype", "in_bf16"), [(torch.float32, False), (torch.bfloat16, True)])
def test_fp32_is_not_multiplied_in_bf16(launched: Any, lnc: int, dtype: torch.dtype, *, in_bf16: bool) -> None:
    computes_every_head(attend_of(lnc), 2, dtype)
    assert [one["mixed_precision"] for kernel in launched for one in kernel.named] == [in_bf16, in_bf16]


def test_the_rule_of_lengths_is_that_of_the_tiles_of_the_ring() -> None:
    tile = kernels_of("ring_attention_kernel").get_seq_tile_size
    for length in range(512, 32768 + 1, 512):
        assert ring_length_allows(length) == (length % 1024 == 0 and length % tile(length) == 0), length
