"""Frozen splits: which rows of a data set are left out of a fit together, under a version that others can cite.

A file ``splits.json`` beside rows, or up to two folders above them, names the split of each row, and has a digest of
what the rows say was run and measured. Figures of two cost models compare only where version and digests agree.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from autoshard.calibration.rows import MeasuredRow, MeasuredRows
from autoshard.calibration.validate import TimedRun
from autoshard.errors import inside
from autoshard.spec import record
from autoshard.spec.files import read_data

FILE = "splits.json"
_ABOVE = 2  # folders above rows in which the file may lie
_WORDS = ("inferred", "published", "source", "confidence", "first_seen")  # columns that say nothing of what was run


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSet:
    """The splits of a data set: ids of rows by the name of their split."""

    digest: str
    splits: Mapping[str, tuple[str, ...]] = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The splits of data sets by name, under a version."""

    version: str
    date: str
    sets: Mapping[str, FrozenSet] = field(hash=False)

    @cached_property
    def by_row(self) -> Mapping[tuple[str, str], str]:
        """The split of a row, by data set and id."""
        sets = ((name, frozen_set) for name, frozen_set in self.sets.items())
        return {
            (name, row): split for name, frozen_set in sets for split, rows in frozen_set.splits.items() for row in rows
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRows:
    """Which data sets of some rows are as a version of the splits has them."""

    version: str
    date: str
    same: tuple[str, ...]
    changed: tuple[str, ...]  # figures of these do not compare with those of others

    @classmethod
    def of(cls, splits: Splits, rows: MeasuredRows) -> "FrozenRows":
        """Compare rows with splits; data sets that these do not know are in neither."""
        known_sets = {name: set_rows for name, set_rows in by_set(rows).items() if name in splits.sets}
        same = [name for name, set_rows in known_sets.items() if digest(set_rows) == splits.sets[name].digest]
        changed = [name for name in known_sets if name not in same]
        return cls(version=splits.version, date=splits.date, same=tuple(same), changed=tuple(changed))


def by_set(rows: MeasuredRows) -> Mapping[str, Sequence[MeasuredRow]]:
    """Return rows by their data set."""
    rows_by_set: dict[str, list[MeasuredRow]] = defaultdict(list)
    for where, row in rows.rows.items():
        rows_by_set[rows.sets[where]].append(row)
    return rows_by_set


def digest(rows: Iterable[MeasuredRow]) -> str:
    """Return what changes with anything that rows say was run or measured, and not with their order.

    >>> row = MeasuredRow.read({"id": "a", "platform": "trn1", "seq_len": 4096, "global_batch_seqs": 8, "nodes": 1})
    >>> digest([row]) == digest([replace(row, confidence="A")]) != digest([replace(row, step_time_s=1.0)])
    True
    """
    said = [
        {key: value for key, value in record.encode(row).items() if value is not None and key not in _WORDS}
        for row in sorted(rows, key=lambda measured: measured.id)
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def splits_beside(path: Path) -> Splits | None:
    """Return the splits of the rows in a path, if there is a file of them."""
    folders = [path, *path.absolute().parents[: _ABOVE + path.is_file()]]
    file = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if file is None:
        return None
    with inside(str(file)):
        return record.decode(Splits, read_data(file))


def left_out(rows: Sequence[TimedRun], sets: Collection[str]) -> list[TimedRun]:
    """Return the rows of data sets as the fits that come with autoshard predict them when their split is left out.

    Only data sets of which every row is in a fit, and whose rows are those that were fitted: ``sets``.
    """
    missing = {row.set for row in rows if (fit := row.run.constants.fit) is None or row.time.id not in fit.rows}
    predictions: dict[object, float] = {}  # rows of one layout have one prediction
    predicted_rows: list[TimedRun] = []
    for row in rows:
        fit = row.run.constants.fit
        if row.set in sets and row.set not in missing and fit:
            same = row.time.group, row.run, row.run.framework, row.run.release
            predicted = predictions.setdefault(same, fit.rows[row.time.id] * row.time.measured)
            ratio = predicted / row.time.predicted
            interval = {"low": (row.time.low or 0.0) * ratio, "high": (row.time.high or 0.0) * ratio}
            predicted_rows.append(replace(row, time=replace(row.time, predicted=predicted, **interval)))
    return predicted_rows
