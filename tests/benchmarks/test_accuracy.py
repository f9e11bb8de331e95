import json
import re
from pathlib import Path

import pytest

from autoshard.calibration.validate import Validation, validate
from benchmarks.__main__ import main
from benchmarks.accuracy import TIME_BAR, judge, run
from benchmarks.accuracy_table import PredictedSets
from tests.calibration.measured_cases import SMALL


def measured(folder: Path, *factors: float, name: str = "own") -> Validation:
    """Rows that took so many times what is predicted."""
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps(SMALL), encoding="utf-8")
    (said,) = validate(path).rows
    rows = [
        {**SMALL, "id": str(number), "step_time_s": said.predicted_step_time_s * factor}
        for number, factor in enumerate(factors)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return validate(path)


def test_the_worst_set_is_judged(tmp_path: Path) -> None:
    good, bad = measured(tmp_path, 1.0, 1.0), measured(tmp_path, 0.5, name="bad")
    assert judge([good], 0.0).holds
    both = judge([good, bad], 0.0)
    assert (both.value, both.bar, both.holds) == (1.0, TIME_BAR, False)
    assert (both.extras["own.mape"], both.extras["own.holds"]) == (0.0, True)
    assert (both.extras["bad.mape"], both.extras["bad.holds"]) == (1.0, False)


def test_sets_of_one_name_stay_apart(tmp_path: Path) -> None:
    both = judge([measured(tmp_path, 1.0), measured(tmp_path, 0.5)], 0.0)
    assert (both.extras["own.mape"], both.extras["own-2.mape"]) == (0.0, 1.0)


def test_a_row_that_is_not_predicted_does_not_pass(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, (SMALL, {**SMALL, "id": "odd", "arch": None}))), encoding="utf-8")
    result = judge([measured(tmp_path, 1.0, name="fine"), validate(path)], 0.0)
    assert not result.holds and result.extras["left_out"] == 1


def test_rows_are_for_accuracy_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cold_start", "--rows", str(tmp_path)]) == 2
    assert "cold_start has no use for measured rows" in capsys.readouterr().err
    assert main(["accuracy", "--rows", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_what_to_write_is_for_accuracy_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cold_start", "--write"]) == 2
    assert "cold_start has no use for tables on pages" in capsys.readouterr().err


def test_tables_are_written_when_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[PredictedSets] = []
    monkeypatch.setattr("benchmarks.accuracy.write_pages", lambda found, rows: written.append(found))
    measured(tmp_path, 1.0)
    monkeypatch.setattr("benchmarks.accuracy.DATA", tmp_path)  # in the place of all rows of this repository
    run()
    assert not written
    result = run(rows=tmp_path, write=True)
    assert result.holds and {"own.mape", "own-2.mape"} <= result.extras.keys()
    (found,) = written
    assert found.other and [entry.name for entry in found.other] == ["own"]
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", found.date)
