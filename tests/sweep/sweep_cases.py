"""Sweeps that take a second."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoshard.sweep.points import Sweep, SweepPoint, points_of
from autoshard.sweep.work import SweepJob, jobs_of

TINY = {"model": "tiny-llama", "cluster": "local", "seq_len": 64, "global_batch": 16}


def tiny(**more: Any) -> Sweep:
    return Sweep(**{"base": TINY, "grid": {"ranks": (1, 2)}, **more})


def points(sweep: Sweep, folder: Path = Path()) -> tuple[SweepPoint, ...]:
    return points_of(sweep, folder)


def jobs(sweep: Sweep, folder: Path) -> list[SweepJob]:
    return jobs_of(points(sweep, folder), sweep.mode, folder, sweep.rehearse)


def written(sweep: dict[str, Any], folder: Path, name: str = "tiny.yaml") -> Path:
    path = folder / name
    path.write_text(json.dumps(sweep), encoding="utf-8")  # which is YAML
    return path


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]


def statuses(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [row["status"] for row in rows]
