"""The jobs of a sweep: the points of one question, planned or run in processes, each a row whatever happens."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from autoshard.cost.predict import check_plan
from autoshard.errors import AutoshardError, InputError, NoPlan
from autoshard.extensions import EXTENSIONS, load_extension
from autoshard.files import replace_text
from autoshard.plan.codec import dump, load, plan_hash
from autoshard.plan.plan import Plan
from autoshard.run.reports import losses_of
from autoshard.search.ask.api import request_of
from autoshard.search.ask.arguments import Brought
from autoshard.search.ask.choice.doubt import DOUBT
from autoshard.search.ask.no_plan import unanswered
from autoshard.search.ask.planner import search
from autoshard.spec.model import ModelSpec
from autoshard.spec.recipe import TRAINING_KEYS, Recipe
from autoshard.sweep.points import SweepPoint
from autoshard.units import counted
from autoshard.version import __version__

Row = dict[str, Any]  # flat: names to numbers, text, truth values or null
Start = Callable[["subprocess.Popen[str]"], None]

_KEYS = ("tp", "pp", "cp", "ep", "dp", "vp", "mbs", "zero", "schedule")  # of a candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """Points of one question that are done together: its best plans, or one run."""

    mode: Literal["plan", "run"]
    points: tuple[SweepPoint, ...]
    folder: Path
    rehearse: int | None = None

    @property
    def name(self) -> str:
        """The text that is shown while the job runs."""
        return self.points[0].name


def jobs_of(
    points: Sequence[SweepPoint], mode: Literal["plan", "run"], folder: Path, rehearse: int | None
) -> list[SweepJob]:
    """Gather points: plans of one question are found by one search, runs are apart."""
    groups: dict[object, list[SweepPoint]] = {}
    for point in points:
        key = point.id if mode == "run" else json.dumps(dict(point.entries), sort_keys=True, default=str)
        groups.setdefault(key, []).append(point)
    return [SweepJob(mode=mode, points=tuple(group), folder=folder, rehearse=rehearse) for group in groups.values()]


def job_rows(job: SweepJob, started: Start | None = None) -> list[Row]:
    """Do a job; what goes wrong is a row with its message. ``started`` gets the process of a run."""
    before_s, cpu_s = time.perf_counter(), time.process_time()
    rows: list[Row] = []
    try:
        for point, plan in _planned(job):
            none = {
                "status": "no plan",
                "message": f"the question has {counted(len(rows), 'plan')}, not {point.choice}",
            }
            row = {**_question_row(job, point), **(_plan_row(plan) if plan else none)}
            if plan and job.mode == "run":
                row |= _ran(job, point, plan, started)
            rows.append(row)
    except (InputError, NoPlan) as error:  # an answer: this cannot be
        rows = failed_rows(job, str(error), status="no plan")
    except AutoshardError as error:
        rows = failed_rows(job, str(error))
    except Exception as error:
        rows = failed_rows(job, "".join(traceback.format_exception_only(error)).strip())
    seconds = {"wall_s": round(time.perf_counter() - before_s, 3), "cpu_s": round(time.process_time() - cpu_s, 3)}
    return [{**row, **seconds} for row in rows]


def failed_rows(job: SweepJob, message: str, status: str = "failed") -> list[Row]:
    """Return a row with the message for every point of a job that gave no result."""
    return [{**_question_row(job, point), "status": status, "message": message} for point in job.points]


def _planned(job: SweepJob) -> Iterator[tuple[SweepPoint, Plan | None]]:
    """Yield every point with its plan, or None where the question has fewer."""
    if path := job.points[0].plan:
        read = check_plan(load(path), place=path)
        if read.rejections:
            raise NoPlan("; ".join(str(rejection.message) for rejection in read.rejections))
        for point in job.points:
            yield point, _written(read.plan, point, job.folder)
        return
    recipe = job.points[0].recipe
    module = job.points[0].module
    request = request_of(recipe.question, recipe.nodes, Brought(model=_read_off(module, recipe)) if module else None)
    count = max(point.choice for point in job.points)
    result = search(request, count, simple_within=DOUBT if count == 1 and request.objective == "time" else None)
    if not result.plans:
        raise unanswered(request, result)
    plans = result.plans if count > 1 else (result.preferred,)  # that `plan` writes
    for point in job.points:
        plan = plans[point.choice - 1] if point.choice <= len(plans) else None
        if plan and point.choice > 1:  # of the others only outlines are found
            plan = request.with_lnc_of(plan.cluster.lnc).plan(plan.candidate, plan.engine)
        yield point, plan and _written(_with_code(plan, module) if module else plan, point, job.folder)


def _read_off(module: str, recipe: Recipe) -> ModelSpec:
    """Read a model off its code; torch starts only for this."""
    from autoshard.modules.decoder.reading import decoder_of

    return decoder_of(module, recipe.question.seq_len)


def _with_code(plan: Plan, module: str) -> Plan:
    """Add to a plan what a run needs of code that is no card."""
    if plan.model.traced is None:
        return plan
    from autoshard.modules.training.planning import with_code

    return with_code(plan, module)


def _written(plan: Plan, point: SweepPoint, folder: Path) -> Plan:
    """Write the plan of a point, and return it."""
    path = folder / "plans" / f"{point.id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, dump(plan))
    return plan


def _question_row(job: SweepJob, point: SweepPoint) -> Row:
    flat = (str, int, float, type(None))
    varied = {
        f"at.{key}": value if isinstance(value, flat) else json.dumps(value) for key, value in point.varied.items()
    }
    entries = json.dumps(dict(point.entries), sort_keys=True, default=str)
    return {
        "id": point.id, "point": point.name, "choice": point.choice, "mode": job.mode, "status": "planned",
        "message": None, **varied, "entries": entries, "autoshard": __version__,
    }  # fmt: skip


def _plan_row(plan: Plan) -> Row:
    """Return the columns that describe a plan and its prediction."""
    prediction, candidate, dollars = plan.prediction, plan.candidate, plan.dollars
    assert prediction, "a found plan has its prediction"
    return {
        "plan_hash": plan_hash(plan), "model": plan.model.name, "cluster": plan.cluster.name,
        "nodes": plan.cluster.num_nodes, "ranks": plan.cluster.num_ranks, "lnc": plan.cluster.lnc,
        "seq_len": plan.workload.seq_len, "global_batch": plan.workload.global_batch,
        "precision": plan.workload.precision.name, "engine": plan.engine, "kernels": plan.kernels,
        "candidate": str(candidate), **{key: getattr(candidate, key) for key in _KEYS},
        "step_time_s": prediction.step_time_s, "step_time_low_s": prediction.low_s,
        "step_time_high_s": prediction.high_s,
        **{f"time_s.{part}": seconds for part, seconds in prediction.time_parts.items()},
        **{key: getattr(prediction, key) for key in ("tokens_per_s", "mfu", "peak_bytes", "capacity_bytes")},
        "compile_s": prediction.compiling.compile_s if prediction.compiling else None,
        "usd_per_step": dollars.usd_per_step if dollars else None,
        "usd_per_billion_tokens": dollars.usd_per_billion_tokens if dollars else None,
        "basis": prediction.basis,
    }  # fmt: skip


def _ran(job: SweepJob, point: SweepPoint, plan: Plan, started: Start | None) -> Row:
    """Run a plan in a process of its own, and return what was measured, or how that failed."""
    path, folder = job.folder / "plans" / f"{point.id}.json", job.folder / "runs" / point.id
    options = path.with_name(f"{point.id}.run.json")
    training = {key: point.entries[key] for key in TRAINING_KEYS if key in point.entries}
    training["checkpoint"] = {"to": "none", **training.get("checkpoint", {})}  # short runs go on from nothing
    replace_text(options, json.dumps(training, default=str))
    words = ["run", str(path), "--config", str(options), "--out", str(folder), "--json", *EXTENSIONS.options()]
    words += [] if job.rehearse is None else ["--rehearse", str(job.rehearse)]
    starter: list[str] = []
    if plan.engine == "nxd" and not job.rehearse and find_spec("neuronx_distributed"):  # its ranks, here on one node
        count = str(plan.cluster.ranks_per_node)
        starter = ["torch.distributed.run", "--standalone", "--nproc-per-node", count, "-m"]
    if not any(folder.glob("checkpoints/*")):
        shutil.rmtree(folder, ignore_errors=True)  # what a kill has left, from which nothing goes on
    process = subprocess.Popen(
        [sys.executable, "-m", *starter, "autoshard.cli", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if started:
        started(process)
    out, complaints = process.communicate()
    if process.returncode:
        lines = [line.removeprefix("autoshard: ") for line in (complaints or out).strip().splitlines()]
        message = "\n".join(lines) or f"the run ended with exit code {process.returncode}"
        return {"status": "failed", "message": message}
    report = json.loads(out)
    row = json.loads((folder / "measured.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    step, steps, at_home = report["step_time_s"], report["steps"], row["platform"] == plan.cluster.name
    state_bytes = [sum(part["measured"] or 0 for part in group["memory_bytes"].values()) for group in report["ranks"]]
    return {
        "status": "ran",
        "run": str(folder),
        "ran_candidate": report["candidate"],
        "ran_on": row["platform"],
        "kind": row["kind"],
        "framework_version": row["framework_version"],
        "measured_step_time_s": step["measured"],
        "ran_predicted_s": step["predicted"],
        "measured_over_predicted": step["measured"] / step["predicted"] if at_home else None,
        "measured_state_bytes": max(state_bytes, default=0),
        "num_steps": len(steps),
        "last_loss": (losses_of(steps) or [None])[-1],
    }


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker process and the parent's end of its pipe: jobs go in, rows come out; the pipe closes when it ends."""

    process: BaseProcess
    pipe: Connection
    job: SweepJob

    def begin(self, job: SweepJob) -> None:
        """Give the process a job."""
        self.job = job
        with suppress(OSError):  # the process is gone, as we shall hear
            self.pipe.send(job)

    def end(self) -> int:
        """Let the process end, and return its exit code; it ends when the pipe is closed."""
        self.pipe.close()
        self.process.join()
        return self.process.exitcode or 0


