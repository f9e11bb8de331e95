"""The numbers of a GPU: gradients in three modes beside FP64, formats, rounding by chance, and copies of the host."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from autoshard.engine.torch.formats import Formats, own
from autoshard.engine.torch.kernels.fused_attention import CUDNN, GPU, agree, fused
from autoshard.engine.torch.kernels.grouped import GroupedMultiplier, groups_products, multiplies_groups_fp8
from autoshard.engine.torch.kernels.matrices import GRADIENTS, VALUES, Multiplier, add_product, adds_wide
from autoshard.engine.torch.states.rounding import RoundingBits
from benchmarks.gpu import right
from benchmarks.gpu.device import Device, device_of, world_of_one
from benchmarks.guarded import Setting

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """The GPUs of this machine, and this process as the only rank."""
    found = device_of(Setting(folder=Path(), dry=False, machine=None))
    with world_of_one(found):
        yield found


@pytest.mark.parametrize("precision", right.PRECISIONS)
@pytest.mark.parametrize("name", right.CASES)
def test_gradients_of_three_modes_are_those_of_double_precision(name: str, precision: str, device: Device) -> None:
    (found,) = right.compared(right.CASES[name], precision, device, name)
    assert found.holds, found.as_json()
    assert set(right.MODES) <= set(found.extras)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64", "int64"])
def test_numbers_of_the_host_arrive_in_their_format(dtype: str) -> None:
    formats = Formats(device=torch.device("cuda"))
    array = np.arange(1000).reshape(10, 100)[:, ::2]
    tensor = formats.tensor(array, dtype)  # type: ignore[arg-type]
    assert tensor.is_cuda and tensor.dtype == formats.of(dtype)  # type: ignore[arg-type]
    np.testing.assert_allclose(tensor.double().cpu().numpy(), array, rtol=2**-8)
    assert torch.equal(own(array, device=torch.device("cuda")).cpu(), torch.from_numpy(array.copy()))


def test_a_pinned_copy_is_whole_when_it_is_waited_for() -> None:
    """A copy from pinned memory goes on while the host does; another stream must wait for it."""
    here = torch.arange(2**24, dtype=torch.int32).pin_memory()
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        there = here.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(aside)
    back = torch.empty_like(here, pin_memory=True)
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, here)


def test_products_add_to_sums_in_fp32_in_one_kernel() -> None:
    cuda = torch.device("cuda")
    assert adds_wide(cuda, torch.bfloat16, torch.float32), "Hopper and Ampere have it; the engine falls back without"
    left, right_ = (torch.randn(64, 64, device=cuda).bfloat16() for _ in range(2))
    total = torch.full((64, 64), 1e-3, device=cuda)
    add_product(total, left, right_, cuda)
    torch.testing.assert_close(total.double(), left.double() @ right_.double() + 1e-3, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no FP8")
@pytest.mark.parametrize("smaller", [(VALUES, VALUES), (GRADIENTS, VALUES)])
def test_products_in_fp8_are_those_of_the_host(smaller: tuple[torch.dtype, torch.dtype]) -> None:
    random = torch.Generator().manual_seed(0)
    first, second = (torch.randn(64, 64, generator=random).bfloat16() for _ in range(2))
    device, host = Multiplier(torch.device("cuda"), smaller), Multiplier(torch.device("cpu"), smaller)
    expected = host.product(first, second).double()
    most = 2**-7 * float(expected.abs().max())
    torch.testing.assert_close(
        device.product(first.cuda(), second.cuda()).double().cpu(), expected, rtol=2**-7, atol=most
    )
    total = torch.zeros(64, 64, device="cuda")
    device.add(total, first.cuda(), second.cuda())
    torch.testing.assert_close(total.double().cpu(), expected, rtol=2**-7, atol=most)


@pytest.mark.parametrize("counts", [[16, 0, 33, 15], [64], None])
def test_products_of_experts_in_fp8_are_those_of_the_host(counts: list[int] | None) -> None:
    cuda, random = torch.device("cuda"), torch.Generator().manual_seed(0)
    num_experts = len(counts) if counts else 4
    rows, matrices = (
        torch.randn(*shape, generator=random).bfloat16()
        for shape in ((64, 32) if counts else (4, 16, 32), (num_experts, 48, 32))
    )
    ends = torch.tensor(counts).cumsum(0).int() if counts else None
    host, device = (
        GroupedMultiplier(where, in_fp8=multiplies_groups_fp8(cuda)) for where in (torch.device("cpu"), cuda)
    )
    for right_factor in (matrices.transpose(1, 2), matrices.transpose(1, 2).contiguous()):
        expected = host.product(rows, right_factor, ends).double()
        product = device.product(rows.cuda(), right_factor.cuda(), None if ends is None else ends.cuda())
        most = 2**-7 * float(expected.abs().max())
        torch.testing.assert_close(product.double().cpu(), expected, rtol=2**-7, atol=most)


def test_the_kernels_that_plans_count_on_are_there() -> None:
    cuda = torch.device("cuda")
    assert multiplies_groups_fp8(cuda) == (torch.cuda.get_device_capability() == (9, 0))
    assert fused(cuda, torch.bfloat16, 128) is not None and groups_products(cuda)
    assert fused(cuda, torch.float32, 128) is None
    if torch.cuda.get_device_capability() >= (9, 0):
        assert agree(CUDNN, GPU, cuda, torch.bfloat16) and fused(cuda, torch.bfloat16, 128, 4096) is CUDNN
    assert fused(cuda, torch.bfloat16, 128) is GPU


def test_bits_that_round_are_those_of_the_host() -> None:
    bits = RoundingBits(seed=3, update=2, weight="layer.0.up.weight", whole=(48, 32))
    bounds = ((0, 48), (0, 32))
    here, there = (bits.bits(bounds, 0, 48 * 32, torch.device(where)) for where in ("cpu", "cuda"))
    assert torch.equal(here, there.cpu())
