"""Measured rows against the cost model: every row predicted from its own layout, and the errors of every data set."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import StatisticsError, correlation, fmean, median
from typing import Any

import numpy as np

from autoshard.calibration.cuttings import run_cuttings, run_request
from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.rows import MeasuredRow, MeasuredRows, measured_rows
from autoshard.cost.calibration import Calibration
from autoshard.cost.sharded import CutBlocks
from autoshard.errors import Fault, InputError
from autoshard.layout.layout import Cutting
from autoshard.plan.build import cut_atoms
from autoshard.plan.plan import Plan, Prediction, rounded
from autoshard.spec.cluster_catalogue import NodeType
from autoshard.spec.kernels import load_kernels
from autoshard.units import GIB

_GIVEN_BACK = ("reserved", "queued")  # parts of memory that an allocator frees when a device is full
LEAST_LAYOUTS = 3  # of a group that says something about an order or a choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A prediction beside its measurement.

    Rows of one ``group`` are choices for the same question, each a ``layout``; ``work`` is what makes their values
    comparable (tokens of a step, because groups are published in which the batch follows the layout; 1 for memory).
    """

    id: str
    group: str
    layout: Hashable
    predicted: float
    measured: float
    low: float | None = None
    high: float | None = None
    work: float = 1.0

    @property
    def error(self) -> float:
        """Relative error: positive where too much was predicted."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """Whether the predictions order the layouts of one group as the measurements do, and what a wrong choice costs."""

    group: str
    num_layouts: int
    spearman: float | None  # None where all predictions, or all measurements, are equal
    regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Relative errors of one quantity over a data set; all but ``bias`` and ``worst`` without their sign."""

    count: int
    num_layouts: int  # distinct ones: rows of one group and layout measured the same thing again
    noise_floor: float | None  # what no prediction from layouts explains; None where none was measured twice
    mape: float
    median: float
    p90: float
    worst: float
    worst_id: str
    bias: float
    coverage: float | None  # share of measurements inside the stated interval; None where none is stated
    spearman: float | None  # mean over the groups that have one
    regret: float | None  # mean over the groups
    worst_regret: float | None
    num_groups: int  # of any number of layouts
    most_layouts: int  # of one of them
    groups: tuple[GroupOrder, ...] = field(repr=False)  # of three layouts or more


