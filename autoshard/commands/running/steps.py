"""The steps of a run: printed (one redrawn line on a terminal, otherwise lines), in a file and in trackers."""

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.live import Live
from rich.text import Text

from autoshard.cost.timeline import timeline_of
from autoshard.errors import file_faults
from autoshard.files import replace_text
from autoshard.plan.plan import Plan
from autoshard.report.run import run_summary, step_line
from autoshard.report.terminal import make_console
from autoshard.report.traces.predicted import trace_text
from autoshard.run.folder import EVALUATIONS, METRICS
from autoshard.run.other_programs import BusyProcessors, OtherPrograms
from autoshard.run.reports import EvaluatedStep, RunReport, TimedStep
from autoshard.runtime.metrics.log import MetricsLog, Pace, Paced, record_of, records_in
from autoshard.runtime.metrics.neuron_monitor import NeuronMonitor, neuron_record
from autoshard.runtime.metrics.shown import ShownSteps
from autoshard.runtime.metrics.trackers import Trackers, refuse_without_packages, trackers_of
from autoshard.spec.cluster import LOCAL
from autoshard.spec.record import encode
from autoshard.spec.training import Training

_EVERY = 100  # without a terminal, so many first steps are all printed
_PAUSE_S = 10.0  # between printed steps after those
_FRAME_S = 0.1  # between drawings on a terminal
_FINISH_S = 90.0  # for trackers to finish uploading; after a failed run, less:
_FAILED_S = 10.0


