"""What the real functions around NxD's attention kernels launch: every head, in the plan's number format."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.engine.nxd.layers import flash_attend, ring_attend
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


def found_in(attend: Callable[..., Tensor], heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run a module forward and backward: what it made, its values, their gradient, what came from above."""
    query, key, value = (torch.randn(2, SEQ, heads, 1, HEAD_DIM, dtype=dtype) for _ in range(3))
    key, value = key[:, :, :, 0], value[:, :, :, 0].requires_grad_()
    mixed = attend(query.requires_grad_(), key, value)
    upstream = torch.randn_like(mixed)
    (gradient,) = torch.autograd.grad(mixed, value, upstream)
    return mixed[:, :, :, 0], value.detach(), gradient, upstream[:, :, :, 0]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Launched, Launched]:
    """The real function of flash attention, and the kernels that it launches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from neuronx_distributed.kernels.flash_attn import (  # pyright: ignore[reportMissingImports]
            nki_flash_attn_func,
        )
    kernels = Launched(forward), Launched(backward)
    for name, kernel in zip(("flash_fwd", "flash_attn_bwd"), kernels, strict=True):
        monkeypatch.setattr(f"neuronxcc.nki.kernels.{name}", kernel)
    monkeypatch.setattr("neuronxcc.nki.language.nc", lambda cores: cores)
    return nki_flash_attn_func, *kernels


@pytest.mark.parametrize("heads", range(1, 9))
@pytest.mark.parametrize(("platform", "lnc"), [("trn1", 1), ("trn2", 1), ("trn2", 2)])
def test_flash_attention_computes_every_head(
    flash: Any, monkeypatch: pytest.MonkeyPatch, platform: str, lnc: int, heads: int
) -> None:
    monkeypatch.setenv(standins.PLATFORM, platform)
    mixed, value, gradient, upstream = found_in(partial(flash_attend, flash[0], lnc), heads, torch.bfloat16)
    torch.testing.assert_close(mixed, value)
    torch.testing.assert_close(gradient, upstream)


def test_the_function_itself_leaves_heads_out(flash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, NxD computes odd numbers of heads, and flash_attend need not care."""
    monkeypatch.setenv(standins.PLATFORM, "trn2")
    query = torch.randn(1, 7, SEQ, HEAD_DIM)
    assert flash[0](query, query, query, 2, transpose_nki_inputs=False)[:, 6].isnan().all()


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Launched, Launched]:
    """The real function of ring attention, and the kernels that it launches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from neuronx_distributed.kernels import ring_attention_kernel  # pyright: ignore[reportMissingImports]
    kernels = Launched(forward), Launched(backward)
    monkeypatch.setattr(ring_attention_kernel, "_ring_fwd_nki_call", kernels[0])
    monkeypatch.setattr(ring_attention_kernel, "_ring_bwd_nki_call", kernels[1])
    return ring_attention_kernel.nki_ring_attn_func, *kernels


@pytest.mark.parametrize("heads", range(1, 9))
def test_ring_attention_computes_every_head(ring: Any, heads: int) -> None:
    mixed, value, gradient, upstream = found_in(partial(ring_attend, ring[0], 0, [(0, 0)]), heads, torch.bfloat16)
    torch.testing.assert_close(mixed, value)
    torch.testing.assert_close(gradient, upstream)


@pytest.mark.parametrize("kernel", ["flash", "ring"])
@pytest.mark.parametrize(("dtype", "in_bf16"), [(torch.float32, False), (torch.bfloat16, True)])
def test_fp32_is_not_multiplied_in_bf16(
    request: pytest.FixtureRequest, kernel: str, dtype: torch.dtype, in_bf16: bool
) -> None:
    function, *launched = request.getfixturevalue(kernel)
    found_in(
        partial(flash_attend, function, 1) if kernel == "flash" else partial(ring_attend, function, 0, [(0, 0)]),
        2,
        dtype,
    )
    assert [one["mixed_precision"] for kernel in launched for one in kernel.named] == [in_bf16, in_bf16]


def test_the_rule_of_lengths_is_that_of_the_tiles_of_the_ring() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from neuronx_distributed.kernels.ring_attention_kernel import (  # pyright: ignore[reportMissingImports]
            get_seq_tile_size,
        )
    for length in range(512, 32768 + 1, 512):
        whole = length % 1024 == 0 and length % get_seq_tile_size(length) == 0
        assert ring_length_allows(length) == whole, length
