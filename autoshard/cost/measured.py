"""Measured rows: one published run per line of JSON, with what was run, what it took, and where that is written."""

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from autoshard.errors import Fault, InputError, require
from autoshard.spec import record
from autoshard.spec.files import read_json_lines
from autoshard.spec.workload import Optimizer

_COUNTS = ("seq_len", "global_batch_seqs", "micro_batch", "nodes", "chips", "lnc", "tp", "pp", "vp", "cp", "ep", "dp")
_MEASURED = ("step_time_s", "peak_memory_gib")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One measured run; None is what its publisher does not say."""

    id: str
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
    def layout(self) -> tuple[object, ...]:
        """What a planner decides about the run: rows of one group that agree here measured the same choice twice."""
        axes = (self.tp, self.pp, self.vp, self.cp, self.ep, self.dp, self.sp)
        texts = (self.recompute, self.sharding, self.precision, self.pipeline_schedule, self.candidate, self.framework)
        return (*axes, self.micro_batch, *texts)

    @property
    def measured_again(self) -> Hashable:
        """What rows of one layout agree in that were measured at different times; nobody's rows if it has no group."""
        return (self.group or self.id, *self.layout, self.global_batch_seqs, self.seq_len, self.optimizer)


def read_rows(path: Path) -> Mapping[str, MeasuredRow]:
    """Read a file of measured rows, each under its place; all faults of all lines are reported at once."""
    faults: list[Fault] = []
    rows: dict[str, MeasuredRow] = {}
    places: dict[str, str] = {}
    for where, data in read_json_lines(path).items():
        try:
            row = read_row(data)
            if row.id in places:
                raise InputError.of("id", f"{row.id} stands in {places[row.id]} already")
        except InputError as error:
            faults.extend(placed(where, fault) for fault in error.faults)
        else:
            rows[where] = row
            places[row.id] = where
    if not faults and not rows:
        faults.append(Fault(where=str(path), message="holds no rows; write one JSON object per line"))
    if faults:
        raise InputError(faults)
    return rows


def placed(where: str, fault: Fault) -> Fault:
    """Say in which line a field is wrong."""
    return Fault(where=f"{where}, {fault.where}" if fault.where else where, message=fault.message)


def read_row(data: object) -> MeasuredRow:
    """Read one row, or raise an InputError that names every field at fault.

    >>> read_row({"id": "a", "platform": "trn1", "seq_len": 4096, "global_batch_seqs": 8, "nodes": 1, "tp": 8.0}).tp
    8
    """
    if not isinstance(data, dict):
        return record.decode(MeasuredRow, data)
    fields = cast(dict[str, object], data)
    return record.decode(MeasuredRow, {name: _whole(name, value) for name, value in fields.items()})


def _whole(name: str, value: object) -> object:
    """Read 8.0 as 8 where things are counted: tables in CSV know no whole numbers."""
    return int(value) if name in _COUNTS and isinstance(value, float) and value.is_integer() else value
