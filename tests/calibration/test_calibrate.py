"""Constants from measured runs: those that made the rows are found again, and what is left out is really left out."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from autoshard.calibration.calibrate import fit, samples_in
from autoshard.calibration.fitting import FitRows, Sample, fitted, log_seconds
from autoshard.calibration.prior import prior_of
from autoshard.calibration.validate import validate
from autoshard.cli import main
from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import (
    CONSTANTS,
    Calibration,
    Reach,
    Software,
    calibration_text,
    load_calibration,
    uncalibrated,
)
from autoshard.cost.departures import EFFICIENCIES, departures
from autoshard.errors import InputError
from autoshard.spec import record
from tests.calibration.measured_cases import ARCH, DATA, SMALL, TRAINIUM, written
from tests.slower import rest_is_slow

TRN1 = "trn1.32xlarge"
LAYOUTS = [
    {"tp": 2, "pp": 2, "dp": 2}, {"tp": 4, "pp": 1, "dp": 2}, {"tp": 1, "pp": 1, "dp": 8}, {"tp": 8, "pp": 1, "dp": 1},
]  # fmt: skip
# Large enough that kernels outlast their launches, and nothing hides: all constants show.
LARGE = {"arch": {**ARCH, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8}, "seq_len": 4096,
         "framework": "Megatron-LM + TransformerEngine", "first_seen": "2026-01-02"}  # fmt: skip
OWN = [{**SMALL, **LARGE, **layout, "id": str(number)} for number, layout in enumerate(LAYOUTS)]
LINKS = EFFICIENCIES[4:]


def rows_of(shipped: Calibration, folder: Path) -> Path:
    """Write the rows of a fit, all of which this repository has."""
    assert shipped.fit
    lines = (line for path in DATA.glob("*.jsonl") for line in path.read_text("utf-8").splitlines())
    rows = [row for row in map(json.loads, lines) if row["id"] in shipped.fit.rows]
    assert len(rows) == len(shipped.fit.rows)
    return written(folder, *rows)


def own_rows(folder: Path, **constants: float) -> Path:
    """Small runs that took what the model says under these constants."""
    found = validate(written(folder, *OWN), replace(uncalibrated(), **constants)).rows
    pairs = zip(OWN, found, strict=True)
    return written(folder, *({**row, "step_time_s": one.predicted_step_time_s} for row, one in pairs))


def made_by(samples: Sequence[Sample], calibration: Calibration) -> list[Sample]:
    """Rows as they would be if these constants were true, with blocks cut as a fit takes them to be."""
    seconds = np.exp(log_seconds([sample.run for sample in samples], calibration)).tolist()
    return [replace(one, step_time_s=time_s) for one, time_s in zip(samples, seconds, strict=True)]


def constants_of(samples: Sequence[Sample]) -> Calibration:
    """The constants of a fit to all rows, of which nobody knows anything before."""
    rows = FitRows(samples=tuple(samples), prior=prior_of([one.run for one in samples], [one.id for one in samples]))
    return rows.prior.constants(fitted(rows))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Sample]:
    """Some rows of trn1, of several models."""
    return samples_in(rows_of(built_in(TRN1), tmp_path_factory.mktemp("rows")), TRN1).samples[::2]


@pytest.mark.parametrize(
    ("slower", "task_s"), rest_is_slow([(0.62, 0.013), (0.45, 0.0), (0.9, 0.04), (0.45, 0.04), (0.9, 0.0)], 0)
)
def test_one_slowness_of_all_rates_and_tasks_are_found_again(slower: float, task_s: float, published: Sequence[Sample]):
    samples = made_by(published, replace(uncalibrated(), **dict.fromkeys(EFFICIENCIES, slower), task_s=task_s))
    found = constants_of(samples)
    for sample, again in zip(samples, made_by(samples, found), strict=True):
        assert again.step_time_s == pytest.approx(sample.step_time_s, rel=0.03)
    for name in EFFICIENCIES:
        assert getattr(found, name) == pytest.approx(slower, rel=0.1), name


@pytest.mark.slow
def test_a_single_rate_of_compiled_graphs_follows_the_others_where_rows_do_not_say_otherwise(
    published: Sequence[Sample],
):
    new = [one for one in published if one.run.release >= (2, 18)]
    few = made_by(new[:3], replace(uncalibrated(), **dict.fromkeys(EFFICIENCIES, 0.5)))
    found = constants_of(few)
    rates = [getattr(found, name) for name in EFFICIENCIES]
    assert max(rates) / min(rates) < 1.05 and np.mean(rates) == pytest.approx(0.5, rel=0.1)


@pytest.mark.slow
def test_on_processors_products_attention_copies_and_starts_are_told_apart(tmp_path: Path):
    """Steps of small plans on ``local``, of unlike width and length; messages cost what other copies in memory do."""
    shapes = [(128, 64), (128, 4096), (512, 128), (2048, 256), (1024, 1024)]
    layouts = [{"tp": 1, "chips": 1}, {"tp": 2, "chips": 2}]
    rows = [
        {**SMALL, "platform": "local", "arch": {**ARCH, "hidden": hidden, "ffn": 3 * hidden}, "seq_len": seq_len,
         "framework": "autoshard, torch engine", "first_seen": "2026-01-02", "pp": 1, "dp": 1, "sharding": "none",
         **layout, "id": f"{hidden} {seq_len} {layout['tp']}"}
        for hidden, seq_len in shapes for layout in layouts
    ]  # fmt: skip
    streams = dict.fromkeys(("vector_efficiency", "memory_efficiency", *LINKS), 0.5)
    true = {"matrix_efficiency": 8.0, "attention_efficiency": 1.5, **streams, "launch_s": 4e-6, "collective_s": 1e-3}
    samples = samples_in(written(tmp_path, *rows), "local").samples
    reach = Reach(cluster="local", axes=("tp",), kernels=("torch_engine",))
    samples = made_by(samples, replace(uncalibrated(), reach=reach, **true))
    found = constants_of(samples)
    again = made_by(samples, found)
    off = [abs(one.step_time_s / sample.step_time_s - 1) for sample, one in zip(samples, again, strict=True)]
    assert np.mean(off) < 0.03, off
    assert found.matrix_efficiency > 3 * found.attention_efficiency > 3 * found.memory_efficiency


def nearly(value: Any) -> Any:
    """The same value, whose floats at any depth need to be no nearer than a processor makes them."""
    if isinstance(value, dict):
        return {key: nearly(item) for key, item in cast(dict[str, Any], value).items()}
    return pytest.approx(value, rel=1e-3) if isinstance(value, float) else value


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [TRN1])
def test_the_shipped_constants_are_those_of_their_rows(cluster: str, tmp_path: Path):
    """Hold every figure against the other; a fit goes down to the fifth digit, what follows is the processor's."""
    shipped = built_in(cluster)
    assert shipped.fit
    found = samples_in(rows_of(shipped, tmp_path), cluster)
    ours, theirs = (record.encode(one) for one in (fit(found, cluster), shipped))
    for part in (ours, theirs):
        part |= part.pop("fit")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        close = isinstance(value, float) or name == "rows"
        assert ours[name] == (pytest.approx(value, rel=1e-3) if close else nearly(value)), name


