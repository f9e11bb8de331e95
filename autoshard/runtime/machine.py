"""What this machine has for a plan: engines, devices, memory; a plan is refused for what it lacks."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from autoshard.errors import InputError, require
from autoshard.plan.plan import Plan
from autoshard.plan.rules.columns import Engine
from autoshard.run.protocol import HOST, Builds
from autoshard.run.reports import Measured
from autoshard.spec.cluster import LOCAL
from autoshard.units import format_bytes

XLA = "xla"  # Neuron devices as NxD has them
CUDA = "cuda"
_ASKS_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch's name
_MOST_RANKS = 64  # more processes than this are no use on one machine, as spec/clusters/local.json says
_SHARED = ("runtime",)  # memory of a platform itself; here, pages that forks of one process share
COMPILER = "neuron_parallel_compile"
_REMEDY = (
    "On a Trainium machine type: pip install --extra-index-url https://pip.repos.neuron.amazonaws.com "
    "'autoshard[neuron]'. To try a small plan of the same shape here, type --rehearse 8"
)


def user_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where what runs teach about this machine is kept; None if ``AUTOSHARD_CACHE`` is empty or HOME is unknown.

    >>> user_folder({"XDG_CACHE_HOME": "cache"}), user_folder({"AUTOSHARD_CACHE": ""})
    (PosixPath('cache/autoshard'), None)
    """
    named = environment.get("AUTOSHARD_CACHE")
    if named is not None:
        return Path(named).absolute() if named else None
    home, caches = environment.get("HOME"), environment.get("XDG_CACHE_HOME")
    return Path(caches or f"{home}/.cache") / "autoshard" if caches or home else None


def builder(engine: Engine = "torch", *, of_code: bool = False) -> Builds:
    """Return how an engine is built; importing it takes seconds, and must come before ranks are forked.

    A model ``of_code`` is one that was read off its code, which the engine executes.
    """
    require_torch()
    if engine == "nxd":
        from autoshard.engine.nxd.engine import build as build_nxd

        return build_nxd
    if of_code:
        from autoshard.modules.training.engine import build_code

        return build_code
    from autoshard.engine.torch.agreeing import build_agreeing

    return build_agreeing


def counter(*, of_code: bool = False) -> Callable[[Plan, int], Measured]:
    """Return the function that counts a step of one rank without the others."""
    require_torch()
    if of_code:
        from autoshard.modules.training.engine import code_counter

        return code_counter()
    from autoshard.engine.torch.fake import count_rank

    return count_rank


def require_torch() -> None:
    """Refuse to execute a plan without torch, and say how to install it.

    Parts of torch ask when they are imported whether there is a GPU. CUDA's own answer would make GPUs unusable to
    forks of this process, which ranks are; the driver's does not.
    """
    os.environ.setdefault(_ASKS_DRIVER, "1")
    try:
        import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "is not installed, and plans are executed with it. Type: pip install 'autoshard[torch]'"
        raise InputError.of("torch", f"{message}. Planning works without") from None


def device_of(plan: Plan, *, forked: bool) -> str:
    """Return torch's name of the devices for the ranks of a plan that PyTorch itself executes.

    Forks cannot use a device that their parent has begun with, so that for them those of CUDA are only counted. Plans
    for Trainium take no GPUs: measurements on GPUs would be reported of Trainium.
    """
    if plan.cluster.name == LOCAL:
        return HOST
    require_torch()
    import torch

    if forked:
        device = CUDA if torch.cuda.device_count() >= plan.mesh.num_ranks else HOST
        used = "this process has used a GPU, as code does that a plan imports, and forked ranks cannot use it then"
        remedy = f"Start the ranks with torchrun --nproc-per-node {plan.mesh.num_ranks}"
        require((device == HOST or not torch.cuda.is_initialized(), "devices", f"{used}. {remedy}"))
    else:
        there = torch.accelerator.current_accelerator(check_available=True)
        device = HOST if there is None or device_backend(there.type) == "gloo" else there.type
    return HOST if device == CUDA and plan.cluster.platform else device


def device_backend(device: str) -> str:
    """Return the backend of torch's world between such devices; gloo where that is the host.

    >>> device_backend("cuda"), device_backend("mps"), device_backend("vulkan")
    ('nccl', 'gloo', 'gloo')
    """
    import torch.distributed as dist

    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:  # torch knows of none
        return "gloo"


