"""The device of a measurement: a GPU, or the host in a dry run; how it is timed, and its one-rank world."""

# pyright: basic
# torch's own signatures are only partly typed.

import contextlib
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from autoshard.errors import nearest, require
from autoshard.run.protocol import HOST
from autoshard.runtime.here import cluster_here
from autoshard.runtime.machine import CUDA, joined_device
from autoshard.spec.cluster import LOCAL, Cluster
from autoshard.spec.cluster_catalogue import NodeType, cluster_names, load_cluster, load_node_type
from benchmarks.guarded import Setting
from benchmarks.result import Extra, Result

T = TypeVar("T")
PLAYED = "h100-80"  # what a dry run plays
CLUSTER = "cluster.json"  # the file of this machine, beside its findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a part measures on. A dry run goes through tiny sizes on the host, and names the sizes of the device."""

    type: str
    name: str
    node_type: NodeType
    count: int  # how many there are on this machine
    dry: bool
    folder: Path  # where findings are kept

    @property
    def torch(self) -> torch.device:
        """The device as torch names it."""
        return torch.device(self.type)

    def node(self, ranks: int = 1) -> Cluster:
        """Return a node with so many chips."""
        whole = self.node_type.cluster(self.node_type.variants[0], 1)
        return replace(whole, chips_per_node=ranks, placements=())

    def peak(self, dtype: str = "bf16") -> float | None:
        """Return the peak rate of a format, if it is known."""
        return self.node_type.chip.matrix_flops_per_s.get(dtype)

    def wait(self) -> None:
        """Wait until the device has done what it was asked to."""
        if self.type == CUDA:
            torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        """Return the most bytes that tensors took since the last call; 0 on the host."""
        if self.type != CUDA:
            return 0
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found

    def free(self) -> None:
        """Give memory that no tensor uses back to the device."""
        if self.type == CUDA:
            torch.cuda.empty_cache()


def device_of(setting: Setting) -> Device:
    """Return the GPUs of this machine, which are counted and not begun with; in a dry run what stands for them."""
    if setting.dry:
        known = [name for name in cluster_names() if not load_cluster(name).platform and name != LOCAL]
        machine = setting.machine or PLAYED
        require((machine in known, "--machine", f"{machine!r} is no machine with GPUs. {nearest(machine, known)}"))
        return Device(
            type=HOST, name=machine, node_type=load_node_type(machine), count=2, dry=True, folder=setting.folder
        )
    count = torch.cuda.device_count()
    sees_none = f"torch {torch.__version__} sees no GPU here. --dry-run goes through every part without one"
    require((count > 0, "on_gpu", sees_none))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / CLUSTER
        file.write_text(json.dumps(asked_in_a_fork(cluster_here)), encoding="utf-8")
        node_type = load_node_type(str(file))
    return Device(
        type=CUDA, name=node_type.chip.name, node_type=node_type, count=count, dry=False, folder=setting.folder
    )


def asked_in_a_fork(about: Callable[[], T]) -> T:
    """Return what a function says of the GPUs; a fork asks, because later forks of who asks could not use them."""
    if torch.cuda.is_initialized():
        return about()
    with ProcessPoolExecutor(1, get_context("fork")) as fork:
        return fork.submit(about).result()


@contextmanager
def world_of_one(device: Device) -> Iterator[None]:
    """Be the only rank of torch's world, which needs no network."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(joined_device(device.type, 0), store=store, rank=0, world_size=1)
    num_threads = torch.get_num_threads()
    if device.dry:
        torch.set_num_threads(1)  # sizes are tiny, and threads of a busy host wait for each other
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def seconds_of(call: Callable[[], object], device: Device, repeats: int = 20) -> float:
    """Return the median seconds that a device takes for a call, after three that do not count."""
    if device.dry:
        repeats = 1
    for _ in range(1 if device.dry else 3):
        call()
    device.wait()
    if device.type != CUDA:
        return statistics.median(_host_seconds(call) for _ in range(repeats))
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in marks:
        start.record()
        call()
        end.record()
    device.wait()
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in marks)


def _host_seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One measurement of a part: its name, what it measures on a GPU, and the function that does it."""

    name: str
    what: str
    measure: Callable[[], Iterable[Result]]
    means_something_dry: bool = False  # whether its values on the host, of tiny sizes, say anything


def measured(items: Sequence[Item], device: Device, limit_s: float) -> Iterator[Result]:
    """Measure items one after the other: one that fails says why, and so does one for which no time is left."""
    end_s = time.monotonic() + limit_s
    for item in items:
        if time.monotonic() > end_s and not device.dry:
            yield failed(item.name, f"left out: the {limit_s:.0f} s of its part were over")
            continue
        try:
            for found in item.measure():
                yield _dry(found, item) if device.dry else found
        except Exception as error:  # torch raises anything; the next item may do
            traceback.print_exc()
            yield failed(item.name, f"{type(error).__name__}: {first_line(error)}")
        device.free()


def _dry(found: Result, item: Item) -> Result:
    """Return a finding that nobody takes for one of a GPU: without its numbers, with what it would measure."""
    told = {"would_measure": item.what}
    if item.means_something_dry:
        return replace(found, extras={**found.extras, **told})
    return replace(found, value=0.0, unit=f"{found.unit} (dry run)", bar=None, holds=True, extras=told)


def first_line(error: BaseException) -> str:
    """Return the first line that an error says."""
    return next(iter(str(error).splitlines()), "it says nothing")


def failed(name: str, reason: str) -> Result:
    """Return what stands for a measurement that failed."""
    return Result(name=name, value=0.0, unit="failed", bar=None, holds=False, extras={"failed": reason})


def result(name: str, value: float, unit: str, extras: Mapping[str, Extra] | None = None) -> Result:
    """Return a finding without a bar, with four figures."""
    return Result(name=name, value=rounded(value), unit=unit, bar=None, holds=True, extras=short(extras or {}))


def rounded(value: float) -> float:
    """Return a number with four figures.

    >>> rounded(123456.0), rounded(0.00123456)
    (123500.0, 0.001235)
    """
    return float(f"{value:.4g}")


def short(extras: Mapping[str, Extra]) -> dict[str, Extra]:
    """Return the same with four figures each."""
    return {name: rounded(value) if isinstance(value, float) else value for name, value in extras.items()}
