"""Tiny models in many layouts on all cores, beside one process on the host: losses and norms of every step."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import load
from autoshard.plan.environment import COMPILER_FLAGS
from autoshard.plan.plan import Plan
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster import EngineName
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from benchmarks.result import Result
from benchmarks.trainium.machine import Machine
from benchmarks.trainium.running import QUIET, Ran, run_apart, run_here, run_plan, written

BAR = (
    2e-3  # of losses and norms in FP32: the order of sums and the device's functions differ, a wrong layout is far off
)
STEPS, DRY_STEPS, REHEARSED_RANKS = 3, 2, 4
LIKE_LLAMA: Mapping[str, Any] = {
    "hidden": 512, "ffn": 1024, "num_heads": 32, "num_kv_heads": 8, "head_dim": 16, "num_layers": 4, "vocab": 512,
}  # fmt: skip
_DEEP = {"num_layers": 8}
_MIXTURE = {"num_experts": 4, "experts_per_token": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCase:
    """A layout in terms of a machine: ``{t}`` and ``{T}`` its sizes of tp, ``{p}`` stages, ``{S}`` their layers."""

    text: str
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    workload: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kernels: str | None = "nxd_core"  # NxD's flash attention takes long sequences only


CASES: Mapping[str, LayoutCase] = {
    "tp": LayoutCase(text="tp={T},pp=1"),
    "tp_dp": LayoutCase(text="tp={t},pp=1"),
    "tp_dp_without_sp": LayoutCase(text="tp={t},pp=1,sp=false"),
    "dp": LayoutCase(text="tp=1,pp=1"),
    "dp_without_zero": LayoutCase(text="tp=1,pp=1,zero=0"),
    "tp_dp_without_zero": LayoutCase(text="tp={t},pp=1,zero=0"),
    "bf16": LayoutCase(text="tp={t},pp=1", workload={"precision": Precision.named("bf16")}),
    "flash": LayoutCase(text="tp={t},pp=1", workload={"seq_len": 2048}, kernels=None),
    "experts": LayoutCase(text="tp={t},pp=1", model=_MIXTURE, workload={"expert_capacity": 2.0}),
    "two_sequences": LayoutCase(text="tp={t},pp=1,mbs=2"),
    "full_recompute": LayoutCase(text="tp={t},pp=1,recompute=full"),
    "recompute_of_one_layer": LayoutCase(text="tp={t},pp=1,recompute=full:1"),
    "recompute_of_mlps": LayoutCase(text="tp={t},pp=1,recompute=selective[LlamaMLP]"),
    "recompute_of_attention": LayoutCase(text="tp={t},pp=1,recompute=selective[CoreAttention]"),
    "pp": LayoutCase(text="tp=1,pp={p}", model=_DEEP),
    "tp_pp": LayoutCase(text="tp={t},pp={p}", model=_DEEP),
    "interleaved": LayoutCase(text="tp={t},pp={p},vp=2,schedule=interleaved", model=_DEEP),
    "uneven_stages": LayoutCase(text="tp={t},pp={p},stages={S}", model=_DEEP),
    "sgd": LayoutCase(text="tp={t},pp=1", workload={"optimizer": "sgd"}),
    "tied_embeddings": LayoutCase(text="tp={t},pp=1", model={"tied_embeddings": True}),
    "odd_vocabulary": LayoutCase(text="tp={t},pp=1", model={"vocab": 499}),
    "copies_of_keys": LayoutCase(text="tp={t},pp=1", model={"num_kv_heads": 2}),
    "queries_and_keys_normed": LayoutCase(text="tp={t},pp=1", model={"qk_norm": True}),
}
_BF16_BAR = 2e-2
_OF_LNC_2 = 64  # ranks of a node of trn2
_MOST = 20


def plans(machine: Machine, engine: EngineName = "nxd") -> Mapping[str, Plan]:
    """Return the plans of the first 20 cases that the Rules let a machine of this kind run."""
    node, found = machine.node(), dict[str, Plan]()
    sizes = _tp_sizes(node.num_ranks, node.platform)
    stages = 4 if node.num_ranks >= 4 * sizes[0] else 2  # on trn1 a pipeline of tp 8 takes all of a node
    layers = {4: "1/3/2/2", 2: "3/5"}[stages]
    for name, case in CASES.items():
        text = case.text.format(t=sizes[0], T=sizes[-1], p=stages, S=layers)
        stated = Candidate.parse(f"{text},dp=1")
        dp = node.num_ranks // (stated.tp * stated.pp)
        kernels = f",kernels={case.kernels}" if case.kernels and engine == "nxd" else ""
        try:
            plan = _plan(machine, f"{text},dp={dp}{kernels}" if dp else "", case, engine)
        except InputError:
            continue  # a Rule of this machine, or too few ranks
        if plan not in found.values():  # where there is one size of tp only
            found[name] = plan
    return dict(list(found.items())[:_MOST])


def run(machine: Machine, engine: EngineName = "nxd") -> Iterable[Result]:
    """Run every layout, and one process for each model; yield the largest difference of each."""
    singles = dict[tuple[ModelSpec, Workload], Ran]()
    for name, plan in plans(machine, engine).items():
        title = name if engine == "nxd" else f"native_{name}"
        ran = _gone_through(plan, machine, title) if machine.dry else _on_all(plan, machine, title)
        as_run = load(ran.folder / "plan.json")
        question = (as_run.model, as_run.workload)
        if question not in singles:
            singles[question] = _single(as_run, machine, title)
        yield compared(title, plan, ran, singles[question], dry=machine.dry)


def native(machine: Machine) -> Iterable[Result]:
    """Run the layouts that native PyTorch can."""
    return run(machine, "torch")


def _on_all(plan: Plan, machine: Machine, name: str) -> Ran:
    """Run a layout on all cores; what it takes to compile it is no measure of anything."""
    return run_plan(plan, machine, f"layout_{name}", STEPS, more={COMPILER_FLAGS: "--optlevel=1"})


def _tp_sizes(num_ranks: int, platform: str) -> tuple[int, ...]:
    """Return the sizes of tp that a platform runs, 1 where there are too few ranks for another."""
    known = {"trn1": (8, 32)}.get(platform, (4, 16, 64) if num_ranks <= _OF_LNC_2 else (4, 8, 32))
    return tuple(size for size in known if size <= num_ranks) or (1,)


def _plan(machine: Machine, text: str, case: LayoutCase, engine: EngineName) -> Plan:
    card = replace(load_model("tiny-llama"), name="tiny", max_positions=4096, source="made up", **LIKE_LLAMA)
    usual: dict[str, Any] = {
        "seq_len": 256,
        "precision": Precision.named("fp32"),
        "global_batch": 16 * Candidate.parse(text).dp,
    }
    workload = Workload(**{**usual, **case.workload})
    return machine.plan(text, replace(card, **case.model), workload, engine=engine)


def _gone_through(plan: Plan, machine: Machine, name: str) -> Ran:
    """Rehearse a layout: a smaller one of the same shape, executed by the torch engine on the host."""
    file, folder = written(plan, machine, name), machine.setting.folder / "rehearsed" / name
    return run_here((str(file), "--rehearse", str(REHEARSED_RANKS), "--steps", str(DRY_STEPS)), folder)


def _single(plan: Plan, machine: Machine, name: str) -> Ran:
    """Run the same question in one process of the host."""
    request = Request(
        model=plan.model, cluster=load_cluster("local", ranks=1), workload=plan.workload, engines=("torch",)
    )
    one = plan_at(request, Candidate.parse("tp=1,pp=1,dp=1,mbs=1"))
    file = written(one, machine, f"{name}_single")
    folder, steps = machine.setting.folder / "single" / name, DRY_STEPS if machine.dry else STEPS
    options = (str(file), "--steps", str(steps), *QUIET)
    return run_here(options, folder) if machine.dry else run_apart(options, folder)


def compared(name: str, plan: Plan, ran: Ran, single: Ran, *, dry: bool) -> Result:
    """Return the largest relative difference of a loss or a norm."""
    off = [
        abs(mine[what] - its[what]) / abs(its[what])
        for mine, its in zip(ran.steps, single.steps, strict=True)
        for what in ("loss", "norm")
    ]
    worst, bar = max(off), BAR if plan.workload.precision.weights == "fp32" else _BF16_BAR
    return Result(
        name=f"layout_{name}",
        value=worst,
        unit="of losses and norms, off one process" + (" (rehearsed by the torch engine)" if dry else ""),
        bar=bar,
        holds=math.isfinite(worst) and worst <= bar,
        extras={"candidate": str(plan.candidate), "ran": str(load(ran.folder / "plan.json").candidate)},
    )


def refused(machine: Machine) -> Iterator[str]:
    """Yield the names of the cases that a machine of this kind cannot run, or that are beyond the first 20."""
    runs = plans(machine)
    return (name for name in CASES if name not in runs)
