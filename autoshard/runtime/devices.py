"""Which devices the ranks of a plan use, and whether this machine can hold all of them."""

import os
from pathlib import Path

from autoshard.engine.base import HOST
from autoshard.errors import require
from autoshard.plan.plan import Plan
from autoshard.runtime.engines import require_torch
from autoshard.spec.cluster import LOCAL
from autoshard.units import format_bytes

XLA = "xla"  # Neuron devices as NxD has them
_CUDA = "cuda"


def device_of(plan: Plan, *, forked: bool) -> str:
    """Return torch's name of the devices for the ranks of a plan that PyTorch itself executes.

    Forks cannot use a device that their parent has begun with, so that for them those of CUDA are only counted. Plans
    for Trainium take no GPUs: what was measured on them would be told of Trainium.
    """
    if plan.cluster.name == LOCAL:
        return HOST
    require_torch()
    import torch

    if forked:
        found = _CUDA if torch.cuda.device_count() >= plan.mesh.num_ranks else HOST
    else:
        there = torch.accelerator.current_accelerator(check_available=True)
        found = HOST if there is None or device_backend(there.type) == "gloo" else there.type
    return HOST if found == _CUDA and plan.cluster.engine == "nxd" else found


def device_backend(device: str) -> str:
    """Return what torch's world talks through between such devices; gloo where that is the host.

    >>> device_backend("cuda"), device_backend("mps"), device_backend("vulkan")
    ('nccl', 'gloo', 'gloo')
    """
    import torch.distributed as dist

    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:  # torch knows of none
        return "gloo"


def joined_device(device: str, place: int) -> str:
    """Take the device of the rank at this place of its machine; return what torch's world then talks through."""
    if device == HOST:
        return "gloo"
    if device == XLA:
        from autoshard.engine.nxd.library import register

        register()
        return XLA
    import torch

    there = torch.accelerator.device_count()
    message = f"this is number {place} of the ranks on its machine, counted from 0, and sees {there} of {device}"
    remedy = "Start one rank for each device, and let all see all of them (Slurm: --gpus-per-node, not --gpus-per-task)"
    require((place < there, "ranks", f"{message}. {remedy}"))
    torch.accelerator.set_device_index(place)
    return f"{HOST}:gloo,{device}:{device_backend(device)}"  # what lies with the host goes between hosts


MOST_RANKS = 64  # more processes than this are no use on one machine, as spec/clusters/local.json says
_SELF = ("runtime",)  # what a platform keeps for itself; here, pages that forks of one process share


def refuse_too_large(plan: Plan, available_bytes: int) -> None:
    """Refuse a plan that is not meant for one machine, or would make this one swap; the prediction says how much."""
    assert plan.prediction, "a plan is predicted before it runs"
    num_ranks, stages = plan.mesh.num_ranks, plan.prediction.stage_memory
    need_bytes = sum(memory.without(_SELF) for memory in stages) * num_ranks // max(1, len(stages))
    need, have = format_bytes(need_bytes), format_bytes(available_bytes)
    small = "To try a small plan of the same shape, type --rehearse 8"
    require(
        (
            num_ranks <= MOST_RANKS,
            "mesh",
            f"{num_ranks} ranks; one machine runs at most {MOST_RANKS}. Start them with torchrun or srun. {small}",
        ),
        (
            num_ranks > MOST_RANKS or need_bytes <= available_bytes,
            "prediction.stage_memory",
            f"the {num_ranks} ranks are predicted to hold {need}, and this machine has {have} left. {small}",
        ),
    )


def available_bytes() -> int:
    """Return the memory that new processes can have without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
