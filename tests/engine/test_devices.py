"""On a device nothing meets what lies with the host: every feature is run where tensors have shapes only."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import autoshard.engine.torch.fake as fake
import autoshard.engine.torch.kernels.fused_attention as fused_attention
from autoshard.engine.torch.fake import count_rank, fake_world
from autoshard.engine.torch.formats import NOWHERE
from autoshard.graph.kinds.indexing import random_document_starts
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Batch
from autoshard.spec.workload import Precision
from tests.ranks.cases import MIXTRAL, gpt, llama, plan_of
from tests.slower import rest_is_slow

fake_batch = fake.batch_without_numbers
HOST, GPU = fused_attention.KERNELS, {"meta": fused_attention.GPU}
SEPARATE, ROUNDED = {"documents": "separate", "seq_len": 32}, {"precision": Precision.named("bf16-sr")}
CASES = [
    ("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag", gpt(head_dim=8), SEPARATE, HOST),
    ("tp=2,pp=1,cp=2,dp=1", llama(head_dim=8, window=3), SEPARATE, {}),
    ("tp=1,pp=2,dp=2,ep=2,recompute=full", llama(head_dim=8, **MIXTRAL), {}, GPU),
    ("tp=2,pp=1,dp=2,zero=3", gpt(head_dim=8), ROUNDED, HOST),
    ("tp=1,pp=1,cp=2,dp=1,cp_kind=all_to_all", gpt(head_dim=8), SEPARATE, GPU),
    ("tp=1,pp=2,dp=2,vp=2,schedule=zb_v,zero=3", gpt(head_dim=8, num_layers=4), {}, HOST),
    ("tp=2,pp=2,dp=2,schedule=zb_h1,zero=1", llama(head_dim=8), {"optimizer": "sgd"}, HOST),
    ("tp=2,pp=1,cp=2,dp=1", llama(head_dim=8, window=3), {}, GPU),
    ("tp=2,pp=1,cp=2,dp=1", llama(head_dim=8), {}, {"meta": fused_attention.CUDNN}),
    ("tp=2,pp=1,cp=2,dp=1", llama(head_dim=8, window=3), {}, {}),
    ("tp=2,pp=1,dp=2,zero=1", gpt(head_dim=8), ROUNDED, HOST),
]  # fmt: skip


@pytest.mark.parametrize(("text", "model", "changes", "kernels"), rest_is_slow(CASES))
def test_a_step_on_a_device_takes_no_tensor_of_the_host(
    text: str, model: Any, changes: Any, kernels: Any, monkeypatch: pytest.MonkeyPatch
):
    """Which part of which sequence is attended to must not depend on numbers there, whatever kernels there are."""
    monkeypatch.setattr(fused_attention, "KERNELS", kernels)
    monkeypatch.setattr(fake, "batch_without_numbers", with_documents)
    plan = plan_of(text, model, **changes)
    for rank in (0, plan.mesh.num_ranks - 1):
        memory = count_rank(plan, rank).memory_bytes
        assert memory["saved"] and bool(memory["masters"]) == (changes is not ROUNDED)
        assert bool(memory["optimizer"]) == (plan.workload.optimizer != "sgd")


def with_documents(plan: Plan) -> Batch:
    given = fake_batch(plan)
    return {**given, "document_starts": random_document_starts(np.random.default_rng(0), given["tokens"].shape)}


def test_tensors_of_two_devices_are_found_out():
    with fake_world(0, 1), pytest.raises(RuntimeError, match="the host and of a device"):
        torch.ones(3, device=NOWHERE).add_(torch.ones(3))


def test_kernels_of_gpus_are_given_denominators_without_gaps(monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = []
    noting = SimpleNamespace(
        _scaled_dot_product_flash_attention_backward=lambda *args, scale: given.extend((*args, scale))
    )
    monkeypatch.setattr(fused_attention, "_aten", noting)
    numbers = torch.arange(8.0).view(1, 4, 2).transpose(1, 2)
    fused_attention.GPU.backward((*[torch.empty(1, 2, 4, 8)] * 5, numbers), True, 0.25)
    assert given[5].is_contiguous() and given[5].equal(numbers) and given[-1] == 0.25


@pytest.mark.parametrize(("capability", "fuses"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_older_than_their_kernel_attend_without_it(capability, fuses, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(fused_attention, "agree", lambda *_: False)
    assert bool(fused_attention.fused(torch.device("cuda"), torch.bfloat16, 64)) == fuses
    assert fused_attention.fused(torch.device("cuda"), torch.float32, 64) is None


@pytest.mark.parametrize(
    ("capability", "agrees", "more", "is_cudnn"),
    [
        ((9, 0), True, {}, True),
        ((10, 0), True, {}, True),
        ((8, 9), True, {}, False),
        ((9, 0), False, {}, False),
        ((9, 0), True, {"head_dim": 192}, False),
        ((9, 0), True, {"length": 0}, False),
        ((9, 0), True, {"length": 127}, False),
    ],
)
def test_cudnn_attends_where_it_is_faster_and_gives_the_same_numbers(
    capability, agrees, more, is_cudnn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(fused_attention, "agree", lambda *_: agrees)
    kernel = fused_attention.fused(torch.device("cuda"), torch.bfloat16, **{"head_dim": 128, "length": 4096, **more})
    assert kernel is (fused_attention.CUDNN if is_cudnn else fused_attention.GPU)


def without_a_kernel(*_: Any) -> Any:
    raise RuntimeError("No available kernel")


def test_a_kernel_is_used_only_if_its_numbers_are_the_usual_ones():
    """Its results, its denominators, and its gradients with heads that share keys."""
    usual, cpu = fused_attention.KERNELS["cpu"], torch.device("cpu")
    assert fused_attention.agree(replace(usual), usual, cpu, torch.float32)
    wrong = {
        "results": {"forward": lambda *given: (usual.forward(*given)[0] * 1.1, usual.forward(*given)[1])},
        "denominators": {"forward": lambda *given: (usual.forward(*given)[0], usual.forward(*given)[1] + 0.5)},
        "gradients": {"backward": lambda *given: (*usual.backward(*given)[:2], usual.backward(*given)[2] * 2)},
        "no kernel": {"forward": without_a_kernel},
        "the diagonal": {"forward": lambda heads, causal, scale: usual.forward(heads, False, scale)},
    }
    for what, change in wrong.items():
        assert not fused_attention.agree(replace(usual, **change), usual, cpu, torch.float32), what
