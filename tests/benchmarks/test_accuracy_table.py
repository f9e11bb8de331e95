"""The tables of the pages are what the command writes, and what it does not know again stays as it was."""

import dataclasses
from pathlib import Path

import pytest

from autoshard.calibration.validate import SetAccuracy
from autoshard.cost.calibration import built_in
from autoshard.errors import InputError
from benchmarks.accuracy_table import PAGES, PredictedSets, calibration_table, page_text, write_pages
from tests.calibration.measured_cases import DATA, published

EMPTY = "before\n<!-- accuracy -->\n<!-- /accuracy -->\nmiddle\n<!-- calibrations -->\n<!-- /calibrations -->\nafter\n"
COLUMNS = ("set", "rows", "layouts", "noise floor", "MAPE")
COMMAND = "python -m benchmarks accuracy --write"


@pytest.fixture(scope="module")
def own() -> tuple[SetAccuracy, ...]:
    return published().sets


def named(entry: SetAccuracy, name: str) -> SetAccuracy:
    return dataclasses.replace(entry, name=name)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def test_the_pages_are_what_the_command_writes(own: tuple[SetAccuracy, ...]) -> None:
    calibrations = calibration_table(DATA)
    for page, columns in PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert text == page_text(text, columns, PredictedSets(own=own), calibrations), f"{page}: run {COMMAND}"


def test_a_line_has_the_numbers_of_its_set(own: tuple[SetAccuracy, ...]) -> None:
    text = page_text(EMPTY, COLUMNS, PredictedSets(own=own), "no calibrations")
    trainium = next(entry for entry in own if entry.name == "trainium")
    errors = trainium.step_time
    assert errors and errors.noise_floor
    assert f"| trainium | 42 | {errors.num_layouts} | {errors.noise_floor:.1%} | {errors.mape:.1%} | here |" in text
    assert text.startswith("before\n") and "\nmiddle\n" in text and text.endswith("\nafter\n")
    assert "no calibrations" in text.partition("middle")[2]


def test_lines_about_other_rows_stay_until_they_are_made_anew(own: tuple[SetAccuracy, ...]) -> None:
    first, *_ = own
    there = (named(first, "far"), named(first, "away"), first)  # the last has the name of a set of this repository
    with_others = page_text(EMPTY, COLUMNS, PredictedSets(own=own, other=there, date="2026-01-02"), "c")
    dated = [line for line in lines(with_others) if line.endswith("| 2026-01-02 |")]
    assert [line.split()[1] for line in dated] == ["far", "away"]
    assert page_text(with_others, COLUMNS, PredictedSets(own=own), "c") == with_others
    fewer = page_text(with_others, COLUMNS, PredictedSets(own=own[:1]), "c")
    assert lines(fewer)[2:] == dated  # whatever became of the sets of this repository
    anew = page_text(with_others, COLUMNS, PredictedSets(own=own, other=(named(first, "new"),), date="2026-03-04"), "c")
    assert [line.split()[1] for line in lines(anew) if line.endswith("| 2026-03-04 |")] == ["new"]
    assert "2026-01-02" not in anew


def test_a_set_without_measurements_has_no_errors(own: tuple[SetAccuracy, ...]) -> None:
    bare = dataclasses.replace(own[0], step_time=None, peak_memory=None)
    text = page_text(EMPTY, COLUMNS, PredictedSets(own=(bare,)), "c")
    assert f"| {bare.name} | {bare.num_rows} | 0 | - | - | here |" in text


def test_a_page_without_a_place_is_refused() -> None:
    with pytest.raises(InputError, match="no place for a table: <!-- accuracy -->"):
        page_text("nothing", COLUMNS, PredictedSets(own=()), "c")


def test_all_pages_are_written(tmp_path: Path, own: tuple[SetAccuracy, ...]) -> None:
    page = tmp_path / "page.md"
    page.write_text(EMPTY, encoding="utf-8")
    write_pages(PredictedSets(own=own), DATA, {page: COLUMNS})
    assert page.read_text(encoding="utf-8") == page_text(
        EMPTY, COLUMNS, PredictedSets(own=own), calibration_table(DATA)
    )


def test_calibrations_show_what_they_were_fitted_to(tmp_path: Path) -> None:
    fit = built_in("trn1.32xlarge").fit
    assert fit
    here = next(line for line in calibration_table(DATA).splitlines() if line.startswith("| trn1.32xlarge |"))
    cells = [cell.strip() for cell in here.strip("| ").split("|")]
    assert cells[1:3] == [str(len(fit.rows)), str(fit.num_layouts)]
    assert cells[4:7] == [f"{fit.in_sample_mape:.1%}", f"{fit.left_out_mape:.1%}", fit.left_out_by]
    assert cells[3].endswith("%")
    (tmp_path / "few.jsonl").write_text((DATA / "gpu_published.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    elsewhere = next(line for line in calibration_table(tmp_path).splitlines() if line.startswith("| trn1.32xlarge |"))
    assert elsewhere.split("|")[4].strip() == "-"  # its rows are not there to be compared
