"""Where the tensors of a run lie: on this machine's accelerators if the plan is for some, else with the host."""

from autoshard.cost.calibration import DECLARED
from autoshard.engine.base import HOST
from autoshard.errors import require
from autoshard.plan.plan import Plan
from autoshard.runtime.engines import require_torch

XLA = "xla"  # Neuron devices as NxD has them


def device_of(plan: Plan, *, forked: bool) -> str:
    """Return torch's name of the devices for the ranks of a plan that PyTorch itself executes.

    Forks cannot use a device that their parent has begun with, so that for them those of CUDA are only counted.
    """
    if plan.cluster.name == DECLARED:
        return HOST
    require_torch()
    import torch

    if forked:
        return "cuda" if torch.cuda.device_count() >= plan.mesh.num_ranks else HOST
    found = torch.accelerator.current_accelerator(check_available=True)
    return HOST if found is None or device_backend(found.type) == "gloo" else found.type


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
    message = f"this is number {place} of the ranks on its machine, counted from 0, which has {there} of {device}"
    require((place < there, "ranks", f"{message}. Start one rank for each device"))
    torch.accelerator.set_device_index(place)
    return f"{HOST}:gloo,{device}:{device_backend(device)}"  # what lies with the host goes between hosts
