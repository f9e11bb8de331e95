"""How fast a run's state is saved and loaded, beside a plain copy of its files, and how long a step waits for it."""

# pyright: basic
# torch's own signatures are only partly typed.

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autoshard.engine.torch.engine import TorchEngine, build
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Allows, Run, StepReport
from autoshard.run.reports import SavedStep
from autoshard.runtime.checkpoint.files import RunState
from autoshard.runtime.checkpoint.loading import LoadRates, load_checkpoint
from autoshard.runtime.checkpoint.saver import CheckpointLabel, Saver
from autoshard.runtime.checkpoint.shelf import Shelf, folder_of
from autoshard.runtime.checkpoint.storage import Storage
from autoshard.runtime.data.batches import synthetic_step
from autoshard.runtime.launch import Placing, launch
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Checkpointing, Training
from autoshard.spec.workload import Precision, Workload
from benchmarks.measure import forget_pages, plain_copy, yardstick_s
from benchmarks.result import Result

ROUNDS = 7
BAR, BLOCKED_BAR = 0.5, 0.1
PEAK_BAR_MIB = 256  # four boxes of a file, where half of the state is 540


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds until the last rank was done, and the most bytes that a rank held beyond what it held before."""

    copy_s: float
    save_s: float
    load_s: float
    blocked_s: float  # by a save beside a step: in starting it, and before the update
    beside_s: float  # what that save took
    step_s: float  # what that step took
    plain_step_s: float  # what a step takes without a save
    save_peak_bytes: int
    load_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All rounds, and what was saved in each."""

    rounds: tuple[Round, ...]
    state_bytes: int

    def median(self, value: Callable[[Round], float]) -> float:
        """Return the middle one of all rounds."""
        return float(np.median([value(one) for one in self.rounds]))


