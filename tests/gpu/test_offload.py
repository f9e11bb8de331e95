"""Activations in the memory of a host beside a real GPU: streams, pinned buffers, and what the device still holds."""

import pytest
import torch

from autoshard.engine.torch.offloading import HostMemory
from tests.gpu.through_host import shares_on
from tests.ranks.cases import Task, llama, plan_of, same

pytestmark = pytest.mark.gpu
TEXTS = ("tp=1,pp=1,dp=1,recompute={}", "tp=1,pp=2,dp=1,recompute={}", "tp=1,pp=2,dp=1,schedule=zb_h1,recompute={}")
MIB = 2**20


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["none", "full"])
def test_ranks_on_one_gpu_make_the_same_step_to_the_last_bit(text: str, kind: str) -> None:
    model = llama(head_dim=8, num_layers=4)
    alone, beside = (Task.of(plan_of(text.format(drop), model)) for drop in (kind, f"{kind}+offload"))
    for exact in (True, False):
        for here, there in zip(
            shares_on("cuda", alone, exact=exact), shares_on("cuda", beside, exact=exact), strict=True
        ):
            same(here, there)


def test_memories_come_back_whole_although_the_device_writes_over_them_at_once() -> None:
    """What was copied is given back only when the copy is done, and is used again only when it has come back."""
    device = torch.device("cuda")
    host, expected = HostMemory(device, torch.device("cpu")), dict[int, torch.Tensor]()
    for step in range(3):
        for layer in range(8):
            kept = torch.randn(64 * MIB // 4, device=device) + step
            expected[layer] = kept[:: 2**12].cpu()
            host.put((f"layer.{layer}", step), {"kept": kept, "view": kept[1024:].view(-1, 512)}, ())
            del kept
            torch.full((64 * MIB // 4,), -1.0, device=device)  # in the memory that the last layer left, if it did
        for layer in reversed(range(8)):
            host.fetch((f"layer.{layer - 1}", step))
            values = host.take((f"layer.{layer}", step))
            assert torch.equal(values["kept"][:: 2**12].cpu(), expected[layer])
            assert values["view"].data_ptr() == values["kept"].data_ptr() + 4096
            values["kept"].fill_(-1.0)
            del values
    host.settle()
    assert host.most_bytes == 8 * 64 * MIB


def test_a_device_holds_three_blocks_of_many_at_most() -> None:
    device, size = torch.device("cuda"), 64 * MIB
    host = HostMemory(device, torch.device("cpu"))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for layer in range(16):
        host.put((f"layer.{layer}", 0), {"kept": torch.ones(size // 4, device=device)}, ())
    for layer in reversed(range(16)):
        host.fetch((f"layer.{layer - 1}", 0))
        del host.take((f"layer.{layer}", 0))["kept"]
    assert torch.cuda.max_memory_allocated(device) - before <= 3 * size