def work_through(jobs: Sequence[SweepJob], num_workers: int, begin: Callable[[SweepJob], None]) -> Iterator[list[Row]]:
    """Run jobs in parallel processes, and yield the rows of each as it ends; a dead process loses only its own job.

    ``begin`` hears of every job before its process. When we end, however that happens, so do the processes.
    """
    context: Any = multiprocessing.get_context("spawn")  # a fork would take along what draws the progress
    waiting, workers = list(reversed(jobs)), list[_Worker]()
    try:
        while waiting or workers:
            while waiting and len(workers) < num_workers:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, tuple(EXTENSIONS.files)), daemon=False)
                with _without_interrupts():  # a process that is interrupted while it imports prints its stack
                    process.start()
                theirs.close()
                workers.append(_Worker(process=process, pipe=ours, job=waiting.pop()))
                begin(workers[-1].job)
                workers[-1].begin(workers[-1].job)
            for pipe in wait([worker.pipe for worker in workers]):
                worker = next(worker for worker in workers if worker.pipe is pipe)
                done, rows = worker.job, None
                with suppress(EOFError, OSError):
                    rows = worker.pipe.recv()
                if rows is not None and waiting:
                    begin(waiting[-1])
                    worker.begin(waiting.pop())
                else:
                    workers.remove(worker)
                    code = worker.end()
                    killed = f"was killed by {signal.Signals(-code).name}, perhaps for its memory" if code < 0 else ""
                    rows = rows or failed_rows(done, f"the process of this point {killed or f'ended with {code}'}")
                yield rows
    finally:
        for worker in workers:
            worker.end()


@contextmanager
def _without_interrupts() -> Generator[None]:
    """Hold SIGINT back in a block; what starts there holds it back too, and the block's own comes at its end."""
    resource_tracker.ensure_running()  # which begins with the first process, and lets signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, extensions: Sequence[Path]) -> None:
    """Do jobs until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells all; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for path in extensions:
        load_extension(path)
    running: list[subprocess.Popen[str]] = []
    jobs: SimpleQueue[SweepJob] = SimpleQueue()

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                jobs.put(pipe.recv())
        for process in running:
            process.terminate()  # it saves what it has to save, and takes its ranks with it
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        rows = job_rows(jobs.get(), running.append)
        running.clear()
        pipe.send(rows)
