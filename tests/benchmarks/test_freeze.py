"""The committed splits are those of the committed rows, and what the fits leave out together."""

import pytest

from autoshard.calibration.frozen import splits_beside
from autoshard.calibration.rows import measured_rows
from benchmarks.departures import DATA
from benchmarks.freeze import frozen, timed
from tests.benchmarks.departing import departing_rows


@pytest.mark.thorough
def test_every_timed_row_is_in_a_split_that_the_fits_leave_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.freeze.departing_rows", departing_rows)
    committed = splits_beside(DATA)
    assert committed, "a new version of the rows needs `python -m benchmarks.freeze VERSION DATE`"
    assert committed == frozen(committed.version, committed.date)
    for folder in (DATA, DATA / "sweeps"):
        found = measured_rows(folder)
        rows = [(found.sets[where], row.id) for where, row in found.rows.items() if timed([row])]
        assert set(rows) <= set(committed.by_row)
