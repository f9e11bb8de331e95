"""What a module of somebody else is: its package, how a small one is made, and what it is called with."""

import importlib.util
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.errors import InputError

Call = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Where modules come from: what is imported, which version was tried, under which licence, how it is installed."""

    imported: str
    version: str
    licence: str
    install: str
    imports: tuple[str, ...] = ()  # what it needs, and does not ask for when it is installed

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported here."""
        return all(importlib.util.find_spec(name) is not None for name in (self.imported, *self.imports))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignModule:
    """A small module of a package. Products of experts that torch has in FP32 only are tried in FP32."""

    name: str
    package: str
    make: Callable[[], torch.nn.Module]
    inputs: Callable[[], Call]
    dtype: torch.dtype = torch.float64
    training: bool = False  # for those whose dropout is off by default, and whose norms depend on the mode


def _pip(imported: str, version: str, licence: str, name: str = "", imports: tuple[str, ...] = ()) -> Package:
    install = " ".join([f"pip install {name or imported}=={version}", *imports])
    return Package(imported=imported, version=version, licence=licence, install=install, imports=imports)


PACKAGES: Mapping[str, Package] = {
    "timm": _pip("timm", "1.0.31", "Apache-2.0"),
    "vit-pytorch": _pip("vit_pytorch", "1.26.11", "MIT", "vit-pytorch"),
    "x-transformers": _pip("x_transformers", "2.31.10", "MIT", "x-transformers"),
    "diffusers": _pip("diffusers", "0.42.1", "Apache-2.0"),
    "transformers": _pip("transformers", "5.23.0", "Apache-2.0"),
    "torchtitan": _pip("torchtitan", "0.2.2", "BSD-3-Clause", imports=("triton",)),
    "nanoGPT": Package(
        imported="nanoGPT", version="3adf61e", licence="MIT",
        install="git clone https://github.com/karpathy/nanoGPT, and name the folder around it in PYTHONPATH",
    ),
    "minGPT": Package(
        imported="mingpt", version="37baab7", licence="MIT",
        install="git clone https://github.com/karpathy/minGPT, and name that folder in PYTHONPATH",
    ),
    "conformer": _pip("conformer", "0.3.2", "MIT"),
    "performer-pytorch": _pip("performer_pytorch", "1.1.4", "MIT", "performer-pytorch"),
    "g-mlp-pytorch": _pip("g_mlp_pytorch", "0.1.5", "MIT", "g-mlp-pytorch"),
    "mlp-mixer-pytorch": _pip("mlp_mixer_pytorch", "0.3.1", "MIT", "mlp-mixer-pytorch"),
}  # fmt: skip


def absent_of(packages: Mapping[str, Package], *, write: bool) -> list[str]:
    """Return which packages are not installed; to ``write`` a page needs all."""
    absent = [name for name, package in packages.items() if not package.is_installed]
    if write and absent:
        missing = "; ".join(f"{name}: {packages[name].install}" for name in absent)
        raise InputError.of("--write", f"needs all packages. Install {missing}")
    return absent


def made(path: str, *args: Any, **kwargs: Any) -> Callable[[], torch.nn.Module]:
    """Return what calls a class or a function of a package, which is imported only then."""
    return lambda: pkgutil.resolve_name(path)(*args, **kwargs)


def images(size: int = 32, channels: int = 3) -> Callable[[], Call]:
    """Return four images, as the only input."""
    return lambda: [torch.randn(4, channels, size, size)]


def numbers(*shapes: Sequence[int]) -> Callable[[], Call]:
    """Return random numbers of these shapes."""
    return lambda: [torch.randn(*shape) for shape in shapes]


def tokens(count: int = 1, length: int = 16, vocab: int = 64) -> Callable[[], Call]:
    """Return four rows of tokens, ``count`` times."""
    return lambda: [torch.randint(1, vocab, (4, length)) for _ in range(count)]
