"""Stand-ins for what NxD imports of the vendor, so that its real source runs on a CPU.

They are for import only: whatever is not given a real value here is ``Unreal``, and to call it raises. Of torch_xla the
files in ``REAL_XLA`` run as they are (they are Python, of any installed or unpacked wheel); its collectives are those
of ``gloo_xla``. No module of neuronx_distributed is changed.
"""

import collections
import enum
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.neuron import gloo_xla

VENDOR = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib", "torch_xla")
# Of transformers 4, which NxD was written for; a tracer that is only used when it is asked for by name.
GONE = ("transformers.utils.fx",)
REAL_XLA = (
    "torch_xla.core.xla_env_vars",
    "torch_xla.distributed.zero_redundancy_optimizer",
    "torch_xla.utils.checkpoint",
    "torch_xla.utils.serialization",
    "torch_xla.utils.utils",
)
PLATFORM = "NEURON_PLATFORM_TARGET_OVERRIDE"  # as torch_neuronx reads it: trn1 or trn2
# ZeRO-1 of torch_xla runs on any device but says that it needs its own.
_ONLY_XLA = "    assert self.device.type == 'xla'\n"


class StandInCalled(RuntimeError):
    """Something was called that only exists on a Neuron machine."""


class Unreal:
    """A name that can be imported, subclassed and passed on, but not called."""

    def __init__(self, name: str) -> None:
        self.__dict__.update(_name=name, __name__=name.rpartition(".")[2])

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise StandInCalled(f"{self._name} is a stand-in: it needs a Neuron machine")

    def __getattr__(self, name: str) -> "Unreal":
        if name.startswith("__"):
            raise AttributeError(name)
        return Unreal(f"{self._name}.{name}")

    def __getitem__(self, _: Any) -> "Unreal":
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}>"


def _kernel(*given: Any, **_: Any) -> Any:
    """A decorator of kernels, bare or with options: what it decorates cannot run here."""
    if given and callable(given[0]):
        return Unreal(f"kernel {getattr(given[0], '__name__', given[0])}")
    return lambda function: Unreal(f"kernel {getattr(function, '__name__', function)}")


def _platform() -> str:
    return os.environ.get(PLATFORM, "trn1")


class _Options:
    """Keeps what it is made with: configurations that become defaults of arguments when a module is imported."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given = given
        self.__dict__.update(named)


class _Rings:
    """Who sends to whom in ring attention: made with the groups, and asked by a kernel that cannot run here."""

    def __init__(self, replica_groups: Sequence[Sequence[int]]) -> None:
        rings = [
            [[one, group[(place + 1) % len(group)]] for place, one in enumerate(group)] for group in replica_groups
        ]
        self.rank_src_tgt_pairs = {
            one: ring for ring, group in zip(rings, replica_groups, strict=True) for one in group
        }


def _names(name: str, *members: str) -> Any:
    return enum.Enum(name, {member: number for number, member in enumerate(members)})


_SUPPORTED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# By name alone, because releases of the vendor move them from module to module.
ANYWHERE: Mapping[str, Any] = {
    "get_platform_target": _platform,
    "SUPPORTED_TYPES": _SUPPORTED,
    "jit": _kernel,
    "nki_jit": _kernel,
    "skip_middle_end_transformations": _kernel,
    "enable_stack_allocator": _kernel,
    "CollectivesConfig": _Rings,
    "FlashConfig": _Options,
    "SkipMode": collections.namedtuple("SkipMode", ("skip_token", "skip_weight")),
    "VNC": lambda number: number,
    "BlockShardStrategy": _names("BlockShardStrategy", "HI_LO", "PING_PONG"),
    "ActFnType": _names("ActFnType", "SiLU", "GELU", "GELU_Tanh_Approx", "Swish"),
    "ExpertAffinityScaleMode": _names("ExpertAffinityScaleMode", "NO_SCALE", "POST_SCALE", "PRE_SCALE"),
}
XLA: Mapping[str, Mapping[str, Any]] = {
    "torch_xla": {"__version__": "2.9.0", "sync": lambda *_, **__: None},
    "torch_xla.core.xla_model": gloo_xla.MODEL,
    "torch_xla.runtime": gloo_xla.RUNTIME,
}


class _StandIn(types.ModuleType):
    """A module whose every name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = XLA.get(self.__name__, {}) if self.__name__.startswith("torch_xla") else ANYWHERE
        if name in known:
            return known[name]
        return sys.modules.get(f"{self.__name__}.{name}") or Unreal(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the vendor's packages; ``xla`` is the folder of the real torch_xla, None where that runs as it is."""

    def __init__(self, xla: Path | None) -> None:
        self._xla = xla

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._xla is None and fullname.partition(".")[0] == "torch_xla":
            return None
        if self._xla and fullname in REAL_XLA:
            file = self._xla.joinpath(*fullname.split(".")[1:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(fullname, file, loader=_AnyDevice(fullname, str(file)))
        if fullname.partition(".")[0] not in VENDOR and fullname not in GONE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: the module's names are made when they are asked for."""


class _AnyDevice(importlib.machinery.SourceFileLoader):
    """Loads a file of torch_xla without the line that refuses a CPU."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        text = importlib.util.decode_source(data)
        if path.endswith("zero_redundancy_optimizer.py"):
            assert text.count(_ONLY_XLA) == 1, f"{path} is not the file that these stand-ins know"
            text = text.replace(_ONLY_XLA, "")
        return super().source_to_code(text.encode(), path, _optimize=_optimize)

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # never from a cache of the file as it was


class _AnyClass(types.ModuleType):
    """``torch.classes.neuron``: its classes stand in annotations of NxD's inference code."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def absent() -> str:
    """Say what is missing to run the tests with the real NxD; "" if nothing is."""
    for package in ("neuronx_distributed", "torch_xla"):
        if importlib.util.find_spec(package) is None:
            return f"{package} cannot be imported: on a CPU, put its source on PYTHONPATH"
    return ""


def install() -> None:
    """Put the stand-ins in place and import NxD; on a Neuron machine only the latter."""
    os.environ.setdefault("NXD_LOG_LEVEL", "ERROR")
    if importlib.util.find_spec("torch_neuronx") is None:
        spec = importlib.util.find_spec("torch_xla")
        assert spec and spec.origin, "absent() would have said so"
        sys.meta_path.insert(0, _Finder(Path(spec.origin).parent))
        torch.classes.neuron = _AnyClass("neuron")  # pyright: ignore[reportAttributeAccessIssue]
        os.environ |= {"NXD_CPU_MODE": "1", "PJRT_DEVICE": "NEURON"}  # the latter only says how ranks are counted
        gloo_xla.take_lists()
    _import_nxd()


def install_beside_xla() -> None:
    """Put those of the vendor's other packages in place, and import NxD; torch_xla is imported, and is the real one."""
    os.environ.setdefault("NXD_LOG_LEVEL", "ERROR")
    sys.meta_path.insert(0, _Finder(None))
    torch.classes.neuron = _AnyClass("neuron")  # pyright: ignore[reportAttributeAccessIssue]
    os.environ |= {"NXD_CPU_MODE": "0"}
    _import_nxd()


def _import_nxd() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("neuronx_distributed")