@pytest.mark.slow
def test_a_file_of_constants_is_read_as_it_was_fitted_and_has_every_row(tmp_path: Path):
    path = own_rows(tmp_path, **dict.fromkeys(EFFICIENCIES, 0.5))
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    found = fit(samples_in(written(tmp_path, *rows, {**rows[0], "id": "idle", "step_time_s": None}), "h100-80"), "mine")
    every = tuple(str(number) for number in range(len(OWN)))
    assert found.fit and ((*found.fit.rows,), found.fit.left_out_by, found.fit.date) == (every, "layout", "2026-01-02")
    (tmp_path / "mine.json").write_text(calibration_text(found), "utf-8")
    assert load_calibration(tmp_path / "mine.json") == found


@pytest.mark.slow
def test_rows_of_a_gpu_move_what_is_known_of_the_program_on_it_a_little(tmp_path: Path):
    known = built_in("h100-80", "te", "Megatron-LM + TransformerEngine")
    samples = samples_in(written(tmp_path, *OWN), "h100-80").samples
    those = [one.run for one in samples]
    start = prior_of(those).centre
    assert [getattr(start, name) for name in CONSTANTS] == [getattr(known, name) for name in CONSTANTS]
    same = constants_of(made_by(samples, start))
    for name in EFFICIENCIES:
        assert getattr(same, name) == pytest.approx(getattr(start, name), rel=1e-3)
    slower = [replace(one, step_time_s=1.3 * one.step_time_s) for one in made_by(samples, start)]
    four, one = (
        float(np.mean(log_seconds(those, constants_of(some)) - log_seconds(those, start)))
        for some in (slower, slower[:1])
    )
    assert 0.02 < one < four < np.log(1.3), "a row alone moves less"
    assert constants_of(slower).matrix_efficiency > 0.95 * start.matrix_efficiency, "micro-benchmarks say more of it"


