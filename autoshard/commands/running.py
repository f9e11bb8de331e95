"""A run from its folder to its tables: who may write there, what is shown, what becomes of failures."""

import datetime
import itertools
import json as json_text
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoshard.commands.output import print_json, write_text
from autoshard.errors import InputError, RunFailed, Stopped

if TYPE_CHECKING:
    from autoshard.calibration.rows import Kind
    from autoshard.commands.steps import StepsShown
    from autoshard.engine.base import Builds, Run
    from autoshard.engine.ran import RunReport
    from autoshard.plan.plan import Plan
    from autoshard.runtime.launch import GivenRank
    from autoshard.spec.training import Training

_MOST_STARTS = 5  # after one step, by whoever starts jobs again, before somebody must look


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A plan that runs now."""

    plan: "Plan"
    notes: tuple[str, ...]
    run: "Run"
    tried: bool  # a rehearsal, not on the machine that the plan is for
    restarts: int
    json: bool

    @property
    def engine(self) -> Literal["nxd", "torch"]:
        """What executes it here."""
        return "torch" if self.tried else self.plan.engine

    @property
    def platform(self) -> str:
        """Name what runs it: its own cluster, or the processors of this machine."""
        from autoshard.engine.base import HOST
        from autoshard.spec.cluster import LOCAL

        return LOCAL if self.run.device == HOST else self.plan.cluster.name


def run_on(running: Running, given: "GivenRank | None") -> int:
    """Run to the end, starting failed ranks again where that is asked for; every rank's process calls this."""
    from autoshard.plan.nxd.environment import environment
    from autoshard.runtime.data.opened import source_of
    from autoshard.runtime.engines import builder
    from autoshard.runtime.folder import locked
    from autoshard.runtime.launch import put_environment

    leads = given is None or given.rank == 0
    if running.engine == "nxd":
        put_environment(environment(running.plan))
    build, running = builder(running.engine), _named(running)
    with locked(running.run.folder) if leads else nullcontext():
        if leads:
            source_of(running.plan, running.run.training.data, running.run.training.seed)  # refuses what is wrong
            _begin(running, given)
        shown = Shown(running) if leads else None
        report = _with_restarts(running, given, build, shown)
        return _concluded(running, report, shown) if shown and report else 0


def _named(running: Running) -> Running:
    """Name the run for trackers, as its folder does or anew; a checkpoint that it goes on from knows better."""
    from autoshard.runtime.metrics.trackers import proposed_ids, refuse_without_packages

    track = running.run.training.track
    refuse_without_packages(track)
    ids = tuple(sorted(proposed_ids(running.run.folder).items())) if track.wandb is not None else ()
    return replace(running, run=replace(running.run, trackers=ids))


def _with_restarts(
    running: Running, given: "GivenRank | None", build: "Builds", shown: "Shown | None"
) -> "RunReport | None":
    """Run; failed ranks are started again while that is allowed and makes progress."""
    from autoshard.errors import NotFinite

    left, last = running.restarts, -1
    while True:
        try:
            return _executed(running, given, build, shown)
        except RunFailed as error:
            begun = shown.begun_after if shown else 0
            if given is not None or shown is None or isinstance(error, NotFinite):
                raise
            if shown.has_saved:  # whatever step the user named to begin with, the newest checkpoint is of this run
                running = replace(running, run=replace(running.run, resume="auto"))
            left = running.restarts if begun > last else left  # a newer checkpoint than at the last failure
            last = max(last, begun)
            if not left:
                raise
            left -= 1
            shown.say(f"{error}\nthe ranks are started again; {left} restarts are left without a newer checkpoint")


