"""Runs that become measured rows: layers of Llama-3 8B in several layouts, which ``autoshard calibrate`` reads."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autoshard.calibration.contribution import contribution
from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from autoshard.runtime.here import installed_packages, machine_words, node_type_here
from autoshard.spec.cluster import EngineName
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from benchmarks.result import Extra, Result
from benchmarks.trainium.machine import Machine, told
from benchmarks.trainium.running import RUNS, dry_counts, run_plan

STEPS, LAYERS = 10, 8
_TWO = 2  # cores of a single chip of trn1
CONTRIBUTION = "contribution.jsonl"
# Layouts by the ranks of a node; micro-batches are 4 a replica. Each is as long as the others differ in: tp, recompute,
# the size of a micro-batch, a pipeline.
LAYOUTS: Mapping[int, Mapping[str, str]] = {
    32: {
        "tp8": "tp=8,pp=1,dp=4,mbs=1,recompute=full", "tp32": "tp=32,pp=1,dp=1,mbs=1,recompute=full",
        "tp8_pp4": "tp=8,pp=4,dp=1,mbs=1,recompute=full", "tp32_mbs2": "tp=32,pp=1,dp=1,mbs=2,recompute=full",
        "tp32_kept": "tp=32,pp=1,dp=1,mbs=1",
    },
    64: {
        "tp4": "tp=4,pp=1,dp=16,mbs=1,recompute=full", "tp16": "tp=16,pp=1,dp=4,mbs=1,recompute=full",
        "tp16_kept": "tp=16,pp=1,dp=4,mbs=1", "tp16_pp4": "tp=16,pp=4,dp=1,mbs=1,recompute=full",
    },
    4: {
        "tp4": "tp=4,pp=1,dp=1,mbs=1,recompute=full", "dp4": "tp=1,pp=1,dp=4,mbs=1,recompute=full",
        "tp4_mbs2": "tp=4,pp=1,dp=1,mbs=2,recompute=full",
    },
    2: {
        "dp2": "tp=1,pp=1,dp=2,mbs=1,recompute=full", "pp2": "tp=1,pp=2,dp=1,mbs=1,recompute=full",
        "dp2_mbs2": "tp=1,pp=1,dp=2,mbs=2,recompute=full",
    },
}  # fmt: skip


def plans(machine: Machine, engine: EngineName = "nxd") -> Mapping[str, Plan]:
    """Return the plans of a machine's rows; those that its Rules refuse are left out."""
    node, found = machine.node(), dict[str, Plan]()
    model = _model(node.num_ranks)
    for name, text in LAYOUTS.get(node.num_ranks, {}).items():
        sizes = dict(part.split("=", 1) for part in text.split(","))
        batch = 4 * int(sizes["dp"]) * int(sizes["mbs"])
        seq_len = 2048 if node.num_ranks == _TWO else 4096
        workload = Workload(seq_len=seq_len, global_batch=batch, precision=Precision.named("bf16"))
        try:
            found[name] = machine.plan(text, model, workload, engine=engine)
        except InputError:
            continue
    return found


def run(machine: Machine) -> Iterable[Result]:
    """Run each plan as a user does; at the end all rows of the folder as a file for others."""
    engine = machine.engines[0]
    for name, plan in plans(machine, engine).items():
        assert plan.prediction, "a plan is predicted before it runs"
        layout: dict[str, Extra] = {"candidate": str(plan.candidate), "model": plan.model.name, "engine": engine}
        if machine.dry:
            counted = dry_counts(plan, machine, f"row_{name}")
            layout["saved_bytes"] = counted["ranks"][0]["memory_bytes"]["saved"]["measured"]
            yield told(f"row_{name}", plan.prediction.step_time_s, None, layout)
        else:
            ran = run_plan(plan, machine, f"row_{name}", STEPS)
            yield told(f"row_{name}", plan.prediction.step_time_s, ran.step_time_s, layout)
    if not machine.dry:
        yield from _contributed(machine)


def _contributed(machine: Machine) -> Iterator[Result]:
    """Write all rows that this folder has, those of stages included, into one file for others."""
    found = contribution(machine.setting.folder / RUNS, machine_words(), installed_packages(), node_type_here())
    file = machine.setting.folder / CONTRIBUTION
    file.write_text(found.text, encoding="utf-8")
    extras: dict[str, Extra] = {"file": CONTRIBUTION, "left_out": len(found.read.left_out)}
    yield Result(name="rows", value=len(found.rows), unit="rows", bar=None, holds=True, extras=extras)


def _model(num_ranks: int) -> ModelSpec:
    whole = load_model("llama3-8b")
    if num_ranks == _TWO:
        small = {"hidden": 2048, "ffn": 7168, "num_heads": 16, "num_kv_heads": 4, "num_layers": 4, "vocab": 16_384}
        return replace(whole, name="llama3-2048-4-layers", source="half as wide as Llama-3 8B", **small)
    name, source = f"llama3-8b-{LAYERS}-layers", f"{LAYERS} layers of {whole.source}"
    return replace(whole, name=name, num_layers=LAYERS, source=source)
