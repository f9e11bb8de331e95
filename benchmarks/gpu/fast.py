"""How fast the engine is: layers of 8B's sizes in three modes beside plain PyTorch, in turns; a mixture as well."""

# pyright: basic
# torch's own signatures are only partly typed.

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from autoshard.plan.plan import Plan
from benchmarks.gpu.device import Device, Item, failed, first_line, measured, result, rounded, short, world_of_one
from benchmarks.gpu.profiled import Profiled, marking_blocks, profiled, warm
from benchmarks.gpu.subjects import Subject, fitting, ours, plain
from benchmarks.result import Extra, Result

BAR = 1.0  # of the speed of plain PyTorch
ROUNDS, STEPS = 4, 3
_SECONDS = 200.0
_GIB = 2**30


def run(device: Device) -> Iterator[Result]:
    """Compare a dense model and a mixture."""
    cards = {"llama": ("llama3-8b", ("plain", "compiled", "generated", "literal")),
             "mixtral": ("mixtral-8x7b", ("plain", "compiled"))}  # fmt: skip
    items = [
        Item(
            name=f"fast_{name}",
            what=f"steps of layers of {card}: {', '.join(subjects)}, in turns",
            measure=partial(compared, f"fast_{name}", card, subjects, device),
        )
        for name, (card, subjects) in cards.items()
    ]
    with world_of_one(device):
        yield from measured(items, device, _SECONDS)


def compared(name: str, card: str, subjects: Sequence[str], device: Device) -> Iterator[Result]:
    """Return what each subject takes, and how fast ours is, compiled, beside plain PyTorch."""
    plan = fitting(card, device)
    made, times, peaks, reasons = list[Subject](), dict[str, list[float]](), dict[str, int](), dict[str, str]()
    for one in subjects:
        with _reasoned(reasons, one):
            made.append(plain(plan, device) if one == "plain" else _ours(plan, one, device))
    _in_turns(made, device, times, peaks, reasons)
    for one in made:
        with _reasoned(reasons, one.name):
            if one.name not in reasons:
                yield _of_subject(f"{name}_{one.name}", plan, one, times[one.name], peaks[one.name], device)
    yield from (failed(f"{name}_{one}", reason) for one, reason in reasons.items())
    if {"plain", "compiled"} & reasons.keys():
        return
    ratios = np.array(times["plain"]) / np.array(times["compiled"])
    speed = rounded(float(np.median(ratios)))
    tokens = plan.workload.seq_len * plan.workload.global_batch
    extras: dict[str, Extra] = {
        "compiled_s": float(np.median(times["compiled"])), "plain_s": float(np.median(times["plain"])),
        "tokens": tokens, "slowest_turn": float(ratios.min()), "fastest_turn": float(ratios.max()),
        "model": f"{plan.model.name}, vocabulary {plan.model.vocab}",
    }  # fmt: skip
    yield Result(
        name=name, value=speed, unit="of the speed of plain PyTorch, compiled", bar=BAR, holds=speed >= BAR,
        extras=short(extras),
    )  # fmt: skip


def _ours(plan: Plan, mode: str, device: Device) -> Subject:
    assert mode in ("literal", "generated", "compiled")
    return ours(plan, mode, device)


@contextmanager
def _reasoned(reasons: dict[str, str], name: str) -> Iterator[None]:
    """Note why a subject fails, and go on with the others."""
    try:
        yield
    except Exception as error:  # memory runs out, a compiler fails
        traceback.print_exc()
        reasons[name] = f"{type(error).__name__}: {first_line(error)}"


def _in_turns(
    subjects: Sequence[Subject],
    device: Device,
    times: dict[str, list[float]],
    peaks: dict[str, int],
    reasons: dict[str, str],
) -> None:
    """Note the seconds of all timed steps by subject, and the most memory that each took.

    Turns go forth and back, so that a device that gets slower, because it gets warm, is as slow for all.
    """
    for number in range(1 if device.dry else ROUNDS):
        for one in subjects if number % 2 == 0 else reversed(subjects):
            if one.name in reasons:
                continue
            with _reasoned(reasons, one.name), one.there(device):
                warm(one.step, device, 2 if number == 0 else 1)
                device.peak_bytes()
                for _ in range(1 if device.dry else STEPS):
                    start_s = time.perf_counter()
                    one.step()
                    device.wait()
                    times.setdefault(one.name, []).append(time.perf_counter() - start_s)
                peaks[one.name] = max(device.peak_bytes(), peaks.get(one.name, 0))


def _of_subject(name: str, plan: Plan, one: Subject, times: Sequence[float], peak_bytes: int, device: Device) -> Result:
    step_s = float(np.median(times))
    tokens = plan.workload.seq_len * plan.workload.global_batch
    with one.there(device), marking_blocks():
        warm(one.step, device, 1)
        seen = profiled(one.step, device)
    assert plan.prediction, "a plan that was made has its prediction"
    mfu, peak = plan.prediction.mfu * plan.prediction.step_time_s / step_s, device.peak()
    extras: dict[str, Extra] = {
        "step_s": step_s, "tokens_per_s": tokens / step_s, "mfu": mfu if peak else None,
        "tflops": mfu * peak / 1e12 if peak else None, "peak_gib": peak_bytes / _GIB, **_seen(plan, seen),
    }  # fmt: skip
    return result(name, step_s, "s a step", extras)


def _seen(plan: Plan, seen: Profiled) -> Mapping[str, Extra]:
    """Return what a profile tells: kernels, gaps, and the host's own time."""
    passes = [seen.by_range().get(f"layer.{kind}", (0.0, 0))[1] for kind in "FB"]
    runs = plan.model.num_layers * plan.schedule.num_micro_batches
    return {
        "kernels": len(seen.kernels),
        "kernels_per_layer": sum(passes) / runs if all(passes) else None,  # plain PyTorch is one range
        "gaps": seen.gaps,
        "device_s": seen.busy_s,
        "host_s": seen.host_s,
    }
