"""``autoshard sweep``: many plans or runs in one table; an interrupted sweep can be continued."""

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from autoshard.commands.output import print_answer
from autoshard.commands.progress import StatusLine
from autoshard.commands.writing.places import folder_checks, place_checks
from autoshard.errors import RunFailed, inside, require
from autoshard.files import remove_asides, replace_text
from autoshard.jobs.quoting import shell_words, word
from autoshard.report.page.sweep_page import sweep_page
from autoshard.report.sweep import sweep_sheets
from autoshard.runtime.folder import locked
from autoshard.spec.price import checked_prices
from autoshard.spec.training import NO_PROJECT, is_project
from autoshard.sweep.on_wandb import agent_point, controller_text, log_sweep
from autoshard.sweep.points import Sweep, SweepPoint, load_sweep, points_of, sweep_path
from autoshard.sweep.questions import SweepQuestions
from autoshard.sweep.table import (
    PARQUET,
    ROWS,
    RowFile,
    array_script,
    stored_rows,
    task_file,
    write_parquet,
    write_task,
)
from autoshard.sweep.work import Row, SweepJob, job_rows, jobs_of, work_through
from autoshard.units import counted, format_seconds

PAGE, CONTROLLER = "report.html", "wandb-sweep.yaml"
_MOST_NAMES = 4  # of running points


def sweep(
    source: Path,
    out: Path | None = None,
    jobs: int | None = None,
    retry: bool = False,
    parquet: bool = False,
    wandb: str | None = None,
    wandb_agent: bool = False,
    scheduler: Literal["slurm"] | None = None,
    task: int | None = None,
    price: float | str | None = None,
    json: bool = False,
) -> int:
    """Plan or run every point of a sweep in parallel, and collect the results in one table.

    After an interruption, the same command continues: points that have a row are not repeated.

    Args:
        source: A YAML file, or the name of a sweep that comes with autoshard (see `autoshard list sweeps`).
        out: The folder of the sweep: rows.jsonl, plans, runs. Default: sweeps/ and the name of the file.
        jobs: How many points run in parallel. Default: one per processor; with mode run, one.
        retry: Repeat points that failed.
        parquet: Also write rows.parquet.
        wandb: A Weights & Biases project; it receives the sweep as a group with one run per point.
        wandb_agent: Run one point, which the sweep controller of Weights & Biases names.
        scheduler: Run nothing; write a job array for this scheduler instead, with one task per point.
        task: Run only the points of this task of the job array.
        price: What an hour costs you in dollars, of a node (21.5) or of a chip (2.5/chip).
        json: Print the rows as one JSON object at the end.
    """
    _refuse(jobs, task, wandb, wandb_agent, scheduler, parquet)
    source, elsewhere = sweep_path(source), bool(wandb or wandb_agent or scheduler) or task is not None
    content, folder = _at_price(load_sweep(source), price, elsewhere), out or Path("sweeps") / source.stem
    if wandb_agent:
        return _print_rows([agent_point(content, source.parent, folder, wandb)])
    points = _answerable(content, source)
    require(*folder_checks(folder))
    all_jobs = jobs_of(points, content.mode, folder, content.rehearse)
    if scheduler is not None:
        return _write_array(content, all_jobs, source, folder)
    if task is not None:
        return _task(all_jobs, task, folder)
    with locked(folder):
        remove_asides(folder)
        require(*(check for name in _written(wandb, parquet) for check in place_checks(folder / name)))
        rows = RowFile(folder)
        if retry:
            rows.forget_failed()
        pending = jobs_of([one for one in points if one.id not in rows.rows], content.mode, folder, content.rehearse)
        num_done = len(points) - sum(len(job.points) for job in pending)
        if num_done and not json:
            are = "is" if len(points) == 1 else "are"
            print(f"{num_done} of {counted(len(points), 'point')} {are} already done")
        num_workers = jobs or (1 if content.mode == "run" else os.cpu_count() or 1)
        progress = SweepProgress(len(points), num_done, silent=json)
        for done in work_through(pending, min(num_workers, len(pending)), progress.begin):
            rows.add(done)
            progress.end(done)
        ordered = [rows.rows[point.id] for point in points]
        return _conclude(content, source, ordered, folder, wandb=wandb, parquet=parquet, json=json)


def _answerable(content: Sweep, source: Path) -> tuple[SweepPoint, ...]:
    """Return the points of a sweep file; refuse it where it names what is not there."""
    with inside(source):
        points = points_of(content, source.parent)
        SweepQuestions(content, source.parent).refuse()
    return points


def _at_price(content: Sweep, price: float | str | None, elsewhere: bool) -> Sweep:
    """Return a sweep whose points cost what the user pays; points that start elsewhere read the file alone."""
    if price is None:
        return content
    several = any("cluster" in choice for choices in content.axes.values() for choice in choices)
    require(
        (not several, "--price", "the sweep has several clusters; in its file, write price beside each cluster"),
        (not elsewhere, "--price", f"is for points that start here; write price: {price} into the sweep, under base"),
    )
    with inside("--price"):
        checked_prices(price)
    return replace(content, base={**content.base, "price": price})


