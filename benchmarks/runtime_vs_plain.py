"""What a step of the torch engine costs beside the same step as people write it with PyTorch alone."""

# pyright: basic
# torch's own signatures are only partly typed.

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autoshard.engine.base import Run
from autoshard.engine.torch.engine import build
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.runtime.data.batches import synthetic_step
from autoshard.runtime.launch import Placing, launch
from autoshard.search.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Training
from autoshard.spec.workload import Precision, Workload
from benchmarks import plain_llama
from benchmarks.measure import yardstick_s
from benchmarks.on_gpu import layers_of, speeds
from benchmarks.result import Extra, Result

PAIRS = 15
BAR = 0.97  # of the speed of a plain loop in one process
SEQ_LEN, SEQUENCES = 256, 8
Plain = Callable[[ModelSpec, int], plain_llama.Step]
CASES: Mapping[str, tuple[str, Plain]] = {
    "one": ("tp=1,pp=1,dp=1,mbs=2", plain_llama.one_process),
    "tp2": ("tp=2,pp=1,dp=1,mbs=2", plain_llama.tensor_parallel),
    "pp2": ("tp=1,pp=2,dp=1,mbs=2", plain_llama.pipelined),
    "dp2": ("tp=1,pp=1,dp=2,mbs=2,zero=0", plain_llama.data_parallel),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Ratios of the plain loop's CPU seconds to ours, pair by pair: above 1 ours is cheaper."""

    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return float(np.median(self.ratios))

    @property
    def interval(self) -> tuple[float, float]:
        """Where the median lies with 90% certainty, by resampling the pairs."""
        random = np.random.default_rng(0)
        medians = np.median(random.choice(self.ratios, (2000, len(self.ratios))), axis=1)
        return float(np.quantile(medians, 0.05)), float(np.quantile(medians, 0.95))


def shape() -> ModelSpec:
    """A Llama that is large enough for its products to matter, and small enough for a laptop."""
    sizes: dict[str, Any] = {"hidden": 256, "ffn": 704, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
    return replace(load_model("tiny-llama"), **sizes, num_layers=4, vocab=2048)


def plan_of(text: str) -> Plan:
    """Return the plan of exactly this layout on this machine, in FP32."""
    candidate = Candidate.parse(text)
    workload = Workload(seq_len=SEQ_LEN, global_batch=SEQUENCES, precision=Precision.named("fp32"))
    cluster = load_cluster("local", ranks=candidate.num_ranks)
    return plan_at(Request(model=shape(), cluster=cluster, workload=workload, engines=("torch",)), candidate)


def compared(text: str, plain: Plain, pairs: int = PAIRS) -> Compared:
    """Run both in the same ranks, turn by turn, and count the CPU seconds of all ranks."""
    plan = plan_of(text)

    def body(say: Callable[[Any], None]) -> tuple[float, ...]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            engine = build(plan, Run(folder=Path(folder), training=Training(steps=1)))
        batches, other = synthetic_step(plan), plain(plan.model, SEQ_LEN)
        ratios: list[float] = []
        for number in range(pairs + 2):
            both = [_cpu_s(lambda: engine.step(batches, 3e-4)), _cpu_s(lambda: other(batches))]
            ratios += [both[1] / both[0]] if number > 1 else []  # the first steps set things up
        return tuple(ratios)

    with tempfile.TemporaryDirectory() as folder:
        ratios = launch(None, plan.mesh.num_ranks, body, show=lambda _: None, placing=Placing(folder=Path(folder)))
    return Compared(ratios=ratios)


def _cpu_s(step: Callable[[], object]) -> float:
    """Return what a step takes on all ranks together."""
    dist.barrier()
    start_s = time.process_time()
    step()
    spent = torch.tensor(time.process_time() - start_s, dtype=torch.float64)
    dist.all_reduce(spent)
    return float(spent)


def run() -> Result:
    """Compare every case; on a GPU, if one is there, large layers too."""
    found = judge({name: compared(text, plain) for name, (text, plain) in CASES.items()})
    there = torch.cuda.device_count() > 0
    on_gpu = speeds(layers_of()) if there else {"gpu_speed": None, "gpu_note": "skipped: no GPU here"}
    return replace(found, extras={**found.extras, **on_gpu})


def judge(found: Mapping[str, Compared]) -> Result:
    """One process must come close to a plain loop, ranks must be no slower than PyTorch's own parts."""
    extras: dict[str, Extra] = {}
    for name, one in found.items():
        low, high = one.interval
        extras |= {f"{name}_speed": round(one.median, 3), f"{name}_low": round(low, 3), f"{name}_high": round(high, 3)}
    ranks: Sequence[Compared] = [one for name, one in found.items() if name != "one"]
    extras |= {"pairs": len(found["one"].ratios), "yardstick_s": yardstick_s()}
    return Result(
        name="runtime_vs_plain",
        value=round(found["one"].median, 3),
        unit="of the speed of plain PyTorch",
        bar=BAR,
        holds=found["one"].median >= BAR and all(one.interval[1] >= 1.0 for one in ranks),
        extras=extras,
    )
