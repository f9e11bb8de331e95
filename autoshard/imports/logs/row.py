"""A measured row of a log: what was run, by its configuration, and what it took, by its reports."""

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.calibration.architecture import stated_arch
from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.rows import MeasuredRow
from autoshard.errors import inside
from autoshard.imports.logs.log import TrainingLog
from autoshard.imports.logs.measure import (
    MeasuredPeak,
    MeasuredStep,
    StepWork,
    dropped_words,
    measured_peak,
    measured_step,
)
from autoshard.imports.logs.megatron import FORK
from autoshard.imports.logs.question import is_fork
from autoshard.imports.question import ImportedQuestion
from autoshard.plan.folding import expert_mesh
from autoshard.spec import record
from autoshard.spec.cluster_catalogue import NodeType
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.units import counted, format_seconds

_FRAMEWORKS = {"mcore": "Megatron-Core", "te": "Megatron-LM + TransformerEngine", "megatron": "Megatron-LM"}
_TITLES = {"nxdt": "neuronx-distributed-training", "torchtitan": "torchtitan", "deepspeed": "DeepSpeed",
           "accelerate": "Accelerate"}  # fmt: skip
_SHARDING = {0: "none", 1: "ZeRO-1", 3: "ZeRO-3"}
_DIGITS = 8
_NO_LETTER = re.compile(r"[^a-z0-9.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A log that became a row."""

    log: TrainingLog
    question: ImportedQuestion
    step: MeasuredStep
    peak: MeasuredPeak
    row: MeasuredRow
    run: MeasuredRun  # as the row is read again


def logged_run(
    log: TrainingLog, question: ImportedQuestion, node_type: NodeType | None = None, release: str | None = None
) -> LoggedRun:
    """Measure a log and write its row; ``node_type`` is the file of a cluster that is not in the catalogue."""
    request, layout = question.request, question.candidate
    ranks = request.cluster.num_ranks
    work = StepWork(sequences=request.workload.global_batch, seq_len=request.workload.seq_len, ranks=ranks)
    step, peak = measured_step(log, work), measured_peak(log, layout.pp, ranks)
    row = replace(_row(log, question, step, peak), cluster=record.encode(node_type) if node_type else None,
                  release=release)  # fmt: skip
    with inside(log.file):
        run = run_of(row, node_type)
    return LoggedRun(log=log, question=question, step=step, peak=peak, row=row, run=run)


def framework_of(log: TrainingLog, question: ImportedQuestion) -> str:
    """Name the program of a run as rows do, so that its constants are those of rows of the same program."""
    program = question.run.program.name
    if is_fork(log):
        return FORK
    kernels = question.candidate.kernels or question.request.cluster.kernels
    return _TITLES.get(program) or _FRAMEWORKS.get(kernels, question.run.program.title)


def _row(log: TrainingLog, question: ImportedQuestion, step: MeasuredStep, peak: MeasuredPeak) -> MeasuredRow:
    request, layout = question.request, question.candidate
    model, workload, cluster = request.model, request.workload, request.cluster
    framework = framework_of(log, question)
    axes: dict[str, Any] = {axis: getattr(layout, axis) for axis in ("tp", "pp", "vp", "cp", "dp", "lnc")}
    ep, etp = expert_mesh(layout)
    has_card = model.name in model_names() and load_model(model.name) == model
    group = f"{model.name}-{cluster.name}-{layout.num_ranks}-{workload.seq_len}-{workload.global_batch}"
    printed = f"{question.run.file}{f':{question.run.name}' if question.run.name else ''}"
    config = "printed in the log" if question.run.file == log.file else Path(printed).name
    spread = f"{format_seconds(step.low_s)} to {format_seconds(step.high_s)}"
    by = "; also ".join([step.basis, *step.checks])
    says = f"median of {counted(step.reports, 'report')}, the middle half {spread}; by {by}"
    return MeasuredRow(
        id=_id_of(log, question, framework),
        group=group,
        platform=cluster.name,
        model=model.name,
        arch=None if has_card else stated_arch(model),
        seq_len=workload.seq_len,
        global_batch_seqs=workload.global_batch,
        micro_batch=layout.mbs,
        nodes=cluster.num_nodes,
        chips=cluster.num_nodes * cluster.chips_per_node,
        **axes,
        ep=ep,
        etp=etp if layout.fold else None,
        sp=layout.sequence_parallel,
        sharding=_SHARDING[layout.zero],
        precision="fp16,gradients=fp32" if workload.precision.name == "fp16" else workload.precision.name,
        optimizer=workload.optimizer,
        documents=None if workload.documents == "joined" else workload.documents,
        expert_imbalance=workload.expert_imbalance if model.num_experts else None,
        **workload.router_training,
        candidate=str(layout),
        framework=framework,
        framework_version=log.version,
        kernels=layout.kernels or cluster.kernels,
        step_time_s=step.time_s,
        peak_memory_gib=peak.gib,
        peak_memory_gib_by_stage=peak.by_stage,
        inferred={entry.what: entry.why for entry in question.assumed} or None,
        published={"step_time_s": says} | ({"peak_memory_gib": peak.says} if peak.says else {}),
        source={"log": Path(log.file).name, "steps": dropped_words(log, step), "config": config},
        first_seen=log.date,
    )


def _id_of(log: TrainingLog, question: ImportedQuestion, framework: str) -> str:
    """Name a run so that its log has the same name when it has grown, or lies elsewhere."""
    layout, first = question.candidate, log.steps[0]
    request = question.request
    report = (first.number, first.time_s, first.rate, first.stamp_s)
    work = (request.workload.seq_len, request.workload.global_batch, request.workload.precision.name)
    parts = (framework, request.model.name, request.cluster.name, str(layout), str(work), str(report))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_DIGITS]
    name = f"{framework} {request.model.name} n{layout.num_ranks} tp{layout.tp}pp{layout.pp}cp{layout.cp}"
    return f"{_NO_LETTER.sub('-', name.lower()).strip('-')}-{digest}"
