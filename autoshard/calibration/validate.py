"""Measured rows against the cost model: every row predicted from its own layout, and the errors of every data set."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoshard.calibration.accuracy import Accuracy, Compared, accuracy
from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.rows import MeasuredRow, measured_rows
from autoshard.cost.calibration import Calibration, built_in
from autoshard.cost.sharded import CutBlocks
from autoshard.errors import Fault, InputError
from autoshard.plan.build import cut_atoms
from autoshard.plan.plan import Plan, Prediction, rounded
from autoshard.search.request import Request
from autoshard.spec.kernels import load_kernels
from autoshard.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRow:
    """The prediction of one row, from its own layout alone; ``assumed`` says what the row leaves open, by column.

    Memory is what the framework's own peak counter counts, which may leave out the runtime's share.
    """

    id: str
    predicted_step_time_s: float
    low_s: float
    high_s: float
    predicted_peak_memory_gib: float
    assumed: Mapping[str, str] = field(hash=False)
    parts: Mapping[str, float] = field(hash=False)  # seconds; they add up to the step
    predicted_peak_memory_gib_by_stage: tuple[float, ...]  # by pipeline rank


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAccuracy:
    """One data set: its rows, and the errors where something was measured."""

    name: str
    num_rows: int
    basis: str  # what the predictions rest on
    step_time: Accuracy | None
    peak_memory: Accuracy | None  # of the fullest pipeline rank
    stage_memory: Accuracy | None  # of every pipeline rank, where each was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Data sets with their errors, and all of their rows."""

    sets: tuple[SetAccuracy, ...]
    rows: tuple[PredictedRow, ...]
    left_out: tuple[Fault, ...] = ()  # what is no row, or not one that can be predicted


def validate(path: Path, calibration: Calibration | None = None) -> Validation:
    """Predict every row of all data sets that a path means, but those that cannot be used.

    Without a calibration, each row is predicted with the constants of its own cluster.
    """
    rows = measured_rows(path)
    known: dict[MeasuredRun, Prediction] = {}  # many rows measure one layout again
    predicted: dict[str, PredictedRow] = {}
    bases: dict[str, dict[str, None]] = {}
    faults: dict[str, InputError] = {}
    for where, row in rows.rows.items():
        try:
            run = run_of(row)
            constants = calibration or built_in(run.cluster.name)
            if run not in known:
                known[run] = predicted_run(run, constants)
        except InputError as error:
            faults[where] = error
        else:
            predicted[where] = _predicted_row(row.id, run, known[run])
            bases.setdefault(rows.sets[where], {})[constants.basis] = None
    rows = rows.without(faults)
    rows.refuse_none(path)
    pairs = {name: [(row, predicted[where]) for where, row in rows.rows.items() if rows.sets[where] == name]
             for name in bases}  # fmt: skip
    sets = tuple(_set_accuracy(name, own, " | ".join(bases[name])) for name, own in pairs.items())
    return Validation(sets=sets, rows=tuple(predicted.values()), left_out=rows.left_out_lines)


def predicted_run(run: MeasuredRun, calibration: Calibration) -> Prediction:
    """Predict one run with the best cut of every operation that its layout allows, legal or not."""
    prediction = outlined_run(run, calibration)[0].prediction
    assert prediction, "an outlined plan has its prediction"
    return prediction


def outlined_run(run: MeasuredRun, calibration: Calibration) -> tuple[Plan, CutBlocks]:
    """Return the plan of a run, and its blocks in their best cut."""
    engine = run.cluster.engine
    request = Request(
        model=run.model, cluster=run.cluster, workload=run.workload, engines=(engine,), calibration=calibration
    )
    atoms, cutting = cut_atoms(run.candidate, run.model), request.cutting(run.candidate, engine)
    blocks = CutBlocks(step=request.question(run.candidate).step, cutting=cutting, atoms=atoms)
    return request.plan(run.candidate, engine, cutting, tables=False), blocks


def _predicted_row(row_id: str, run: MeasuredRun, prediction: Prediction) -> PredictedRow:
    uncounted = load_kernels(run.candidate.kernels or run.cluster.kernels).uncounted
    by_stage = tuple(rounded(memory.without(uncounted) / GIB) for memory in prediction.stage_memory)
    return PredictedRow(
        id=row_id,
        predicted_step_time_s=prediction.step_time_s,
        low_s=prediction.low_s,
        high_s=prediction.high_s,
        predicted_peak_memory_gib=max(by_stage),
        assumed=run.assumed,
        parts=prediction.time_parts,
        predicted_peak_memory_gib_by_stage=by_stage,
    )


def _set_accuracy(name: str, rows: list[tuple[MeasuredRow, PredictedRow]], basis: str) -> SetAccuracy:
    times, sizes, stages = list[Compared](), list[Compared](), list[Compared]()
    for row, prediction in rows:
        names: dict[str, Any] = {"id": row.id, "group": row.group or row.id, "layout": row.layout}
        if row.step_time_s:
            entry = Compared(
                **dict(names, layout=(*row.layout, row.global_batch_seqs, row.seq_len)),
                predicted=prediction.predicted_step_time_s,
                measured=row.step_time_s,
                low=prediction.low_s,
                high=prediction.high_s,
                work=row.global_batch_seqs * row.seq_len,
            )
            times.append(entry)
        if row.peak_memory_gib:
            predicted = prediction.predicted_peak_memory_gib
            sizes.append(Compared(**names, predicted=predicted, measured=row.peak_memory_gib))
        measured, by_stage = row.peak_memory_gib_by_stage or (), prediction.predicted_peak_memory_gib_by_stage
        if len(measured) == len(by_stage):  # each with the same rank of other layouts; other counts are no stages here
            for number, (size, predicted) in enumerate(zip(measured, by_stage, strict=True)):
                own: dict[str, Any] = {key: f"{names[key]}, stage {number}" for key in ("id", "group")}
                stages.append(Compared(**{**names, **own}, predicted=predicted, measured=size))
    return SetAccuracy(
        name=name,
        num_rows=len(rows),
        basis=basis,
        step_time=accuracy(times),
        peak_memory=accuracy(sizes),
        stage_memory=accuracy(stages),
    )
