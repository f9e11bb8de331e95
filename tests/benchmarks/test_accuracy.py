"""Accuracy: the worst set of rows is judged; the tables of the pages are what the command writes."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from autoshard.calibration.rows import measured_rows
from autoshard.calibration.validate import SetAccuracy, Validation, validate
from autoshard.cost.built_in import built_in
from autoshard.errors import InputError
from benchmarks.accuracy import TIME_BAR, judge, run
from benchmarks.accuracy_table import PAGES, PredictedSets, calibration_table, left_out, page_text, write_pages
from tests.calibration.measured_cases import DATA, SMALL, TRAINIUM, published, written

EMPTY = "before\n{accuracy}middle\n{calibrations}{left-out}after\n".format_map(
    {name: f"<!-- {name} -->\n<!-- /{name} -->\n" for name in ("accuracy", "calibrations", "left-out")}
)
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
    parts = {name: left_out(tmp_path / f"{name}.jsonl", one) for name, one in (("own", good), ("bad", bad))}
    assert judge([good], parts["own"], 0.0).holds
    both = judge([good, bad, good], parts["bad"], 0.0)
    assert (both.value, both.bar, both.holds) == (1.0, TIME_BAR, False)
    assert (both.extras["h100-80.mape"], both.extras["h100-80.count"]) == (1.0, 1)
    assert (both.extras["own.mape"], both.extras["own.holds"]) == (0.0, True)
    assert (both.extras["bad.mape"], both.extras["bad.holds"], both.extras["own-2.mape"]) == (1.0, False, 0.0)
    path = tmp_path / "odd.jsonl"
    path.write_text("\n".join(map(json.dumps, (SMALL, {**SMALL, "id": "odd", "arch": None}))), encoding="utf-8")
    result = judge([good, validate(path)], parts["own"], 0.0)
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
    return published(TRAINIUM).sets


def named(entry: SetAccuracy, name: str) -> SetAccuracy:
    return dataclasses.replace(entry, name=name)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def pages_of(path: Path) -> PredictedSets:
    return PredictedSets(own=published(path).sets, parts=left_out(path, published(path)))


@pytest.mark.slow
def test_the_pages_are_what_the_command_writes() -> None:
    found, calibrations = pages_of(DATA), calibration_table(DATA)
    for page, columns in PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert text == page_text(text, columns, found, calibrations), f"{page}: run {COMMAND}"


@pytest.mark.slow
def test_tables_go_between_their_markers_and_the_pages_have_these_lines(tmp_path: Path) -> None:
    found, calibrations = pages_of(TRAINIUM), calibration_table(DATA)
    page = tmp_path / "page.md"
    page.write_text(EMPTY, encoding="utf-8")
    for path, columns in PAGES.items():
        expected = [line for line in lines(page_text(EMPTY, columns, found, calibrations)) if "trainium" in line]
        assert len(expected) == 3 and {*expected} <= {*lines(path.read_text(encoding="utf-8"))}, f"run {COMMAND}"
    write_pages(found, DATA, {page: COLUMNS})
    text = page.read_text(encoding="utf-8")
    errors = next(entry for entry in found.own if entry.name == "trainium").step_time
    assert errors and errors.noise_floor
    assert f"| trainium | 42 | {errors.num_layouts} | {errors.noise_floor:.1%} | {errors.mape:.1%} | here |" in text
    assert text.startswith("before\n") and "\nmiddle\n" in text and text.endswith("\nafter\n")


@pytest.mark.slow
def test_rows_are_told_apart_by_software_and_predicted_by_the_fit_that_left_them_out(tmp_path: Path) -> None:
    parts, constants = left_out(TRAINIUM, published(TRAINIUM)), built_in("trn1.32xlarge")
    assert constants.fit
    rows = measured_rows(TRAINIUM).rows.values()
    old = [row.id for row in rows if tuple(map(int, (row.release or "9").split("."))) < (2, 18)]
    errors = {name: abs(ratio - 1) for name, ratio in constants.fit.rows.items()}
    for name, ids in (("before 2.18", old), ("2.18 and later", [one for one in errors if one not in old])):
        found = parts[f"trainium1, SDK {name}"]
        assert found.count == len(ids)
        assert found.mape == pytest.approx(sum(errors[one] for one in ids) / len(ids))
        # Inside: measured lies within the interval of what is predicted.
        inside = [abs(math.log(constants.fit.rows[one])) <= math.log1p(constants.interval) for one in ids]
        assert found.coverage == pytest.approx(sum(inside) / len(ids))
    fp8 = written(tmp_path, SMALL, {**SMALL, "id": "8", "precision": "bf16,products=fp8", "step_time_s": 2.0})
    predicted = validate(fp8)
    found = left_out(fp8, predicted)
    assert {name: one.count for name, one in found.items()} == {"h100-80": 1, "h100-80, FP8": 1}
    for one, row, measured_s in zip(found.values(), predicted.rows, (1.0, 2.0), strict=True):  # in no fit
        assert one.mape == pytest.approx(abs(row.predicted_step_time_s / measured_s - 1))


@pytest.mark.slow
def test_lines_about_other_rows_stay_until_they_are_made_anew(own: tuple[SetAccuracy, ...]) -> None:
    first, *_ = own
    there = (named(first, "far"), named(first, "away"), first)  # the last has the name of a set of this repository
    with_others = page_text(EMPTY, COLUMNS, PredictedSets(own=own, parts={}, other=there, date="2026-01-02"), "c")
    dated = [line for line in lines(with_others) if line.endswith("| 2026-01-02 |")]
    assert [line.split()[1] for line in dated] == ["far", "away"]
    assert page_text(with_others, COLUMNS, PredictedSets(own=own, parts={}), "c") == with_others
    again = lines(page_text(with_others, COLUMNS, PredictedSets(own=own[:1], parts={}), "c"))
    assert [line for line in again if line.endswith("| 2026-01-02 |")] == dated
    newer = PredictedSets(own=own, parts={}, other=(named(first, "new"),), date="2026-03-04")
    anew = page_text(with_others, COLUMNS, newer, "c")
    assert [line.split()[1] for line in lines(anew) if line.endswith("| 2026-03-04 |")] == ["new"]
    assert "2026-01-02" not in anew


@pytest.mark.slow
def test_what_is_not_known_is_a_dash_and_a_page_without_a_place_is_refused(own: tuple[SetAccuracy, ...]) -> None:
    bare = dataclasses.replace(own[0], step_time=None, peak_memory=None)
    text = page_text(EMPTY, COLUMNS, PredictedSets(own=(bare,), parts={}), "c")
    assert f"| {bare.name} | {bare.num_rows} | 0 | - | - | here |" in text
    with pytest.raises(InputError, match="no place for a table: <!-- accuracy -->"):
        page_text("nothing", COLUMNS, PredictedSets(own=(), parts={}), "c")


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
