"""Constants from measured runs: those that made the rows are found again, and what is left out is really left out."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.calibration import calibrate as module
from autoshard.calibration.calibrate import Sample, fit, fit_constants, least_squares, samples_in
from autoshard.calibration.splits import Split, splits_for
from autoshard.calibration.validate import outlined_run, validate
from autoshard.cli import main
from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import (
    EFFICIENCIES,
    Calibration,
    Reach,
    Software,
    calibration_text,
    load_calibration,
    uncalibrated,
)
from autoshard.cost.predict import step_timer
from autoshard.errors import InputError
from autoshard.spec import record
from tests.calibration.measured_cases import ARCH, DATA, SMALL, written

TRN1 = "trn1.32xlarge"
LAYOUTS = [
    {"tp": 2, "pp": 2, "dp": 2}, {"tp": 4, "pp": 1, "dp": 2}, {"tp": 1, "pp": 1, "dp": 8}, {"tp": 8, "pp": 1, "dp": 1},
]  # fmt: skip
# Large enough that kernels outlast their launches, and nothing hides: all constants show.
LARGE = {"arch": {**ARCH, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8}, "seq_len": 4096,
         "framework": "Megatron-LM + TransformerEngine", "first_seen": "2026-01-02"}  # fmt: skip
OWN = [{**SMALL, **LARGE, **layout, "id": str(number)} for number, layout in enumerate(LAYOUTS)]
LINKS = EFFICIENCIES[4:]
ARITHMETIC_MEMORY_LINK: Split = (EFFICIENCIES[:3], ("memory_efficiency",), LINKS)
share = st.floats(0.45, 0.9)  # what is outside of this no platform reaches


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
    timers = [step_timer(*outlined_run(sample.run, uncalibrated())) for sample in samples]
    return [replace(one, step_time_s=timer(calibration)) for one, timer in zip(samples, timers, strict=True)]


WORK = np.array([[5.0, 1.0, 2.0], [1.0, 4.0, 1.0], [2.0, 2.0, 7.0], [6.0, 3.0, 0.5], [1.0, 1.0, 9.0], [3.0, 8.0, 2.0]])
PULL = 2e-2  # one unit away from the start counts as much as a row that is 2% off
START, LIMITS = np.full(3, 1.4), (np.ones(3), np.full(3, 9.0))
slownesses = st.lists(st.floats(1, 3), min_size=3, max_size=3).map(np.array)


class TestLeastSquares:
    """Known slownesses are found again, an outlier is not, and bounds hold."""

    def seconds(self, x):
        """A step with a kernel that is bound by the slower of two units."""
        return WORK @ x + np.maximum(x[0], 1.5 * x[1])

    def found(self, measured):
        return least_squares(lambda x: self.seconds(x) / measured, START, LIMITS, START)

    @given(slownesses)
    def test_known_slownesses_are_found_again_but_for_what_the_pull_moves(self, true):
        # That is about PULL^2 |true - start| / s^2, with s the least singular value of the slopes of log(seconds).
        assert self.found(self.seconds(true)) == pytest.approx(true, rel=1e-2)
        assert self.found(0.5 * self.seconds(np.ones(3))) == pytest.approx(np.ones(3)), "no faster than its data sheet"

    @given(slownesses, st.integers(0, 2 * len(WORK) - 1), st.sampled_from([0.1, 3.0, 10.0]))
    def test_one_gross_outlier_moves_the_others_little(self, true, place, factor):
        measured = np.tile(self.seconds(true), 2)
        measured[place] *= factor
        found = least_squares(lambda x: np.tile(self.seconds(x), 2) / measured, START, LIMITS, START)
        assert np.abs(self.seconds(found) / self.seconds(true) - 1).max() < 0.1

    def test_what_the_rows_do_not_decide_stays_where_it_was(self):
        measured = 3.0 * WORK[:, 0]
        found = least_squares(lambda x: WORK[:, 0] * x[0] / measured, START, LIMITS, START)
        # The rows' log(x / 3) weighs 1/9 for each of them; the pull towards 1.4 weighs PULL^2.
        moved = PULL**2 * (3.0 - 1.4) / (len(WORK) / 9)
        assert found == pytest.approx([3.0 - moved, 1.4, 1.4], rel=1e-5)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Sample]:
    """Some rows of trn1, of several models."""
    return samples_in(rows_of(built_in(TRN1), tmp_path_factory.mktemp("rows")), TRN1).samples[::2]


@settings(max_examples=2, deadline=None)
@given(arithmetic=share, memory=share, link=share)
def test_constants_that_made_the_rows_are_found_again(
    arithmetic: float, memory: float, link: float, published: Sequence[Sample]
):
    values = (arithmetic, arithmetic, arithmetic, memory, link, link)
    samples = made_by(published, replace(uncalibrated(), **dict(zip(EFFICIENCIES, values, strict=True))))
    found = fit_constants(ARITHMETIC_MEMORY_LINK, samples)
    for sample, again in zip(samples, made_by(samples, found), strict=True):
        assert again.step_time_s == pytest.approx(sample.step_time_s, rel=0.02)
    # Where arithmetic takes nearly all of the time, these layouts cannot tell slow memory from slow links.
    assert found.matrix_efficiency == pytest.approx(arithmetic, rel=0.06)


def test_what_starting_takes_is_found_from_nothing(tmp_path: Path):
    path = written(tmp_path, *({**row, "arch": ARCH} for row in OWN[:3]))  # so small that starts are all
    true = replace(uncalibrated(), launch_s=4e-5, collective_s=1e-3)
    samples = made_by(samples_in(path, "h100-80").samples, true)
    found = fit_constants((EFFICIENCIES, ("launch_s",), ("collective_s",)), samples)
    assert found.launch_s == pytest.approx(4e-5, rel=0.2) and found.collective_s == pytest.approx(1e-3, rel=0.1)


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
    splits = splits_for([one.run for one in samples])
    off: dict[str, float] = {}
    for name, split in splits.items():
        again = made_by(samples, fit_constants(split, samples))
        ratios = [one.step_time_s / sample.step_time_s for sample, one in zip(samples, again, strict=True)]
        off[name] = float(np.abs(np.array(ratios) - 1).mean())
    each = "matrix, attention, memory, launch, collective"
    assert off.pop(each) < 0.03 < min(off.values()), off


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
        part |= part.pop("tried")
    for feature, seen in theirs["seen"].items():  # files of before rows were counted
        seen["counts"] = seen["counts"] or ours["seen"][feature]["counts"]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        close = isinstance(value, float) or name == "rows"
        assert ours[name] == (pytest.approx(value, rel=1e-3) if close else value), name


def test_rows_without_noise_tell_the_constants_apart_and_what_is_left_out_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    seen: list[tuple[str, ...]] = []
    real = fit_constants

    def spied(split: Split, samples: Sequence[Sample]) -> Calibration:
        seen.append(tuple(sample.id for sample in samples))
        return real(split, samples)

    monkeypatch.setattr(module, "fit_constants", spied)
    path = own_rows(tmp_path, **dict.fromkeys(EFFICIENCIES[:4], 0.5), **dict.fromkeys(LINKS, 0.5))
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    found = fit(samples_in(written(tmp_path, *rows, {**rows[0], "id": "idle", "step_time_s": None}), "h100-80"), "mine")
    every = tuple(str(number) for number in range(len(OWN)))
    assert found.fit and ((*found.fit.rows,), found.fit.left_out_by, found.fit.date) == (every, "layout", "2026-01-02")
    assert found.fit.left_out_mape < 0.02 and found.near_link_efficiency == pytest.approx(0.5, rel=0.1)
    folds = {every, *(tuple(one for one in every if one != out) for out in every)}
    layouts = len(found.fit.tried) * len(OWN) + 1
    assert set(seen[:layouts]) == folds, "what follows leaves out values of features"
    (tmp_path / "mine.json").write_text(calibration_text(found), "utf-8")
    assert load_calibration(tmp_path / "mine.json") == found


def test_what_older_releases_and_other_frameworks_take_longer_is_found_beside_the_constants(
    published: Sequence[Sample], tmp_path: Path
):
    true = replace(uncalibrated(), **dict.fromkeys(EFFICIENCIES, 0.6), task_s=0.03)
    software = Software(frameworks={"neuronx-nemo-megatron": 1.3}, settled="2.18", slower_per_release=0.05)
    rows = [
        replace(one, step_time_s=one.step_time_s * software.slowness(one.run.framework, one.run.release))
        for one in made_by(published, true)
    ]
    split = (EFFICIENCIES, ("slower_per_release",), ("framework neuronx-nemo-megatron",), ("task_s",))
    found = fit_constants(split, rows)
    assert found.software and found.matrix_efficiency == pytest.approx(0.6, rel=0.03)
    assert found.software.slower_per_release == pytest.approx(0.05, abs=0.005)
    assert found.software.frameworks["neuronx-nemo-megatron"] == pytest.approx(1.3, rel=0.03)
    assert found.task_s == pytest.approx(0.03, abs=0.006)


@pytest.mark.parametrize(
    ("rows", "cluster", "says"),
    [
        (OWN, "h10", "'h10' is not a cluster. Did you mean"),
        (OWN[:2], "h100-80", "2 rows of h100-80 with a step_time_s are too few; a fit needs 3"),
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


def test_rows_that_no_constants_describe_are_refused(tmp_path: Path):
    rows = [{**row, "step_time_s": 10.0**number} for number, row in enumerate(OWN[:3])]
    with pytest.raises(InputError, match="the cost model does not describe them"):
        fit(samples_in(written(tmp_path, *rows), "h100-80"), "mine")


def test_a_missing_calibration_file_is_named_with_the_other_faults(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model", "no", "--calibration", "none.json"]) == 2
    said = capsys.readouterr().err
    assert "--calibration none.json: cannot be read" in said and "--model" in said
    assert main(["validate", str(DATA), "--calibration", "none.json"]) == 2
