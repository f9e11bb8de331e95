"""One stage of ten layers of Llama-3 70B as the nxd engine runs it: compiling, graphs, seconds, memory, prediction."""

import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Compiling, Plan
from autoshard.runtime.compiling import compiled_of
from autoshard.spec.cluster import EngineName
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from benchmarks.result import Extra, Result
from benchmarks.trainium.machine import Machine, told
from benchmarks.trainium.running import dry_counts, run_plan, started, written
from benchmarks.trainium.timed import graphs_beside

LAYERS, VOCAB = 10, 16_384  # a small table of words, so that the layers are what is measured
STEPS, TIMED_STEPS, MICRO_BATCHES = 10, 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCase:
    """How a stage is cut, and by which engine it is run."""

    text: str
    engine: EngineName = "nxd"
    lnc: int | None = None


# The two plans of the 70B that predictions disagree on; on trn2 both ways to join cores, and native PyTorch.
_TRN1 = {
    "tp8": StageCase(text="tp=8,pp=1,dp=4,recompute=full"),
    "tp32": StageCase(text="tp=32,pp=1,dp=1,recompute=full"),
}
_TRN2 = {
    "lnc2": StageCase(text="tp=16,pp=1,dp=4,recompute=full", lnc=2),
    "lnc1": StageCase(text="tp=32,pp=1,dp=4,recompute=full", lnc=1),
    "native": StageCase(text="tp=16,pp=1,dp=4,recompute=full", engine="torch", lnc=2),
}
_CASES: Mapping[str, Mapping[str, StageCase]] = {
    "trn1.32xlarge": _TRN1, "trn1n.32xlarge": _TRN1, "trn2.48xlarge": _TRN2, "trn2u.48xlarge": _TRN2,
}  # fmt: skip
_OF_TWO_CORES = {"tp1": StageCase(text="tp=1,pp=1,dp=2,recompute=full")}


def cases(machine: Machine) -> Mapping[str, StageCase]:
    """Return the cases that a machine holds, and that an engine here can run, by name."""
    few = _OF_TWO_CORES if machine.node().num_ranks == 2 else dict[str, StageCase]()
    known = _CASES.get(machine.node_type.name, few)
    return {name: case for name, case in known.items() if case.engine in machine.engines}


def stage_plan(machine: Machine, case: StageCase) -> Plan:
    """Return the plan of a stage: a model of its layers, alone."""
    model, replicas = stage_model(machine), Candidate.parse(case.text).dp
    workload = Workload(
        seq_len=8192 if model.num_layers == LAYERS else 2048,
        global_batch=MICRO_BATCHES * replicas,
        precision=Precision.named("bf16"),
    )
    return machine.plan(f"{case.text},mbs=1", model, workload, engine=case.engine, lnc=case.lnc)


def stage_model(machine: Machine) -> ModelSpec:
    """Return ten layers of Llama-3 70B; for two cores four layers of 2,048 wide."""
    whole = load_model("llama3-70b")
    if machine.node().num_ranks == 2:
        small = {"hidden": 2048, "ffn": 7168, "num_heads": 16, "num_kv_heads": 4, "num_layers": 4}
        return replace(whole, name="llama3-2048-4-layers", vocab=VOCAB, source="an eighth of Llama-3 70B", **small)
    source = f"ten layers of {whole.source}"
    return replace(whole, name="llama3-70b-10-layers", num_layers=LAYERS, vocab=VOCAB, source=source)


def run(name: str, machine: Machine) -> Iterable[Result]:
    """Compile the stage, run it, and run it again with every graph timed."""
    plan = stage_plan(machine, cases(machine)[name])
    return _gone_through(plan, machine, f"stage_{name}") if machine.dry else _measured(plan, machine, f"stage_{name}")


def _gone_through(plan: Plan, machine: Machine, name: str) -> Iterator[Result]:
    assert plan.prediction, "a plan is predicted before it runs"
    counted = dry_counts(plan, machine, name)
    if compiling := plan.prediction.compiling:
        yield told(f"{name}_compile", compiling.compile_s, None, _graphs(plan, compiling))
    yield told(f"{name}_step", plan.prediction.step_time_s, None, {"candidate": str(plan.candidate)})
    for part, seconds in plan.prediction.time_parts.items():
        yield told(f"{name}_{part}", seconds, None)
    held = counted["ranks"][0]["memory_bytes"]
    parts: dict[str, Extra] = {f"{part}_bytes": sizes["measured"] for part, sizes in held.items()}
    yield _memory(name, plan, None, parts)


def _measured(plan: Plan, machine: Machine, name: str) -> Iterator[Result]:
    assert plan.prediction, "a plan is predicted before it runs"
    prediction = plan.prediction
    if prediction.compiling:
        yield _compiled(plan, prediction.compiling, machine, name)
    ran = run_plan(plan, machine, name, STEPS)
    shares: dict[str, Extra] = {f"predicted_{part}_s": seconds for part, seconds in prediction.time_parts.items()}
    more: dict[str, Extra] = {"low_s": prediction.low_s, "high_s": prediction.high_s, "first_step_s": ran.first_step_s}
    yield told(
        f"{name}_step", prediction.step_time_s, ran.step_time_s, {"candidate": str(plan.candidate), **more, **shares}
    )
    yield _memory(name, plan, ran.device_bytes, {})
    if plan.engine == "nxd":
        yield from _graph_times(plan, machine, name)


def _compiled(plan: Plan, compiling: Compiling, machine: Machine, name: str) -> Result:
    folder, file = machine.setting.folder / "compiled" / name, written(plan, machine, name)
    command = [sys.executable, "-m", "autoshard.cli", "run", str(file), "--compile-only", "--out", str(folder)]
    start_s = time.monotonic()
    compiled = compiled_of(started(command))
    graphs = _graphs(plan, compiling) | {"graphs": compiled.num_graphs if compiled else None}
    return told(f"{name}_compile", compiling.compile_s, time.monotonic() - start_s, graphs)


def _graph_times(plan: Plan, machine: Machine, name: str) -> Iterator[Result]:
    """Run again and wait for every graph; such a run is no measured row."""
    timed = f"{name}_timed"
    ran = run_plan(plan, machine, timed, TIMED_STEPS, program="benchmarks.trainium.timed")
    seconds = dict[str, list[float]]()
    for line in graphs_beside(ran.folder).read_text("utf-8").splitlines():
        graph, taken = json.loads(line)
        seconds.setdefault(graph, []).append(taken)
    for graph, found in seconds.items():
        counts: dict[str, Extra] = {"times": len(found), "first_s": found[0], "least_s": min(found)}
        yield Result(
            name=f"{name}_graph_{graph}", value=statistics.median(found), unit="s", bar=None, holds=True, extras=counts
        )


def _graphs(plan: Plan, compiling: Compiling) -> dict[str, Extra]:
    return {"predicted_graphs": compiling.num_graphs, "ranks": plan.mesh.num_ranks}


def _memory(name: str, plan: Plan, node_bytes: int | None, more: Mapping[str, Extra]) -> Result:
    """Return the memory of a rank beside its prediction; neuron-monitor sums over the node."""
    assert plan.prediction, "a plan is predicted before it runs"
    predicted = plan.prediction.peak_bytes
    value = predicted if node_bytes is None else node_bytes / plan.mesh.num_ranks
    unit = "bytes a rank" + (", predicted" if node_bytes is None else ", by neuron-monitor")
    extras: dict[str, Extra] = {"predicted_bytes": predicted, **more}
    return Result(name=f"{name}_memory", value=float(value), unit=unit, bar=None, holds=True, extras=extras)
