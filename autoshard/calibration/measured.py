"""Measured rows: one published run per line of JSON, with what was run, what it took, and where that is written."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from autoshard.errors import Fault, InputError, require
from autoshard.spec import record
from autoshard.spec.files import json_lines
from autoshard.spec.workload import Documents, Optimizer

Kind = Literal["run", "rehearsal", "short"]  # short: ended, or was stopped, before its times had settled

_COUNTS = ("seq_len", "global_batch_seqs", "micro_batch", "nodes", "chips", "lnc", "tp", "pp", "vp", "cp", "ep", "dp")
_MEASURED = ("step_time_s", "peak_memory_gib")
_TOLD = 3  # faults of a row that is left out
_UNFIT: Mapping[Kind, str] = {
    "rehearsal": "is of a rehearsal, which runs a small model in the place of the plan's",
    "short": "is of a run that ended before its times had settled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One measured run; None is what its publisher does not say."""

    id: str
    kind: Kind | None = None  # a whole run, where a row does not say
    group: str | None = None  # rows that could be chosen between: same model, chips, sequence and batch
    platform: str
    model: str | None = None
    arch: Mapping[str, object] | None = field(default=None, hash=False)
    seq_len: int
    global_batch_seqs: int
    micro_batch: int | None = None
    nodes: int | None = None
    chips: int | None = None
    lnc: int | None = None
    tp: int | None = None
    pp: int | None = None
    vp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    sp: bool | None = None
    recompute: str | None = None
    sharding: str | None = None
    precision: str | None = None
    optimizer: Optimizer | None = None  # AdamW, where a row does not say
    documents: Documents | None = None  # joined, where a row does not say
    pipeline_schedule: str | None = None
    candidate: str | None = None  # the whole layout in text, where it was autoshard that ran; agrees with the columns
    framework: str | None = None
    framework_version: str | None = None
    step_time_s: float | None = None
    peak_memory_gib: float | None = None
    peak_memory_gib_by_stage: tuple[float, ...] | None = None
    confidence: str | None = None
    inferred: Mapping[str, object] | None = field(default=None, hash=False)  # what is not published: field -> from what
    source: Mapping[str, object] | None = field(default=None, hash=False)
    first_seen: str | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no run can have."""
        counts = [(name, getattr(self, name)) for name in _COUNTS]
        measured = [(name, getattr(self, name)) for name in _MEASURED]
        require(
            (bool(self.id.strip()), "id", "must not be empty"),
            (self.nodes is not None or self.chips is not None, "nodes", "missing; say nodes, chips or both"),
            *(
                (value is None or value >= 1, name, f"must be at least 1, or null, not {value}")
                for name, value in counts
            ),
            *(
                (value is None or value > 0, name, f"must be positive, or null, not {value}")
                for name, value in measured
            ),
        )

    @property
    def unmeasured(self) -> "MeasuredRow":
        """The same row without what was measured: all that a prediction may look at."""
        return dataclasses.replace(self, step_time_s=None, peak_memory_gib=None, peak_memory_gib_by_stage=None)

    @property
    def unfit(self) -> str:
        """Say why the row tells nothing about the runs of its group; "" if it does."""
        return _UNFIT.get(self.kind or "run", "")

    @property
    def layout(self) -> tuple[object, ...]:
        """What a planner decides about the run: rows of one group that agree here measured the same choice twice."""
        axes = (self.tp, self.pp, self.vp, self.cp, self.ep, self.dp, self.sp)
        texts = (self.recompute, self.sharding, self.precision, self.pipeline_schedule, self.candidate, self.framework)
        return (*axes, self.micro_batch, *texts)

    @property
    def measured_again(self) -> Hashable:
        """What rows of one layout agree in that were measured at different times; nobody's rows if it has no group."""
        work = (self.global_batch_seqs, self.seq_len, self.optimizer, self.documents)
        return (self.group or self.id, *self.layout, *work)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRead:
    """What files hold: rows, each under its place, and by place why others are left out."""

    rows: Mapping[str, MeasuredRow] = field(default_factory=dict[str, MeasuredRow])
    left_out: Mapping[str, InputError] = field(default_factory=dict[str, InputError])

    def without(self, faults: Mapping[str, InputError]) -> "RowsRead":
        """Return the same with some of the rows left out."""
        rows = {where: row for where, row in self.rows.items() if where not in faults}
        return RowsRead(rows=rows, left_out={**self.left_out, **faults})

    def joined(self, other: "RowsRead") -> "RowsRead":
        """Add what other files hold; a row counts once."""
        known = {row.id: where for where, row in self.rows.items()}
        again = {where: _again(row, known[row.id]) for where, row in other.rows.items() if row.id in known}
        more = other.without(again)
        return RowsRead(rows={**self.rows, **more.rows}, left_out={**self.left_out, **more.left_out})


