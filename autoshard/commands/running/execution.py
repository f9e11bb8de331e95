"""One run: its folder, its start and restarts, its printed steps, and its tables at the end."""

import datetime
import json as json_text
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from autoshard.calibration.rows import Occasion, row_text
from autoshard.commands.output import print_answer, write_text
from autoshard.commands.running.lasting import LastingOutput
from autoshard.commands.running.steps import StepDisplay
from autoshard.commands.running.teaching import learn_from_run, predicted_here
from autoshard.errors import InputError, NotFinite, RunFailed, Stopped, require
from autoshard.files import append_line, remove_asides, replace_text
from autoshard.jobs.quoting import word
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.report.run import ending_lines, run_json, run_sheet, start_lines, without_steps
from autoshard.report.sheet import Node
from autoshard.run.folder import EVALUATIONS, METRICS, PLAN, REPORT, TRAINING
from autoshard.run.protocol import HOST, Builds, Run
from autoshard.run.reports import EvaluatedStep, RunReport, SavedStep, Started
from autoshard.runtime.data.opened import source_of
from autoshard.runtime.evaluating import refuse_evaluation
from autoshard.runtime.folder import (
    allow_attempts,
    count_attempt,
    free_sibling,
    holds_files,
    locked,
    note_end,
    note_stepped,
    noting_failure,
    refuse_other_run,
)
from autoshard.runtime.launch import (
    Placing,
    heed_end_of_agent,
    launch,
    only_extracts,
    patience_notes,
    patience_s,
)
from autoshard.runtime.machine import builder
from autoshard.runtime.meeting import GivenRank, telling_refusals
from autoshard.runtime.metrics.log import records_in
from autoshard.runtime.metrics.trackers import refuse_without_packages
from autoshard.runtime.restart import (
    StartBefore,
    place_of,
    refuse_strange_place,
    saved_steps,
    start_before,
    start_options,
    start_point,
    training_text,
    workload_notes,
)
from autoshard.runtime.watchdog import Watch
from autoshard.spec.cluster import LOCAL
from autoshard.spec.training import Training
from autoshard.units import counted
from autoshard.version import __version__

_MOST_STARTS = 5  # without progress, by a scheduler that restarts jobs; then the run refuses to start
_ID_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A plan to run, the options of the run, and notes for the user."""

    plan: Plan
    notes: tuple[str, ...]
    run: Run
    tried: bool  # a rehearsal, not on the machine that the plan is for
    restarts: int
    json: bool
    before: StartBefore = field(default_factory=StartBefore)
    stated: frozenset[str] = frozenset()  # options of training

    @property
    def engine(self) -> Literal["nxd", "torch"]:
        """The engine that executes it here."""
        return "torch" if self.tried else self.plan.engine

    @property
    def platform(self) -> str:
        """Name the hardware: the plan's cluster, or the processors of this machine."""
        return LOCAL if self.run.device == HOST else self.plan.cluster.name


def execute(execution: Execution, launched: GivenRank | None) -> int:
    """Execute a run with its restarts, and return the exit code.

    Under torchrun every rank calls this, with the rank that torchrun ``launched``; else only the launching process.
    """
    if launched is not None:
        heed_end_of_agent()
    leads = launched is None or launched.rank == 0
    of_code = execution.plan.model.traced is not None
    build, training = builder(execution.engine, of_code=of_code), execution.run.training
    refuse_without_packages(training.track)
    # Of a new run: a checkpoint knows the id of its own.
    ids = (("wandb", secrets.token_hex(_ID_BYTES)),) if training.track.wandb is not None else ()
    execution = replace(execution, run=replace(execution.run, trackers=ids))
    if not leads:
        _start(execution, launched, build, None)
        return 0
    with telling_refusals(launched) as end_telling, locked(execution.run.folder):
        execution = _taken_over(execution)
        training = execution.run.training
        source_of(execution.plan, training.data, training.seed)  # refuses what is wrong
        refuse_evaluation(execution.plan, training, execution.engine)
        norms = f"{execution.engine} notes no norms by group; the torch engine does. Leave track.norms out"
        require((execution.engine == "torch" or training.track.norms is None, "track.norms", norms))
        if launched is None and not execution.tried and execution.platform == LOCAL:  # ranks of torchrun read one plan
            here, notes = predicted_here(execution.plan)
            execution = replace(execution, plan=here, notes=(*execution.notes, *notes))
        with LastingOutput() as output:
            _begin(execution, launched)
            end_telling()
            display = RunDisplay(execution)
            report = _with_restarts(execution, launched, build, display)
            return _conclude(execution, report, display, output) if report else 0