class StepDisplay:
    """Prints every step, and sends it to ``metrics.jsonl`` and to trackers; used as a context, which closes them all.

    It exists in the printing process only, and starts nothing before the first step. Logged steps after ``num_done``
    are deleted, because they are done again. ``platform`` names the hardware, ``run_id`` is the run's id at W&B. At the
    end ``failure`` says which file could not be written (training continues without it), and ``notes`` are the messages
    of trackers.
    """

    def __init__(
        self, plan: Plan, training: Training, folder: Path, *, platform: str, silent: bool, num_done: int = 0,
        run_id: str | None = None,
    ) -> None:  # fmt: skip
        track, files = training.track, dict[str, Path]()
        refuse_without_packages(track)
        with file_faults(str(folder)):
            self._log = MetricsLog(folder / METRICS, num_done)
            self._evaluations = MetricsLog(folder / EVALUATIONS, num_done) if training.eval.sets else None
            if track.wandb is not None:
                files = {"plan": folder / "plan.json", "predicted_trace": folder / "predicted_trace.json"}
                replace_text(files["predicted_trace"], trace_text(plan, timeline_of(plan)))
            self._judged = {number for number, _ in records_in(folder, EVALUATIONS)}
        shown = ShownSteps(folder, num_done)
        trackers = trackers_of(track, folder, shown=shown, run_id=run_id, files=files)
        config = {"candidate": str(plan.candidate), "plan": encode(plan), "training": encode(training)}
        self._trackers = Trackers(trackers, config, shown)
        self._pace = Pace(training.steps, plan.prediction if plan.cluster.name == platform else None)
        self._monitor, self._other_programs, self._on_processors = NeuronMonitor(), OtherPrograms(), platform == LOCAL
        self._num_steps, self._judging, self._silent = training.steps, training.eval, silent
        self._held: tuple[int, dict[str, Any]] | None = None  # the last step, if trackers wait for its evaluation
        self._console = make_console()
        self._live: Live | None = None
        self._num_shown = 0
        self._drawn_s = float("-inf")
        self._waiting: tuple[TimedStep, Paced] | None = None  # the last step, if it is not printed yet
        self._summary: dict[str, Any] = {}
        self.notes: list[str] = []
        self.failure: str | None = None
        if 0 < self._log.last < num_done:  # a folder without any is that of a run that goes on elsewhere
            lacks = f"steps {self._log.last + 1} to {num_done} are missing in {METRICS}, as after a power cut"
            self.say("note", f"{lacks}: the checkpoint has them, and curves and totals do not")

    def __call__(self, step: TimedStep) -> None:
        """Log and print one more step."""
        now_s = time.monotonic()
        paced = self._pace(step, now_s)
        record = record_of(step, at=time.time(), mfu=paced.mfu, neuron=neuron_record(self._monitor.taken()))
        try:
            self._log.append(record)
        except OSError as error:
            if self.failure is None:
                self.failure = f"{self._log.path}: step {step.number} was not written: {error.strerror or error}"
                self.say("warning", f"{self.failure}. The run continues")
        self._hand_on()
        self._held = step.number, record
        if not self._judging.is_due(step.number, self._num_steps):
            self._hand_on()
        if step.phase == "steady" and self._on_processors:
            self._other_programs.begin()
        busy = str(self.other_programs or "") if paced.warnings else ""
        for warning in paced.warnings:
            self.say("warning", f"{warning}. Meanwhile {busy}" if busy else warning)
        self._pass_on()
        self._num_shown += 1
        if self._silent:
            return
        # A step soon after the last drawing waits, except the last one and one without an update.
        pause_s = _FRAME_S if self._console.is_terminal else _PAUSE_S if self._num_shown > _EVERY else 0.0
        if now_s - self._drawn_s < pause_s and step.number < self._num_steps and step.updated:
            self._waiting = (step, paced)
        else:
            self._drawn_s = now_s
            self._print(step, paced)

    def evaluated(self, result: EvaluatedStep) -> None:
        """Log and print how a step was judged."""
        assert self._evaluations, "a run is judged where its training says so"
        try:
            if result.number not in self._judged:  # by a start that was killed before it had saved that
                self._evaluations.append({**result.record, "at": time.time()})
        except OSError as error:
            self.failure = self.failure or f"{self._evaluations.path}: was not written: {error.strerror or error}"
        _, record = self._held or (result.number, {})
        self._held = result.number, {**record, "eval": {"loss": result.loss, "perplexity": result.perplexity}}
        self._hand_on()
        self.say("note", str(result))

    def keep(self) -> None:
        """Bring what is logged to the disk, as a checkpoint of these steps is there."""
        for log in filter(None, (self._log, self._evaluations)):
            try:
                log.keep()
            except OSError as error:
                self.failure = self.failure or f"{log.path}: cannot be brought to the disk: {error.strerror or error}"

    def __enter__(self) -> "StepDisplay":
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        """Print the last step, and close the display, the log and the trackers."""
        if self._waiting:
            self._print(*self._waiting)
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._monitor.close()
        self._hand_on()
        self._trackers.finish(self._summary, failed=kind is not None, within_s=_FINISH_S if kind is None else _FAILED_S)
        self._pass_on()
        self._log.close()
        if self._evaluations:
            self._evaluations.close()

    @property
    def other_programs(self) -> BusyProcessors | None:
        """What other programs used of this machine since the first steady step, where ranks compute on processors."""
        return self._other_programs.busy()

    def conclude(self, plan: Plan, report: RunReport, platform: str) -> None:
        """Give trackers the comparison of run and prediction, which they log when they close."""
        self._summary = run_summary(plan, report, platform)

    def _hand_on(self) -> None:
        """Hand the step that is held to trackers, which take each step once."""
        if self._held:
            self._trackers.log(*self._held)
            self._held = None

    def _pass_on(self) -> None:
        """Print the messages of trackers."""
        for kind, text in self._trackers.notes():
            self.say(kind, text)

    def say(self, kind: str, text: str) -> None:
        """Print a note or a warning; warnings appear on stderr even in silent mode."""
        if kind == "note":
            self.notes.append(text)
        if not self._silent:
            self._console.print(f"{kind}: {text}", soft_wrap=True, markup=False, highlight=False)
        elif kind == "warning":
            print(f"{kind}: {text}", file=sys.stderr)

    def _print(self, step: TimedStep, paced: Paced) -> None:
        self._waiting = None
        width = self._console.width if self._console.is_terminal else None
        line = step_line(step, self._num_steps, mfu=paced.mfu, ratio=paced.ratio, left_s=paced.left_s, width=width)
        if width is None:
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)
            return
        if self._live is None:  # not earlier: forked ranks must not inherit a thread that draws
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
