"""What GPUs of one machine send each other: collectives by kind and size, and messages between two."""

# pyright: basic
# torch's own signatures are only partly typed.

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime.launch import Placing, launch
from benchmarks.gpu.device import Device, Item, failed, first_line, measured, result, seconds_of
from benchmarks.gpu.profiled import profiled, warm
from benchmarks.gpu.subjects import fitting, ours
from benchmarks.result import Extra, Result

SIZES_MIB = (1, 16, 64, 256, 1024)
_SECONDS = 100.0
_MIB = 2**20

# By kind: the share of the bytes of the whole that each of n ranks sends in a ring, which is what links are judged by.
SENT: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda count: 2 * (count - 1) / count,
    "all_gather": lambda count: (count - 1) / count,
    "reduce_scatter": lambda count: (count - 1) / count,
    "message": lambda _: 1.0,
}


def run(device: Device) -> Iterator[Result]:
    """Measure on all ranks; the first one tells what it finds."""
    found = list[Result]()

    def body(say: Callable[[Any], None]) -> None:
        for one in measured(items_of(device, dist.get_world_size()), device, _SECONDS):
            say(one)

    with tempfile.TemporaryDirectory() as folder:
        placing = Placing(folder=Path(folder), device=device.type)
        try:
            launch(None, device.count, body, show=found.append, placing=placing)
        except Exception as error:
            found.append(failed("links", first_line(error)))
    yield from found


def items_of(device: Device, count: int) -> Sequence[Item]:
    """Return all measurements, the same on every rank."""
    found = [
        Item(
            name=f"{kind}_{size}_mib",
            what=f"{kind} of {size} MiB in bf16 "
            + ("between neighbours" if kind == "message" else f"over {count} GPUs"),
            measure=partial(sending_rate, kind, size, device),
        )
        for kind in SENT
        for size in SIZES_MIB
    ]
    found += [
        Item(
            name=f"hidden_{name}",
            what=f"how much of what {layout} sends in a step is hidden behind what it computes",
            measure=partial(hidden_share, f"hidden_{name}", layout, device),
        )
        for name, layout in layouts_of(count).items()
    ]
    return found


def layouts_of(count: int) -> Mapping[str, str]:
    """Return layouts of all GPUs: buckets of gradients, pieces of weights and gradients, tensors, and layers divided.

    Heads and layers are divided by powers of two, and pipelines have two stages.
    """
    power = 1 << (min(count, 8).bit_length() - 1)
    if power != count:
        return {"buckets": f"tp=1,pp=1,dp={count},zero=1", "zero_3": f"tp=1,pp=1,dp={count},zero=3"}
    pipeline = f"tp=1,pp=2,dp={count // 2}"
    return {
        "buckets": f"tp=1,pp=1,dp={count},zero=1", "zero_3": f"tp=1,pp=1,dp={count},zero=3",
        "tensors": f"tp={count},pp=1,dp=1", "pipeline": pipeline,
    }  # fmt: skip


def sending_rate(kind: str, size_mib: int, device: Device) -> Iterator[Result]:
    """Return the bytes that each rank sends in a second, as a ring sends them."""
    count = dist.get_world_size()
    numbers = count * 64 if device.dry else size_mib * _MIB // 2 // count * count
    whole = torch.ones(numbers, dtype=torch.bfloat16, device=device.torch)
    part = torch.ones(numbers // count, dtype=torch.bfloat16, device=device.torch)
    calls: Mapping[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
        "message": partial(_pass_on, whole, torch.empty_like(whole)),
    }
    time_s = seconds_of(calls[kind], device)
    sent = SENT[kind](count) * whole.nbytes
    yield result(f"{kind}_{size_mib}_mib", sent / time_s / 1e9, "GB/s", {"time_us": time_s * 1e6, "ranks": count})


def _pass_on(sent: torch.Tensor, received: torch.Tensor) -> None:
    """Send to the next rank what the one before sends."""
    rank, count = dist.get_rank(), dist.get_world_size()
    messages = [
        dist.P2POp(dist.isend, sent, (rank + 1) % count),
        dist.P2POp(dist.irecv, received, (rank - 1) % count),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def hidden_share(name: str, layout: str, device: Device) -> Iterator[Result]:
    """Return which share of the time in which the first rank sends is hidden, in a step of some layers of 8B."""
    plan = fitting("llama3-8b", device, 4, layout, sequences=2 * dist.get_world_size())
    subject = ours(plan, "generated" if device.dry else "compiled", device)
    with subject.there(device):
        warm(subject.step, device, 2)
        seen = profiled(subject.step, device)
    extras: dict[str, Extra] = {"step_s": seen.span_s, "sending_s": seen.sending_s, "hidden_s": seen.hidden_s}
    yield result(name, seen.hidden_s / seen.sending_s if seen.sending_s else 0.0, "of its sending time", extras)
