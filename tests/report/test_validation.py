"""What validate and calibrate print: golden for the rows of this repository, and no wider than a terminal."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.calibration.validate import validate
from autoshard.cost.calibration import CONSTANTS, uncalibrated
from autoshard.report.terminal import drawn
from autoshard.report.validation import calibration_report, validation_sheets
from tests.calibration.measured_cases import DATA, SMALL, TRAINIUM, published
from tests.report.printed import printed


@pytest.mark.parametrize(
    ("name", "path"), [("trainium", TRAINIUM), pytest.param("published", DATA, marks=pytest.mark.slow)]
)
def test_the_rows_of_this_repository(name: str, path: Path, golden):
    golden(f"report/validate-{name}.txt", printed(drawn(*validation_sheets(published(path)))))


def test_what_was_not_measured_has_no_error(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({**SMALL, "step_time_s": None, "peak_memory_gib": None}), encoding="utf-8")
    text = printed(drawn(*validation_sheets(validate(path))))
    assert "Peak memory" not in text
    assert "furthest off" not in text
    assert ["runs", "0", "0", *"-" * 10] in [line.split() for line in text.splitlines()]


def test_constants_are_shown_as_times_or_shares_and_names_stand_in_one_column():
    slow = replace(uncalibrated(), launch_s=7.25e-6, collective_s=0.0, step_s=0.5, memory_efficiency=0.8125)
    first, *lines = calibration_report(slow).splitlines()
    assert first == f"uncalibrated: {slow.basis}"
    shown = dict(re.split(r" +", line.strip(), maxsplit=1) for line in lines)
    assert list(shown) == [*CONSTANTS]
    assert (shown["launch_s"], shown["collective_s"], shown["step_s"]) == ("7.2 us", "0 s", "500.0 ms")
    assert shown["memory_efficiency"] == "0.812"
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in lines}) == 1
    assert "dp_ratio 2.000" in re.sub(" +", " ", calibration_report(replace(slow, dp_ratio=2.0)))
