"""Freezes the splits of the rows of this repository: ``python -m benchmarks.freeze VERSION DATE``.

A new version is for new rows, or for rows that were wrong: figures under another version do not compare.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

from autoshard.calibration.frozen import FILE, FrozenSet, Splits, by_set, digest
from autoshard.calibration.measured_run import run_of
from autoshard.calibration.rows import MeasuredRow, measured_rows
from autoshard.files import replace_text
from autoshard.spec import record
from benchmarks.departures import DATA, departing_rows


def frozen(version: str, date: str) -> Splits:
    """Return the splits of every timed row: those that the fits of programs leave out, and the models of Trainium."""
    names = dict(_names())
    sets: dict[str, FrozenSet] = {}
    for folder in (DATA, DATA / "sweeps"):
        for name, rows in by_set(measured_rows(folder)).items():
            splits: dict[str, list[str]] = defaultdict(list)
            for row in timed(rows):
                splits[names[row.id]].append(row.id)
            sets[name] = FrozenSet(digest=digest(rows), splits={split: tuple(ids) for split, ids in splits.items()})
    return Splits(version=version, date=date, sets=sets)


def timed(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """Return the rows that say how long a step took."""
    return [row for row in rows if row.step_time_s]


def _names() -> Iterator[tuple[str, str]]:
    for program in departing_rows():
        for sample, apart in zip(program.samples, program.rows.apart, strict=True):
            yield sample.id, f"{program.framework}, {program.cluster}: {apart}"
    for row in timed([*measured_rows(DATA).rows.values()]):
        run = run_of(row)
        if run.cluster.engine == "nxd":
            yield row.id, f"{run.cluster.name}: {run.model.name}"


if __name__ == "__main__":
    text = json.dumps(record.encode(frozen(*sys.argv[1:3])), indent=1) + "\n"
    replace_text(DATA / FILE, text)
