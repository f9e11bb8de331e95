"""``autoshard plan`` as a whole process: what it used, and what it says it looked at."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Usage, measure, warm_environment, yardstick_s
from benchmarks.result import Extra

# What pip writes as the console script, but that its answer goes to a file. That nothing fits is an answer as well.
_SCRIPT = """
import contextlib, sys
from autoshard.cli import main
with open("answer.json", "w", encoding="utf-8") as answer, contextlib.redirect_stdout(answer):
    code = main()
sys.exit(0 if code == 1 else code)
"""
_COUNTS = ("num_points", "num_legal", "num_solved", "num_bounded", "num_too_large", "num_tables")
Questions = Mapping[str, Sequence[str]]  # options of ``autoshard plan`` by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What one search used, and its certificate; none where no plan was found."""

    usage: Usage
    certificate: Mapping[str, Any] | None

    @property
    def gap(self) -> float:
        """By which share the answer may be worse than the best."""
        if self.certificate is None:
            return 0.0
        return max(0.0, 1.0 - self.certificate["bound"] / self.certificate["value"])

    @property
    def counts(self) -> dict[str, Extra]:
        """What became of the outer points."""
        return {} if self.certificate is None else {name: self.certificate[name] for name in _COUNTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Every question asked once, and the yardstick loop beside them."""

    planned: Mapping[str, Planned]
    yardstick_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the rounds say of one question."""

    cpu_s: float  # the median
    least_s: float
    peak_bytes: int  # the most of all rounds
    last: Planned

    @classmethod
    def of(cls, rounds: Sequence[Round], name: str) -> "Summary":
        """Sum up the answers to one question."""
        used = [one.planned[name].usage for one in rounds]
        return cls(
            cpu_s=median(one.cpu_s for one in used),
            least_s=min(one.cpu_s for one in used),
            peak_bytes=max(one.peak_bytes for one in used),
            last=rounds[-1].planned[name],
        )

    @property
    def extras(self) -> dict[str, Extra]:
        """What helps to judge the median."""
        return {
            "fastest_s": round(self.least_s, 3),
            "peak_mb": round(self.peak_bytes / 1e6, 1),
            "gap": self.last.gap,
            **self.last.counts,
        }


def rounds_of(questions: Questions, count: int) -> list[Round]:
    """Ask all questions in turn, so many times; a first time that is not counted compiles and fills caches."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "autoshard").write_text(_SCRIPT, encoding="utf-8")
        env = warm_environment(Path(__file__).parents[1], place / "bytecode")
        return [_round(questions, place, env) for _ in range(count + 1)][1:]


def yardstick_of(rounds: Sequence[Round]) -> dict[str, Extra]:
    """Return the median of the loop that was timed beside the searches."""
    return {"yardstick_s": round(median(one.yardstick_s for one in rounds), 4), "rounds": len(rounds)}


def _round(questions: Questions, place: Path, env: Mapping[str, str]) -> Round:
    planned = {name: planned_with(options, place, env) for name, options in questions.items()}
    return Round(planned=planned, yardstick_s=yardstick_s())


def planned_with(options: Sequence[str], place: Path, env: Mapping[str, str]) -> Planned:
    """Run one search in a process of its own, in a folder with the script."""
    usage = measure([sys.executable, "autoshard", "plan", *options, "--json", "--force"], cwd=place, env=env)
    answer = (place / "answer.json").read_text(encoding="utf-8")
    return Planned(usage=usage, certificate=json.loads(answer)["certificate"] if answer else None)
