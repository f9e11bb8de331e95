"""Accuracy: the worst set of rows is judged; the tables of the pages are what the command writes."""

import dataclasses
import json
from pathlib import Path

import pytest

from autoshard.calibration.validate import SetAccuracy, Validation, validate
from autoshard.cost.calibration import built_in
from autoshard.errors import InputError
from benchmarks.accuracy import TIME_BAR, judge, run
from benchmarks.accuracy_table import PAGES, PredictedSets, calibration_table, page_text, write_pages
from tests.calibration.measured_cases import DATA, SMALL, published

EMPTY = "before\n<!-- accuracy -->\n<!-- /accuracy -->\nmiddle\n<!-- calibrations -->\n<!-- /calibrations -->\nafter\n"
COLUMNS = ("set", "rows", "layouts", "noise floor", "MAPE")
COMMAND = "python -m benchmarks accuracy --write"


def measured(folder: Path, *factors: float, name: str = "own") -> Validation:
    """Rows that took so many times what is predicted."""
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps(SMALL), encoding="utf-8")
    (said,) = validate(path).rows
    times = [said.predicted_step_time_s * factor for factor in factors]
    rows = [{**SMALL, "id": str(number), "step_time_s": time_s} for number, time_s in enumerate(times)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return validate(path)


def test_the_worst_set_is_judged_and_a_row_that_is_not_predicted_does_not_pass(tmp_path: Path) -> None:
    good, bad = measured(tmp_path, 1.0, 1.0), measured(tmp_path, 0.5, name="bad")
    assert judge([good], 0.0).holds
    both = judge([good, bad, good], 0.0)
    assert (both.value, both.bar, both.holds) == (1.0, TIME_BAR, False)
    assert (both.extras["own.mape"], both.extras["own.holds"]) == (0.0, True)
    assert (both.extras["bad.mape"], both.extras["bad.holds"], both.extras["own-2.mape"]) == (1.0, False, 0.0)
    path = tmp_path / "odd.jsonl"
    path.write_text("\n".join(map(json.dumps, (SMALL, {**SMALL, "id": "odd", "arch": None}))), encoding="utf-8")
    result = judge([good, validate(path)], 0.0)
    assert not result.holds and result.extras["left_out"] == 1


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


@pytest.fixture(scope="module")
def own() -> tuple[SetAccuracy, ...]:
    return published().sets


def named(entry: SetAccuracy, name: str) -> SetAccuracy:
    return dataclasses.replace(entry, name=name)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def test_the_pages_are_what_the_command_writes(own: tuple[SetAccuracy, ...], tmp_path: Path) -> None:
    calibrations = calibration_table(DATA)
    for page, columns in PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert text == page_text(text, columns, PredictedSets(own=own), calibrations), f"{page}: run {COMMAND}"
    page = tmp_path / "page.md"
    page.write_text(EMPTY, encoding="utf-8")
    write_pages(PredictedSets(own=own), DATA, {page: COLUMNS})
    text = page.read_text(encoding="utf-8")
    errors = next(entry for entry in own if entry.name == "trainium").step_time
    assert errors and errors.noise_floor
    assert f"| trainium | 42 | {errors.num_layouts} | {errors.noise_floor:.1%} | {errors.mape:.1%} | here |" in text
    assert text.startswith("before\n") and "\nmiddle\n" in text and text.endswith("\nafter\n")


def test_lines_about_other_rows_stay_until_they_are_made_anew(own: tuple[SetAccuracy, ...]) -> None:
    first, *_ = own
    there = (named(first, "far"), named(first, "away"), first)  # the last has the name of a set of this repository
    with_others = page_text(EMPTY, COLUMNS, PredictedSets(own=own, other=there, date="2026-01-02"), "c")
    dated = [line for line in lines(with_others) if line.endswith("| 2026-01-02 |")]
    assert [line.split()[1] for line in dated] == ["far", "away"]
    assert page_text(with_others, COLUMNS, PredictedSets(own=own), "c") == with_others
    assert lines(page_text(with_others, COLUMNS, PredictedSets(own=own[:1]), "c"))[2:] == dated
    anew = page_text(with_others, COLUMNS, PredictedSets(own=own, other=(named(first, "new"),), date="2026-03-04"), "c")
    assert [line.split()[1] for line in lines(anew) if line.endswith("| 2026-03-04 |")] == ["new"]
    assert "2026-01-02" not in anew


def test_what_is_not_known_is_a_dash_and_a_page_without_a_place_is_refused(own: tuple[SetAccuracy, ...]) -> None:
    bare = dataclasses.replace(own[0], step_time=None, peak_memory=None)
    text = page_text(EMPTY, COLUMNS, PredictedSets(own=(bare,)), "c")
    assert f"| {bare.name} | {bare.num_rows} | 0 | - | - | here |" in text
    with pytest.raises(InputError, match="no place for a table: <!-- accuracy -->"):
        page_text("nothing", COLUMNS, PredictedSets(own=()), "c")


def test_calibrations_show_what_they_were_fitted_to(tmp_path: Path) -> None:
    fit = built_in("trn1.32xlarge").fit
    assert fit
    here = next(line for line in calibration_table(DATA).splitlines() if line.startswith("| trn1.32xlarge |"))
    cells = [cell.strip() for cell in here.strip("| ").split("|")]
    assert cells[1:3] == [str(len(fit.rows)), str(fit.num_layouts)] and cells[3].endswith("%")
    assert cells[4:7] == [f"{fit.in_sample_mape:.1%}", f"{fit.left_out_mape:.1%}", fit.left_out_by]
    (tmp_path / "few.jsonl").write_text((DATA / "gpu_published.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    elsewhere = next(line for line in calibration_table(tmp_path).splitlines() if line.startswith("| trn1.32xlarge |"))
    assert elsewhere.split("|")[4].strip() == "-"  # its rows are not there to be compared
