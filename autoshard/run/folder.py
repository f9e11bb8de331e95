"""What lies where in the folder of a run: those who run write it, those who watch read it."""

from pathlib import Path, PurePath

from autoshard.errors import nearest
from autoshard.files import is_aside

RUNS = "runs"  # where the folders of runs lie, unless another place is named
PLAN, TRAINING, ATTEMPTS, METRICS = "plan.json", "training.json", "attempts.jsonl", "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
TRACKED = "tracked.json"  # the last step that each tracker has for certain
REPORT = "report.json"  # what was predicted and measured, by part; written at the end
LOCK = ".lock"
LOGS = "logs"  # of the ranks
POSITIONS, CHECKPOINTS, INDEX = "positions", "checkpoints", "index.json"
PARTIAL = ".partial"  # ends the name of a checkpoint that is being written
HANG_REPORTS = "hang-rank-*.txt"
PROFILES = "profile"  # traces of steps that a run records


def precedes_plan(path: Path) -> bool:
    """Say whether a start may leave this file or folder in the run's folder before its plan lies there.

    Ranks that torchrun starts keep their positions there before the first rank has looked at the folder; a file that
    is being written lies beside its place.
    """
    return path.name in (LOCK, POSITIONS, LOGS) or is_aside(path)


def hang_report(folder: Path, rank: int) -> Path:
    """Return where a rank reports that ranks hang."""
    return folder / HANG_REPORTS.replace("*", str(rank))


def profile_path(folder: Path, step: int, rank: int) -> Path:
    """Return where the trace of a rank's step lies; Perfetto and chrome://tracing open it."""
    return folder / PROFILES / f"step-{step}-rank-{rank}.json.gz"


def folder_of(step: int) -> str:
    """Name the checkpoint of a step, so that names sort as steps do.

    >>> folder_of(120)
    'step-00000120'
    """
    return f"step-{step:08}"


def checkpoint_step(folder: str) -> int | None:
    """Return the step of a checkpoint's name; None if it is none."""
    before, _, number = PurePath(folder).name.partition("step-")
    return int(number) if not before and number.isdecimal() else None


def run_meant(folder: Path) -> str:
    """Say which folder beside one that is not there may be meant, or how to start a run."""
    there = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    return nearest(folder.name, there) if there else "To start a run, type: autoshard run tiny-text"