def _with_restarts(
    execution: Execution, launched: GivenRank | None, build: Builds, display: "RunDisplay"
) -> RunReport | None:
    """Run; start failed ranks again while restarts are left or newer checkpoints appear."""
    restarts, last = execution.restarts, -1
    place = place_of(execution.run.folder, execution.run.training.checkpoint.to)
    steps = saved_steps(place)
    while True:
        try:
            with noting_failure(execution.run.folder):
                return _start(execution, launched, build, display)
        except RunFailed as error:
            if launched is not None or isinstance(error, NotFinite) or not execution.restarts:
                raise
            if display.has_saved or saved_steps(place) != steps:  # of this run, whatever step the user named
                execution = replace(execution, run=replace(execution.run, resume="auto"))
            if display.begun_after > last:  # a newer checkpoint than at the last failure
                restarts, last = execution.restarts, display.begun_after
            if not restarts:
                raise
            restarts -= 1
            more = f"{counted(restarts, 'time')} more without a newer checkpoint"
            display.note(f"{error}\nthe ranks are started again, {more}")


def _start(
    execution: Execution, launched: GivenRank | None, build: Builds, display: "RunDisplay | None"
) -> RunReport | None:
    """Run the plan once; return None in the processes of all ranks but the first, which have no report."""
    from autoshard.runtime.train import train

    plan, run = execution.plan, execution.run
    here = execution.platform == plan.cluster.name
    watch = Watch(run.folder, plan, run.training.watchdog, here=here)
    grace_s = patience_s(plan, run.training.checkpoint, here=here)
    placing = Placing(folder=run.folder, device=run.device, watch=watch, grace_s=grace_s)
    with display or nullcontext():
        show = display or (lambda _: None)
        report = launch(
            launched, plan.mesh.num_ranks, lambda say: train(plan, run, build, say, watch), show=show, placing=placing
        )
        if display and display.steps and report and report.steps:
            report = replace(report, other_programs=display.steps.other_programs)
            display.steps.conclude(plan, report, execution.platform)
        return report


