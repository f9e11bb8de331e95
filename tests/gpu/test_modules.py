"""Modules that `autoshard.shard` runs on a GPU: one rank computes what the plain module computes there."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autoshard.modules.sharded import shard
from benchmarks.gpu.device import device_of, world_of_one
from benchmarks.guarded import Setting
from tests.modules.comparing import difference
from tests.modules.modules import MODULES, SINGLE, made

pytestmark = pytest.mark.gpu

COMPILED = ("Llama layer", "nanoGPT block", "language model with loss")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """This process as the only rank."""
    with world_of_one(device_of(Setting(folder=Path(), dry=False, machine=None))):
        yield


def trained(name: str, *, compiled: bool) -> float:
    """Take two steps with the plain and the sharded module, in FP64: the largest difference."""
    module, inputs = made(name)
    plain = module.to("cuda")
    inputs = tuple(one.to("cuda") for one in inputs)
    sharded = shard(copy.deepcopy(plain), inputs, "dp=1", cluster="h100-80", compile=compiled)
    return difference(plain, sharded, inputs)


@pytest.mark.parametrize("name", MODULES)
def test_a_sharded_module_trains_as_the_plain_one(name: str) -> None:
    assert trained(name, compiled=False) < (1e-4 if name in SINGLE else 1e-10)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_regions_compute_the_same(name: str) -> None:
    assert trained(name, compiled=True) < 1e-6  # rotary angles are FP32, and Triton's cosine differs in its last bits


def test_bf16_and_autocast_are_those_of_the_plain_module() -> None:
    """Products in BF16 under autocast: the results of both round alike, up to the order of sums."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).to("cuda")
    x = torch.randn(8, 256, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        sharded = shard(copy.deepcopy(plain), [x], "dp=1", cluster="h100-80")
        results = [module(x) for module in (plain, sharded)]
    for result in results:
        result.float().sum().backward()
    assert results[0].dtype == results[1].dtype == torch.bfloat16
    torch.testing.assert_close(results[1], results[0], rtol=2**-6, atol=2**-6)
    for whole, cut in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert whole.grad is not None and cut.grad is not None
        torch.testing.assert_close(cut.grad.full_tensor(), whole.grad, rtol=0.05, atol=0.05)  # pyright: ignore