def _executed(
    running: Running, given: "GivenRank | None", build: "Builds", shown: "Shown | None"
) -> "RunReport | None":
    """Run the plan; None in the process of another rank than the first, which has nothing to tell."""
    from autoshard.runtime.launch import Placing, launch
    from autoshard.runtime.train import train
    from autoshard.runtime.watchdog import Watch

    plan, run = running.plan, running.run
    watch = Watch(run.folder, plan, here=running.platform == plan.cluster.name)
    grace_s = run.training.checkpoint.grace_seconds
    placing = Placing(folder=run.folder, device=run.device, watch=watch, grace_s=grace_s)
    with shown or nullcontext():
        show = shown or (lambda _: None)
        report = launch(
            given, plan.mesh.num_ranks, lambda say: train(plan, run, build, say), show=show, placing=placing
        )
        if shown and report:
            shown.conclude(report)
        return report


class Shown:
    """Shows what a run says, and keeps its steps; every start of its ranks is a new context."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._steps: StepsShown | None = None
        self.begun_after = 0
        self.has_saved = False
        self.failure: str | None = None
        self.notes: list[str] = list(running.notes)

    def __call__(self, said: Any) -> None:
        """Show one thing that a rank said."""
        from autoshard.engine.ran import SavedStep, Started

        if isinstance(said, Started):
            self._begin(said)
        elif isinstance(said, SavedStep | str):
            self.has_saved = self.has_saved or isinstance(said, SavedStep)
            self.say(str(said))
        else:
            assert self._steps is not None, "a run starts before its steps"
            self._steps(said)

    def __enter__(self) -> "Shown":
        """Begin a start of the ranks."""
        return self

    def __exit__(self, *error: Any) -> None:
        """End what was shown of it."""
        if self._steps is not None:
            self._steps.__exit__(*error)
            self.failure = self.failure or self._steps.failure
            self.notes += self._steps.notes
            self._steps = None

    def say(self, text: str) -> None:
        """Tell the user something between steps."""
        if self._steps is not None:
            self._steps.say("note", text)
            return
        self.notes.append(text)
        if not self._running.json:
            print(f"note: {text}", flush=True)

    def conclude(self, report: "RunReport") -> None:
        """Tell trackers how the run compares with its prediction."""
        if self._steps is not None and report.steps:
            self._steps.conclude(self._running.plan, report, self._running.platform)

    def _begin(self, started: Any) -> None:
        from autoshard.commands.steps import shown
        from autoshard.runtime.folder import count_attempt

        running = self._running
        self.begun_after = started.step
        count_attempt(running.run.folder, started.step, max(_MOST_STARTS, running.restarts + 1))
        for note in started.notes:
            self.say(note)
        self._steps = shown(
            running.plan, running.run.training, running.run.folder, platform=running.platform,
            silent=running.json, num_done=started.step, given_ids=dict(started.trackers),
        )  # fmt: skip


def _begin(running: Running, given: "GivenRank | None") -> None:
    """Make the folder ready with the plan in it, and say what is about to run."""
    from autoshard.plan.codec import dump
    from autoshard.report.ran import start_lines
    from autoshard.runtime.folder import PLAN, allow_attempts, changes_since, holds_files, refuse_other_run

    run, plan = running.run, running.plan
    folder, changes = run.folder, list[str]()
    if holds_files(folder):
        if run.resume == "never":
            what = "holds files already" if folder.is_dir() else "is a file"
            raise InputError.of(
                f"--out {folder}", f"{what}, and a run overwrites nothing. Type --out {free_name(folder)}"
            )
        refuse_other_run(folder, plan)
        changes = [f"changed since the last start: {one}" for one in changes_since(folder, run.training)]
        if isinstance(run.resume, int):
            allow_attempts(folder)
    else:
        changes_since(folder, run.training)
    write_text(dump(plan), folder / PLAN)
    if running.json:
        return
    num_ranks = plan.mesh.num_ranks
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    where = "of this machine" if given is None or given.alone else f"that {given.by} started"
    print(f"{plan.model.name} on {ranks} {where}: {plan.candidate}")
    shown = run.training.track.tensorboard
    watching = [] if running.tried else start_lines(plan, str(folder), socket.gethostname(), tensorboard=shown)
    for note in (*running.notes, *changes, *_without_effect(plan, run.training), *watching):
        print(f"note: {note}")


def _without_effect(plan: "Plan", training: "Training") -> Iterator[str]:
    """Yield what the user sets and this run does not use, or not all of it."""
    warm_up, steps = training.schedule.warm_up_steps, training.steps
    if warm_up >= steps:
        yield f"the warm-up of {warm_up} steps does not end within {steps} steps"
    if plan.workload.optimizer == "sgd" and training.adamw != type(training.adamw)():
        yield "the constants of adamw are not used: the plan's optimizer is sgd"


def free_name(folder: Path) -> Path:
    """Return a name beside a folder that nothing has."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())


