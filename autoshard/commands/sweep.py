"""``autoshard sweep``: many plans or runs, each a row of one table; a sweep that was killed goes on."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autoshard.commands.output import print_json
from autoshard.errors import InputError, RunFailed, require

if TYPE_CHECKING:
    from autoshard.sweep.points import Sweep
    from autoshard.sweep.table import RowFile
    from autoshard.sweep.work import Row, SweepJob

_SWEEPS = Path("sweeps")


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
    json: bool = False,
) -> int:
    """Plan or run every point of a sweep, in parallel, and put all that comes out into one table.

    The same command goes on where a sweep was stopped: points that have a row are not done again.

    Args:
        source: The sweep: a YAML file, or the name of one that comes along (see `autoshard list sweeps`).
        out: The folder of the sweep: rows.jsonl, plans, runs. Default: sweeps/ and the name of the file.
        jobs: How many points are done at a time. Default: as many as processors; with mode run one.
        retry: Do points again that failed before.
        parquet: Write rows.parquet as well.
        wandb: The Weights & Biases project that gets the sweep as a group, a run for each point.
        wandb_agent: Do one point, which the sweep controller of Weights & Biases chooses.
        scheduler: Do nothing but write a job array for it, a task for each point.
        task: Do the points of this task of the job array only.
        json: Print the rows as one JSON object at the end.
    """
    from autoshard.runtime.folder import locked
    from autoshard.sweep.points import load_sweep, points_of, sweep_path
    from autoshard.sweep.table import RowFile
    from autoshard.sweep.work import jobs_of

    _refuse(jobs, task, wandb, wandb_agent, scheduler, parquet)
    source = sweep_path(source)
    content, folder = load_sweep(source), out or _SWEEPS / source.stem
    if wandb_agent:
        from autoshard.sweep.on_wandb import agent_point

        return _print_rows([agent_point(content, source.parent, folder, wandb)])
    try:
        points = points_of(content, source.parent)
    except InputError as error:
        raise error.under(str(source)) from None
    all_jobs = jobs_of(points, content.mode, folder, content.rehearse)
    if scheduler is not None:
        return _write_array(content, all_jobs, source, folder)
    if task is not None:
        return _task(all_jobs, task, folder)
    with locked(folder):
        rows = RowFile(folder)
        if retry:
            rows.forget_failed()
        left = jobs_of([one for one in points if one.id not in rows.rows], content.mode, folder, content.rehearse)
        num_workers = jobs or (1 if content.mode == "run" else os.cpu_count() or 1)
        _work(left, len(points), rows, num_workers, silent=json)
        ordered = [rows.rows[point.id] for point in points]
        return _conclude(content, source, ordered, folder, wandb=wandb, parquet=parquet, json=json)


def _refuse(
    jobs: int | None, task: int | None, wandb: str | None, agent: bool, scheduler: str | None, parquet: bool
) -> None:
    """Refuse options that exclude each other, and packages that are missing, before any work."""
    alone = {"--wandb-agent": agent, "--scheduler": scheduler is not None, "--task": task is not None}
    together = " and ".join(name for name, given in alone.items() if given)
    has_wandb = not (wandb or agent) or find_spec("wandb") is not None
    has_arrow = not parquet or find_spec("pyarrow") is not None
    require(
        (jobs is None or jobs >= 1, "--jobs", f"must be at least 1, not {jobs}"),
        (task is None or task >= 0, "--task", f"must be at least 0, not {task}"),
        (sum(alone.values()) <= 1, together, "exclude each other. Keep one"),
        (has_wandb, "--wandb", "is not installed here. Type: pip install 'autoshard[wandb]'"),
        (has_arrow, "--parquet", "needs pyarrow. Type: pip install 'autoshard[data]'"),
    )


def _write_array(content: "Sweep", all_jobs: "Sequence[SweepJob]", source: Path, folder: Path) -> int:
    """Write the job array of a sweep instead of doing it."""
    from autoshard.sweep.table import array_script

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "array.sbatch"
    path.write_text(array_script(content, all_jobs, source, folder), encoding="utf-8")
    print(f"wrote {path}: {len(all_jobs)} tasks\nnext: sbatch {path}")
    print(f"then, for the table and for what is left: autoshard sweep {source} --out {folder}")
    return 0


def _work(left: "Sequence[SweepJob]", num_points: int, rows: "RowFile", num_workers: int, *, silent: bool) -> None:
    """Do the jobs that are left, and store their rows as they come."""
    from autoshard.commands.progress import SweepProgress
    from autoshard.sweep.workers import work_through

    num_left = sum(len(job.points) for job in left)
    if num_left < num_points and not silent:
        print(f"{num_points - num_left} of {num_points} points are done already")
    progress = SweepProgress(num_points, num_points - num_left, silent=silent)
    for done in work_through(left, min(num_workers, len(left)), progress.begin):
        rows.add(done)
        progress.end(done)


def _conclude(
    content: "Sweep", source: Path, rows: "list[Row]", folder: Path, *, wandb: str | None, parquet: bool, json: bool
) -> int:
    """Show the table, and write it where it is asked for."""
    from autoshard.report.sweep import sweep_report
    from autoshard.report.terminal import make_console
    from autoshard.sweep.table import ROWS, write_parquet

    notes = [f"wrote {folder / ROWS}"]
    if parquet:
        notes.append(f"wrote {write_parquet(rows, folder)}")
    if wandb is not None:
        from autoshard.sweep.on_wandb import controller_text, log_sweep

        controller = folder / "wandb-sweep.yaml"
        controller.write_text(controller_text(content, source, folder, wandb), encoding="utf-8")
        notes += [*log_sweep(rows, wandb, folder), f"for W&B's own controller: wandb sweep {controller}"]
    if json:
        print_json({"folder": str(folder), "rows": rows, "notes": notes})
    else:
        make_console().print(sweep_report(rows))
        print("\n" + "\n".join(notes))
    failures = [row for row in rows if row["status"] == "failed"]
    if failures:
        what = f"{len(failures)} of {len(rows)} points failed; each row says why. To do them again, type --retry"
        raise RunFailed(what)
    return 0


def _task(jobs: "Sequence[SweepJob]", number: int, folder: Path) -> int:
    """Do one task of a job array; its rows wait in the folder until a sweep gathers them."""
    from autoshard.sweep.table import stored_rows, task_file, write_task
    from autoshard.sweep.work import rows_of

    require((number < len(jobs), "--task", f"the array has tasks 0 to {len(jobs) - 1}"))
    job, name = jobs[number], jobs[number].points[0].id
    if task_file(folder, name).exists() or {point.id for point in job.points} <= stored_rows(folder).keys():
        print(f"{job.name}: done already")
        return 0
    rows = rows_of(job)
    write_task(rows, folder, name)
    return _print_rows(rows)


def _print_rows(rows: "Sequence[Row]") -> int:
    for row in rows:
        print(f"{row['point']}: {row['status']} {row['message'] or row['candidate']}")
    failures = [str(row["message"]) for row in rows if row["status"] == "failed"]
    if failures:
        raise RunFailed(failures[0])
    return 0