def _refuse(
    jobs: int | None, task: int | None, wandb: str | None, agent: bool, scheduler: str | None, parquet: bool
) -> None:
    """Refuse options that exclude each other, and options whose package is missing, before any work."""
    alone = {"--wandb-agent": agent, "--scheduler": scheduler is not None, "--task": task is not None}
    has_wandb = not (wandb or agent) or find_spec("wandb") is not None
    has_arrow = not parquet or find_spec("pyarrow") is not None
    require(
        (jobs is None or jobs >= 1, "--jobs", f"must be at least 1, not {jobs}"),
        (task is None or task >= 0, "--task", f"must be at least 0, not {task}"),
        (sum(alone.values()) <= 1, " and ".join(filter(alone.get, alone)), "exclude each other. Keep one"),
        (not wandb or is_project(wandb), f"--wandb {wandb}", NO_PROJECT),
        (has_wandb, "--wandb", "is not installed here. Type: pip install 'autoshard[wandb]'"),
        (has_arrow, "--parquet", "needs pyarrow. Type: pip install 'autoshard[data]'"),
    )


def _written(wandb: str | None, parquet: bool) -> list[str]:
    """Return the names of the files that a sweep writes beside plans and runs."""
    return [ROWS, PAGE, *([CONTROLLER] if wandb else []), *([PARQUET] if parquet else [])]


def _write_array(content: Sweep, jobs: Sequence[SweepJob], source: Path, folder: Path) -> int:
    """Write a sweep as a job array instead of running it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "array.sbatch"
    replace_text(path, array_script(content, jobs, source, folder))
    again = shell_words(["autoshard", "sweep", str(source), "--out", str(folder)])
    print(f"wrote {path}: {counted(len(jobs), 'task')}\nnext: sbatch {word(str(path))}")
    print(f"afterwards, to print the table and run the points that are missing: {again}")
    return 0


def _conclude(
    content: Sweep, source: Path, rows: list[Row], folder: Path, *, wandb: str | None, parquet: bool, json: bool
) -> int:
    """Print the table, and write it to the places that options name."""
    page = folder / PAGE
    replace_text(page, sweep_page(source.stem, rows))
    idle = content.training_keys if content.mode == "plan" else ()
    notes = [f"{', '.join(idle)}: of training, which changes no plan. For runs write mode: run"] if idle else []
    notes += [f"wrote {folder / ROWS}", f"wrote {page}: the sweep drawn"]
    if parquet:
        notes.append(f"wrote {write_parquet(rows, folder)}")
    if wandb is not None:
        controller = folder / CONTROLLER
        replace_text(controller, controller_text(content, source, folder, wandb))
        notes += [*log_sweep(rows, wandb, folder, page), f"for W&B's own controller: wandb sweep {controller}"]
    if json:
        print_answer({"folder": str(folder), "rows": rows, "notes": notes})
    else:
        print_answer(sweep_sheets(source.stem, rows).values())
        print("\n" + "\n".join(notes))
    failures = [row for row in rows if row["status"] == "failed"]
    if failures:
        what = (
            f"{len(failures)} of {counted(len(rows), 'point')} failed; each row says why. To repeat them, type --retry"
        )
        raise RunFailed(what)
    return 0


def _task(jobs: Sequence[SweepJob], number: int, folder: Path) -> int:
    """Run one task of a job array; a later sweep collects its rows from the folder."""
    require((number < len(jobs), "--task", f"the array has tasks 0 to {len(jobs) - 1}"))
    job, name = jobs[number], jobs[number].points[0].id
    if task_file(folder, name).exists() or {point.id for point in job.points} <= stored_rows(folder).keys():
        print(f"{job.name}: already done")
        return 0
    rows = job_rows(job)
    write_task(rows, folder, name)
    return _print_rows(rows)


def _print_rows(rows: Sequence[Row]) -> int:
    for row in rows:
        print(f"{row['point']}: {row['status']} {row['message'] or row['candidate']}")
    failures = [str(row["message"]) for row in rows if row["status"] == "failed"]
    if failures:
        raise RunFailed(failures[0])
    return 0


class SweepProgress:
    """The progress of a sweep: one line per finished point, and on a terminal one line with the running points."""

    def __init__(self, num_points: int, num_done: int, *, silent: bool) -> None:
        self._count, self._done, self._silent = num_points, num_done, silent
        self._under_way: dict[str, str] = {}
        self._line = StatusLine(silent=silent)

    def begin(self, job: SweepJob) -> None:
        """Add a running job."""
        self._under_way[job.points[0].id] = job.name
        self._draw()

    def end(self, rows: Sequence[Row]) -> None:
        """Print the results of a job that has ended."""
        self._under_way.pop(rows[0]["id"], None)
        self._line.clear()
        for row in rows:
            self._done += 1
            if row["message"] is not None:
                outcome = f"{row['status']}: {' '.join(str(row['message']).split())}"
            else:
                seconds = format_seconds(row["measured_step_time_s"]) if row["status"] == "ran" else ""
                measured = f", measured {seconds}" if seconds else ""
                measured += f", loss {row['last_loss']:.4f}" if row.get("last_loss") is not None else ""
                outcome = f"step {format_seconds(row['step_time_s'])}{measured}  {row['candidate']}"
            if not self._silent:
                place = f"{self._done:{len(str(self._count))}}/{self._count}"
                print(f"{place}  {row['point']}: {outcome}", flush=True)
        self._draw()

    def _draw(self) -> None:
        names = list(self._under_way.values())
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            text = ", ".join(names[:_MOST_NAMES]) + more
            self._line.show(f"{self._done}/{self._count} done; running: {text}", at_once=True)
