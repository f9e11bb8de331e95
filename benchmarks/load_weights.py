"""How long eight ranks take to load weights from storage that gives all of them 100 MB/s together.

Storage is a token bucket that the ranks share: every byte that a rank asks for costs its time, whatever caches hold.
Each layout loads from a Hugging Face folder (``hf``), from a checkpoint that its own plan has cut (``own``), and from
one that no plan has cut: every rank reads what it needs (``each``), or each box is read once and sent (``shared``).
"""

# pyright: basic
# torch's own signatures are only partly typed.

import mmap
import multiprocessing
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch
import torch.distributed as dist

from autoshard.engine.hf_names import HfNames
from autoshard.engine.torch.engine import build
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Run
from autoshard.runtime.checkpoint.loading import LoadRates, load_checkpoint
from autoshard.runtime.checkpoint.shelf import Shelf
from autoshard.runtime.checkpoint.storage import Storage
from autoshard.runtime.convert.converting import Conversion, convert, read_weights
from autoshard.runtime.convert.hf import write_json
from autoshard.runtime.convert.stored import WeightSource
from autoshard.runtime.launch import Placing, launch
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.hf.writing import config_of
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Training
from autoshard.spec.workload import Precision, Workload
from benchmarks.result import Result

NUM_RANKS = 8
STORAGE_BYTES_PER_S = 100e6
BAR = 0.5  # of the time in which every rank reads what it needs, where none holds what another does
LAYOUTS = ("dp=8,zero=1", "dp=8,zero=0", "dp=8,zero=3", "tp=8", "tp=2,dp=4,zero=1", "tp=2,pp=2,dp=2,zero=1")
EACH = LoadRates(storage_bytes_per_s=1e18, network_bytes_per_s=1.0)
SHARED = LoadRates(storage_bytes_per_s=1.0, network_bytes_per_s=1e18)


class Bucket:
    """Gives bytes to all processes that are forked from this one, at one rate together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._lock, self._memory = bytes_per_s, multiprocessing.Lock(), mmap.mmap(-1, 16)

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes have come."""
        with self._lock:
            free_s, total = struct.unpack("dd", self._memory[:])
            until_s = max(time.monotonic(), free_s) + num_bytes / self._bytes_per_s
            self._memory[:] = struct.pack("dd", until_s, total + num_bytes)
        time.sleep(max(0.0, until_s - time.monotonic()))

    @property
    def taken_bytes(self) -> float:
        """How many bytes were taken so far."""
        return struct.unpack("dd", self._memory[:])[1]


class SlowSystem:
    """A file system whose files are read through a bucket."""

    def __init__(self, system: Any, bucket: Bucket) -> None:
        self._system, self._bucket = system, bucket

    def __getattr__(self, name: str) -> Any:
        """Do all but open as the system does."""
        return getattr(self._system, name)

    @contextmanager
    def open(self, path: str, mode: str, **_: Any) -> Iterator[Any]:
        """Open a file of which every byte that is read takes its time."""
        with self._system.open(path, mode) as file:
            yield _SlowFile(file, self._bucket)


