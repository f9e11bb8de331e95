"""Rows are read strictly, and everything that is wrong is told with its line and column, at once."""

import json
from pathlib import Path
from typing import Any

import pytest

from autoshard.calibration.measured import MeasuredRow, read_row, read_rows
from autoshard.errors import InputError
from tests.calibration.measured_cases import FILES, SMALL


def written(folder: Path, *rows: object) -> Path:
    path = folder / "runs.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def faults(path: Path) -> list[str]:
    with pytest.raises(InputError) as caught:
        read_rows(path)
    return [str(fault).removeprefix(str(path)) for fault in caught.value.faults]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_rows_of_this_repository_are_read_and_name_their_source(path: Path):
    rows = read_rows(path).values()
    assert len(rows) == {"trainium": 42, "gpu_published": 34}[path.stem]
    assert all(row.source and row.source["repo"] and row.step_time_s for row in rows)


def test_a_row_needs_little():
    row = read_row({"id": "a", "platform": "trn1", "seq_len": 8, "global_batch_seqs": 8, "chips": 16.0})
    assert (row.chips, row.nodes, row.tp, row.step_time_s, row.arch) == (16, None, None, None, None)


def test_null_is_absent():
    nothing = {name: None for name in MeasuredRow.__dataclass_fields__ if name not in SMALL or name == "dp"}
    assert read_row({**SMALL, **nothing}) == read_row({name: value for name, value in SMALL.items() if name != "dp"})


def test_unmeasured_rows_keep_all_but_the_measurements():
    row = read_row({**SMALL, "peak_memory_gib_by_stage": [1.0, 2.0]})
    rest = {name: value for name, value in SMALL.items() if name not in ("step_time_s", "peak_memory_gib")}
    assert row.unmeasured == read_row(rest)
    assert row.unmeasured.arch == row.arch


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": ""}, "id: must not be empty"),
        ({"id": None}, "id: expected a string, found null"),
        ({"tp": 0}, "tp: must be at least 1, or null, not 0"),
        ({"tp": "8"}, "tp: expected a whole number, found '8'"),
        ({"tp": 1.5}, "tp: expected a whole number, found 1.5"),
        ({"seq_len": None}, "seq_len: expected a whole number, found null"),
        ({"step_time_s": -1.0}, "step_time_s: must be positive, or null, not -1.0"),
        ({"step_time": 1.0}, "step_time: unknown key. Did you mean step_time_s?"),
        ({"arch": []}, "arch: expected an object, found a list"),
        ({"nodes": None, "chips": None}, "nodes: missing; say nodes, chips or both"),
    ],
)
def test_one_wrong_column_is_one_line(change: dict[str, Any], says: str, tmp_path: Path):
    assert faults(written(tmp_path, SMALL, {**SMALL, "id": "b", **change})) == [f" line 2, {says}"]


def test_every_fault_of_every_line_comes_at_once(tmp_path: Path):
    path = written(tmp_path, {**SMALL, "tp": 0, "pp": 0}, "", SMALL, SMALL, [])
    assert faults(path) == [
        " line 1, tp: must be at least 1, or null, not 0",
        " line 1, pp: must be at least 1, or null, not 0",
        f" line 4, id: small stands in {path} line 3 already",
        " line 5: expected an object, found a list",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", " line 1: is not JSON: Expecting property name"),
        ('{"id": NaN}', " line 1: is not usable JSON: NaN is no number"),
        ('{"number": 1, "loss": 2.5}', " line 1: is no measured row, which has an id and a platform"),
        ('{"id": "a", "kind": "walk"}', " line 1, kind: "),
        ('{"id": "a", "id": "b"}', " line 1: the key 'id' stands twice"),
        ("[" * 100_000, " line 1: is nested too deeply"),
        ("", ": holds no rows; write one JSON object per line"),
        ('{"tp": ' + "9" * 5000 + "}", " line 1: is not usable JSON"),
    ],
)
def test_what_is_no_row_is_one_line(text: str, says: str, tmp_path: Path):
    assert faults(written(tmp_path, text))[0].startswith(says)


def test_files_that_cannot_be_read(tmp_path: Path):
    assert faults(tmp_path / "none.jsonl") == [": cannot be read: No such file or directory"]
    (tmp_path / "raw.jsonl").write_bytes(b"\xff\xfe")
    assert faults(tmp_path / "raw.jsonl") == [" line 1: is not text in UTF-8"]