def _concluded(running: Running, report: "RunReport", shown: Shown) -> int:
    """Write the measured row, and say how the prediction held; what could not be written is an error at the end."""
    from autoshard.report.ran import ran_json, ran_report
    from autoshard.report.terminal import make_console
    from autoshard.runtime.folder import ATTEMPTS, allow_attempts
    from autoshard.runtime.launch import only_extracts

    folder, plan = running.run.folder, running.plan
    if only_extracts():
        print("graphs were extracted and nothing was computed: no losses, no times, no measured row")
        return 0
    failures = [one for one in (shown.failure, report.unsaved and f"the state at the end: {report.unsaved}") if one]
    failures += _noted(folder / ATTEMPTS, lambda: allow_attempts(folder))
    rows = folder / "measured.jsonl"
    if report.steps:
        row = json_text.dumps(_row(plan, report, running.platform, "rehearsal" if running.tried else report.kind))
        failures += _noted(rows, lambda: _append(row, rows))
    if running.json:
        print_json({"folder": str(folder), "notes": shown.notes, **(ran_json(plan, report) if report.steps else {})})
    elif report.steps:
        make_console().print(ran_report(plan, report, running.platform))
        print(
            f"\nwrote {folder}: plan.json, metrics.jsonl, measured.jsonl, checkpoints\nnext: autoshard validate {rows}"
        )
        clusters = f"--cluster {running.platform} --out {running.platform}.json"
        print(f"or, after 3 runs of 2 layouts: autoshard calibrate {folder.parent} {clusters}")
    else:
        steps = running.run.training.steps
        print(f"nothing is left to do: all {steps} steps were taken. To take more, type --steps {2 * steps}")
    if failures:
        raise RunFailed("\n".join(failures))
    if report.signal:
        raise _stopped(report)
    return 0


def _stopped(report: "RunReport") -> BaseException:
    """Return how a run ends that a signal stopped after a step."""
    if report.signal == signal.SIGINT:
        return KeyboardInterrupt()
    return Stopped(signal.Signals(report.signal).name, report.signal)


def _append(line: str, path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _noted(path: Path, write: Callable[[], None]) -> list[str]:
    """Write, and return what went wrong instead of raising it: the tables are still to come."""
    try:
        write()
    except OSError as error:
        return [f"{path}: {error.strerror or error}"]
    return []


def _row(plan: "Plan", report: "RunReport", platform: str, kind: "Kind") -> dict[str, Any]:
    """Return the run as a measured row, without what it leaves open."""
    import torch

    from autoshard import __version__
    from autoshard.calibration.rows import Occasion, row_of
    from autoshard.spec.record import encode

    now = datetime.datetime.now(datetime.UTC)
    ran = Occasion(
        name=f"{plan.model.name} {plan.candidate} {now:%Y-%m-%dT%H:%M:%S.%fZ}",
        step_time_s=report.step_time_s,
        date=f"{now:%Y-%m-%d}",
        versions=f"autoshard {__version__}, torch {torch.__version__}",
        platform=platform,
        kind=kind,
    )
    return {name: value for name, value in encode(row_of(plan, ran)).items() if value is not None}
