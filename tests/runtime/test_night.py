"""A night in small: a recipe is trained as a new user does, killed twice, and finished under another plan."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.runtime.cases import ROOT, children_of, started, wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
STEPS, BOUND = 300, 0.5  # by then the poems are known by heart
FP32 = ("--precision", "fp32")


def curve(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def train(folder: Path, *words: str) -> str:
    with started(folder, "run", "recipes/tiny-text.yaml", *FP32, *words) as process:
        out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return out


def kill_after(folder: Path, out: str, step: int, *words: str, rank_only: bool) -> None:
    """Start the run, and kill all of it, or one rank, when it has come so far."""
    metrics = folder / out / "metrics.jsonl"
    with started(folder, "run", "recipes/tiny-text.yaml", *FP32, "--out", out, *words) as process:
        wait_until(lambda: metrics.is_file() and max(curve(folder / out), default=0) >= step, f"step {step} is done")
        os.kill(children_of(process.pid)[1] if rank_only else process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode in (3, -signal.SIGKILL)


def test_a_run_that_is_killed_twice_and_finished_under_another_plan_follows_the_same_curve(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    train(tmp_path, "--out", "whole")
    kill_after(tmp_path, "killed", 70, rank_only=True)
    kill_after(tmp_path, "killed", 160, rank_only=False)
    said = train(tmp_path, "--out", "killed", "--fix", "tp=2,pp=2")
    assert "note: continues after step" in said and "which was saved under" in said
    whole, killed = curve(tmp_path / "whole"), curve(tmp_path / "killed")
    assert list(killed) == list(range(1, STEPS + 1)), "none is lost, none is done twice"
    last = max(step for step in range(1, STEPS + 1) if killed[step] == whole[step])
    assert last >= 150, "to the last bit, up to the checkpoint from which another plan went on"
    assert max(abs(killed[step] - whole[step]) / whole[step] for step in range(1, 201)) < 1e-3
    assert whole[STEPS] < BOUND and abs(killed[STEPS] - whole[STEPS]) < 0.1 * whole[STEPS]
