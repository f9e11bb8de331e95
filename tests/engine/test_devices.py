"""On a device nothing meets what lies with the host: every feature is run where tensors have shapes only."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import autoshard.engine.torch.fake as fake
import autoshard.engine.torch.kernels.attention as fused
from autoshard.engine.base import Batch, Measured
from autoshard.engine.torch.fake import counted, fake_world
from autoshard.engine.torch.formats import NOWHERE
from autoshard.graph.kinds.indexing import random_document_starts
from autoshard.plan.plan import Plan
from autoshard.spec.workload import Precision
from tests.engine.test_kernels import attention
from tests.ranks.cases import gpt, llama, plan_of

fake_batch = fake._batch
EXPERTS = {"num_experts": 4, "experts_per_token": 2}
CASES = {
    "learned positions cut by cp": ("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag", gpt(head_dim=8)),
    "attention cut by heads": ("tp=1,pp=1,cp=2,dp=1,cp_kind=all_to_all", gpt(head_dim=8)),
    "a ring with tp and a window": ("tp=2,pp=1,cp=2,dp=1", llama(head_dim=8, window=3)),
    "ZeRO-3 with tied ends of a V": ("tp=1,pp=2,dp=2,vp=2,schedule=zb_v,zero=3", gpt(head_dim=8, num_layers=4)),
    "ZeRO-1 after halves of backward": ("tp=2,pp=2,dp=2,schedule=zb_h1,zero=1", llama(head_dim=8)),
    "experts": ("tp=1,pp=2,dp=2,ep=2,recompute=full", llama(head_dim=8, **EXPERTS)),
}


def steps(name: str) -> None:
    """Run the first and the last rank of a case where nothing has memory."""
    plan = plan_of(*CASES[name])
    found = [counted(plan, rank) for rank in (0, plan.mesh.num_ranks - 1)]
    assert all(isinstance(one, Measured) and one.memory_bytes["saved"] for one in found)


@pytest.mark.parametrize("name", CASES)
def test_a_step_on_a_device_takes_no_tensor_of_the_host(name: str):
    steps(name)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("learned positions cut by cp", {"meta": fused.KERNELS["cuda"]}),
        ("attention cut by heads", {"meta": fused.KERNELS["cuda"]}),
        ("a ring with tp and a window", {}),
    ],
)
def test_documents_are_told_apart_by_the_host(name: str, kernels, monkeypatch: pytest.MonkeyPatch):
    """Their kernels see shapes only: which part of which sequence is attended to must not depend on numbers there."""
    monkeypatch.setattr(fused, "KERNELS", kernels)
    monkeypatch.setattr(fake, "_batch", with_documents)
    text, model = CASES[name]
    plan = plan_of(text, model, documents="separate", seq_len=32)
    assert all(counted(plan, rank).memory_bytes["saved"] for rank in (0, plan.mesh.num_ranks - 1))


def with_documents(plan: Plan) -> Batch:
    given = fake_batch(plan)
    return {**given, "document_starts": random_document_starts(np.random.default_rng(0), given["tokens"].shape)}


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_rounding_takes_no_tensor_of_the_host(zero: int):
    plan = plan_of(f"tp=2,pp=1,dp=2,zero={zero}", gpt(head_dim=8), precision=Precision.named("bf16-sr"))
    assert counted(plan, 0).memory_bytes["masters"] == 0


@pytest.mark.parametrize("kernels", [{"meta": fused.KERNELS["cuda"]}, {}], ids=["those of GPUs", "none"])
def test_attention_takes_the_kernel_of_the_device_if_there_is_one(kernels, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "KERNELS", kernels)
    steps("a ring with tp and a window")


def test_tensors_of_two_devices_are_found_out():
    with fake_world(0, 1), pytest.raises(RuntimeError, match="the host and of a device"):
        torch.ones(3, device=NOWHERE).add_(torch.ones(3))


def test_kernels_of_gpus_are_given_denominators_without_gaps(monkeypatch: pytest.MonkeyPatch):
    given: list[object] = []
    monkeypatch.setattr(
        fused, "_aten", SimpleNamespace(_scaled_dot_product_flash_attention_backward=lambda *args: given.extend(args))
    )
    numbers = torch.arange(8.0).view(1, 4, 2).transpose(1, 2)
    fused.GPU.backward((*[torch.empty(1, 2, 4, 8)] * 5, numbers), True)
    lse = given[5]
    assert isinstance(lse, torch.Tensor) and lse.is_contiguous() and lse.equal(numbers)


@pytest.mark.parametrize(("capability", "fuses"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_older_than_their_kernel_attend_without_it(capability, fuses, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert bool(fused.fused(torch.device("cuda"), torch.bfloat16, 64)) == fuses
    assert fused.fused(torch.device("cuda"), torch.float32, 64) is None


@pytest.mark.parametrize("window", [None, pytest.param(150, marks=pytest.mark.slow)])
def test_attention_on_a_device_without_a_kernel_is_the_same(window: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "KERNELS", {})
    attention(np.r_[0:70, 210:280], np.arange(280), window)
    attention(np.arange(300), np.arange(300), window, np.repeat([[0, 7, 150]], [7, 143, 150], axis=1))