@pytest.mark.thorough
def test_rows_that_the_repository_has_are_not_known_before_them():
    (b200,) = (one for one in departures().programs if one.cluster == "b200")
    samples = [sample for folder in (DATA, DATA / "sweeps") for sample in samples_in(folder, "b200").samples]
    start = prior_of([one.run for one in samples], [one.id for one in samples]).centre
    known = prior_of([one.run for one in samples]).centre
    assert known.memory_efficiency != start.memory_efficiency
    assert {one.id for one in samples} == {*b200.fit.rows}


@pytest.mark.slow
def test_what_older_releases_and_other_frameworks_take_longer_is_found_beside_the_constants(
    published: Sequence[Sample],
):
    true = replace(uncalibrated(), **dict.fromkeys(EFFICIENCIES, 0.6), task_s=0.03)
    software = Software(frameworks={"neuronx-nemo-megatron": 1.3}, settled="2.18", slower_per_release=0.05)
    found = constants_of(made_by(published, replace(true, software=software)))
    assert found.software and found.matrix_efficiency == pytest.approx(0.6, rel=0.05)
    assert found.software.slower_per_release == pytest.approx(0.05, abs=0.01)
    assert found.software.frameworks["neuronx-nemo-megatron"] == pytest.approx(1.3, rel=0.05)
    assert found.task_s == pytest.approx(0.03, abs=0.008)


@pytest.mark.parametrize(
    ("rows", "cluster", "says"),
    [
        (OWN, "h10", "'h10' is not a cluster. Did you mean"),
        (OWN[:2], "h100-80", "2 rows of h100-80 with a step_time_s: too few, a fit needs 3"),
        ([{**row, "step_time_s": None} for row in OWN], "h100-80", "lines 1 to 4: step_time_s: is not there"),
        ([{**OWN[0], "id": name} for name in "abc"], "h100-80", "all rows are of one layout"),
        (OWN, TRN1, f"lines 1 to 4: platform: was run on h100-80, not on {TRN1}"),
        ([{**row, "first_seen": None} for row in OWN], "h100-80", "--date: missing; no row of"),
        ([*OWN[:2], {**OWN[2], "arch": None}], "h100-80", "line 3: arch: its architecture is not known"),
        ([*OWN[:2], {**OWN[2], "kind": "rehearsal"}], "h100-80", "line 3: is of a rehearsal"),
    ],
)
def test_every_fault_is_a_clear_line(rows: list[dict[str, Any]], cluster: str, says: str, tmp_path: Path):
    with pytest.raises(InputError) as caught:
        samples_in(written(tmp_path, *rows), cluster)
    assert any(says in str(fault) for fault in caught.value.faults)
    assert all("\n" not in str(fault) for fault in caught.value.faults)


@pytest.mark.slow
def test_rows_that_no_constants_describe_are_refused(tmp_path: Path):
    rows = [{**row, "step_time_s": 10.0**number} for number, row in enumerate(OWN[:3])]
    with pytest.raises(InputError, match="the cost model does not describe them"):
        fit(samples_in(written(tmp_path, *rows), "h100-80"), "mine")


def test_a_missing_calibration_file_is_named_with_the_other_faults(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model", "no", "--calibration", "none.json"]) == 2
    said = capsys.readouterr().err
    assert "--calibration none.json: there is no such file" in said and "--model" in said
    assert main(["validate", str(DATA), "--calibration", "none.json"]) == 2


@pytest.mark.slow
def test_a_row_in_a_wrong_unit_is_told_and_not_fitted_to(tmp_path: Path):
    rows = [json.loads(line) for line in TRAINIUM.read_text("utf-8").splitlines()]
    rows[3]["step_time_s"] *= 1000
    found = samples_in(written(tmp_path, *rows), "trn1.32xlarge")
    assert found.suspected == {rows[3]["id"]}
    (told,) = (str(fault) for fault in found.left_out if "looks wrong" in str(fault))
    assert rows[3]["id"] in told and "milliseconds" in told
    clean = samples_in(TRAINIUM, "trn1.32xlarge")
    assert not clean.suspected
    prior = prior_of([sample.run for sample in clean.samples])
    fits = [FitRows(samples=one.samples, prior=prior, suspected=one.suspected) for one in (found, clean)]
    assert fits[0].believed == tuple(number for number in fits[1].believed if number != 3)