def accuracy(rows: Sequence[Compared]) -> Accuracy | None:
    """Sum up predictions and measurements; None where nothing was measured.

    >>> one = Compared(id="a", group="g", layout="tp=1", predicted=1.5, measured=1.0, low=0.5, high=2.0)
    >>> two = Compared(id="b", group="g", layout="tp=2", predicted=1.0, measured=2.0, low=0.5, high=1.5)
    >>> found = accuracy([one, two])
    >>> found.mape, found.bias, found.coverage, found.worst_id, found.regret, found.most_layouts
    (0.5, 0.0, 0.5, 'a', None, 2)
    >>> three = Compared(id="c", group="g", layout="tp=4", predicted=2.0, measured=3.0)
    >>> found = accuracy([one, two, three])
    >>> found.spearman, found.regret
    (0.5, 1.0)
    """
    if not rows:
        return None
    sizes = [abs(row.error) for row in rows]
    worst = max(rows, key=lambda row: abs(row.error))
    members: dict[str, dict[Hashable, list[Compared]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        members[row.group][row.layout].append(row)
    groups: list[GroupOrder] = []
    for group, layouts in members.items():  # a layout that was measured several times counts once, at its median
        predicted = [rounded(median(row.predicted / row.work for row in same)) for same in layouts.values()]
        measured = [median(row.measured / row.work for row in same) for same in layouts.values()]
        if len(layouts) >= LEAST_LAYOUTS:
            rank, cost = spearman(predicted, measured), regret(predicted, measured)
            groups.append(GroupOrder(group=group, num_layouts=len(layouts), spearman=rank, regret=cost))
    again = [[row.measured for row in same] for layouts in members.values() for same in layouts.values()]
    ranks = [group.spearman for group in groups if group.spearman is not None]
    regrets = [group.regret for group in groups]
    inside = [row.low <= row.measured <= row.high for row in rows if row.low is not None and row.high is not None]
    return Accuracy(
        count=len(rows),
        num_layouts=len(again),
        noise_floor=noise_floor(again),
        mape=rounded(fmean(sizes)),
        median=rounded(median(sizes)),
        p90=rounded(float(np.percentile(sizes, 90))),
        worst=rounded(worst.error),
        worst_id=worst.id,
        bias=rounded(fmean(row.error for row in rows)),
        coverage=rounded(fmean(inside)) if inside else None,
        spearman=rounded(fmean(ranks)) if ranks else None,
        regret=rounded(fmean(regrets)) if regrets else None,
        worst_regret=max(regrets, default=None),
        num_groups=len(members),
        most_layouts=max(map(len, members.values())),
        groups=tuple(groups),
    )


def noise_floor(measured: Iterable[Sequence[float]]) -> float | None:
    """Return the mean error that the median of each layout has as its prediction, over layouts measured again.

    Predictions from layouts alone say the same of all measurements of one layout, so hardly any has a smaller error
    on these; None where no layout was measured twice.

    >>> noise_floor([[8.0, 10.0, 12.5], [7.0]])
    0.15
    """
    sizes = [abs(median(same) / value - 1) for same in measured if len(same) > 1 for value in same]
    return rounded(fmean(sizes)) if sizes else None


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the correlation of ranks, equal values sharing the mean of theirs; None where one side is all equal.

    >>> spearman([1.0, 2.0, 3.0, 4.0], [10.0, 30.0, 20.0, 40.0])
    0.8
    >>> spearman([1.0, 1.0], [1.0, 2.0]) is None
    True
    """

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(value) + ordered.count(value) / 2 for value in values]

    try:
        return rounded(correlation(ranks(first), ranks(second)))
    except StatisticsError:
        return None


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return how much more the choice with the smallest prediction measured than the best; equal ones by their mean.

    >>> regret([1.0, 2.0, 3.0], [12.0, 10.0, 20.0])
    0.2
    >>> regret([1.0, 1.0, 3.0], [12.0, 10.0, 20.0])
    0.1
    """
    least = min(predicted)
    picked = [value for guess, value in zip(predicted, measured, strict=True) if guess == least]
    return rounded(fmean(picked) / min(measured) - 1)


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
    fits: bool  # with what the runtime holds, without what an allocator could give back


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingLayouts:
    """How many layouts of a data set are predicted to fit in memory, of those that ran and of those that crashed."""

    num_ran: int
    ran_and_fit: int
    num_crashed: int
    crashed_and_fit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAccuracy:
    """One data set: its rows, and the errors where something was measured."""

    name: str
    num_rows: int
    basis: str  # what the predictions rest on
    step_time: Accuracy | None
    peak_memory: Accuracy | None  # of the fullest pipeline rank
    stage_memory: Accuracy | None  # of every pipeline rank, where each was measured
    fitting: FittingLayouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Data sets with their errors, and all of their rows."""

    sets: tuple[SetAccuracy, ...]
    rows: tuple[PredictedRow, ...]
    left_out: tuple[Fault, ...] = ()  # what is no row, or not one that can be predicted
    num_unread: int = 0  # rows among these that are of whole runs


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """The time of a row, of which set it is, and what was run."""

    set: str
    run: MeasuredRun
    time: Compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """A validation, the times that it compared, and the rows that it read."""

    validation: Validation
    times: tuple[TimedRun, ...]
    rows: MeasuredRows


def validate(path: Path, calibration: Calibration | None = None) -> Validation:
    """Predict every row of all data sets that a path means, but those that cannot be used.

    Without a calibration, each row is predicted with the constants of its own cluster.
    """
    return validated(path, calibration).validation


def validated(path: Path, calibration: Calibration | None = None, own: NodeType | None = None) -> Validated:
    """Predict every row as ``validate`` does, and return its time and run; ``own`` is a cluster of the user's."""
    rows = measured_rows(path)
    questions: dict[str, tuple[MeasuredRun, Calibration]] = {}
    predictions: dict[object, Prediction] = {}  # many rows measure one layout again
    predicted: dict[str, PredictedRow] = {}
    runs: dict[str, MeasuredRun] = {}
    bases: dict[str, dict[str, None]] = {}
    faults: dict[str, InputError] = {}
    for where, row in rows.rows.items():
        try:
            run = run_of(row, own if own and row.platform == own.name else rows.clusters.get(where))
            questions[where] = run, (calibration or run.constants).running(run.framework, run.release)
        except InputError as error:
            faults[where] = error
    cuttings = run_cuttings(questions.values())
    for where, (run, constants) in questions.items():
        try:
            key = run, constants
            prediction = predictions[key] = predictions.get(key) or predicted_run(run, constants, cuttings.get(key))
        except InputError as error:
            faults[where] = error
            continue
        bases.setdefault(rows.sets[where], {})[constants.basis] = None
        runs[where] = run
        predicted[where] = predicted_row(rows.rows[where].id, run, prediction)
    rows = rows.without(faults, path)
    pairs = {name: [(row, predicted[where]) for where, row in rows.rows.items() if rows.sets[where] == name]
             for name in bases}  # fmt: skip
    sets = tuple(_set_accuracy(name, set_pairs, " | ".join(bases[name])) for name, set_pairs in pairs.items())
    validation = Validation(sets=sets, rows=tuple(predicted.values()), left_out=rows.left_out_lines,
                       num_unread=rows.num_unread)  # fmt: skip
    timed = [(where, row, row.step_time_s) for where, row in rows.rows.items()]
    times = [
        TimedRun(set=rows.sets[where], run=runs[where], time=_time_of(row, predicted[where], time_s))
        for where, row, time_s in timed
        if time_s
    ]
    return Validated(validation=validation, times=tuple(times), rows=rows)


def predicted_row(name: str, run: MeasuredRun, prediction: Prediction) -> PredictedRow:
    """Return a prediction as rows compare it: memory is what the program's own counter counts."""
    uncounted = load_kernels(run.kernels).uncounted
    by_stage = tuple(rounded(memory.without(uncounted) / GIB) for memory in prediction.stage_memory)
    fullest_bytes = max(memory.without(_GIVEN_BACK) for memory in prediction.stage_memory)
    return PredictedRow(
        id=name,
        predicted_step_time_s=prediction.step_time_s,
        low_s=prediction.low_s,
        high_s=prediction.high_s,
        predicted_peak_memory_gib=max(by_stage),
        assumed=run.assumed,
        parts=prediction.time_parts,
        predicted_peak_memory_gib_by_stage=by_stage,
        fits=fullest_bytes <= run.cluster.rank_memory_bytes,
    )


def predicted_run(run: MeasuredRun, calibration: Calibration, cutting: Cutting | None = None) -> Prediction:
    """Predict one run with the best cut of every operation that its layout allows, legal or not."""
    prediction = outlined_run(run, calibration, cutting)[0].prediction
    assert prediction, "an outlined plan has its prediction"
    return prediction


def outlined_run(run: MeasuredRun, calibration: Calibration, cutting: Cutting | None = None) -> tuple[Plan, CutBlocks]:
    """Return the plan of a run, and its blocks in their best cut, which is found if it is not stated."""
    engine, request = run.cluster.engine, run_request(run, calibration)
    atoms, cutting = cut_atoms(run.candidate, run.model), cutting or request.cutting(run.candidate, engine)
    blocks = CutBlocks(step=request.question(run.candidate).step, cutting=cutting, atoms=atoms)
    return request.plan(run.candidate, engine, cutting, tables=False), blocks


def _set_accuracy(name: str, rows: list[tuple[MeasuredRow, PredictedRow]], basis: str) -> SetAccuracy:
    def compared(row: MeasuredRow, predicted: float, measured: float, stage: str = "") -> Compared:
        names: dict[str, Any] = {"id": row.id + stage, "group": (row.group or row.id) + stage, "layout": row.layout}
        return Compared(**names, predicted=predicted, measured=measured)

    times, sizes, stages = list[Compared](), list[Compared](), list[Compared]()
    for row, prediction in rows:
        if row.step_time_s:
            times.append(_time_of(row, prediction, row.step_time_s))
        if row.peak_memory_gib:
            sizes.append(compared(row, prediction.predicted_peak_memory_gib, row.peak_memory_gib))
        measured, by_stage = row.peak_memory_gib_by_stage or (), prediction.predicted_peak_memory_gib_by_stage
        if len(measured) == len(by_stage):  # each with the same rank of other layouts; other counts are no stages here
            pairs = enumerate(zip(by_stage, measured, strict=True))
            stages += [compared(row, predicted, size, f", stage {number}") for number, (predicted, size) in pairs]
    compared_rows = {"step_time": times, "peak_memory": sizes, "stage_memory": stages}
    errors = {quantity: accuracy(pairs) for quantity, pairs in compared_rows.items()}
    crashed = [prediction.fits for row, prediction in rows if row.kind == "crashed"]
    ran = [prediction.fits for row, prediction in rows if row.kind != "crashed"]
    fitting = FittingLayouts(
        num_ran=len(ran), ran_and_fit=sum(ran), num_crashed=len(crashed), crashed_and_fit=sum(crashed)
    )
    return SetAccuracy(name=name, num_rows=len(rows), basis=basis, fitting=fitting, **errors)


def _time_of(row: MeasuredRow, prediction: PredictedRow, measured_s: float) -> Compared:
    """Compare times; batch and length are part of the layout."""
    work = (row.global_batch_seqs, row.seq_len)
    return Compared(
        id=row.id, group=row.group or row.id, layout=(*row.layout, *work), work=math.prod(work),
        predicted=prediction.predicted_step_time_s, measured=measured_s, low=prediction.low_s, high=prediction.high_s,
    )  # fmt: skip
