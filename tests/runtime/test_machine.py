"""What a machine has for a plan: devices, and what is said where it lacks NxD."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.backend_registration import rename_privateuse1_backend

import autoshard.commands.run as run_command
from autoshard.commands.running.execution import Execution
from autoshard.engine.torch.world import channel_backend
from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.environment import environment
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Run
from autoshard.runtime import machine
from autoshard.runtime.machine import device_of, joined_device
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Training
from autoshard.spec.workload import Precision, Workload
from tests.plan.nxd.test_match import planned
from tests.ranks.spawn import on_ranks


def plan_for(name: str) -> Plan:
    candidate = Candidate.parse(
        {"local": "tp=2,pp=1,dp=1", "trn1.32xlarge": "tp=8,pp=1,dp=4", "trn2.48xlarge": "tp=4,pp=1,dp=16"}.get(
            name, "tp=8,pp=1,dp=1"
        )
    )
    cluster = load_cluster(name, ranks=2) if name == "local" else load_cluster(name)
    workload = Workload(seq_len=64, global_batch=16, precision=Precision.named("bf16"))
    request = Request(model=load_model("tiny-llama"), cluster=cluster, workload=workload, engines=("torch",))
    return plan_at(request, candidate, even_refused=True)


def having(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int) -> list[int]:
    """Pretend that this machine has so many devices; return which are taken."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count if kind == "cuda" else 0)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind) if kind else None
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    return taken


@pytest.mark.parametrize(
    ("kind", "count", "forked", "started"),
    [
        ("cuda", 8, "cuda", "cuda"),
        ("cuda", 7, "cpu", "cuda"),
        ("mps", 1, "cpu", "cpu"),
        (None, 0, "cpu", "cpu"),
        ("xpu", 8, "cpu", "xpu"),
    ],
)
def test_a_plan_for_gpus_takes_those_that_are_here(kind, count, forked, started, monkeypatch: pytest.MonkeyPatch):
    having(monkeypatch, kind, count)
    plan = plan_for("h100-80")
    assert (device_of(plan, forked=True), device_of(plan, forked=False)) == (forked, started)
    assert device_of(plan_for("local"), forked=True) == device_of(plan_for("local"), forked=False) == "cpu"


def begun(*_: object, **__: object) -> None:
    raise AssertionError("CUDA has begun in the process whose forks are to use it")


def test_who_forks_ranks_leaves_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A fork cannot use a GPU that its parent has begun with; only the driver may be asked."""
    having(monkeypatch, "cuda", 8)
    for name in ("is_available", "get_device_properties", "_lazy_init", "init"):
        monkeypatch.setattr(torch.cuda, name, begun)
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    run = Run(folder=tmp_path, training=Training())
    execution = Execution(plan=plan_for("h100-80"), notes=(), run=run, tried=False, restarts=0, json=False)
    chosen = run_command._in_mode(run_command._on_device(execution, None), "auto").run
    assert chosen.device == "cuda" and torch.cuda._nvml_based_avail()


def test_a_gpu_that_is_used_already_is_not_for_forked_ranks(monkeypatch: pytest.MonkeyPatch):
    having(monkeypatch, "cuda", 8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(InputError, match=r"has used a GPU.*Start the ranks with torchrun --nproc-per-node 8"):
        device_of(plan_for("h100-80"), forked=True)
    assert device_of(plan_for("h100-80"), forked=False) == "cuda"


def test_numbers_are_added_in_one_order_on_a_device_if_the_recipe_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    states: list[bool] = []
    for device, asked in (("cuda", True), ("cuda", False), ("cpu", True)):
        with machine.adding_in_order(device, asked=asked):
            states.append(torch.are_deterministic_algorithms_enabled())
    assert states == [True, False, False] and os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    settings: Any = torch.utils.deterministic
    assert not torch.are_deterministic_algorithms_enabled() and settings.fill_uninitialized_memory


def test_a_plan_for_trainium_takes_no_gpu(monkeypatch: pytest.MonkeyPatch):
    plan = plan_for("trn1.32xlarge")
    having(monkeypatch, "cuda", 64)
    assert device_of(plan, forked=True) == device_of(plan, forked=False) == "cpu"
    having(monkeypatch, "xpu", 64)
    assert device_of(plan, forked=False) == "xpu"


def test_a_plan_for_pytorch_on_trainium_takes_its_cores_by_torchs_own_names() -> None:
    """TorchNeuron registers a device and a backend, both called neuron; nothing here imports it."""
    plan = plan_for("trn2.48xlarge")
    names = ["NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"]
    assert plan.kernels == "neuron_native" and environment(plan) == dict.fromkeys(names, "2")
    (answer,) = on_ranks(1, neuron_device, plan, prepare=import_torch)
    assert answer == ("neuron", "cpu:gloo,neuron:neuron", [63], "neuron")


def import_torch() -> None:
    """Nothing else: the case has a process that no other case is given."""


def neuron_device(plan: Plan) -> tuple[str, str, list[int], str]:
    """Register what TorchNeuron does; a process cannot undo it."""
    rename_privateuse1_backend("neuron")
    dist.Backend.default_device_backend_map["neuron"] = "neuron"
    with pytest.MonkeyPatch.context() as patch:
        taken = having(patch, "neuron", 64)
        found = device_of(plan, forked=False)
        return found, joined_device(found, 63), taken, str(channel_backend(torch.device(found)))


def test_every_rank_takes_its_own_device_and_talks_through_the_host_as_well(monkeypatch: pytest.MonkeyPatch):
    taken = having(monkeypatch, "cuda", 4)
    assert joined_device("cuda", 3) == "cpu:gloo,cuda:nccl" and taken == [3]
    assert joined_device("cpu", 9) == "gloo" and taken == [3]
    with pytest.raises(InputError, match="number 4 of the ranks on its machine, counted from 0, and sees 4 of cuda"):
        joined_device("cuda", 4)


def test_without_nxd_the_message_says_what_to_install_and_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("llama3-70b", "trn1.32xlarge", "tp=32,pp=8,dp=2")
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install .*autoshard\[neuron\].*type --rehearse 8"):
        machine.refuse_without_neuron(plan, "plan.json", started=True)
    monkeypatch.setattr(machine, "find_spec", lambda _: object())
    with pytest.raises(InputError, match=r"torchrun --nnodes 16 --nproc-per-node 32 -m autoshard\.cli run plan\.json"):
        machine.refuse_without_neuron(plan, "plan.json", started=False)
    machine.refuse_without_neuron(plan, "plan.json", started=True)
