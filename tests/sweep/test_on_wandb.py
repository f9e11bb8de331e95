"""What a sweep shows on W&B: files of runs without a key, read back by W&B's own reader."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runtime.metrics.offline import records, wandb_environment
from tests.sweep.sweep_cases import TINY, rows_in, written

Records = list[dict[str, Any]]


def typed(folder: Path, *words: str, **more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "autoshard.cli", "sweep", *words]
    more = {"PYTHONWARNINGS": "error,ignore::ResourceWarning", **more}  # folders in which W&B makes its tables
    env = wandb_environment(folder, **more)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def runs_in(folder: Path) -> dict[str, Records]:
    """What is in each file, by the name that the run is shown under."""
    files = sorted(folder.rglob("offline-run-*/run-*.wandb"))
    found = [records(file, folder) for file in files]
    names = [next(one["run"].get("display_name", "") for one in part if "run" in one) for part in found]
    assert len(set(names)) == len(names), f"each is shown once: {names}"
    return dict(zip(names, found, strict=True))


def entry(found: Records, kind: str) -> dict[str, Any]:
    return next(one[kind] for one in found if kind in one)


def summary(found: Records) -> dict[str, Any]:
    return {name: value for one in found if "summary" in one for name, value in one["summary"]["update"].items()}


def history(found: Records) -> list[dict[str, Any]]:
    return [one["history"]["item"] for one in found if "history" in one]


@pytest.mark.slow
def test_every_point_is_a_run_of_one_group_and_a_second_start_shows_only_what_is_new(tmp_path: Path):
    path = written({"base": TINY, "grid": {"fix": ["tp=1", "tp=3"], "ranks": [1, 2]}}, tmp_path)
    done = typed(tmp_path, str(path), "--wandb", "tested", "--out", "out")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert f"kept offline. To send all, type: wandb sync {tmp_path}/out/wandb/offline-*" in done.stdout
    found = runs_in(tmp_path)
    rows = {row["point"]: row for row in rows_in(tmp_path / "out")}
    assert set(found) == {*rows, "out"} and len(rows) == 4
    for name, part in found.items():
        assert (entry(part, "run")["project"], entry(part, "run")["run_group"]) == ("tested", "out")
        assert entry(part, "run")["job_type"] == ("summary" if name == "out" else "plan")
    best = rows["fix=tp=1 ranks=2"]
    config = entry(found["fix=tp=1 ranks=2"], "run")["config"]["update"]
    shown = config["candidate"], config["at.ranks"], config["plan_hash"]
    assert shown == (best["candidate"], 2, best["plan_hash"])
    assert summary(found["fix=tp=1 ranks=2"])["step_time_s/predicted"] == best["step_time_s"]
    assert "do not divide by 3" in summary(found["fix=tp=3 ranks=2"])["message"]
    (item,) = history(found["out"])
    assert item["table._type"] == "table-file" and item["table.nrows"] == 4
    table = json.loads(next(tmp_path.rglob("media/table/table_*.table.json")).read_text(encoding="utf-8"))
    hashes = [line[table["columns"].index("plan_hash")] for line in table["data"]]
    assert sorted(filter(None, hashes)) == sorted(row["plan_hash"] for row in rows.values() if "plan_hash" in row)
    assert item["page._type"] == "html-file"
    page = next(tmp_path.rglob("media/html/page_*.html"))
    assert page.read_text(encoding="utf-8") == (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert item["step time of every point_table.nrows"] == item["tokens a second over ranks_table.nrows"] == 2
    written({"base": TINY, "grid": {"fix": ["tp=1"], "ranks": [1, 2, 4]}}, tmp_path)
    again = typed(tmp_path, str(path), "--wandb", "tested", "--out", "out")
    assert again.returncode == 0, again.stderr
    files = tmp_path.rglob("offline-run-*/run-*.wandb")
    names = [entry(records(file, tmp_path), "run").get("display_name") for file in files]
    assert sorted(map(str, names)) == sorted([*rows, "out", "out", "fix=tp=1 ranks=4"])


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_has_its_curve_and_what_was_measured_and_nothing_is_sent_twice(tmp_path: Path):
    axes = {"seed": [1, 2, 3], "init_weights": [None, None, "nowhere"]}
    sweep = {"mode": "run", "base": {**TINY, "steps": 3, "ranks": 1, "fix": "mbs=4"}, "zip": axes}
    words = str(written(sweep, tmp_path)), "--wandb", "tested", "--out", "out"
    done = typed(tmp_path, *words)
    assert done.returncode == 3 and "1 of 3 points failed" in done.stderr, done.stderr
    found, rows = runs_in(tmp_path), rows_in(tmp_path / "out")
    first, _, failed = (found[row["point"]] for row in rows)
    metrics = (tmp_path / "out" / "runs" / rows[0]["id"] / "metrics.jsonl").read_text().splitlines()
    steps = [(item["_step"], item["loss"]) for item in history(first)]
    assert steps == [(number, json.loads(line)["loss"]) for number, line in enumerate(metrics, 1)], "no point more"
    shown = summary(first)
    assert history(first)[-1]["step_time_s/measured"] == shown["step_time_s/measured"] > 0
    assert shown["step_time_s/measured"] == rows[0]["measured_step_time_s"] and shown["loss"] == rows[0]["last_loss"]
    assert shown["step_time_s/ratio"] == pytest.approx(shown["step_time_s/measured"] / rows[0]["ran_predicted_s"])
    assert "nowhere" in summary(failed)["message"] and entry(failed, "exit")["exit_code"] == 1
    assert history(found["out"])[0]["measured over predicted_table.nrows"] == 2
    assert history(found["out"])[0]["loss over seed_table.nrows"] == 2
    assert rows[0]["last_loss"] != rows[1]["last_loss"] and rows[0]["plan_hash"] == rows[1]["plan_hash"]
    controller = yaml.safe_load((tmp_path / "out" / "wandb-sweep.yaml").read_text(encoding="utf-8"))
    assert controller["metric"] == {"name": "loss", "goal": "minimize"}
    again = typed(tmp_path, *words)
    assert again.returncode == 3 and "Weights & Biases: all was shown before" in again.stdout
    assert len(list(tmp_path.rglob("offline-run-*/run-*.wandb"))) == 4, "three points and the group"


@pytest.mark.slow
def test_the_controller_of_wandb_is_told_what_can_be_chosen_and_its_choice_is_done(tmp_path: Path):
    sweep = {"base": TINY, "grid": {"ranks": [1, 2]}, "zip": {"seq_len": [32, 64], "global_batch": [16, 8]}}
    path = written(sweep, tmp_path)
    assert typed(tmp_path, str(path), "--wandb", "tested", "--out", "out").returncode == 0
    given = yaml.safe_load((tmp_path / "out" / "wandb-sweep.yaml").read_text(encoding="utf-8"))
    assert given["parameters"] == {"zip": {"values": [0, 1]}, "ranks": {"values": [1, 2]}}
    assert given["metric"] == {"name": "step_time_s/predicted", "goal": "minimize"}
    chosen = tmp_path / "chosen.yaml"  # what an agent writes before it calls the command
    chosen.write_text(yaml.safe_dump({"wandb_version": 1, "ranks": {"value": 2}, "zip": {"value": 1}}))
    agent = {"SWEEP_ID": "s1", "RUN_ID": "chosen1", "SWEEP_PARAM_PATH": str(chosen), "PROJECT": "t"}
    env = wandb_environment(tmp_path, **{f"WANDB_{name}": value for name, value in agent.items()})
    done = subprocess.run(given["command"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("offline-run-*/run-chosen1.wandb")
    found = records(file, tmp_path)
    row = next(row for row in rows_in(tmp_path / "out") if row["point"] == "seq_len=64 global_batch=8 ranks=2")
    assert entry(found, "run")["sweep_id"] == "s1"
    assert history(found)[-1]["step_time_s/predicted"] == row["step_time_s"]
    assert summary(found)["id"] == row["id"]