def read_rows(path: Path) -> Mapping[str, MeasuredRow]:
    """Read a file of measured rows, each under its place; all faults of all lines are reported at once."""
    found = rows_in(path)
    faults = [placed(where, fault) for where, error in found.left_out.items() for fault in error.faults]
    if faults:
        raise InputError(faults)
    return found.rows


def rows_in(path: Path) -> RowsRead:
    """Read what can be read of a file of measured rows: a run that is killed leaves half a line."""
    faults: dict[str, InputError] = {}
    rows: dict[str, MeasuredRow] = {}
    places: dict[str, str] = {}
    for where, data in json_lines(path).items():
        try:
            row = read_row(data)
            if row.id in places:
                raise _again(row, places[row.id])
        except InputError as error:
            faults[where] = error
        else:
            rows[where] = row
            places[row.id] = where
    if not faults and not rows:
        faults[str(path)] = InputError.of("", "holds no rows; write one JSON object per line")
    return RowsRead(rows=rows, left_out=faults)


def _again(row: MeasuredRow, where: str) -> InputError:
    return InputError.of("id", f"{row.id} stands in {where} already")


def in_lines(left_out: Mapping[str, InputError]) -> tuple[Fault, ...]:
    """Say in one line why a row is left out, and of neighbouring lines of a file with the same fault only once.

    >>> for fault in in_lines({f"a.jsonl line {n}": InputError.of("", "is no row") for n in (1, 2, 5)}):
    ...     print(fault)
    a.jsonl lines 1 to 2: is no row
    a.jsonl line 5: is no row
    """
    found: list[tuple[str, int, int, str]] = []
    for where, error in left_out.items():
        file, _, line = where.rpartition(" line ")
        file, number = (file, int(line)) if line.isdigit() else (where, 0)
        says = _shortened(error.faults)
        if found and (found[-1][0], found[-1][2] + 1, found[-1][3]) == (file, number, says):
            found[-1] = (file, found[-1][1], number, says)
        else:
            found.append((file, number, number, says))
    return tuple(Fault(where=_lines(file, first, last), message=says) for file, first, last, says in found)


def _shortened(faults: Sequence[Fault]) -> str:
    rest = f", and {len(faults) - _TOLD} faults more" if len(faults) > _TOLD else ""
    return "; ".join(map(str, faults[:_TOLD])) + rest


def _lines(file: str, first: int, last: int) -> str:
    if first == last:
        return f"{file} line {first}" if first else file
    return f"{file} lines {first} to {last}"


def placed(where: str, fault: Fault) -> Fault:
    """Say in which line a field is wrong."""
    return Fault(where=f"{where}, {fault.where}" if fault.where else where, message=fault.message)


def read_row(data: object) -> MeasuredRow:
    """Read one row, or raise an InputError that names every field at fault.

    >>> read_row({"id": "a", "platform": "trn1", "seq_len": 4096, "global_batch_seqs": 8, "nodes": 1, "tp": 8.0}).tp
    8
    """
    if isinstance(data, InputError):  # no JSON
        raise data
    if not isinstance(data, dict):
        return record.decode(MeasuredRow, data)
    fields = cast(dict[str, object], data)
    if not {"id", "platform"} & fields.keys():
        raise InputError.of("", "is no measured row, which has an id and a platform")
    return record.decode(MeasuredRow, {name: _whole(name, value) for name, value in fields.items()})


def _whole(name: str, value: object) -> object:
    """Read 8.0 as 8 where things are counted: tables in CSV know no whole numbers."""
    return int(value) if name in _COUNTS and isinstance(value, float) and value.is_integer() else value