def joined_device(device: str, local_rank: int) -> str:
    """Take the device of the rank of this number on its machine; return the backend of torch's world then."""
    if device == HOST:
        return "gloo"
    if device == XLA:
        from autoshard.engine.nxd.library import register_xla

        register_xla()
        return XLA
    import torch

    there = torch.accelerator.device_count()
    message = f"this is number {local_rank} of the ranks on its machine, counted from 0, and sees {there} of {device}"
    remedy = "Start one rank for each device, and let all see all of them (Slurm: --gpus-per-node, not --gpus-per-task)"
    require((local_rank < there, "ranks", f"{message}. {remedy}"))
    torch.accelerator.set_device_index(local_rank)
    return f"{HOST}:gloo,{device}:{device_backend(device)}"  # tensors of the host go between hosts


@contextmanager
def adding_in_order(device: str, *, asked: bool) -> Iterator[None]:
    """Let torch add numbers in one order on a device, so that equal runs have equal bits; it warns where it cannot.

    Processors do so in any case.
    """
    if not asked or device == HOST:
        yield
        return
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is begun
    settings: Any = torch.utils.deterministic
    before, fills = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # nothing reads memory that nothing has written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fills


def refuse_too_large(plan: Plan, available_bytes: int) -> None:
    """Refuse a plan that is not meant for one machine, or would make this one swap; the prediction says how much."""
    assert plan.prediction, "a plan is predicted before it runs"
    num_ranks, stages = plan.mesh.num_ranks, plan.prediction.stage_memory
    need_bytes = sum(memory.without(_SHARED) for memory in stages) * num_ranks // max(1, len(stages))
    need, have = format_bytes(need_bytes), format_bytes(available_bytes)
    small = "To try a small plan of the same shape, type --rehearse 8"
    many = f"{num_ranks} ranks; one machine runs at most {_MOST_RANKS}. Start them with torchrun or srun. {small}"
    require((num_ranks <= _MOST_RANKS, "mesh", many))
    ranks = "its rank is" if num_ranks == 1 else f"the {num_ranks} ranks are"
    large = f"{ranks} predicted to hold {need}, and this machine has {have} left. {small}"
    require((need_bytes <= available_bytes, "prediction.stage_memory", large))


def refuse_full_device(plan: Plan, rank: int, free_bytes: int) -> None:
    """Refuse a rank whose device has less left than its tensors alone are predicted to take."""
    assert plan.prediction, "a plan is predicted before it runs"
    stage = plan.mesh.coordinates(rank).get("pp", 0)
    need_bytes = plan.prediction.stage_memory[stage].without((*_SHARED, "reserved"))
    need, have = format_bytes(need_bytes), format_bytes(free_bytes)
    message = f"rank {rank} is predicted to hold {need} in tensors, and its device has {have} left"
    remedy = "End what else runs there, or plan again with a larger --headroom"
    require((need_bytes <= free_bytes, f"prediction.stage_memory[{stage}]", f"{message}. {remedy}"))


def available_bytes() -> int:
    """Return the memory that new processes can have without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_without_neuron(plan: Plan, name: str, *, started: bool) -> None:
    """Refuse a plan for Trainium on a machine without NxD, and unless its ranks were started."""
    missing = f"nxd runs on Trainium through neuronx-distributed, which is not installed here. {_REMEDY}"
    require((find_spec("neuronx_distributed") is not None, "engine", missing))
    nodes, ranks = plan.cluster.num_nodes, plan.cluster.ranks_per_node
    start = f"torchrun --nnodes {nodes} --nproc-per-node {ranks} -m autoshard.cli run {name}"
    require((started, "engine", f"nxd takes one process for every rank. Type on every node: {start}"))


def missing_compiler(device: str) -> str:
    """Say what torch has not to compile for a device: for processors a compiler of C++, for GPUs Triton.

    A device may bring its own compiler, which has its name (TorchNeuron's is ``neuron``). The device is not begun with,
    because forked ranks could not use it then.
    """
    if device != HOST:
        from torch._dynamo.backends.registry import list_backends

        if device in list_backends():
            return ""
        from torch.utils._triton import has_triton_package

        return "" if has_triton_package() else f"there is no Triton here for {device}"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler on PATH"
    return ""


def refuse_without_compiler(plan: Plan, name: str, num_started: int) -> None:
    """Refuse to compile where the tool is missing, or unless one process was started on every node."""
    missing = f"{COMPILER} starts the compiler, and comes with torch-neuronx, which is not installed here. {_REMEDY}"
    require((which(COMPILER) is not None, "--compile-only", missing))
    nodes, start = plan.cluster.num_nodes, f"autoshard run {name} --compile-only"
    if nodes > 1:
        torchrun = f"torchrun --nnodes {nodes} --nproc-per-node 1 ..."
        start = f"srun --nodes {nodes} --ntasks-per-node 1 {start}, or {torchrun}"
    once = f"takes one process for every node, which starts the ranks: {nodes}, not {num_started}. Type {start}"
    require((num_started == nodes, "--compile-only", once))
