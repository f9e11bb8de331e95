"""Frozen splits: what counts as the same rows, and what is predicted of a row whose split was left out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from autoshard.calibration.choices import LEFT_OUT, PLANNER
from autoshard.calibration.frozen import FILE, FrozenRows, left_out, splits_beside
from autoshard.calibration.rows import measured_rows
from autoshard.calibration.validate import validated
from autoshard.cli import main
from tests.calibration.measured_cases import DATA, TRAINIUM
from tests.slower import rest_is_slow

SWEEP = DATA / "sweeps" / "internevo_a100.jsonl"


def copied(folder: Path, change: dict[str, Any]) -> Path:
    """A copy of a sweep, its splits two folders above it, with another first row."""
    shutil.copy(DATA / FILE, folder / FILE)
    first, *others = SWEEP.read_text("utf-8").splitlines()
    (folder / "sweeps").mkdir()
    path = folder / "sweeps" / SWEEP.name
    path.write_text("\n".join([*others, json.dumps({**json.loads(first), **change})]), "utf-8")
    return path


def frozen(path: Path) -> FrozenRows:
    splits = splits_beside(path)
    assert splits
    return FrozenRows.of(splits, measured_rows(path))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"confidence": "C", "source": {"repo": "elsewhere"}}, True),
        ({"step_time_s": 4.0}, False),
        ({"tp": 2, "dp": 4}, False),
    ],
)
def test_rows_are_those_of_a_version_where_they_say_the_same_of_what_ran(
    tmp_path: Path, change: dict[str, Any], same: bool
):
    found = frozen(copied(tmp_path, change))
    name = (SWEEP.stem,)
    assert (found.same, found.changed) == ((name, ()) if same else ((), name))


def test_rows_without_a_file_of_splits_have_none(tmp_path: Path):
    assert splits_beside(Path(shutil.copy(SWEEP, tmp_path))) is None


@pytest.mark.parametrize("path", rest_is_slow([SWEEP, TRAINIUM]))  # the second: one layout under several releases
def test_left_out_rows_have_the_predictions_of_their_fit_and_intervals_around_them(path: Path):
    times = validated(path).times
    found = left_out(times, {path.stem})
    assert len(found) == len(times)
    for row, before in zip(found, times, strict=True):
        fit, now, low = before.run.constants.fit, row.time, before.time.low or 0.0
        assert fit
        assert now.predicted / now.measured == pytest.approx(fit.rows[now.id], rel=1e-3), (
            "figures of the fit are rounded"
        )
        assert (now.low or 0.0) / now.predicted == pytest.approx(low / before.time.predicted)
    same = {(one.run, one.run.framework, one.run.release, one.time.group) for one in found}
    assert len({one.time.predicted for one in found}) <= len(same)
    assert left_out(times, set()) == []


@pytest.mark.slow
def test_the_command_says_which_rows_compare_and_gives_figures_with_the_split_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["validate", str(SWEEP), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["who"] for one in found["choices"]] == [PLANNER, LEFT_OUT]
    assert found["splits"]["same"] == [SWEEP.stem]
    assert main(["validate", str(copied(tmp_path, {"step_time_s": 4.0}))]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"the rows of {SWEEP.stem} differ, so that their figures compare with no others" in text
    assert LEFT_OUT not in text
