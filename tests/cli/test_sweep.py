"""``autoshard sweep`` as it is typed: what is said, what is done again, what a job array does."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoshard.cli import main
from tests.sweep.sweep_cases import TINY, rows_in, statuses, written

_ONE = ("--jobs", "1")  # a process costs more than a point
TWO = {"base": TINY, "grid": {"ranks": [1, 2]}}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def typed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["sweep", *_ONE, *words]) == code, capsys.readouterr().err
    said = capsys.readouterr()
    return said.out if code == 0 else said.err


def sweep_of(**data: Any) -> str:
    return str(written({**TWO, **data}, Path()))


def test_a_sweep_is_done_once_and_more_points_are_added(capsys: pytest.CaptureFixture[str]) -> None:
    said = typed(capsys, sweep_of())
    assert re.search(r"2/2  ranks=[12]: step .* tp=", said)
    assert "The points of the sweep" in said and "wrote sweeps/tiny/rows.jsonl" in said
    before = Path("sweeps/tiny/rows.jsonl").read_bytes()
    assert "2 of 2 points are done already" in typed(capsys, sweep_of())
    assert Path("sweeps/tiny/rows.jsonl").read_bytes() == before
    more = {"list": [{"ranks": 1}, {"ranks": 2}, {"fix": "tp=3"}], "grid": {}}
    assert "2 of 3 points are done already" in typed(capsys, sweep_of(**more))
    assert Path("sweeps/tiny/rows.jsonl").read_bytes().startswith(before)
    assert len(list(Path("sweeps/tiny/plans").iterdir())) == 2
    found = json.loads(typed(capsys, sweep_of(**more), "--json", "--parquet"))
    assert found["rows"] == rows_in(Path("sweeps/tiny")) and statuses(found["rows"]) == [
        "planned",
        "planned",
        "no plan",
    ]
    assert "8 query heads of tiny-llama do not divide by 3" in found["rows"][2]["message"]
    assert Path("sweeps/tiny/rows.parquet").is_file() and "wrote sweeps/tiny/rows.parquet" in found["notes"]


@pytest.mark.slow
@pytest.mark.ranks
def test_one_run_that_fails_does_not_end_the_rest_and_is_tried_again_when_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = sweep_of(mode="run", base={**TINY, "steps": 2, "ranks": 1}, grid={"init_weights": ["weights", None]})
    assert "1 of 2 points failed; each row says why" in typed(capsys, words, code=3)
    first = rows_in(Path("sweeps/tiny"))
    assert statuses(first) == ["failed", "ran"] and "there is no folder weights" in first[0]["message"]
    assert first[1]["num_steps"] == 2 and first[1]["measured_step_time_s"] > 0
    assert first[1]["measured_over_predicted"] == pytest.approx(
        first[1]["measured_step_time_s"] / first[1]["ran_predicted_s"]
    )
    assert "2 of 2 points are done already" not in typed(capsys, words, code=3)
    assert rows_in(Path("sweeps/tiny")) == first
    assert "1 of 2 points failed" in typed(capsys, words, "--retry", code=3)
    again = rows_in(Path("sweeps/tiny"))
    assert again[0] == first[1] and statuses(again) == ["ran", "failed"]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_plan_of_a_cluster_is_rehearsed(capsys: pytest.CaptureFixture[str]) -> None:
    base = {"model": "llama3-8b", "nodes": 1, "seq_len": 2048, "global_batch": 64, "steps": 2, "fix": "tp=8"}
    typed(capsys, sweep_of(mode="run", rehearse=2, base=base, grid={}))
    (row,) = rows_in(Path("sweeps/tiny"))
    assert (row["status"], row["kind"], row["ran_on"]) == ("ran", "rehearsal", "local")
    assert row["candidate"].startswith("tp=8") and "tp=2" in row["ran_candidate"]
    assert row["measured_over_predicted"] is None, "seconds of another machine are not compared"


def test_a_job_array_does_the_same_points(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = sweep_of(frontier=2, grid={"ranks": [1, 2]})
    said = typed(capsys, path, "--scheduler", "slurm", "--out", "out")
    assert "wrote out/array.sbatch: 2 tasks\nnext: sbatch out/array.sbatch" in said
    script = Path("out/array.sbatch")
    text = script.read_text()
    assert "#SBATCH --array=0-1%16" in text and len(text.splitlines()) < 30
    subprocess.run([str(Path(sys.executable).with_name("shellcheck")), str(script)], check=True)
    for task in ("0", "1"):
        typed(capsys, path, "--out", "out", "--task", task)
    assert "done already" in typed(capsys, path, "--out", "out", "--task", "1")
    assert not Path("out/rows.jsonl").exists()
    assert "4 of 4 points are done already" in typed(capsys, path, "--out", "out")
    assert statuses(rows_in(Path("out"))) == ["planned"] * 4
    assert "done already" in typed(capsys, path, "--out", "out", "--task", "0")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--jobs", "0"], "--jobs: must be at least 1, not 0"),
        (["--task", "2"], "--task: the array has tasks 0 to 1"),
        (["--task", "0", "--scheduler", "slurm"], "--scheduler and --task: exclude each other"),
        (["--scheduler", "pbs"], "--scheduler: 'pbs' is not one of them"),
        (["--out", "tiny.yaml"], "--out tiny.yaml: is a file. Name a folder"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in typed(capsys, sweep_of(), *words, code=2)


def test_faults_of_the_file_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tiny.yaml.modle: unknown key. Did you mean model or nodes?" in typed(
        capsys, sweep_of(grid={"modle": [1]}), code=2
    )
    many = {"mode": "run", "base": {"model": "llama3-8b"}, "grid": {"nodes": [1, 4]}}
    assert "a task has one node, and nodes=4 runs on more" in typed(
        capsys, sweep_of(**many), "--scheduler", "slurm", code=2
    )
    assert typed(capsys, "none.yaml", code=2) == "autoshard: none.yaml: cannot be read: No such file or directory\n"
    typed(capsys, code=2)


def test_sweeps_that_come_along_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "sweeps", "--json"]) == 0
    names = [Path(one["name"]).stem for one in json.loads(capsys.readouterr().out)["sweeps"]]
    assert {"tiny", "llama3-70b-scaling-trn1", "lnc-trn2", "sequence-length", "recompute-micro-batch"} <= set(names)