@dataclass(frozen=True, slots=True)
class _SlowFile:
    file: Any
    bucket: Bucket

    def seek(self, place: int) -> None:
        self.file.seek(place)

    def readinto(self, memory: Any) -> int:
        self.bucket.take(len(memory))
        return self.file.readinto(memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """How long a load took until the last rank was done, and what storage gave, in multiples of the weights."""

    time_s: float
    times: float


def shape() -> ModelSpec:
    """A Llama whose weights in FP32 are 71 MB."""
    sizes: dict[str, Any] = {"hidden": 512, "ffn": 1408, "num_heads": 16, "num_kv_heads": 8, "head_dim": 32}
    return replace(load_model("tiny-llama"), **sizes, num_layers=4, vocab=4096)


def plan_of(text: str, model: ModelSpec) -> Plan:
    """Return a plan of eight ranks."""
    axes = dict.fromkeys(("tp", "pp", "dp"), "1") | dict(part.split("=") for part in text.split(","))
    workload = Workload(seq_len=64, global_batch=8, precision=Precision.named("fp32"))
    request = Request(
        model=model, cluster=load_cluster("local", ranks=NUM_RANKS), workload=workload, engines=("torch",)
    )
    return plan_at(request, Candidate.parse(",".join(f"{key}={value}" for key, value in axes.items())))


def run() -> Result:
    """Measure all layouts."""
    model, found = shape(), dict[str, Mapping[str, Loaded]]()
    with tempfile.TemporaryDirectory(prefix="load-weights-", dir=Path.cwd()) as name:
        first = written(Path(name) / "hf", model)
        for text in LAYOUTS:
            found[text] = measured(plan_of(text, model), first, Path(name) / text)
    ratios = [ways["shared"].time_s / ways["each"].time_s for ways in found.values()]
    return Result(
        name="load_weights",
        value=round(min(ratios), 3),
        unit="of the time in which every rank reads what it needs",
        bar=BAR,
        holds=min(ratios) <= BAR,
        extras={
            f"{text} {way} {unit}": value
            for text, ways in found.items()
            for way, one in ways.items()
            for unit, value in (("s", round(one.time_s, 2)), ("times", round(one.times, 2)))
        },
    )


def written(folder: Path, model: ModelSpec) -> Path:
    """Write a Hugging Face folder of drawn weights."""
    folder.mkdir()
    config = config_of(model)
    write_json(folder / "config.json", config)
    names, draw = HfNames.of(str(config["model_type"]), model), torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(size, generator=draw) for name, size in names.shapes.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measured(plan: Plan, first: Path, folder: Path) -> Mapping[str, Loaded]:
    """Load in all ways, each of which fills the same numbers."""
    for name, cut in (("its own", plan), ("whole", None)):
        options: dict[str, Any] = dict.fromkeys(("model", "dtype", "tokenizer", "qkv"))
        conversion = Conversion(source=first, target=folder / name, plan=cut, form="autoshard", workers=2, **options)
        convert(conversion, lambda _: None)
    bucket, placing = Bucket(STORAGE_BYTES_PER_S), Placing(folder=folder / "run")
    (folder / "run").mkdir()

    def body(_: Any) -> Mapping[str, Loaded]:
        return _on_rank(plan, first, folder, bucket)

    return launch(None, NUM_RANKS, body, show=lambda _: None, placing=placing)


def _on_rank(plan: Plan, first: Path, folder: Path, bucket: Bucket) -> Mapping[str, Loaded]:
    torch.set_num_threads(1)
    engine = build(plan, Run(folder=folder / "run", training=Training(steps=1)))
    pieces = [piece for piece in engine.pieces() if piece.part == "weight"]
    group: Any = dist.new_group(backend="gloo")
    weights_bytes = 4 * plan.model.num_parameters

    def barrier() -> None:
        dist.all_reduce(torch.zeros(1), group=group)

    fill = WeightSource.fill

    def slow_fill(self: WeightSource, memory: torch.Tensor, tensor: str, offsets: Sequence[int]) -> None:
        bucket.take(memory.numel() * self.dtypes[tensor].itemsize)
        fill(self, memory, tensor, offsets)

    def from_hf() -> None:
        with patch.object(WeightSource, "fill", slow_fill):
            read_weights(first, plan, pieces)

    def from_checkpoint(name: str, rates: LoadRates) -> Callable[[], None]:
        local = Storage.of(str(folder / name))
        index = Shelf(storage=local).open(0)
        shelf = Shelf(storage=Storage(SlowSystem(local.system, bucket), local.root))

        def operation() -> None:
            load_checkpoint(shelf, index, pieces, group, rates)

        return operation

    ways = {
        "hf": from_hf,
        "own": from_checkpoint("its own", EACH),
        "each": from_checkpoint("whole", EACH),
        "shared": from_checkpoint("whole", SHARED),
    }
    found, sums = dict[str, Loaded](), set[int]()
    for way, operation in ways.items():
        for piece in pieces:
            piece.memory.fill_(float("nan"))
        barrier()
        begin_s, before = time.monotonic(), bucket.taken_bytes
        operation()
        barrier()
        found[way] = Loaded(time_s=time.monotonic() - begin_s, times=(bucket.taken_bytes - before) / weights_bytes)
        barrier()
        sums.add(zlib.crc32(b"".join(piece.memory.contiguous().numpy().tobytes() for piece in pieces if piece.reads)))
    assert len(sums) == 1, "every way fills the same bits"
    return found