class RunDisplay:
    """Prints the messages of a run; used as a context, once for each start of the ranks."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self.steps: StepDisplay | None = None
        self.begun_after = 0
        self.has_saved, self._stepped = False, False
        self.failure: str | None = None
        self.notes: list[str] = list(execution.notes)

    def __call__(self, message: Any) -> None:
        """Print one message of a rank."""
        if isinstance(message, Started):
            run, platform = self._execution.run, self._execution.platform
            self.begun_after, self._stepped = message.step, False
            count_attempt(run.folder, message.step, max(_MOST_STARTS, self._execution.restarts + 1))
            _write_start(self._execution)
            for note in message.notes:
                self.note(note)
            self.steps = StepDisplay(
                self._execution.plan, run.training, run.folder, platform=platform, silent=self._execution.json,
                num_done=message.step, run_id=dict(message.trackers).get("wandb"),
            )  # fmt: skip
        elif isinstance(message, EvaluatedStep):
            assert self.steps is not None, "a run starts before its evaluations"
            self.steps.evaluated(message)
        elif isinstance(message, SavedStep | str):
            if self.steps and isinstance(message, SavedStep):
                self.steps.keep()
            self.has_saved = self.has_saved or isinstance(message, SavedStep)
            self.note(str(message))
        else:
            assert self.steps is not None, "a run starts before its steps"
            if not self._stepped and message.updated:  # numbers gone wrong come again at every start
                self._stepped = True
                with suppress(OSError):  # a full disk ends no run
                    note_stepped(self._execution.run.folder, message.number)
            self.steps(message)

    def __enter__(self) -> "RunDisplay":
        """Return itself."""
        return self

    def __exit__(self, *error: Any) -> None:
        """End the display of steps."""
        if self.steps is not None:
            self.steps.__exit__(*error)
            self.failure = self.failure or self.steps.failure
            self.notes += self.steps.notes
            self.steps = None

    def note(self, text: str) -> None:
        """Print a note between steps."""
        if self.steps is not None:
            self.steps.say("note", text)
            return
        self.notes.append(text)
        if not self._execution.json:
            print(f"note: {text}", flush=True)


def _taken_over(execution: Execution) -> Execution:
    """Return the execution with what its folder says of the start before; refuse a folder that is not for it."""
    run, before = execution.run, execution.before
    folder, training = run.folder, run.training
    if holds_files(folder):
        if run.resume == "never":
            what = "already holds files" if folder.is_dir() else "is a file"
            message = f"{what}, which a run never overwrites. Type --out {free_sibling(folder)}"
            raise InputError.of(f"--out {folder}", message)
        refuse_other_run(folder, before.plan, execution.plan)
    if execution.tried:
        return execution
    to = training.checkpoint.to if "checkpoint.to" in execution.stated else None
    if run.resume != "never" and start_before(folder, to) != before:
        raise RunFailed(f"another start has changed {folder} while this one waited for it. Type the same command again")
    refuse_strange_place(folder, training, before.training, run.resume)
    saves = training.checkpoint.saves and run.resume != "never"
    progress = start_point(folder, training.checkpoint.to, run.resume) if saves else None
    training, notes = start_options(training, execution.stated, before.training, progress)
    notes = (*execution.notes, *workload_notes(before.plan, execution.plan, progress), *notes)
    return replace(execution, run=replace(run, training=training), notes=notes)


def _begin(execution: Execution, launched: GivenRank | None) -> None:
    """Prepare the folder of the run, and print what is going to run."""
    run, plan, training, before = execution.run, execution.plan, execution.run.training, execution.before
    folder, notes = run.folder, list(execution.notes)
    if isinstance(run.resume, int):
        allow_attempts(folder)
    remove_asides(folder)
    if before.plan is None or before.training is None:  # else when ranks have taken the state over: they may refuse it
        _write_start(execution)
    if execution.json:
        return
    where = "of this machine" if launched is None or launched.alone else f"that {launched.by} started"
    print(f"{plan.model.name} on {counted(plan.mesh.num_ranks, 'rank')} {where}: {plan.candidate}")
    warm_up, steps = training.schedule.warm_up_steps, training.steps
    if warm_up >= steps:
        notes.append(f"the warm-up of {counted(warm_up, 'step')} does not end within {counted(steps, 'step')}")
    if plan.workload.optimizer == "sgd" and training.adamw != type(training.adamw)():
        notes.append("the options of adamw have no effect: the plan's optimizer is sgd")
    if not execution.tried:
        notes += filter(None, [training.without_data])
        notes += patience_notes(launched, plan)
        notes += start_lines(plan, str(folder), socket.gethostname(), tensorboard=training.track.tensorboard)
    for note in notes:
        print(f"note: {note}")


def _write_start(execution: Execution) -> None:
    """Write into the folder of the run under which plan and options it goes on."""
    folder = execution.run.folder
    write_text(training_text(execution.run.training), folder / TRAINING)
    write_text(dump(execution.plan), folder / PLAN)


def _conclude(execution: Execution, report: RunReport, display: RunDisplay, output: LastingOutput) -> int:
    """Write the measured row, and print prediction and measurement; report files that could not be written last."""
    folder, plan = execution.run.folder, execution.plan
    if only_extracts():
        print("graphs were extracted but not run: there are no losses, no times and no measured row")
        return 0
    deleted = "" if (folder / PLAN).is_file() else f"{folder} was deleted while the run was on: what it held is lost"
    unsaved = _unsaved(execution, report)
    failures = [failure for failure in (display.failure, unsaved, deleted) if failure]
    rows, training = folder / "measured.jsonl", execution.run.training
    row = _measured_row(execution, report) if report.steps else ""
    try:  # a failure is reported at the end, after the tables
        if report.steps:
            append_line(rows, row)
            replace_text(folder / REPORT, json_text.dumps(run_json(plan, report)) + "\n")
        note_end(folder, signal.Signals(report.signal).name if report.signal else "")
    except OSError as error:
        failures.append(f"{error.filename or rows}: {error.strerror or error}")
    measured = run_json(plan, report) if report.steps else {}
    if execution.json:
        print_answer({"folder": str(folder), "notes": display.notes, **measured})
    elif report.steps:
        print()
        of_run = ([fields for _, fields in records_in(folder, name)] for name in (METRICS, EVALUATIONS))
        print(*ending_lines(*of_run), "", sep="\n")
        print_answer([run_sheet(plan, Node(measured), comparable=plan.cluster.name == execution.platform)])
        print(*(() if deleted else _written(execution, rows)), sep="\n")
    else:
        print(without_steps(training.steps, display.begun_after, stopped_by=report.signal))
    if report.steps:
        _teach(execution, report, row)
    lost = [output.failure] if output.failure and not report.signal else []  # no failure of a run that is saved
    if failures or lost:
        raise RunFailed("\n".join([*failures, *lost]))
    _heed_signal(report, training)
    return 0


def _heed_signal(report: RunReport, training: Training) -> None:
    """Raise what ends a command whose run a signal has stopped; of Ctrl-C with the step, and how the run goes on."""
    if report.signal == signal.SIGINT:
        after = f" after step {report.steps[-1].number} of {training.steps}" if report.steps else ""
        goes_on = ", which is saved: the same command goes on" if training.checkpoint.saves else "; nothing is saved"
        raise KeyboardInterrupt(f"stopped by Ctrl-C{after}{goes_on if report.steps else ''}")
    if report.signal:
        raise Stopped(signal.Signals(report.signal).name, report.signal)


def _unsaved(execution: Execution, report: RunReport) -> str:
    """Say why the state at the end is in no checkpoint, and with which the same command goes on; "" if it is saved."""
    if not report.unsaved:
        return ""
    saved = saved_steps(place_of(execution.run.folder, execution.run.training.checkpoint.to))
    goes_on = f"goes on after step {saved[0]}" if saved else "begins anew"
    return f"the state at the end is not saved, so that the same command {goes_on}: {report.unsaved}"


def _written(execution: Execution, rows: Path) -> Iterator[str]:
    """Yield what lies in the folder, and what may be typed next; a row has no place for operations of code."""
    folder, training = execution.run.folder, execution.run.training
    here = place_of(folder, None)
    is_saved = place_of(folder, training.checkpoint.to) == here and bool(saved_steps(here))
    yield f"\nwrote {folder}: plan.json, metrics.jsonl, measured.jsonl, report.json{', checkpoints' * is_saved}"
    if execution.plan.model.traced:
        yield from [f"next: autoshard convert {word(str(folder))} model.pt"] if is_saved else ()
        return
    if is_saved and training.data.sets:
        yield f'next: autoshard generate {word(str(folder))} --prompt "..."'
        yield f"next: autoshard convert {word(str(folder))} exported"
    if execution.platform == LOCAL:  # whose runs are learned from without a command
        yield f"next: autoshard report {word(str(folder / PLAN))} --run {word(str(folder))} --open"
        return
    clusters = f"--cluster {execution.platform} --out {execution.platform}.json"
    yield f"next: autoshard validate {word(str(rows))}"
    yield f"or, after 3 runs of 2 layouts: autoshard calibrate {word(str(folder.parent))} {clusters}"


def _teach(execution: Execution, report: RunReport, row: str) -> None:
    """Let plans for this machine know what a run on it has taken; a row says not enough of a model of code."""
    of_code = execution.plan.model.traced is not None
    if report.kind == "run" and not execution.tried and execution.platform == LOCAL and not of_code:
        for note in learn_from_run(row):
            print(f"note: {note}", file=sys.stderr)


def _measured_row(execution: Execution, report: RunReport) -> str:
    """Return the run as one measured row, without empty fields."""
    import torch

    plan, now = execution.plan, datetime.datetime.now(datetime.UTC)
    occasion = Occasion(
        name=f"{plan.model.name} {plan.candidate} {now:%Y-%m-%dT%H:%M:%S.%fZ}",
        step_time_s=report.step_time_s,
        date=f"{now:%Y-%m-%d}",
        versions=f"autoshard {__version__}, torch {torch.__version__}",
        platform=execution.platform,
        kind="rehearsal" if execution.tried else report.kind,
    )
    return row_text(plan, occasion)
