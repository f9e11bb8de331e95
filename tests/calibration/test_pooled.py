"""How programs depart from their hardware: what made the rows is found again, and what is left out is not seen."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.calibration import pooled
from autoshard.calibration.measured_run import run_of
from autoshard.calibration.pooled import ProgramRows, departed, departure_of, fitted, interval_of, program_rows
from autoshard.calibration.rows import MeasuredRow, measured_rows
from autoshard.calibration.unknowns import Array, Sample
from autoshard.cost.departures import departures, hardware, shares_of
from autoshard.errors import InputError
from benchmarks.departures import departing_rows, fit_all
from tests.calibration.measured_cases import ARCH, SMALL, written

LARGE = {"arch": {**ARCH, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8}, "seq_len": 4096,
         "framework": "nanotron", "first_seen": "2026-01-02", "step_time_s": 1.0}  # fmt: skip
LAYOUTS = [
    {"tp": 2, "pp": 2, "dp": 2}, {"tp": 4, "pp": 1, "dp": 2}, {"tp": 1, "pp": 1, "dp": 8}, {"tp": 8, "pp": 1, "dp": 1},
    {"tp": 1, "pp": 4, "dp": 2}, {"tp": 2, "pp": 1, "dp": 4},
]  # fmt: skip


def rows_like(folder: Path, *changes: Mapping[str, object]) -> ProgramRows:
    rows = [{**SMALL, **LARGE, **change, "id": str(number)} for number, change in enumerate(changes)]
    found = measured_rows(written(folder, *rows)).rows.values()
    samples = [(Sample(id=row.id, run=run_of(row), step_time_s=1.0, apart=""), row) for row in found]
    (program,) = program_rows(samples)
    return program


def every(rows: ProgramRows) -> range:
    return range(len(rows.samples))


def made_by(rows: ProgramRows, unknowns: Array) -> ProgramRows:
    """The same rows, as they would be if these unknowns were true."""
    seconds = np.exp(rows.residuals(unknowns, every(rows))) * rows.measured
    samples = [replace(one, step_time_s=time_s) for one, time_s in zip(rows.samples, seconds.tolist(), strict=True)]
    return replace(rows, samples=tuple(samples))


def unknowns(**values: float) -> Array:
    return np.array([values.get(name, 0.0) for name in pooled.NAMES])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> ProgramRows:
    mixed = [{**layout, "micro_batch": mbs} for layout in LAYOUTS for mbs in (1, 2)]
    return rows_like(tmp_path_factory.mktemp("rows"), *mixed)


@settings(max_examples=4, deadline=None)
@given(st.floats(-0.1, 0.1), st.floats(-0.3, 0.3), st.floats(0, 2))
def test_what_made_the_rows_predicts_them_again(rows: ProgramRows, matrix: float, near: float, layer: float):
    made = made_by(rows, unknowns(matrix_efficiency=matrix, near_link_efficiency=near, layer_s=layer))
    assert np.abs(made.residuals(fitted(made, every(made)), every(made))).max() < 0.03


def test_hosts_are_told_from_devices_where_layers_are_small(tmp_path: Path):
    small = rows_like(tmp_path, *({**layout, "arch": ARCH, "seq_len": 512} for layout in LAYOUTS))
    true = unknowns(layer_s=2.5, collective_s=1.0)
    found = departed(fitted(made_by(small, true), every(small)))
    assert found["layer_s"] == pytest.approx(departed(true)["layer_s"], rel=0.25)
    assert found["matrix_efficiency"] == pytest.approx(1.0, abs=0.05), "these rows say nothing about products"


def test_a_row_that_is_far_off_moves_the_others_little(rows: ProgramRows):
    samples = list(made_by(rows, unknowns()).samples)
    samples[3] = replace(samples[3], step_time_s=10 * samples[3].step_time_s)
    made = replace(rows, samples=tuple(samples))
    others = [number for number in every(rows) if number != 3]
    assert np.abs(made.residuals(fitted(made, every(made)), others)).max() < 0.05


def test_without_rows_that_say_otherwise_a_program_is_its_hardware():
    found = departed(unknowns())
    assert {found[name] for name in pooled.NAMES if name.endswith("efficiency")} == {1.0}
    assert all(found[name] == usual for name, usual in hardware().hosts.items() if name in pooled.NAMES)
    fastest = departed(np.full(len(pooled.NAMES), -9.0))
    assert max(shares_of("h100-80", fastest).values()) <= 0.97 and min(fastest.values()) >= 0


def test_what_is_left_out_is_not_seen(rows: ProgramRows, monkeypatch: pytest.MonkeyPatch):
    seen: list[set[int]] = []

    def spied(rows: ProgramRows, some: Sequence[int], start: Array | None = None) -> Array:
        seen.append({*some})
        return unknowns()

    monkeypatch.setattr(pooled, "fitted", spied)
    groups = tuple(str(number % 3) for number in every(rows))
    found = departure_of(replace(rows, groups=groups))
    assert found.rows.left_out_by == "group" and len(found.rows.ratios) == len(rows.samples)
    assert seen[0] == {*every(rows)}
    assert seen[1:4] == [{number for number, one in enumerate(groups) if one != group} for group in "012"]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40))
def test_an_interval_holds_four_of_five_unless_that_is_too_wide_to_say_anything(logarithms: list[float]):
    found, sizes = interval_of(np.array(logarithms)), np.abs(logarithms)
    widest = max(0.15, 3 * float(np.expm1(np.median(sizes))))
    inside = float((np.expm1(sizes) <= found + 1e-6).mean())
    assert found <= widest + 1e-6 and (inside >= 0.8 - 1e-9 or found == pytest.approx(widest, rel=1e-6))


def test_rows_without_a_framework_are_no_program(rows: ProgramRows):
    sample = replace(rows.samples[0], run=replace(rows.samples[0].run, framework=None))
    with pytest.raises(InputError, match="no framework, so nothing says which program ran"):
        program_rows([(sample, MeasuredRow.read({**SMALL, "id": sample.id}))])


def test_the_file_names_every_program_of_the_rows_here():
    known = {(one.framework, one.cluster): {*one.rows.ratios} for one in departures().programs}
    assert known == {(one.framework, one.cluster): {row.id for row in one.samples} for one in departing_rows()}


@pytest.mark.slow
def test_the_shipped_departures_are_those_of_their_rows():
    """Programs of few rows; all of them take ten minutes (``python -m benchmarks departures``)."""
    found = fit_all([one for one in departing_rows() if len(one.samples) <= 16])
    shipped = {(one.framework, one.cluster): one for one in departures().programs}
    assert len(found.programs) > 5
    for again in found.programs:
        theirs = shipped[again.framework, again.cluster]
        assert again.constants == pytest.approx(theirs.constants, rel=0.02, abs=1e-6), again.framework
        assert again.rows.left_out_mape == pytest.approx(theirs.rows.left_out_mape, abs=0.003)
