"""Rows with planted faults are named with the kind of fault, and rows of clean sets are not."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autoshard.calibration.suspects import Suspect, suspects
from autoshard.calibration.validate import Validated, validated
from autoshard.cli import main
from autoshard.report.validation import suspect_lines
from tests.calibration.measured_cases import DATA, written
from tests.slower import rest_is_slow

CLEAN = ("sweeps/bloom_a100", "sweeps/internevo_a100", "gpu_megatron_b200", "trainium")


@cache
def known(name: str) -> Validated:
    return validated(DATA / f"{name}.jsonl")


def slower(found: Validated, number: int, factor: float, published: object = None) -> Validated:
    """A validation in which a row says that it took longer, and nothing that its publisher says besides."""
    time, rows = found.times[number], dict(found.rows.rows)
    where = next(place for place, row in rows.items() if row.id == time.time.id)
    step_time_s = time.time.measured * factor
    rows[where] = replace(rows[where], step_time_s=step_time_s, published=published)
    times = list(found.times)
    times[number] = replace(time, time=replace(time.time, measured=step_time_s))
    return replace(found, times=tuple(times), rows=replace(found.rows, rows=rows))


def named(found: Validated) -> dict[str, Suspect]:
    return {one.id: one for one in suspects(found)}


CHEAP_FIRST = sorted(CLEAN, key=lambda name: name != "gpu_megatron_b200")


@pytest.mark.parametrize("name", rest_is_slow(CHEAP_FIRST, 1, 3))
def test_clean_rows_are_not_named(name: str):
    assert named(known(name)) == {}


@pytest.mark.parametrize("name", rest_is_slow(CHEAP_FIRST, 1, 1))
@pytest.mark.parametrize("factor", [1000, 1 / 1000, 60, 1 / 60])
def test_a_wrong_unit_of_time_is_named_and_nothing_else(name: str, factor: float):
    found = known(name)
    (one,) = named(slower(found, 3, factor)).values()
    assert (one.id, one.kind) == (found.times[3].time.id, "unit of time")
    assert abs(one.factor / factor - 1) < 0.35


@pytest.mark.parametrize(("factor", "kind"), [(2.0, "batch"), (0.5, "batch"), (4.0, "outlier"), (0.25, "outlier")])
def test_what_neighbours_contradict_is_named_with_the_likely_reason(factor: float, kind: str):
    found = known("gpu_megatron_b200")
    (one,) = named(slower(found, 3, factor)).values()
    assert (one.id, one.kind) == (found.times[3].time.id, kind)
    assert "neighbours say" in one.says


def test_a_bias_that_all_rows_of_a_program_have_names_nobody():
    found = known("gpu_megatron_b200")
    for number in range(len(found.times)):
        found = slower(found, number, 1.8)
    assert named(found) == {}


def test_a_table_that_is_looked_up_counts_no_flops():
    """Of two layers and a large vocabulary the table of tokens is a third of the weights, and multiplies nothing."""
    assert named(known("engine/h200")) == {}


@pytest.mark.slow
def test_a_published_rate_that_disagrees_with_batch_and_step_time_is_named():
    found = known("sweeps/bloom_a100")
    row = [*found.rows.rows.values()][3]
    rate = (row.published or {})["tflops_per_chip"]
    assert isinstance(rate, float)
    kinds = {2.0: "batch", 0.5: "batch", 1.5: "outlier"}
    for factor, kind in kinds.items():
        (one,) = named(slower(found, 3, 1.0, {"tflops_per_chip": factor * rate})).values()
        assert (one.id, one.kind) == (row.id, kind) and "published tflops_per_chip" in one.says


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"peak_memory_gib": 51_200.0}, "unit of memory", "1024 lies between MiB and GiB"),
        ({"peak_memory_gib": 82.5}, "unit of memory", "as GB would that are named GiB"),
        ({"peak_memory_gib": 100.0}, "unit of memory", "holds 100.0 GiB where a chip has 79.1"),
        ({"step_time_s": 7.0}, "batch", "of the chips' peak, which nobody reaches"),
        ({"peak_memory_gib": 70.0}, None, ""),
    ],
)
def test_what_no_chip_does_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, float], kind: str | None, says: str
):
    row = json.loads((DATA / "sweeps" / "mpt_fsdp.jsonl").read_text("utf-8").splitlines()[0])
    path = written(tmp_path, {**row, "published": None, **change})
    assert main(["validate", str(path), "--json"]) == 0
    every = json.loads(capsys.readouterr().out)["suspects"]
    assert [one["kind"] for one in every] == ([kind] if kind else [])
    assert all(says in one["says"] for one in every)


@pytest.mark.slow
def test_the_group_that_contradicts_itself_is_named():
    found = known("sweeps/nanotron_h100")
    every = suspects(found)
    share = len([one for one in every if one.group.startswith("ultrascale-3b")]) / len(every)
    assert share > 0.7 and len(every) < len(found.times) / 8
    assert all("neighbours say" in one.says for one in every)
    first, *lines = suspect_lines(every)
    assert first.startswith(f"{len(every)} rows look wrong") and len(lines) == len({one.group for one in every})
    assert any(" more" in line and "ultrascale-3b-n16" in line for line in lines)