def shape() -> ModelSpec:
    """A Llama whose weights and moments in FP32 are 1.05 GiB."""
    sizes: dict[str, Any] = {"hidden": 1024, "ffn": 2816, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
    return replace(load_model("tiny-llama"), **sizes, num_layers=8, vocab=2048)


def plan_of(model: ModelSpec, seq_len: int) -> Plan:
    """Return a plan of two ranks, each of which holds half of the masters and moments."""
    workload = Workload(seq_len=seq_len, global_batch=4, precision=Precision.named("fp32"))
    request = Request(model=model, cluster=load_cluster("local", ranks=2), workload=workload, engines=("torch",))
    return plan_at(request, Candidate.parse("tp=1,pp=1,dp=2,mbs=2,zero=1"))


def run() -> Result:
    """Measure 1 GiB."""
    return judge(measured(plan_of(shape(), 256), ROUNDS))


def measured(plan: Plan, rounds: int) -> Measured:
    """Save and load in a folder below this one, since folders for temporary files may lie in memory."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-bandwidth-", dir=Path.cwd()) as name:
        placing = Placing(folder=Path(name))
        return launch(None, 2, lambda _: _Rank(plan, Path(name)).measured(rounds), show=lambda _: None, placing=placing)


class _Rank:
    """A rank with a state, and what saves it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        torch.set_num_threads(1)
        self.plan, self.folder, self.batches = plan, folder, synthetic_step(plan)
        self.engine: TorchEngine = build(plan, Run(folder=folder, training=Training(steps=1)))
        self.shelf = Shelf(storage=Storage.of(str(folder / "checkpoints")))
        keeping = Checkpointing(keep_last=1)
        group, label = dist.new_group(backend="gloo"), CheckpointLabel(model="", candidate="")
        self.saver = Saver(self.shelf, folder / "spool", (), keeping=keeping, group=group, label=label)

    def measured(self, rounds: int) -> Measured:
        """Go through all rounds; one before does not count."""
        self.step()
        self.round(1)
        found = tuple(self.round(number) for number in range(2, rounds + 2))
        own = torch.tensor(sum(piece.memory.nbytes for piece in self.engine.pieces() if piece.saves))
        dist.all_reduce(own)
        return Measured(rounds=found, state_bytes=int(own))

    def step(self, allows: Allows = lambda _: True) -> StepReport:
        """Take a step."""
        return self.engine.step(self.batches, 1e-4, allows)

    def round(self, number: int) -> Round:
        """Save beside a step, save alone, copy what was saved, load it."""
        plain_step_s = _slowest(self.step)
        beside: list[tuple[SavedStep, float]] = []
        step_s = _slowest(lambda: beside.append(self.step_and_save(2 * number)))
        saved, started_s = beside[0]
        with _peak() as save_peak:
            save_s = _slowest(lambda: self.save(2 * number + 1))
        file = self.folder / "checkpoints" / folder_of(2 * number + 1) / f"rank-{dist.get_rank():05}.safetensors"
        forget_pages(file)
        copy_s = _slowest(lambda: plain_copy(file, self.folder / f"copy-{dist.get_rank()}"))
        forget_pages(file)
        with _peak() as load_peak:
            load_s = _slowest(self.load)
        return Round(
            copy_s=copy_s,
            save_s=save_s,
            load_s=load_s,
            blocked_s=_most(saved.blocked_s + started_s),
            beside_s=_most(saved.time_s),
            step_s=step_s,
            plain_step_s=plain_step_s,
            save_peak_bytes=int(_most(save_peak[0])),
            load_peak_bytes=int(_most(load_peak[0])),
        )

    def step_and_save(self, number: int) -> tuple[SavedStep, float]:
        """Start a save, and take a step whose update waits until the state is copied."""
        start_s = time.perf_counter()
        self.saver.begin(_state(number), self.engine.pieces())
        started_s = time.perf_counter() - start_s

        def allows(_: StepReport) -> bool:
            self.saver.wait_copied()
            return True

        self.step(allows)
        return self.saver.ended()[0], started_s

    def save(self, number: int) -> None:
        """Save, and wait for the end."""
        self.saver.begin(_state(number), self.engine.pieces())
        _, failure = self.saver.ended()
        assert not failure, failure

    def load(self) -> None:
        """Load what is there."""
        load_checkpoint(self.shelf, next(self.shelf.usable()), self.engine.pieces(), None, LoadRates.of(self.plan))


def _state(number: int) -> RunState:
    return RunState(step=number, num_updates=number, next_sample=number)


def _slowest(operation: Callable[[], object]) -> float:
    """Return the seconds from when all ranks begin until the last one is done."""
    dist.barrier()
    start_s = time.perf_counter()
    operation()
    return _most(time.perf_counter() - start_s)


def _most(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Append the most bytes that this process holds meanwhile, beyond what it holds now."""
    grown: list[int] = []
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): forget the peak
    before = _resident_bytes("VmRSS")
    yield grown
    grown.append(_resident_bytes("VmHWM") - before)


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def judge(found: Measured) -> Result:
    """Both ways at least half as fast as a plain copy, and a tenth of a save's time at most in which a step waits."""
    save = found.median(lambda one: one.copy_s / one.save_s)
    back = found.median(lambda one: one.copy_s / one.load_s)
    blocked = found.median(lambda one: one.blocked_s / one.beside_s)
    extras = {name: round(found.median(lambda one, name=name: getattr(one, name)), 3) for name in _SECONDS}
    peaks = {name: round(found.median(lambda one, name=name: getattr(one, name)) / 2**20, 1) for name in _PEAKS}
    return Result(
        name="checkpoint_bandwidth",
        value=round(min(save, back), 3),
        unit="of the speed of a plain copy, the slower of save and load",
        bar=BAR,
        holds=save >= BAR and back >= BAR and blocked < BLOCKED_BAR and max(peaks.values()) < PEAK_BAR_MIB,
        extras={
            "save_ratio": round(save, 3),
            "load_ratio": round(back, 3),
            "blocked_share": round(blocked, 3),
            **extras,
            **{name.replace("bytes", "mib"): value for name, value in peaks.items()},
            "state_gib": round(found.state_bytes / 2**30, 3),
            "rounds": len(found.rounds),
            "yardstick_s": yardstick_s(),
        },
    )


_SECONDS: Sequence[str] = ("copy_s", "save_s", "load_s", "blocked_s", "beside_s", "step_s", "plain_step_s")
_PEAKS: Sequence[str] = ("save_peak_bytes", "load_peak_bytes")
