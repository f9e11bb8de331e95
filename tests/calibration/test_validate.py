"""Every row is predicted, from its own layout alone; errors are those of its data set, and as computed by hand."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from autoshard.calibration.validate import Accuracy, Compared, FittingLayouts, Validation, accuracy, spearman, validate
from autoshard.cli import main
from autoshard.cost.built_in import built_in
from autoshard.errors import InputError
from autoshard.spec.record import encode
from tests.calibration.measured_cases import ARCH, DATA, SMALL, written

SWEEPS = Path(__file__).parents[2] / "benchmarks" / "data" / "sweeps"

AT_WORK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def compared(predicted: float, measured: float, **other: Any) -> Compared:
    values = {"id": f"{predicted}/{measured}", "group": "g", "layout": (predicted, measured), **other}
    return Compared(predicted=predicted, measured=measured, **values)


def summed(*rows: Compared) -> Accuracy:
    found = accuracy(rows)
    assert found
    return found


class TestAccuracy:
    def test_errors_by_hand(self):
        found = summed(  # +10%, -20%, +50%, 0, -40%
            compared(1.1, 1.0, low=0.9, high=1.2),
            compared(1.6, 2.0, low=1.5, high=1.7),
            compared(6.0, 4.0, low=4.0, high=8.0),
            compared(3.0, 3.0, low=2.0, high=4.0),
            compared(3.6, 6.0, low=3.5, high=5.9),
        )
        assert (found.count, found.mape, found.median) == (5, pytest.approx(1.2 / 5), pytest.approx(0.2))
        assert found.p90 == pytest.approx(0.4 + 0.6 * 0.1)  # place 3.6 of 0, .1, .2, .4, .5
        assert (found.worst, found.worst_id) == (pytest.approx(0.5), "6.0/4.0")
        assert (found.bias, found.coverage) == (pytest.approx(0.0, abs=1e-12), pytest.approx(3 / 5))

    def test_what_is_not_there_has_no_figure_and_the_worst_keeps_its_sign(self):
        assert accuracy([]) is None and summed(compared(1.0, 4.0), compared(1.5, 1.0)).worst == -0.75
        found = summed(compared(1.0, 2.0))
        assert (found.coverage, found.spearman, found.regret, found.worst_regret) == (None, None, None, None)

    @pytest.mark.parametrize(
        ("first", "second", "value"),
        [
            ([1, 2, 3], [6, 5, 4], -1.0),
            # 1 - 6 * sum(d^2) / (n (n^2 - 1)): ranks 1 4 2 5 3 differ by 0, 2, 1, 1 and 2.
            ([1, 2, 3, 4, 5], [10, 40, 20, 40.5, 30], 1 - 6 * (0 + 4 + 1 + 1 + 4) / 120),
            # Ranks 1.5 1.5 3 against 1 2 3: covariance 1.5, spreads 1.5 and 2.
            ([1, 1, 2], [1, 2, 3], 1.5 / (1.5 * 2) ** 0.5),
        ],
    )
    def test_spearman_by_hand(self, first: Sequence[float], second: Sequence[float], value: float):
        assert spearman(first, second) == spearman(second, first) == pytest.approx(value)

    def test_groups_are_averaged_and_the_worst_is_kept(self):
        pairs = {
            "a": ((1.0, 2.0), (2.0, 1.5), (3.0, 1.0)),
            "b": ((1.0, 1.0), (2.0, 2.0), (3.0, 3.0)),
            "two": ((1.0, 9.0), (2.0, 1.0)),
            "alone": ((5.0, 5.0),),
        }
        found = summed(*(compared(*pair, group=group) for group, own in pairs.items() for pair in own))
        assert (found.spearman, found.regret, found.worst_regret, len(found.groups)) == (0.0, 0.5, 1.0, 2)
        assert (found.num_groups, found.most_layouts) == (4, 3)

    def test_a_group_of_two_layouts_has_neither_an_order_nor_a_regret(self):
        found = summed(compared(1.0, 2.0), compared(2.0, 1.0))
        assert (found.spearman, found.regret, found.worst_regret, found.groups) == (None, None, None, ())
        assert (found.num_groups, found.most_layouts) == (1, 2)

    def test_layouts_of_a_group_are_compared_per_work_each_once(self):
        slow = compared(9.0, 1.7, layout="tp=4")
        halved = (compared(4.0, 8.0, layout="tp=1", work=4.0), compared(1.5, 1.8, layout="tp=2", work=1.0), slow)
        (found,) = summed(*halved).groups
        assert (found.num_layouts, found.spearman, found.regret) == (3, -1.0, pytest.approx(2.0 / 1.7 - 1))
        often = [compared(1.0, value, layout="tp=1") for value in (2.0, 3.0, 10.0)]
        (found,) = summed(*often, compared(2.0, 2.5, layout="tp=2"), compared(3.0, 4.0, layout="tp=4")).groups
        assert not summed(*often).groups and (found.num_layouts, found.regret) == (3, pytest.approx(3.0 / 2.5 - 1))

    @given(st.lists(st.lists(st.floats(1, 100), min_size=2, max_size=5), min_size=1, max_size=5))
    def test_the_noise_floor_is_the_error_of_the_median(self, layouts: list[list[float]]):
        rows = [compared(median(same), value, layout=number) for number, same in enumerate(layouts) for value in same]
        found, once = summed(*rows), compared(1.0, 5.0, group="other", layout=0)
        assert found.noise_floor == pytest.approx(found.mape) == summed(*rows, once).noise_floor
        assert summed(compared(1.0, 2.0), compared(1.0, 3.0)).noise_floor is None


def validated(folder: Path, *rows: dict[str, Any]) -> Validation:
    return validate(written(folder, *rows))


@settings(AT_WORK, max_examples=5)
@given(step_time_s=st.none() | st.floats(1e-6, 1e6), peak=st.none() | st.floats(1e-3, 1e3))
def test_no_measurement_moves_a_prediction(step_time_s: float | None, peak: float | None, tmp_path: Path):
    moved = {**SMALL, "id": "moved", "step_time_s": step_time_s, "peak_memory_gib": peak}
    first, second = validated(tmp_path, SMALL, moved).rows
    assert replace(second, id=first.id) == first


def test_the_json_has_what_is_promised(tmp_path: Path):
    found = encode(validated(tmp_path, SMALL, {**SMALL, "id": "odd", "arch": None}))
    assert list(found) == ["sets", "rows", "left_out", "num_unread"] and found["num_unread"] == 1
    ((row,), (fault,), (entry,)) = found["rows"], found["left_out"], found["sets"]
    assert list(row) == [
        "id", "predicted_step_time_s", "low_s", "high_s", "predicted_peak_memory_gib", "assumed", "parts",
        "predicted_peak_memory_gib_by_stage", "fits",
    ]  # fmt: skip
    assert sum(row["parts"].values()) == pytest.approx(row["predicted_step_time_s"])
    assert row["low_s"] < row["predicted_step_time_s"] < row["high_s"]
    assert fault["where"].endswith("line 2") and "arch: its architecture is not known" in fault["message"]
    assert (entry["num_rows"], entry["step_time"]["count"]) == (1, 1)
    assert entry["basis"] == built_in("h100-80", "mcore").basis
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_errors_are_those_of_the_rows(tmp_path: Path):
    (said,) = validated(tmp_path, SMALL).rows
    time_s, size_gib = said.predicted_step_time_s, said.predicted_peak_memory_gib
    (found,) = validated(tmp_path, {**SMALL, "step_time_s": 2 * time_s, "peak_memory_gib": size_gib / 2}).sets
    assert found.step_time and found.peak_memory
    assert (found.step_time.mape, found.step_time.bias, found.step_time.coverage) == (0.5, -0.5, 0.0)
    assert (found.peak_memory.mape, found.peak_memory.coverage) == (1.0, None)


def test_layouts_that_crashed_are_counted_by_whether_they_would_fit(tmp_path: Path):
    crashed = {**SMALL, "kind": "crashed", "step_time_s": None, "peak_memory_gib": None}
    endless = {**crashed, "id": "endless", "seq_len": 2**17, "micro_batch": 256, "global_batch_seqs": 512}
    (found,) = validate(written(tmp_path, SMALL, {**crashed, "id": "small enough"}, endless)).sets
    counts = FittingLayouts(num_ran=1, ran_and_fit=1, num_crashed=2, crashed_and_fit=1)
    assert found.fitting == counts and found.step_time and found.step_time.count == 1
    with pytest.raises(InputError, match="a run that crashed has no step_time_s"):
        validate(written(tmp_path, {**SMALL, "kind": "crashed"}))


def test_a_layout_fits_where_only_what_an_allocator_could_give_back_is_too_much(tmp_path: Path):
    """InternLM-7B ran with what is more than an A100 has, by the usual share of reserved memory."""
    name = "internevo_a100.jsonl"
    rows = [json.loads(line) for line in (SWEEPS / name).read_text("utf-8").splitlines()]
    (row,) = (row for row in rows if row["id"] == "internevo-7b-a100-n8-t1-all")
    (found,) = validate(written(tmp_path, row)).rows
    assert found.fits and found.predicted_peak_memory_gib > 80, "an A100 has 79.2 GiB"


@pytest.mark.slow
def test_unusual_rows_are_predicted_and_what_decides_the_layout_changes_that(tmp_path: Path):
    changes: list[dict[str, Any]] = [
        {}, {"recompute": "full"}, {"sharding": "ZeRO-3"}, {"precision": "fp32"}, {"micro_batch": 2},
        {"tp": 4, "pp": 1}, {"framework": "torchtitan", "recompute": "selective"},
        {"vp": 2, "pipeline_schedule": "interleaved 1F1B"}, {"platform": "p5.48xlarge", "framework": None},
        {"arch": {**ARCH, "experts": 4, "experts_per_token": 2}, "ep": 2},
        {"arch": {**ARCH, "hidden": 768, "heads": 6, "kv_heads": 6}, "tp": 8, "pp": 1, "dp": 1},  # refused by a Rule
        {"cp": 2, "dp": 1, "seq_len": 250},
    ]  # fmt: skip
    rows = [{**SMALL, **change, "id": str(number)} for number, change in enumerate(changes)]
    (shapeless,) = validated(tmp_path, *rows, {**SMALL, "id": "b", "pp": 8, "tp": 1, "dp": 1}).left_out
    assert "4 layers of own cannot fill 8 stages" in shapeless.message
    found = {(row.predicted_step_time_s, row.predicted_peak_memory_gib) for row in validated(tmp_path, *rows).rows}
    assert len(found) == len(changes)


def test_every_fault_of_every_row_comes_at_once(tmp_path: Path):
    with pytest.raises(InputError) as caught:
        validated(tmp_path, {**SMALL, "recompute": "x"}, {**SMALL, "id": "b", "dp": 3, "platform": "tpu"})
    heads = [str(fault).removeprefix(str(tmp_path / "runs.jsonl")) for fault in caught.value.faults]
    assert heads[0].startswith(": holds no measured row that can be used. Run a plan to its end")
    assert heads[1].startswith(" line 1: recompute: cannot read 'x'.")
    assert heads[2].startswith(" line 2: platform: cannot read 'tpu'.")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"holds no files of rows: their names end in \.jsonl"):
        validate(empty)


def a_run(folder: Path, name: str, text: str | bytes | None) -> Path:
    """Make the folder of a run, with so much of a row."""
    (folder / name / "logs").mkdir(parents=True)
    (folder / name / "plan.json").write_text("{}", encoding="utf-8")
    (folder / name / "steps.jsonl").write_text('{"number": 1, "loss": 2.5}\n' * 54, encoding="utf-8")
    if text is not None:
        path = folder / name / "measured.jsonl"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


WHOLE = json.dumps({**SMALL, "id": "whole", "kind": "run"})
LEFT: dict[str, tuple[str | bytes | None, str]] = {
    "cut": (WHOLE[:200], "line 1: is not JSON: "),
    "empty": ("", ": holds no rows; write one JSON object per line"),
    "garbage": (b"\x00\xff\xfe" * 9, "line 1: is not text in UTF-8"),
    "killed": (None, ": holds a run without a measured row, which is written when it ends"),
    "nan": (json.dumps({**SMALL, "step_time_s": float("nan")}), "line 1: is not usable JSON: NaN is not a number"),
    "of_before": (json.dumps({**SMALL, "widgets": 3}), "line 1: widgets: unknown key"),
    "rehearsed": (json.dumps({**SMALL, "id": "b", "kind": "rehearsal"}), "line 1: is of a rehearsal, which runs a"),
    "short": (json.dumps({**SMALL, "id": "c", "kind": "short"}), "line 1: is of a run that ended before its"),
    "steps": ('{"number": 1, "loss": 2.5}\n' * 54, "lines 1 to 54: is no measured row"),
    "twice": (WHOLE, "line 1: id: whole stands in"),
    "unread": (json.dumps({**SMALL, "id": "d", "recompute": "x"}), "line 1: recompute: cannot read 'x'"),
}


def test_what_runs_leave_is_left_out_in_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    expected = validate(a_run(tmp_path / "runs", "a", WHOLE))
    assert not expected.left_out
    for name, (text, _) in LEFT.items():
        a_run(tmp_path / "runs", name, text)
    found = validate(tmp_path / "runs")
    assert found.rows == expected.rows and [entry.num_rows for entry in found.sets] == [1]
    capsys.readouterr()
    assert main(["validate", str(tmp_path / "runs")]) == 1
    out, err = capsys.readouterr()
    incomplete = ("killed", "rehearsed", "short")
    num_lines = len(LEFT) - len(incomplete) + 53  # that of steps has many
    assert f"{num_lines} of {num_lines + 1} rows could not be used and are in no figure" in out
    said = err.splitlines()
    for name in LEFT.keys() - set(incomplete):
        shutil.rmtree(tmp_path / "runs" / name)
    assert main(["validate", str(tmp_path / "runs")]) == 0
    assert len(said) == len(LEFT)
    for name, (text, says) in LEFT.items():
        place = tmp_path / "runs" / name / ("" if text is None else "measured.jsonl")
        joint = "" if says.startswith(":") else " "
        assert any(line.startswith(f"left out {place}{joint}{says}") for line in said), name


@pytest.mark.parametrize("name", [name for name in LEFT if name not in ("rehearsed", "short", "twice")])
def test_a_run_that_has_nothing_to_use_says_what_to_do(name: str, tmp_path: Path):
    text, says = LEFT[name]
    folder = a_run(tmp_path, name, text)
    for path in (folder, tmp_path, *([folder / "measured.jsonl"] if text is not None else [])):
        with pytest.raises(InputError) as caught:
            validate(path)
        first, *_ = lines = [str(fault) for fault in caught.value.faults]
        assert "Run a plan to its end (autoshard run PLAN)" in first and len(lines) <= 2
        assert any(says.removeprefix(": ") in line for line in lines)


OTHERS: dict[str, tuple[object, str]] = {
    "plan.json": ({"schema": 2, "model": {}, "cluster": {}, "strategies": {}}, "autoshard run {path}"),
    "metrics.jsonl": ({"step": 1, "loss": 2.5, "time_s": 0.1}, "autoshard validate {folder}"),
    "rows.jsonl": ({"id": "a", "status": "planned"}, "Name one of its runs"),
    "recipe.yaml": ({"model": "a", "cluster": "b", "nodes": 2}, "autoshard plan --config {path}"),
    "calibration.json": ({"matrix_efficiency": 0.5, "interval": 0.1}, "--calibration {path}"),
    "lab.json": ({"name": "lab", "variants": [], "links": []}, "autoshard plan --cluster {path}"),
    "config.json": ({"model_type": "llama"}, "autoshard plan --model {path}"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_of_another_kind_is_told_and_the_command_that_takes_it(
    name: str, indent: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data, use = OTHERS[name]
    path = tmp_path / name
    path.write_text(json.dumps(data, indent=None if path.suffix == ".jsonl" else indent), encoding="utf-8")
    assert main(["validate", str(path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "not a file of measured rows" in said and use.format(path=path, folder=tmp_path) in said


@pytest.mark.parametrize("name", ["rehearsed", "short"])
def test_a_rehearsal_is_predicted_where_it_is_named(name: str, tmp_path: Path):
    folder = a_run(tmp_path, name, LEFT[name][0])
    assert len(validate(folder).rows) == len(validate(folder / "measured.jsonl").rows) == 1
    with pytest.raises(InputError, match="holds no measured row that can be used"):
        validate(tmp_path)


@settings(AT_WORK, max_examples=8)
@given(cut=st.integers(0, len(WHOLE)), junk=st.binary(max_size=9).filter(lambda junk: b"\n" not in junk))
def test_a_line_that_a_kill_cuts_costs_that_line_only(cut: int, junk: bytes, tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(WHOLE.encode() + b"\n" + WHOLE[:cut].replace("whole", "last").encode() + junk)
    found = validate(path)
    assert found.rows[0].id == "whole" and len(found.rows) + len(found.left_out) <= 2


WORDS = st.sampled_from(
    [None, "", "none", "full", "selective", "selective[attend]", "torchtitan", "h100", "trn2", "1F1B"]
)
NUMBERS = st.none() | st.sampled_from([0, 1, 2, 3, 4, 8, 2**31, 2**62, 1.0, True, "2"])


@settings(AT_WORK, max_examples=20)
@given(
    words=st.dictionaries(st.sampled_from([key for key in SMALL if isinstance(SMALL[key], str)]), WORDS, max_size=3),
    numbers=st.dictionaries(
        st.sampled_from([key for key in SMALL if isinstance(SMALL[key], int)]), NUMBERS, max_size=3
    ),
    arch=st.dictionaries(st.sampled_from([*ARCH, "experts", "head_dim", "other"]), NUMBERS, max_size=3),
)
def test_any_row_is_predicted_or_told(
    words: dict[str, Any], numbers: dict[str, Any], arch: dict[str, Any], tmp_path: Path
):
    row = {**SMALL, **words, **numbers, "arch": {**ARCH, **arch}}
    try:
        found = validated(tmp_path, row)
    except InputError as error:
        assert all("line 1" in fault.where for fault in error.faults[1:])
    else:
        assert len(found.rows) == 1 and not found.left_out


def test_what_tensors_took_on_a_gpu_was_predicted():
    """Beside logits that a loss reads lies their gradient: two gigabytes, for the vocabulary of Llama-3."""
    (engine,) = validate(DATA / "engine" / "h200.jsonl").sets
    memory = engine.peak_memory
    assert memory is not None and memory.mape < 0.03 and abs(memory.worst) < 0.06
