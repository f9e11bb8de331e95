"""``python -m benchmarks on_gpu``: ten minutes on a GPU that prove, time and profile the torch engine; or a dry run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from autoshard import __version__
from benchmarks.gpu.device import Device, device_of
from benchmarks.guarded import Part, Setting, Suite
from benchmarks.result import Result

BAR = 1.0  # of the speed of plain PyTorch, compiled
_GRACE_MINUTES = 3.0  # after which a part is ended
SPEED = "fast_llama"  # the finding that the bar is about
_PARTS: Sequence[tuple[str, str, float]] = (  # name, what it measures, minutes
    ("right", "gradients of 12 tiny models in three modes and two precisions, beside FP64 on the host", 3.5),
    ("fast", "layers of Llama-3 8B's and Mixtral's sizes, beside plain PyTorch under torch.compile, in turns", 3),
    ("why", "a profile by kernel beside the prediction of every operation; the ten largest differences", 1),
    ("constants", "products by shape, attention by length, memory, starts of kernels, copies to and from the host", 1),
    ("rows", "runs of several layouts as measured rows, and the cluster file of this machine", 2),
)
_LINKS = ("links", "collectives by kind and size, and messages, between all GPUs of this machine", 2)


def parts(setting: Setting) -> Sequence[Part]:
    """Return the parts for this machine; links are measured where there are two GPUs."""
    device = device_of(setting)
    return [_part(*one) for one in (*_PARTS, *([_LINKS] if device.count > 1 else []))]


def _part(name: str, measures: str, minutes: float) -> Part:
    return Part(
        name=name, measures=measures, minutes=minutes, limit_minutes=minutes + _GRACE_MINUTES, run=partial(_run, name)
    )


def _run(name: str, setting: Setting) -> Iterable[Result]:
    """Import a part only where it is measured: another one must not fail with it."""
    run: Callable[[Device], Iterable[Result]] = import_module(f"benchmarks.gpu.{name}").run
    return run(device_of(setting))


def opening(setting: Setting, chosen: Sequence[Part]) -> str:
    """Say what is going to be measured, and on what."""
    device = device_of(setting)
    minutes = sum(part.minutes for part in chosen)
    where = f"{device.count} x {device.name}, autoshard {__version__}, torch {torch.__version__}"
    if setting.dry:
        return f"a dry run: what would be measured on {where}, with tiny sizes on the host; no value is one of a GPU"
    return f"{len(chosen)} parts on {where}: about {minutes:g} minutes"


def closing(setting: Setting, found: Sequence[Mapping[str, Any]]) -> Result:
    """Return the speed beside plain PyTorch, and which findings failed or missed their bars."""
    speed = next((row for row in found if row["name"] == SPEED and "failed" not in row), None)
    failed = [row["name"] for row in found if "failed" in row]
    missed = [row["name"] for row in found if row.get("bar") is not None and not row["holds"]]
    device = device_of(setting)
    return Result(
        name="on_gpu",
        value=float(speed["value"]) if speed else 0.0,
        unit="of the speed of plain PyTorch, compiled" + (" (dry run)" if setting.dry else ""),
        bar=None if setting.dry else BAR,
        holds=not failed and not missed and (setting.dry or speed is not None),
        extras={
            "device": "none: a dry run" if setting.dry else f"{device.count} x {device.name}",
            "versions": f"autoshard {__version__}, torch {torch.__version__}",
            "findings": len(found),
            "failed": ", ".join(failed) or None,
            "missed": ", ".join(missed) or None,
            "folder": str(setting.folder),
        },
    )


SUITE = Suite(name="on_gpu", parts=parts, opening=opening, closing=closing)
