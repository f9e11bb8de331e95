"""``autoshard sweep`` as it is typed: what is said, what is done again, what a job array does."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Typed
from tests.sweep.sweep_cases import TINY, rows_in, statuses, written

ONE = "sweep --jobs 1 tiny.yaml"  # a process costs more than a point


def sweep_of(**data: Any) -> None:
    written({"base": {**TINY, "fix": "tp=1,mbs=1"}, "grid": {"ranks": [1, 2]}, **data}, Path())


@pytest.mark.slow
def test_a_sweep_is_done_once_and_more_points_are_added(typed: Typed) -> None:
    sweep_of()
    said = typed(ONE)[1]
    assert re.search(r"2/2  ranks=[12]: step .* tp=1", said)
    assert "The points of the sweep" in said and "wrote sweeps/tiny/rows.jsonl" in said
    before = Path("sweeps/tiny/rows.jsonl").read_bytes()
    sweep_of(list=[{"ranks": 1}, {"ranks": 2}, {"fix": "tp=3"}], grid={})
    found = json.loads(typed(f"{ONE} --json --parquet")[1])
    assert Path("sweeps/tiny/rows.jsonl").read_bytes().startswith(before)
    assert len(list(Path("sweeps/tiny/plans").iterdir())) == 2
    assert found["rows"] == rows_in(Path("sweeps/tiny"))
    assert statuses(found["rows"]) == ["planned", "planned", "no plan"]
    assert "8 query heads of tiny-llama do not divide by 3" in found["rows"][2]["message"]
    assert Path("sweeps/tiny/rows.parquet").is_file() and "wrote sweeps/tiny/rows.parquet" in found["notes"]
    assert "3 of 3 points are already done" in typed(ONE)[1]
    sweep_of(grid={"ranks": [1], "steps": [2, 3]})
    assert "steps: of training, which changes no plan. For runs write mode: run" in typed(ONE)[1]


@pytest.mark.slow
@pytest.mark.ranks
def test_one_run_that_fails_does_not_end_the_rest_and_is_tried_again_when_told(typed: Typed) -> None:
    sweep_of(mode="run", base={**TINY, "steps": 2, "ranks": 1}, grid={"init_weights": ["weights", None]})
    code, _, err = typed(ONE)
    assert code == 3 and "1 of 2 points failed; each row says why" in err
    first = rows_in(Path("sweeps/tiny"))
    assert statuses(first) == ["failed", "ran"] and "there is no folder weights" in first[0]["message"]
    assert first[1]["num_steps"] == 2 and first[1]["measured_step_time_s"] > 0
    ratio = first[1]["measured_step_time_s"] / first[1]["ran_predicted_s"]
    assert first[1]["measured_over_predicted"] == pytest.approx(ratio)
    assert typed(ONE)[0] == 3 and rows_in(Path("sweeps/tiny")) == first
    assert "1 of 2 points failed" in typed(f"{ONE} --retry")[2]
    again = rows_in(Path("sweeps/tiny"))
    assert again[0] == first[1] and statuses(again) == ["ran", "failed"]


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_plan_of_a_cluster_is_rehearsed(typed: Typed) -> None:
    base = {"model": "llama3-8b", "nodes": 1, "seq_len": 2048, "global_batch": 64, "steps": 2, "fix": "tp=8"}
    sweep_of(mode="run", rehearse=2, base=base, grid={})
    assert typed(ONE)[0] == 0
    (row,) = rows_in(Path("sweeps/tiny"))
    assert (row["status"], row["kind"], row["ran_on"]) == ("ran", "rehearsal", "local")
    assert row["candidate"].startswith("tp=8") and "tp=2" in row["ran_candidate"]
    assert row["measured_over_predicted"] is None, "seconds of another machine are not compared"


@pytest.mark.slow
def test_a_job_array_does_the_same_points(typed: Typed) -> None:
    sweep_of(frontier=2, base=TINY)
    line = f"{ONE} --out out"
    assert "wrote out/array.sbatch: 2 tasks\nnext: sbatch out/array.sbatch" in typed(f"{line} --scheduler slurm")[1]
    script = Path("out/array.sbatch")
    text = script.read_text()
    assert "#SBATCH --array=0-1%16" in text and len(text.splitlines()) < 30
    subprocess.run([str(Path(sys.executable).with_name("shellcheck")), str(script)], check=True)
    for task in (0, 1):
        assert typed(f"{line} --task {task}")[0] == 0
    assert "already done" in typed(f"{line} --task 1")[1] and not Path("out/rows.jsonl").exists()
    assert "4 of 4 points are already done" in typed(line)[1]
    assert statuses(rows_in(Path("out"))) == ["planned"] * 4
    assert "already done" in typed(f"{line} --task 0")[1]


@pytest.mark.parametrize(
    ("words", "data", "says"),
    [
        ("--jobs 0", {}, "--jobs: must be at least 1, not 0"),
        ("--task 2", {}, "--task: the array has tasks 0 to 1"),
        ("--task 0 --scheduler slurm", {}, "--scheduler and --task: exclude each other"),
        ("--out tiny.yaml", {}, "--out tiny.yaml: is a file. Name a folder"),
        ("", {"grid": {"modle": [1]}}, "tiny.yaml: modle: unknown key. Did you mean model or nodes?"),
        ("", {"grid": {"cluster": ["local", "lokal"]}}, "tiny.yaml: cluster: 'lokal' is not a cluster. Did you mean"),
        ("--scheduler slurm", {"base": {"model": "tiny-lama"}}, "model: 'tiny-lama' is not a known model. Did you"),
        ("", {"grid": {"ranks": [1, 65], "seed": [1, 2]}}, "tiny.yaml: ranks: local takes 1 to 64, not 65"),
        ("", {"list": [{"fix": "tpp=2"}, {"calibration": "no.json"}]}, "calibration no.json: there is no such file"),
        (
            "--scheduler slurm",
            {"mode": "run", "base": {"model": "llama3-8b"}, "grid": {"nodes": [1, 4]}},
            "a task has one node, and nodes=4 runs on more",
        ),
    ],
)
def test_what_is_wrong_is_said(words: str, data: dict[str, Any], says: str, typed: Typed) -> None:
    sweep_of(**data)
    assert says in typed.refusal(f"sweep tiny.yaml {words}")


def test_a_sweep_that_is_nowhere_is_said(typed: Typed) -> None:
    assert typed("sweep none.yaml")[2] == "autoshard: none.yaml: there is no such file\n"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="lists the children of a process as Linux does")
def test_an_interrupt_while_workers_start_is_one_line() -> None:
    sweep_of()
    command = [sys.executable, "-m", "autoshard", "sweep", "tiny.yaml", "--jobs", "2"]
    piped = subprocess.PIPE
    process = subprocess.Popen(command, start_new_session=True, stdout=piped, stderr=piped, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text(encoding="utf-8").split()) < 2:  # the tracker of resources, and a worker
        time.sleep(0.01)
    time.sleep(0.1)  # the worker imports
    os.killpg(process.pid, signal.SIGINT)
    complaint = process.communicate(timeout=300)[1]
    assert process.returncode == 130 and complaint.splitlines() == ["autoshard: interrupted"]


@pytest.mark.slow
def test_a_point_is_the_plan_that_plan_writes_and_a_frontier_the_fastest_ones(typed: Typed) -> None:
    base = {"model": "llama3-8b", "cluster": "trn1", "nodes": 4}
    answers = json.loads(typed("plan llama3-8b --cluster trn1 --nodes 4 --json --out plan.json")[1])
    written_s, fastest_s = answers["plan"]["prediction"]["step_time_s"], answers["certificate"]["value"]
    assert written_s > fastest_s * (1 + 1e-4)  # its stages are even
    for frontier, expected in ((1, [written_s]), (2, [fastest_s])):
        written({"list": [base], "frontier": frontier}, Path())
        found = json.loads(typed(f"{ONE} --json --out sweeps/{frontier}")[1])
        seconds = [row["step_time_s"] for row in found["rows"]]
        assert seconds[:1] == pytest.approx(expected, rel=1e-6) and len(seconds) == frontier
