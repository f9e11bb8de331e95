"""What calibrate prints: every constant in a form that shows it, and what was tried."""

import re
from dataclasses import replace

from autoshard.cost.calibration import CONSTANTS, built_in, uncalibrated
from autoshard.report.calibrated import calibration_report


def test_times_are_shown_as_times_and_names_stand_in_one_column():
    slow = replace(uncalibrated(), launch_s=7.25e-6, collective_s=0.0, step_s=0.5, memory_efficiency=0.8125)
    first, *lines = calibration_report(slow).splitlines()
    assert first == f"uncalibrated: {slow.basis}"
    shown = dict(re.split(r" +", line.strip(), maxsplit=1) for line in lines)
    assert list(shown) == [*CONSTANTS]
    assert (shown["launch_s"], shown["collective_s"], shown["step_s"]) == ("7.2 us", "0 s", "500.0 ms")
    assert shown["memory_efficiency"] == "0.812"
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in lines}) == 1


def test_what_was_tried_is_told_with_its_error():
    found = built_in("trn1.32xlarge")
    assert found.fit
    text = calibration_report(found)
    assert "rows whose model was left out:" in text
    for split, error in found.fit.tried.items():
        assert re.search(rf"^  {re.escape(split)} +{error:.1%}$", text, re.MULTILINE)
