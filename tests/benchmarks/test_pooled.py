"""How programs depart from their hardware: what made the rows is found again, and what is left out is not seen."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.calibration import fitting
from autoshard.calibration.fitting import FitRows, FittedUnknowns, Sample, fitted, fitted_without, interval_of
from autoshard.calibration.measured_run import run_of
from autoshard.calibration.prior import Array
from autoshard.calibration.rows import measured_rows
from autoshard.cost.departures import EFFICIENCIES, departures, hardware, numbers_of
from autoshard.errors import InputError
from benchmarks import departures as published
from benchmarks.departures import fit_all
from benchmarks.pooled import ProgramRows, departure_of, program_rows
from tests.benchmarks.departing import departing_rows
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
    (program,) = program_rows([Sample(id=row.id, run=run_of(row), step_time_s=1.0) for row in found], {})
    return program


def every(program: ProgramRows) -> range:
    return range(len(program.samples))


def made_by(program: ProgramRows, values: Array) -> ProgramRows:
    """The same rows, as they would be if these unknowns were true."""
    seconds = np.exp(program.rows.residuals(values, every(program)) + program.rows.measured)
    samples = [replace(one, step_time_s=time_s) for one, time_s in zip(program.samples, seconds.tolist(), strict=True)]
    return replace(program, samples=tuple(samples))


def unknowns(program: ProgramRows, **values: float) -> Array:
    return np.array([values.get(one.names[0], 0.0) for one in program.rows.prior.unknowns])


def departed(program: ProgramRows, values: Array) -> Mapping[str, float]:
    names = [name for unknown in program.rows.prior.unknowns for name in unknown.names]
    return program.departed(program.rows.prior.constants(values), names)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> ProgramRows:
    mixed = [{**layout, "micro_batch": mbs} for layout in LAYOUTS for mbs in (1, 2)]
    return rows_like(tmp_path_factory.mktemp("rows"), *mixed)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> ProgramRows:
    """As few rows as say something, for what holds of any."""
    return rows_like(tmp_path_factory.mktemp("few"), *LAYOUTS[:4])


@pytest.mark.thorough
@settings(max_examples=4, deadline=None)
@given(st.floats(-0.1, 0.1), st.floats(-0.3, 0.3), st.floats(0, 2))
def test_what_made_the_rows_predicts_them_again(rows: ProgramRows, matrix: float, near: float, layer: float):
    made = made_by(rows, unknowns(rows, matrix_efficiency=matrix, near_link_efficiency=near, layer_s=layer))
    assert np.abs(made.rows.residuals(fitted(made.rows), every(made))).max() < 0.03


@pytest.mark.slow
def test_hosts_are_told_from_devices_where_layers_are_small(tmp_path: Path):
    small = rows_like(tmp_path, *({**layout, "arch": ARCH, "seq_len": 512} for layout in LAYOUTS))
    true = unknowns(small, layer_s=2.5, collective_s=1.0)
    found = departed(small, fitted(made_by(small, true).rows))
    assert found["layer_s"] == pytest.approx(departed(small, true)["layer_s"], rel=0.35)
    assert found["matrix_efficiency"] == pytest.approx(1.0, abs=0.05), "these rows say nothing about products"


@pytest.mark.slow
def test_a_row_that_is_far_off_moves_the_others_little(rows: ProgramRows):
    samples = list(made_by(rows, unknowns(rows)).samples)
    samples[3] = replace(samples[3], step_time_s=10 * samples[3].step_time_s)
    made = replace(rows, samples=tuple(samples)).rows
    others = [number for number in every(rows) if number != 3]
    assert np.abs(made.residuals(fitted(made), others)).max() < 0.05


@pytest.mark.thorough
def test_a_fit_without_some_rows_does_not_see_them_and_is_that_of_the_others(rows: ProgramRows):
    made = made_by(rows, unknowns(rows, memory_efficiency=0.3, layer_s=1.0))
    out, rest = [0, 1, 2], every(made)[3:]
    loud = [replace(one, step_time_s=one.step_time_s * (1.2 if place in out else 1.0))
            for place, one in enumerate(made.samples)]  # fmt: skip
    whole = replace(made, samples=tuple(loud)).rows
    again = fitted_without(whole, FittedUnknowns.of(whole), out)
    alone = fitted(replace(made, samples=tuple(loud[3:])).rows)
    assert whole.residuals(again, rest) == pytest.approx(whole.residuals(alone, rest), abs=0.01)


def test_without_rows_that_say_otherwise_a_program_is_its_hardware(rows: ProgramRows):
    found = departed(rows, unknowns(rows))
    assert {found[name] for name in found if name in EFFICIENCIES} == {1.0}
    assert all(found[name] == usual for name, usual in hardware().hosts.items() if name in found)
    fastest = departed(rows, np.full(len(rows.rows.prior.unknowns), -9.0))
    assert max(numbers_of("h100-80", fastest)[name] for name in EFFICIENCIES) <= 0.97 and min(fastest.values()) >= 0


def test_a_constant_that_moves_no_row_is_not_stated(tmp_path: Path):
    """What one GPU sends, and what hosts take for experts of a dense model, say no rows of one GPU."""
    alone = rows_like(
        tmp_path, *({"tp": 1, "pp": 1, "dp": 1, "nodes": 1, "chips": 1, "micro_batch": mbs} for mbs in (1, 2))
    )
    moving = FittedUnknowns.of(alone.rows).moving(alone.rows.prior)
    names = {name for unknown in moving for name in unknown.names}
    assert {"matrix_efficiency", "memory_efficiency", "layer_s"} <= names
    assert not names & {"near_link_efficiency", "far_link_efficiency", "collective_s", "dp_ratio", "experts_s"}


@pytest.mark.slow
def test_constants_that_are_taken_to_be_nothing_stay_so(few: ProgramRows):
    bare = replace(few, without=("layer_s", "shard_s"))
    assert len(bare.rows.prior.unknowns) == len(few.rows.prior.unknowns) - 2
    found = bare.rows.prior.constants(fitted(bare.rows))
    assert found.layer_s == found.shard_s == 0 < found.step_s


def test_what_is_left_out_together_is_a_group_of_a_sweep_else_a_model_else_a_layout(rows: ProgramRows):
    def groups(*names: str) -> ProgramRows:
        pairs = zip(rows.samples, names * len(rows.samples), strict=False)
        return replace(rows, samples=tuple(replace(sample, group=name) for sample, name in pairs))

    assert groups("a").rows.left_out_by == groups("a", "b").rows.left_out_by == "layout"
    sweep = groups("a", "b", "c").rows
    assert sweep.left_out_by == "group" and sweep.apart[:4] == ("a", "b", "c", "a")
    other = [replace(one, run=replace(one.run, model=replace(one.run.model, name=f"model {number % 2}")), group=one.id)
             for number, one in enumerate(rows.samples)]  # fmt: skip
    assert replace(rows, samples=tuple(other)).rows.left_out_by == "model"


@pytest.mark.slow
def test_a_row_is_left_out_of_the_fit_that_predicts_it(few: ProgramRows, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, ...]] = []

    def spied(rows: FitRows, whole: FittedUnknowns, out: Sequence[int]) -> Array:
        seen.append(tuple(out))
        return np.zeros_like(whole.values)

    monkeypatch.setattr(fitting, "fitted_without", spied)
    names = tuple(str(number % 3) for number in every(few))
    samples = tuple(replace(one, group=name) for one, name in zip(few.samples, names, strict=True))
    found = departure_of(replace(few, samples=samples))
    assert found.fit.left_out_by == "group" and len(found.fit.rows) == len(few.samples)
    assert seen[:3] == [tuple(number for number, one in enumerate(names) if one == group) for group in "012"]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40))
def test_an_interval_holds_four_of_five_unless_that_is_too_wide_to_say_anything(logarithms: list[float]):
    found, sizes = interval_of(np.array(logarithms)), np.abs(logarithms)
    widest = max(0.15, 3 * float(np.expm1(np.median(sizes))))
    inside = float((np.expm1(sizes) <= found + 1e-6).mean())
    assert found <= widest + 1e-6 and (inside >= 0.8 - 1e-9 or found == pytest.approx(widest, rel=1e-6))


def test_rows_without_a_framework_are_no_program(rows: ProgramRows):
    sample = replace(rows.samples[0], run=replace(rows.samples[0].run, framework=None))
    with pytest.raises(InputError, match="no framework, so nothing says which program ran"):
        program_rows([sample], {})


@pytest.mark.slow
def test_the_file_names_every_program_of_the_rows_here(monkeypatch: pytest.MonkeyPatch):
    """Which rows there are is read alone: what is predicted of them takes a minute."""
    monkeypatch.setattr(published, "validated", lambda folder: Mock(rows=measured_rows(folder)))
    monkeypatch.setattr(published, "suspects", lambda _: ())
    known = {(one.framework, one.cluster): {*one.fit.rows} for one in departures().programs}
    assert known == {
        (one.framework, one.cluster): {row.id for row in one.samples} for one in published.departing_rows()
    }


@pytest.mark.thorough
def test_the_shipped_departures_are_those_of_their_rows():
    """Programs of few rows; all of them take ten minutes (``python -m benchmarks departures``)."""
    found = fit_all([one for one in departing_rows() if len(one.samples) <= 12])
    shipped = {(one.framework, one.cluster): one for one in departures().programs}
    assert len(found.programs) > 5
    for again in found.programs:
        theirs = shipped[again.framework, again.cluster]
        assert again.constants == pytest.approx(theirs.constants, rel=0.02, abs=1e-6), again.framework
        assert again.fit.left_out_mape == pytest.approx(theirs.fit.left_out_mape, abs=0.003)
