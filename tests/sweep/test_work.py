"""What jobs give, whatever becomes of them: rows, processes that die, lines that a kill has cut."""

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

import autoshard
from autoshard.errors import InputError
from autoshard.plan.codec import dump, load, plan_hash
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.sweep.points import Sweep
from autoshard.sweep.questions import SweepQuestions
from autoshard.sweep.table import RowFile, write_parquet, write_task
from autoshard.sweep.work import SweepJob, job_rows, work_through
from tests.sweep.sweep_cases import TINY, jobs, rows_in, tiny


def test_a_row_is_the_plan_that_the_planner_finds(tmp_path: Path):
    (job,) = jobs(tiny(grid={"ranks": (2,)}, base={**TINY, "fix": "mbs=1"}), tmp_path)
    (row,) = job_rows(job)
    best = load(tmp_path / "plans" / f"{row['id']}.json")
    assert best.prediction and row["status"] == "planned"
    assert (row["plan_hash"], row["candidate"], row["step_time_s"]) == (
        plan_hash(best), str(best.candidate), best.prediction.step_time_s,
    )  # fmt: skip
    assert best.cluster == load_cluster("local", ranks=2)
    assert row["autoshard"] == autoshard.__version__ and row["at.ranks"] == 2
    assert all(value is None or isinstance(value, str | int | float) for value in row.values()), "rows are flat"
    json.dumps(row, allow_nan=False)


def test_code_may_stand_in_the_place_of_a_model(tmp_path: Path):
    base = {**TINY, "seq_len": 16, "fix": "tp=1,pp=1", "model": None}
    sweep = tiny(base=base, grid={"module": ("tests.modules.training.own_decoders:Gpt",)})
    SweepQuestions(sweep, tmp_path).refuse()
    (job,) = jobs(sweep, tmp_path)
    (row,) = job_rows(job)
    plan = load(tmp_path / "plans" / f"{row['id']}.json")
    assert (
        row["status"] == "planned" and plan.code and plan.code.source.endswith("own_decoders:Gpt") and plan.code.order
    )
    with pytest.raises(InputError, match=r"module: there is no file mine\.py"):
        SweepQuestions(tiny(base=base, grid={"module": ("mine.py:make",)}), tmp_path).refuse()


def test_a_plan_file_is_not_searched_again_and_one_that_may_not_run_says_why(tmp_path: Path):
    third = autoshard.plan("tiny-llama", "local", fix={"mbs": 8}).answers[2].plan
    refused = replace(third, headroom=0.99999)
    for name, plan in (("third.json", third), ("refused.json", refused)):
        (tmp_path / name).write_text(dump(plan), encoding="utf-8")
    found = jobs(Sweep(list=({"plan": "third.json"}, {"plan": "refused.json"})), tmp_path)
    good, bad = (job_rows(job)[0] for job in found)
    assert (good["status"], good["plan_hash"], good["point"]) == ("planned", plan_hash(third), "plan=third.json")
    assert bad["status"] == "no plan" and "is predicted to need" in bad["message"]


def test_a_frontier_is_one_search_and_what_is_not_there_is_said(tmp_path: Path):
    found = jobs(tiny(frontier=3, grid={"ranks": (2,)}, base={**TINY, "fix": "tp=1,pp=1,mbs=1,zero=1"}), tmp_path)
    assert len(found) == 1
    rows = job_rows(found[0])
    good = [row for row in rows if row["status"] == "planned"]
    times = [row["step_time_s"] for row in good]
    assert times == sorted(times) and len({row["plan_hash"] for row in good}) == len(good)
    missing = [f"the question has {number - 1} plans, not {number}" for number in range(len(good) + 1, 4)]
    assert [row["message"] for row in rows[len(good) :]] == missing


@pytest.mark.slow
def test_a_process_that_dies_takes_only_its_own_job(tmp_path: Path):
    todo, victim = jobs(tiny(grid={"ranks": (1, 2, 4)}), tmp_path), list[str]()

    def begun(job: SweepJob) -> None:
        if not victim:
            victim.append(job.points[0].id)
            (child,) = multiprocessing.active_children()
            assert child.pid
            os.kill(child.pid, signal.SIGKILL)

    rows = [row for found in work_through(todo, 1, begun) for row in found]
    assert sorted(row["id"] for row in rows) == sorted(point.id for job in todo for point in job.points)
    assert [row["id"] for row in rows if row["status"] == "failed"] == victim
    assert "was killed by SIGKILL" in next(row["message"] for row in rows if row["status"] == "failed")
    assert not multiprocessing.active_children()


def test_a_cut_line_is_dropped_and_its_point_is_left(tmp_path: Path):
    rows = RowFile(tmp_path)
    rows.add([{"id": "a", "status": "planned"}, {"id": "b", "status": "failed"}])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"id": "c", "sta')
    again = RowFile(tmp_path)
    assert set(again.rows) == {"a", "b"}
    again.add([{"id": "c", "status": "planned"}])
    assert [row["id"] for row in rows_in(tmp_path)] == ["a", "b", "c"]
    again.forget_failed()
    (tmp_path / "other").mkdir()
    for line in ("[]", "{}", '{"id": []}', "[" * 5000):
        (tmp_path / "other" / "rows.jsonl").write_text(f"{line}\n")
        with pytest.raises(InputError, match=r"rows.jsonl line 1: is no row of a sweep"):
            RowFile(tmp_path / "other")
    assert set(again.rows) == {"a", "c"} and [row["id"] for row in rows_in(tmp_path)] == ["a", "c"]


def test_parts_of_a_job_array_are_gathered_once(tmp_path: Path):
    write_task([{"id": "a", "status": "planned"}], tmp_path, "a")
    assert set(RowFile(tmp_path).rows) == {"a"}
    write_task([{"id": "a", "status": "planned"}, {"id": "b", "status": "planned"}], tmp_path, "b")
    assert set(RowFile(tmp_path).rows) == {"a", "b"}
    assert [row["id"] for row in rows_in(tmp_path)] == ["a", "b"] and not list(tmp_path.glob("parts/*"))


@pytest.mark.parametrize("text", ["[" * 5000, "[3]", '[{"status": "planned"}]', "{", ""])
def test_a_damaged_part_of_a_job_array_is_named(text: str, tmp_path: Path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"parts/a.json"):
        RowFile(tmp_path)


def test_parquet_has_the_same_rows(tmp_path: Path):
    rows = [{"id": "a", "x": 1, "y": None, "mixed": 3}, {"id": "b", "x": 2.5, "z": "text", "mixed": "three"}]
    table = parquet.read_table(write_parquet(rows, tmp_path)).to_pylist()
    assert table == [
        {"id": "a", "x": 1.0, "y": None, "mixed": "3", "z": None},
        {"id": "b", "x": 2.5, "y": None, "mixed": "three", "z": "text"},
    ]
