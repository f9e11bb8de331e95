"""What validate prints: golden for the rows of this repository, and no wider than a terminal."""

import io
import json
from pathlib import Path

from autoshard.calibration.validate import validate
from autoshard.calibration.validation import Validation
from autoshard.report.terminal import make_console
from autoshard.report.validated import validation_report
from tests.calibration.measured_cases import DATA, SMALL


def printed(validation: Validation) -> str:
    console = make_console()
    console.file = io.StringIO()
    console.print(validation_report(validation))
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_the_rows_of_this_repository(golden):
    text = printed(validate(DATA))
    golden("report/validate-published.txt", text)
    assert max(map(len, text.splitlines())) <= 120


def test_what_was_not_measured_has_no_error(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    rows = [{**SMALL, "step_time_s": None, "peak_memory_gib": None}, {**SMALL, "id": "[red]odd", "arch": None}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    text = printed(validate(path))
    assert "Peak memory" not in text
    assert "furthest off" not in text
    assert "[red]odd" in text and "its architecture is not known" in text
    assert ["runs", "0", "0", *"-" * 10] in [line.split() for line in text.splitlines()]
