"""Measured rows against the cost model: every row predicted from its own layout, and the errors of every data set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from autoshard.calibration.accuracy import Compared, accuracy
from autoshard.calibration.measured import MeasuredRow, RowsRead, in_lines, rows_in
from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.validation import PredictedRow, SetAccuracy, Unrepresented, Validation
from autoshard.cost.calibration import Calibration, built_in
from autoshard.cost.sharded import CutBlocks
from autoshard.errors import Fault, InputError, require
from autoshard.plan.build import cut_atoms
from autoshard.plan.plan import Plan
from autoshard.plan.prediction import Prediction, rounded
from autoshard.search.planner import Request
from autoshard.spec.kernels import load_kernels
from autoshard.units import GIB

SUFFIX = ".jsonl"
OF_A_RUN = "measured.jsonl"  # in the folder of a run, beside other files
_UNENDED = "holds a run without a measured row, which is written when it ends"
_REMEDY = "Run a plan to its end (autoshard run PLAN), and name the file measured.jsonl in its folder, or its folder"


def validate(path: Path, calibration: Calibration | None = None) -> Validation:
    """Predict every row of all data sets that a path means, but those that cannot be used.

    Without a calibration, each row is predicted with the constants of its own cluster.
    """
    known: dict[MeasuredRun, Prediction] = {}

    def constants(run: MeasuredRun) -> Calibration:
        return calibration or built_in(run.cluster.name)

    def predict(run: MeasuredRun) -> Prediction:
        if run not in known:  # many rows measure one layout again
            known[run] = predicted_run(run, constants(run))
        return known[run]

    sets = row_sets(path)
    runs, faults = _understood(sets)
    sets = without(sets, faults)
    refuse_unusable(path, sets)
    parts: list[Validation] = []
    for name, pairs in ((name, [(row, runs[where]) for where, row in one.rows.items()]) for name, one in sets.items()):
        if pairs:
            bases = dict.fromkeys(constants(run).basis for _, run in pairs if not isinstance(run, str))
            parts.append(_validated(name, pairs, predict, " | ".join(bases) or "nothing: no row could be predicted"))
    return replace(reduce(_joined, parts), left_out=left_out(sets))


def row_sets(path: Path) -> Mapping[str, RowsRead]:
    """Read the data sets of a path: every file is one, all runs of a folder are one.

    Rows of rehearsals and of runs that were too short are used where a file or a run is named that has no others.
    """
    files, sets = row_files(path), dict[str, RowsRead]()
    for file in files:
        name = file.stem if path in (file, file.parent) else path.resolve().name
        sets[name] = sets.get(name, RowsRead()).joined(_rows_in(file, named=path == file))
    if path.is_dir() and all(file.parent.parent == path for file in files):
        name = path.resolve().name
        sets[name] = sets.get(name, RowsRead()).without(_unended(path))
    rows = {where: row for one in sets.values() for where, row in one.rows.items()}
    unfit = {where: InputError.of("", row.unfit) for where, row in rows.items() if row.unfit}
    one_named = files in ([path], [path / OF_A_RUN])
    kept = sets if one_named and len(unfit) == len(rows) else without(sets, unfit)
    refuse_unusable(path, kept)
    return kept


def without(sets: Mapping[str, RowsRead], faults: Mapping[str, InputError]) -> Mapping[str, RowsRead]:
    """Leave rows out of the sets in which they stand."""
    return {
        name: one.without({where: error for where, error in faults.items() if where in one.rows})
        for name, one in sets.items()
    }


def left_out(sets: Mapping[str, RowsRead]) -> tuple[Fault, ...]:
    """Say in lines what is left out of all sets."""
    return in_lines({where: error for one in sets.values() for where, error in one.left_out.items()})


def refuse_unusable(path: Path, sets: Mapping[str, RowsRead]) -> None:
    """Raise an InputError that says what to do if no row is left."""
    if not any(one.rows for one in sets.values()):
        nothing = Fault(where=str(path), message=f"holds no measured row that can be used. {_REMEDY}")
        raise InputError([nothing, *left_out(sets)])


def _rows_in(file: Path, *, named: bool) -> RowsRead:
    try:
        return rows_in(file)
    except InputError as error:
        if named:
            raise
        return RowsRead(left_out={fault.where: InputError.of("", fault.message) for fault in error.faults})


def row_files(path: Path) -> list[Path]:
    """Return the files of rows that are meant by a path: a file, all of a folder, that of a run, those of its runs."""
    if not path.is_dir():
        return [path]
    if (path / OF_A_RUN).is_file():
        return [path / OF_A_RUN]
    require((not _is_run(path), str(path), f"{_UNENDED}. {_REMEDY}"))
    files = sorted(path.glob(f"*{SUFFIX}")) or sorted(path.glob(f"*/{OF_A_RUN}"))
    if not files and not _unended(path):
        raise InputError.of(str(path), f"holds no files of rows: their names end in {SUFFIX}")
    return files


def _unended(path: Path) -> Mapping[str, InputError]:
    """Name the runs of a folder that have no row, which they write in the end."""
    runs = sorted(one for one in path.iterdir() if one.is_dir() and _is_run(one))
    return {str(run): InputError.of("", _UNENDED) for run in runs if not (run / OF_A_RUN).is_file()}


def _is_run(folder: Path) -> bool:
    return (folder / "plan.json").is_file() and (folder / "logs").is_dir()


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
    return request.outline(run.candidate, engine, blocks), blocks


def _understood(sets: Mapping[str, RowsRead]) -> tuple[dict[str, MeasuredRun | str], dict[str, InputError]]:
    """Understand all rows without a look at what was measured; by place what was run, and what is wrong."""
    runs: dict[str, MeasuredRun | str] = {}
    faults: dict[str, InputError] = {}
    for where, row in ((where, row) for one in sets.values() for where, row in one.rows.items()):
        try:
            runs[where] = run_of(row.unmeasured)
        except InputError as error:
            faults[where] = error
    return runs, faults


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    row: MeasuredRow
    said: PredictedRow


def _validated(
    name: str,
    rows: list[tuple[MeasuredRow, MeasuredRun | str]],
    predict: Callable[[MeasuredRun], Prediction],
    basis: str,
) -> Validation:
    answers = [(row, _answer(row.id, run, predict)) for row, run in rows]
    pairs = [_Pair(row=row, said=said) for row, said in answers if isinstance(said, PredictedRow)]
    failed = tuple(said for _, said in answers if isinstance(said, Unrepresented))
    found = SetAccuracy(
        name=name,
        num_rows=len(rows),
        num_unrepresented=len(failed),
        basis=basis,
        step_time=accuracy([_times(pair, pair.row.step_time_s) for pair in pairs if pair.row.step_time_s]),
        peak_memory=accuracy([_sizes(pair, pair.row.peak_memory_gib) for pair in pairs if pair.row.peak_memory_gib]),
        stage_memory=accuracy([one for pair in pairs for one in _stage_sizes(pair)]),
    )
    return Validation(sets=(found,), rows=tuple(pair.said for pair in pairs), unrepresented=failed)


def _answer(
    row_id: str, run: MeasuredRun | str, predict: Callable[[MeasuredRun], Prediction]
) -> PredictedRow | Unrepresented:
    if isinstance(run, str):
        return Unrepresented(id=row_id, reason=run)
    try:
        prediction = predict(run)
    except InputError as error:  # the layout has no shape here
        return Unrepresented(id=row_id, reason="; ".join(map(str, error.faults)))
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


def _times(pair: _Pair, measured: float) -> Compared:
    row, said = pair.row, pair.said
    return Compared(
        id=row.id,
        group=row.group or row.id,
        layout=(*row.layout, row.global_batch_seqs, row.seq_len),
        predicted=said.predicted_step_time_s,
        measured=measured,
        low=said.low_s,
        high=said.high_s,
        work=row.global_batch_seqs * row.seq_len,
    )


def _sizes(pair: _Pair, measured: float) -> Compared:
    row = pair.row
    predicted = pair.said.predicted_peak_memory_gib
    return Compared(id=row.id, group=row.group or row.id, layout=row.layout, predicted=predicted, measured=measured)


def _stage_sizes(pair: _Pair) -> list[Compared]:
    """Compare pipeline ranks one by one, each with the same rank of other layouts; other counts are no stages here."""
    measured, said = pair.row.peak_memory_gib_by_stage or (), pair.said.predicted_peak_memory_gib_by_stage
    if len(measured) != len(said):
        return []
    return [
        Compared(
            id=f"{pair.row.id}, stage {number}",
            group=f"{pair.row.group or pair.row.id}, stage {number}",
            layout=pair.row.layout,
            predicted=predicted,
            measured=size,
        )
        for number, (predicted, size) in enumerate(zip(said, measured, strict=True))
    ]


def _joined(first: Validation, second: Validation) -> Validation:
    return Validation(
        sets=(*first.sets, *second.sets),
        rows=(*first.rows, *second.rows),
        unrepresented=(*first.unrepresented, *second.unrepresented),
    )
