"""The accelerators of this machine as a cluster file, from what PyTorch, nvidia-smi and neuron-ls say of them."""

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any, cast

from autoshard.errors import InputError, require
from autoshard.files import replace_text
from autoshard.spec.cluster_catalogue import NodeType, cluster_names, load_node_type
from autoshard.spec.files import json_line, yaml_of
from autoshard.spec.record import encode

_PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")  # on Amazon's machines the type of the instance
_PATIENCE_S = 60.0
NOTHING = (
    "there is no accelerator here that PyTorch, nvidia-smi or neuron-ls shows. For plans on its processors, type "
    "--cluster local"
)
# What drivers call the chips of the catalogue. Others of the same family (PCIe, NVL) have other memory and links.
_KNOWN: Mapping[str, str] = {
    "A100-SXM4-40GB": "a100-40", "A100-SXM4-80GB": "a100-80", "H100 80GB HBM3": "h100-80", "H200": "h200",
    "H800": "h800",
    "B200": "b200", "B300 SXM6 AC": "b300", "GB200": "gb200-nvl72", "GB300": "gb300-nvl72",
}  # fmt: skip
_TRAINIUMS = {"trn1": "trn1.32xlarge", "trn2": "trn2.48xlarge", "trn3": "trn3-gen2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Per:
    """What a multiprocessor of a generation does in a cycle, and a lane of its links in a second."""

    bf16_flops: int  # dense, sums in FP32; half of it on cards named GeForce
    fp32_flops: int
    fp8: bool
    link_bytes_per_s: float  # of one NVLink, one direction
    source: str


_GENERATIONS: Mapping[tuple[int, int], _Per] = {
    (8, 0): _Per(bf16_flops=2048, fp32_flops=128, fp8=False, link_bytes_per_s=25e9,
                 source="A100: 312 TFLOPS at 108 x 1.41 GHz"),
    (8, 6): _Per(bf16_flops=1024, fp32_flops=256, fp8=False, link_bytes_per_s=14e9,
                 source="A40: 149.7 TFLOPS at 84 x 1.74 GHz"),
    (8, 9): _Per(bf16_flops=1024, fp32_flops=256, fp8=True, link_bytes_per_s=14e9,
                 source="L40S: 362 TFLOPS at 142 x 2.52 GHz"),
    (9, 0): _Per(bf16_flops=4096, fp32_flops=256, fp8=True, link_bytes_per_s=25e9,
                 source="H100 SXM: 989.4 TFLOPS at 132 x 1.83 GHz"),
    (10, 0): _Per(bf16_flops=8192, fp32_flops=256, fp8=True, link_bytes_per_s=50e9,
                  source="B200: 2250 TFLOPS at 148 x 1.85 GHz"),
    (12, 0): _Per(bf16_flops=1024, fp32_flops=256, fp8=True, link_bytes_per_s=50e9,
                  source="RTX PRO 6000 Blackwell: 503.8 TFLOPS at 188 x 2.617 GHz"),
}  # fmt: skip
# One lane and direction of PCI Express, by generation. cited: PCI-SIG, base specifications 3.0 to 6.0
_PCIE_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def cluster_here() -> Mapping[str, Any]:
    """Return the cluster file of this machine, whose base is a cluster of the catalogue where it is known."""
    if devices := neuron_devices():
        return _of_trainium(devices)
    gpus = _gpus()
    require((bool(gpus), "--here", NOTHING))
    kinds = sorted({gpu.name for gpu in gpus})
    mixed = f"this machine has GPUs of several kinds ({', '.join(kinds)}), and the ranks of a plan are all alike. Show "
    require((len(kinds) == 1, "--here", f"{mixed}those of one kind only (CUDA_VISIBLE_DEVICES)"))
    return _of_gpus(gpus)


def node_type_here() -> NodeType | None:
    """Return the contents of a cluster file of this machine; None where no accelerator is known."""
    try:
        data = cluster_here()
    except InputError:
        return None
    with TemporaryDirectory() as folder:
        file = Path(folder, "here.yaml")
        replace_text(file, yaml_of(dict(data)))
        return load_node_type(str(file))


def said(program: str, *arguments: str) -> str:
    """Return what a program prints; "" where it is not installed, or fails."""
    if which(program) is None:
        return ""
    with suppress(subprocess.TimeoutExpired, OSError):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        return done.stdout if done.returncode == 0 else ""
    return ""


def product() -> str:
    """Return what this machine calls itself; on Amazon's machines that is the type of the instance."""
    with suppress(OSError):
        return _PRODUCT.read_text("utf-8", errors="replace").strip()
    return ""


# -- Trainium -------------------------------------------------------------------------------------------


def neuron_devices() -> Sequence[Mapping[str, Any]]:
    """Return what neuron-ls says of each device."""
    listed = json_line(said("neuron-ls", "-j"))
    devices = cast(list[object], listed) if isinstance(listed, list) else []
    return [cast(Mapping[str, Any], device) for device in devices if isinstance(device, dict)]


def _of_trainium(devices: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    kind, lnc = str(devices[0].get("instance_type") or product()), devices[0].get("logical_neuroncore_config")
    seen = f"read here: {len(devices)} Neuron devices, of {kind or 'an unnamed machine'} (neuron-ls -j)"
    is_known = kind in cluster_names() and load_node_type(kind).chips_per_node == len(devices)
    family = re.match(r"trn[0-9]", kind)
    base = kind if is_known else _TRAINIUMS.get(family[0] if family else "")
    if base is None:
        unknown = f"{seen}, which autoshard does not know. Write a cluster file with a base: docs/guides/my-cluster.md"
        raise InputError.of("--here", unknown)
    node = load_node_type(base)
    divisions = sorted(node.variants, key=lambda variant: variant.lnc != lnc)  # the first is the default
    if is_known:
        changed = {} if divisions[0] == node.variants[0] else {"variants": encode(tuple(divisions))}
        return {"base": base, "source": seen, **changed}
    domains = ("chip",) if len(devices) == 1 else ("chip", "node")
    return {
        "base": base,
        "source": f"{seen}; the chips of {base}, and what of its links is inside a node",
        "name": kind,
        "chips_per_node": len(devices),
        "variants": [{"ranks_per_chip": variant.ranks_per_chip, "lnc": variant.lnc} for variant in divisions],
        "links": [link.name for link in node.links if link.domain in domains],
        "nodes_per_ultraserver": 1,
        "price_usd_per_node_hour": None,
    }


# -- GPUs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What drivers and PyTorch say of one GPU; None is what they do not say."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    clock_hz: float | None = None
    memory_bytes_per_s: float | None = None


def _gpus() -> list[Gpu]:
    """Return the GPUs that a process here gets; those of nvidia-smi where PyTorch is not built for them."""
    if find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available() and torch.version.hip is None:
            return [_as_torch_says(torch.cuda.get_device_properties(at)) for at in range(torch.cuda.device_count())]
        if torch.version.cuda is not None:
            return []
    listed = said("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    rows = [line.rpartition(",") for line in listed.splitlines() if line.strip()]
    return [Gpu(name=name.strip(), memory_bytes=int(mib) * 2**20) for name, _, mib in rows if mib.strip().isdigit()]


def _as_torch_says(device: Any) -> Gpu:
    clocks = said("nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits").split()
    clock_khz = getattr(device, "clock_rate", None) or (int(clocks[0]) * 1e3 if clocks and clocks[0].isdigit() else 0)
    memory_khz, bits = getattr(device, "memory_clock_rate", None), getattr(device, "memory_bus_width", None)
    return Gpu(
        name=device.name,
        memory_bytes=device.total_memory,
        capability=(device.major, device.minor),
        multiprocessors=device.multi_processor_count,
        clock_hz=clock_khz * 1e3 or None,
        memory_bytes_per_s=2 * memory_khz * 1e3 * bits / 8 if memory_khz and bits else None,
    )


def _of_gpus(gpus: Sequence[Gpu]) -> Mapping[str, Any]:
    gpu, count = gpus[0], len(gpus)
    seen = f"read here: {count} x {gpu.name} (PyTorch or nvidia-smi)"
    kind = product()
    if kind in cluster_names() and load_node_type(kind).chips_per_node == count:
        return {"base": kind, "source": f"{seen}, {kind} by its own name", "chip": {"memory_bytes": gpu.memory_bytes}}
    per = _GENERATIONS.get(gpu.capability or (0, 0))
    base, bonds = _KNOWN.get(gpu.name.removeprefix("NVIDIA ")), _nvlinks(said("nvidia-smi", "topo", "-m"), count)
    if base is not None and (count == 1 or bonds):
        link = next(link.name for link in load_node_type(base).links if link.domain in ("node", "ultraserver"))
        changed = {"chip": {"memory_bytes": gpu.memory_bytes}, "price_usd_per_node_hour": None}
        return {
            "base": base,
            "source": f"{seen}; no network is known",
            "chips_per_node": count,
            "links": [link],
        } | changed
    name = "-".join(re.findall(r"[a-z0-9]+", gpu.name.lower()))
    chip = load_node_type(base).chip.name if base else _chip(gpu, per, name)
    bond_bytes_per_s = bonds * per.link_bytes_per_s if per else 0
    source = f"{seen}; one rank a GPU, as torchrun starts them"
    return {
        "name": name if base is None else f"{base}-pcie",
        "chip": chip,
        "chips_per_node": count,
        "variants": [{"ranks_per_chip": 1}],
        "links": [_link(bond_bytes_per_s, f"{bonds} NVLinks between any two")],
        "engine": "torch",
        "kernels": "torch_engine_gpu",
        "price_usd_per_node_hour": None,
        "sources": {"default": source},
    }


def _chip(gpu: Gpu, per: _Per | None, name: str) -> Mapping[str, Any]:
    """Return the data of a chip that is not in the catalogue, derived from its clocks."""
    parts = {"its generation": per, "its clock": gpu.clock_hz, "its memory's clock": gpu.memory_bytes_per_s}
    missing = ", ".join(part for part, value in parts.items() if not value)
    write = "is not in the catalogue, and nothing here tells"
    where = "Write a cluster file with its data sheet's numbers: docs/guides/my-cluster.md"
    require((not missing, "--here", f"{gpu.name} {write} {missing}. {where}"))
    assert per and gpu.clock_hz and gpu.memory_bytes_per_s and gpu.multiprocessors
    cycles_per_s = gpu.multiprocessors * gpu.clock_hz
    bf16 = per.bf16_flops * cycles_per_s / (2 if "GeForce" in gpu.name else 1)
    rates = {"bf16": bf16, "fp16": bf16, "fp32": per.fp32_flops * cycles_per_s} | ({"fp8": 2 * bf16} if per.fp8 else {})
    clocks = f"{gpu.multiprocessors} multiprocessors at {gpu.clock_hz / 1e9:.3f} GHz"
    return {
        "name": name,
        "memory_bytes": gpu.memory_bytes,
        "memory_bandwidth_bytes_per_s": gpu.memory_bytes_per_s,
        "matrix_flops_per_s": rates,
        "vector_flops_per_s": rates["fp32"],
        "sources": {
            "memory_bytes": "read here: what CUDA gives to processes",
            "memory_bandwidth_bytes_per_s": "derived: twice the memory's clock x the width of its bus, as CUDA says",
            "default": f"derived: {clocks}, with as many operations a cycle as its generation has ({per.source})",
        },
    }


def _nvlinks(topology: str, count: int) -> int:
    r"""Return how many NVLinks join any two GPUs, from the matrix of ``nvidia-smi topo -m``.

    >>> _nvlinks("        GPU0 GPU1 CPU\nGPU0     X   NV12 0-63\nGPU1    NV12  X   0-63", 2)
    12
    """
    rows = [line.split()[1 : count + 1] for line in topology.splitlines() if re.match(r"GPU\d+\s", line)]
    cells = [cell for row in rows for cell in row if cell != "X"]
    return min((int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else 0 for cell in cells), default=0)


def _link(bond_bytes_per_s: float, bonds: str) -> Mapping[str, Any]:
    """Return the link between the GPUs of a machine: NVLinks where each has them to each other, else PCI Express."""
    latency = "3.4 us per step of a ring over NVLink: NCCL's tuning table (src/graph/tuning.cc); taken for PCIe as well"
    options = ("--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader,nounits")
    numbers = [int(word) for word in re.findall(r"\d+", said("nvidia-smi", *options))[:2]]
    generation, lanes = numbers if len(numbers) == 2 and numbers[0] in _PCIE_LANE_BYTES_PER_S else (4, 16)
    pcie = f"PCI Express {generation}.0, {lanes} lanes{'' if numbers else ' (taken, because nvidia-smi says nothing)'}"
    return {
        "name": "nvlink" if bond_bytes_per_s else "pcie",
        "kind": "switch",
        "domain": "node",
        "bandwidth_bytes_per_s": bond_bytes_per_s or lanes * _PCIE_LANE_BYTES_PER_S[generation],
        "chips_per_port": 1,
        "latency_s": 3.4e-6,
        "sources": {"default": f"read here: {bonds if bond_bytes_per_s else pcie}", "latency_s": latency},
    }


# -- in words -------------------------------------------------------------------------------------------


def machine_words() -> Mapping[str, str | int]:
    """Return what the machine here is, for others: chips, their driver, processor; no name of it, and no address."""
    words: dict[str, str | int] = {"processor": _processor(), "cores": os.cpu_count() or 1}
    if devices := neuron_devices():
        kind = str(devices[0].get("instance_type") or product())
        instance = {"instance": kind} if re.fullmatch(r"[a-z0-9]{2,8}\.[a-z0-9]{2,12}", kind) else {}
        return words | instance | {"devices": len(devices)}
    if gpus := _gpus():
        driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
        named = {"gpu": gpus[0].name, "gpus": len(gpus), "gpu_memory_bytes": gpus[0].memory_bytes}
        return words | named | ({"driver": driver[0]} if driver else {})
    return words


def installed_packages() -> str:
    """Return the packages that are installed here, with their versions: ``torch 2.13.0, triton 3.4.0``."""
    versions = {"python": platform.python_version()}
    for name in (
        "torch", "torch-xla", "torch-neuronx", "neuronx-distributed", "neuronx-cc", "nki", "triton",
        "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    ):  # fmt: skip
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _processor() -> str:
    """Return the name of the processor, as its maker gives it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
