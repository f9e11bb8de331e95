"""A profiled step: its kernels, which part of the host's work started each, and for how long the device rests."""

# pyright: basic
# torch's own signatures are only partly typed.

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity, profile, record_function

from autoshard.engine.torch.block import LiteralRun
from autoshard.engine.torch.generated import GeneratedRun
from autoshard.runtime.machine import CUDA
from benchmarks.gpu.device import Device

RANGE = "autoshard:"  # what marked ranges are called before their own name
_SENDS = ("nccl", "gloo:")  # parts of the names of what libraries send and receive by
_WAITS = ("Synchronize", "cudaMemcpy", "aten::item", "aten::_local_scalar_dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that ran, its seconds, and the innermost marked range that started it; "" for none."""

    name: str
    time_s: float
    range: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """One step."""

    kernels: tuple[Kernel, ...]
    span_s: float  # from the start of its first kernel to the end of its last
    busy_s: float  # in which at least one kernel ran
    host_s: float  # of the host's work, without what it waited for the device
    sending_s: float  # in which at least one kernel sent or received
    hidden_s: float  # of it, in which another kernel computed

    @property
    def gaps(self) -> float:
        """The share of the span in which the device did nothing."""
        return 1 - self.busy_s / self.span_s if self.span_s else 0.0

    def by_range(self) -> Mapping[str, tuple[float, int]]:
        """Return seconds and number of the kernels by marked range."""
        found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for kernel in self.kernels:
            time_s, count = found[kernel.range]
            found[kernel.range] = time_s + kernel.time_s, count + 1
        return found

    def by_name(self) -> list[tuple[str, float, int]]:
        """Return names of kernels with seconds and number, the longest first."""
        found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for kernel in self.kernels:
            time_s, count = found[kernel.name]
            found[kernel.name] = time_s + kernel.time_s, count + 1
        return sorted(((name, *one) for name, one in found.items()), key=lambda one: -one[1])


def profiled(step: Callable[[], object], device: Device) -> Profiled:
    """Profile one step; on the host its operations stand for kernels."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == CUDA else [])]
    with profile(activities=activities) as found:
        step()
        device.wait()
    events: Sequence[Any] = found.events() or ()
    on_host = [one for one in events if one.device_type.name == "CPU"]
    on_device = [one for one in events if one.device_type.name != "CPU" and not one.is_user_annotation]
    if device.type != CUDA:
        on_device = [one for one in on_host if not one.cpu_children and not one.name.startswith(RANGE)]
    spans = sorted(
        (one.time_range.start / 1e6, one.time_range.end / 1e6, any(part in one.name for part in _SENDS))
        for one in on_device
    )
    sending, computing = ([span for span in spans if span[2] == one] for one in (True, False))
    sending_s, computing_s, busy_s = map(covered_s, (sending, computing, spans))
    return Profiled(
        kernels=tuple(_kernels(on_host, device)),
        span_s=max((end for _, end, _ in spans), default=0.0) - (spans[0][0] if spans else 0.0),
        busy_s=busy_s,
        host_s=_host_s(on_host),
        sending_s=sending_s,
        hidden_s=sending_s + computing_s - busy_s,
    )


def covered_s(spans: Sequence[tuple[float, ...]]) -> float:
    """Return the length of what spans cover together, which are sorted by their start.

    >>> covered_s([(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (5.0, 6.0)])
    4.0
    """
    total, last = 0.0, float("-inf")
    for start, end, *_ in spans:
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def _kernels(on_host: Sequence[Any], device: Device) -> Iterator[Kernel]:
    """Yield what each event of the host has started."""
    for event in on_host:
        if device.type == CUDA:
            for kernel in (one for one in event.kernels if not one.name.startswith(RANGE)):  # a range is no kernel
                yield Kernel(name=kernel.name, time_s=kernel.duration / 1e6, range=_range_of(event))
        elif not event.cpu_children and not event.name.startswith(RANGE):
            yield Kernel(name=event.name, time_s=event.self_cpu_time_total / 1e6, range=_range_of(event))


def _range_of(event: Any) -> str:
    while event is not None:
        if event.name.startswith(RANGE):
            return event.name.removeprefix(RANGE)
        event = event.cpu_parent
    return ""


def _host_s(on_host: Sequence[Any]) -> float:
    """Return the time of the host's outermost events, without what waits for the device."""
    spans = sorted((one.time_range.start / 1e6, one.time_range.end / 1e6) for one in on_host)
    waits = sorted(
        (one.time_range.start / 1e6, one.time_range.end / 1e6)
        for one in on_host
        if any(part in one.name for part in _WAITS)
    )
    whole_s = spans[-1][1] - spans[0][0] if spans else 0.0
    return max(0.0, whole_s - covered_s(waits))


@contextmanager
def marking_blocks() -> Iterator[None]:
    """Mark while it lasts what each block does in each pass: ``layer.F``, ``layer.B``."""

    def marked(call: Callable[..., Any], kind: Callable[..., str]) -> Callable[..., Any]:
        def run(self: Any, *arguments: Any) -> Any:
            with record_function(f"{RANGE}{self.parts.block.kind}.{kind(*arguments)}"):
                return call(self, *arguments)

        return run

    with ExitStack() as stack:
        for one in (LiteralRun, GeneratedRun):
            forward = marked(one.forward, lambda *_: "F")
            backward = marked(one.backward, lambda kind, *_: kind)
            stack.enter_context(mock.patch.multiple(one, forward=forward, backward=backward))
        yield


def warm(step: Callable[[], object], device: Device, count: int) -> None:
    """Take steps that do not count."""
    for _ in range(count):
        step()
    device.wait()


def is_product(kernel: str) -> bool:
    """Whether a kernel multiplies matrices or attends, by the names that libraries give theirs.

    >>> is_product("nvjet_tst_256x128_64x4"), is_product("triton_poi_fused_add_0"), is_product("flash_fwd_kernel")
    (True, False, True)
    """
    name = kernel.lower()
    words = ("gemm", "nvjet", "cutlass", "cublas", "flash", "attention", "aten::mm", "aten::addmm", "aten::bmm")
    return not name.startswith("triton") and any(word in name for word in words)
