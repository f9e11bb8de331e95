"""What a sweep costs beside its plans, and whether one that is killed three times does each point once."""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.sweep.points import load_sweep, points_of
from benchmarks.measure import measure, warm_environment, yardstick_s
from benchmarks.result import Result

BAR = 1.3
KILLS = 3
JOBS = 2
SEED = 17
# 200 questions that all have a plan or a reason why not.
GRID: Mapping[str, Sequence[object]] = {
    "model": ["llama3-8b", "llama2-13b", "mistral-7b", "qwen3-8b"],
    "nodes": [1, 2, 4, 8, 16],
    "seq_len": [2048, 4096],
    "global_batch": [128, 256, 512, 1024, 2048],
}

# The plans themselves: the same questions one after the other in one process, and nothing kept.
_PLAIN = """
import sys
from pathlib import Path
from autoshard.search.ask.api import request_of
from autoshard.search.ask.choice.doubt import DOUBT
from autoshard.search.ask.planner import search
from autoshard.sweep.points import load_sweep, points_of
path = Path(sys.argv[1])
for point in points_of(load_sweep(path), path.parent):
    search(request_of(point.recipe.question, point.recipe.nodes), simple_within=DOUBT)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was measured: CPU seconds of the plans alone and of the sweep, and what three kills have left."""

    plain_s: float
    sweep_s: float
    num_points: int
    rows_at_kills: tuple[int, ...]
    times_done: Mapping[str, int]  # of every point, after the last start

    @property
    def once(self) -> bool:
        """Whether every point was done, and none twice."""
        return len(self.times_done) == self.num_points and set(self.times_done.values()) == {1}


def run() -> Result:
    """Measure both ways to the same plans, then kill a sweep of them at random."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "sweep.yaml"
        path.write_text(json.dumps({"grid": GRID}), encoding="utf-8")
        env = warm_environment(Path(__file__).parents[1], folder / "bytecode")
        sweep = [sys.executable, "-m", "autoshard.cli", "sweep", str(path), "--jobs", str(JOBS), "--json", "--out"]
        num_points = len(points_of(load_sweep(path), folder))
        measure([sys.executable, "-m", "autoshard.cli", "plan", "--model", "llama3-8b"], cwd=folder, env=env)
        plain = measure([sys.executable, "-c", _PLAIN, str(path)], cwd=folder, env=env)
        swept = measure([*sweep, "measured"], cwd=folder, env=env)
        kills = _killed([*sweep, "killed"], folder, env, num_points)
        measure([*sweep, "killed"], cwd=folder, env=env)
        done = Counter(row["id"] for row in _rows(folder / "killed"))
    seen = Observed(
        plain_s=plain.cpu_s, sweep_s=swept.cpu_s, num_points=num_points, rows_at_kills=kills, times_done=done
    )
    return judge(seen, yardstick_s())


def judge(seen: Observed, loop_s: float) -> Result:
    """Compare the CPU seconds; it holds only if no kill has cost or doubled a point."""
    ratio = seen.sweep_s / seen.plain_s
    return Result(
        name="sweep_overhead",
        value=round(ratio, 3),
        unit="x CPU of the plans",
        bar=BAR,
        holds=ratio <= BAR and seen.once,
        extras={
            "points": seen.num_points,
            "plans_s": round(seen.plain_s, 2),
            "sweep_s": round(seen.sweep_s, 2),
            "rows_at_kills": " ".join(map(str, seen.rows_at_kills)),
            "done_once": sum(times == 1 for times in seen.times_done.values()),
            "done_twice": sum(times > 1 for times in seen.times_done.values()),
            "jobs": JOBS,
            "yardstick_s": round(loop_s, 4),
        },
    )


def _killed(command: Sequence[str], folder: Path, env: Mapping[str, str], num_points: int) -> tuple[int, ...]:
    """Start a sweep and kill it at random, three times; return how many rows there were each time."""
    chance, found = random.Random(SEED), list[int]()
    for target in sorted(chance.sample(range(1, num_points - JOBS), KILLS)):
        with (folder / "output.txt").open("w", encoding="utf-8") as output:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
        while process.poll() is None and len(_rows(folder / "killed")) < target:
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        process.wait()
        found.append(len(_rows(folder / "killed")))
    return tuple(found)


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a table."""
    path = folder / "rows.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
