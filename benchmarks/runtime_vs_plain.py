"""What a step of the torch engine takes beside the same step as people write it with PyTorch alone, compiled or not."""

# pyright: basic
# torch's own signatures are only partly typed.

import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autoshard.engine.torch.engine import build
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.run.protocol import EngineMode, Run
from autoshard.runtime.data.batches import synthetic_step
from autoshard.runtime.launch import Placing, launch
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Training
from autoshard.spec.workload import Precision, Workload
from benchmarks import plain_llama
from benchmarks.measure import yardstick_s
from benchmarks.result import Extra, Result

PAIRS, WARM_UP = 11, 2  # the first steps set things up
BAR = 1.0  # of the speed of plain PyTorch, compiled alike
SEQ_LEN, SEQUENCES = 256, 8
# Of the engine and of the plain loop: the first as they are, the second compiled by Inductor.
MODES: Mapping[EngineMode, plain_llama.Wrap] = {"generated": plain_llama.as_it_is, "compiled": torch.compile}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout, the plain step, and a model: that of ``shape``, or one so small that the host is the limit."""

    text: str
    plain: plain_llama.Plain
    small: bool = False

    @property
    def plan(self) -> Plan:
        """The plan."""
        return plan_of(self.text, small() if self.small else shape())


CASES: Mapping[str, Case] = {
    "one": Case(text="tp=1,pp=1,dp=1,mbs=2", plain=plain_llama.one_process),
    "small": Case(text="tp=1,pp=1,dp=1,mbs=2", plain=plain_llama.one_process, small=True),
    "tp2": Case(text="tp=2,pp=1,dp=1,mbs=2", plain=plain_llama.tensor_parallel),
    "pp2": Case(text="tp=1,pp=2,dp=1,mbs=2", plain=plain_llama.pipelined),
    "dp2": Case(text="tp=1,pp=1,dp=2,mbs=2,zero=0", plain=plain_llama.data_parallel),
    "fsdp2": Case(text="tp=1,pp=1,dp=2,mbs=2,zero=3", plain=plain_llama.fully_sharded),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Ratios of the plain loop's seconds to ours, pair by pair: above 1 ours is faster."""

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
    return replace(load_model("tiny-llama"), **sizes, num_layers=4, vocab=32_000)


def small() -> ModelSpec:
    """A Llama whose operations take less time than to call them."""
    sizes: dict[str, Any] = {"hidden": 32, "ffn": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return replace(load_model("tiny-llama"), **sizes, num_layers=16, vocab=256)


def plan_of(text: str, model: ModelSpec | None = None) -> Plan:
    """Return the plan of exactly this layout on this machine, in FP32."""
    candidate, model = Candidate.parse(text), model or shape()
    seq_len = SEQ_LEN if model.hidden > 32 else SEQ_LEN // 4
    workload = Workload(seq_len=seq_len, global_batch=SEQUENCES, precision=Precision.named("fp32"))
    cluster = load_cluster("local", ranks=candidate.num_ranks)
    return plan_at(Request(model=model, cluster=cluster, workload=workload, engines=("torch",)), candidate)


def compared(case: Case, pairs: int = PAIRS) -> Mapping[str, Compared]:
    """Run ours and theirs in the same ranks, turn by turn; by mode and clock the ratios.

    The wall clock takes the slowest rank, the other one adds up the CPU seconds of all.
    """
    plan = case.plan

    def body(_: Callable[[Any], None]) -> tuple[Sequence[float], ...]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        warnings.simplefilter("ignore")  # of torch, about what it compiles
        batches = synthetic_step(plan)
        steps: list[Callable[[], object]] = []
        for mode, wrap in MODES.items():
            with tempfile.TemporaryDirectory() as folder:
                engine = build(plan, Run(folder=Path(folder), training=Training(steps=1), mode=mode))
            other = case.plain(plan.model, plan.workload.seq_len, wrap)
            steps += [lambda engine=engine: engine.step(batches, 3e-4), lambda other=other: other(batches)]
        return tuple([taken for step in steps for taken in spent_s(step)] for _ in range(pairs + WARM_UP))[WARM_UP:]

    with tempfile.TemporaryDirectory() as folder:
        found = launch(None, plan.mesh.num_ranks, body, show=lambda _: None, placing=Placing(folder=Path(folder)))
    return ratios_of(found, MODES)


def ratios_of(seconds: Sequence[Sequence[Any]], modes: Collection[str]) -> Mapping[str, Compared]:
    """Return the ratios by mode and clock, of seconds by pair, mode, side (ours, theirs) and clock."""
    clocks = np.array(seconds).reshape(len(seconds), len(modes), 2, 2)
    ratios = clocks[:, :, 1] / clocks[:, :, 0]
    return {
        f"{mode}_{clock}": Compared(ratios=tuple(ratios[:, number, place].tolist()))
        for number, mode in enumerate(modes)
        for place, clock in enumerate(("wall", "cpu"))
    }


def spent_s(step: Callable[[], object]) -> tuple[float, float]:
    """Return what a step takes by the clock, and of the processors of all ranks together."""
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    step()
    spent = torch.tensor([time.perf_counter() - start_s, time.process_time() - start_cpu_s], dtype=torch.float64)
    slowest = spent.clone()
    dist.all_reduce(spent)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest[0]), float(spent[1])


def run() -> Result:
    """Compare every case on the host; ``on_gpu`` compares large layers on a GPU."""
    return judge({name: compared(case) for name, case in CASES.items()})


def judge(found: Mapping[str, Mapping[str, Compared]]) -> Result:
    """Compiled, by the clock, every case must be as fast as PyTorch's own parts compiled alike."""
    extras: dict[str, Extra] = {}
    for name, modes in found.items():
        for mode, one in modes.items():
            extras[f"{name}_{mode}"] = round(one.median, 3)
        low, high = modes["compiled_wall"].interval
        extras |= {f"{name}_low": round(low, 3), f"{name}_high": round(high, 3)}
    judged = {name: modes["compiled_wall"] for name, modes in found.items()}
    extras |= {"pairs": len(judged["one"].ratios), "yardstick_s": yardstick_s()}
    return Result(
        name="runtime_vs_plain",
        value=round(judged["one"].median, 3),
        unit="of the speed of plain PyTorch",
        bar=BAR,
        holds=all(one.interval[1] >= BAR for one in judged.values()),
        extras=extras,
    )
