"""Where the tensors of a run lie: on this machine's accelerators if the plan is for some, else with the host."""

from autoshard.engine.base import HOST
from autoshard.errors import require
from autoshard.plan.plan import Plan
from autoshard.runtime.engines import require_torch
from autoshard.spec.cluster import LOCAL

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
