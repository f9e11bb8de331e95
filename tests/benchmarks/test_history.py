"""The history of the benchmarks: what is appended, and what is called a drift."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.history import Occasion, PastResult, append, drifts_of, occasion, read_history
from benchmarks.history_page import results_page
from benchmarks.result import Result
from tests.report.page.pages import read

HERE = Occasion(date="2026-11-20T00:00:00Z", commit="0123456789", machine="A CPU, 2 cores")
QUIET = PastResult(
    date=HERE.date, commit=HERE.commit, machine=HERE.machine, name="plan", value=1.0, unit="CPU s", bar=2.0, holds=True,
    yardstick_s=0.1,
)  # fmt: skip


def days(*values: float, **changes: object) -> list[PastResult]:
    """One result a day."""
    dated = (replace(QUIET, date=f"2026-11-{day:02}T00:00:00Z", value=value) for day, value in enumerate(values, 1))
    return [replace(one, **changes) for one in dated]


def test_what_is_appended_is_read_again_without_half_lines_and_numbers_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    for value in (1.5, float("inf"), 2.0):
        result = Result(name="plan", value=value, unit="CPU s", bar=2.0, holds=True, extras={"yardstick_s": 0.2})
        append(result, HERE, path)
    append(Result(name="rows", value=3, unit="MAPE", bar=None, holds=True), HERE, path)
    with path.open("a") as file:
        file.write('{"date": "2026-11-20T0\n[1]\n')
    found = read_history(path)
    assert [(one.name, one.value) for one in found] == [("plan", 1.5), ("plan", 2.0), ("rows", 3)]
    assert found[0].yardstick_s == 0.2 and found[2].yardstick_s > 0, "measured where the benchmark has none"
    assert found[0].compared == pytest.approx(7.5) and found[2].compared == 3


def test_a_line_names_the_machine_in_general_words_and_the_commit() -> None:
    here = occasion("2026-11-20T00:00:00Z")
    assert here.machine.endswith(" cores") and len(here.machine) > len("2 cores")
    assert len(here.commit.rstrip("+")) in (0, 10)


def test_a_slow_machine_is_no_drift_and_a_slow_program_is() -> None:
    before = days(1.0, 1.02, 0.98, 1.01, 1.0)
    loaded = replace(before[-1], date="2026-11-09", value=1.8, yardstick_s=0.18)
    slower = replace(before[-1], date="2026-11-09", value=1.3)
    assert [one.words for one in drifts_of([*before, loaded])] == [""]
    (found,) = drifts_of([*before, slower])
    assert (
        found.change == pytest.approx(0.3)
        and found.words == "+30.0%, beyond noise of 15.0%, seen once, so measure again"
    )
    (found,) = drifts_of([*before, slower, replace(slower, date="2026-11-10", value=1.25)])
    assert found.words == "+24.4%, beyond noise of 15.0%, seen twice"
    noisy = drifts_of([*days(1.0, 1.4, 0.8, 1.2, 0.9), slower])[0]
    assert noisy.noise is not None and noisy.noise > 0.3 and noisy.words == ""


def test_values_of_other_machines_and_units_stay_apart_and_few_are_not_judged() -> None:
    found = drifts_of([*days(1.0, 1.0, 1.0), *days(9.0, machine="another"), *days(5.0, unit="MAPE")])
    assert [(one.last.machine, one.last.unit, one.change) for one in found] == [
        ("A CPU, 2 cores", "CPU s", None), ("A CPU, 2 cores", "MAPE", None), ("another", "CPU s", None),
    ]  # fmt: skip


def test_a_bar_that_is_missed_now_and_a_count_that_was_zero_are_drifts() -> None:
    missed = days(0.0, 0.0, 0.0, 2.0, unit="certificates refuted")
    missed[-1] = replace(missed[-1], holds=False)
    assert drifts_of(missed)[0].words == "misses its bar, which it held before; no longer 0"
    assert drifts_of(days(0.0, 0.0, 0.0, 0.0, unit="certificates refuted"))[0].words == ""


def test_the_command_records_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.jsonl"
    monkeypatch.setattr("benchmarks.__main__.HISTORY", path)
    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", {"idle": "tests.benchmarks.test_history:idle"})
    assert main(["history"]) == 0 and "Type make bench" in capsys.readouterr().out
    for _ in range(4):
        assert main(["idle", "--record"]) == 0
    assert main(["idle"]) == 0 and len(read_history(path)) == 4
    capsys.readouterr()
    assert main(["history", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["values"] == [0.5] * 4 and shown["change"] == 0.0 and shown["drift"] == ""
    assert main(["history", "--html", str(tmp_path)]) == 2
    assert main(["history", "--html", str(tmp_path / "history.html")]) == 0
    page = read((tmp_path / "history.html").read_text())
    values = {figure.attributes["data-path"]: float(figure.attributes["value"]) for figure in page.every("data")}
    assert values == {"benchmarks.0.value": 0.5, "benchmarks.0.bar": 1.0, "benchmarks.0.change": 0.0}
    assert len(page.every("circle")) == 4
    capsys.readouterr()
    assert main(["history"]) == 0
    assert " idle " in (table := capsys.readouterr().out) and "▅▅▅▅" in table and "+0.0%" in table


def idle() -> Result:
    return Result(name="idle", value=0.5, unit="x import numpy", bar=1.0, holds=True, extras={"yardstick_s": 0.1})


def test_curves_of_a_result_are_drawn_and_its_other_numbers_listed() -> None:
    curves = {
        f"a100-80.{name}.{size}": error for name, error in (("advice", 0.05), ("grid", 0.07)) for size in (4, 18, 9)
    }
    extras = {**curves, "a100-80.rows": 72, "cpu_s": 1.5}
    page = read(results_page([Result(name="advice", value=0.25, unit="part", bar=0.25, holds=True, extras=extras)]))
    (chart,) = [one for one in page.every("figure") if one.attributes["class"] == "chart"]
    tips = [dot.attributes["data-tip"] for dot in chart.every("circle")]
    assert tips == [
        f"{name}, {size}: {error}" for name, error in (("advice", 0.05), ("grid", 0.07)) for size in (4, 9, 18)
    ]
    paths = {figure.attributes["data-path"] for figure in page.every("data")}
    assert paths == {"0.value", "0.bar", "0.a100-80.rows", "0.cpu_s"} and "bar 0.25 part: holds" in page.whole_text
