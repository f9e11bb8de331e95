"""The loop of a run on one rank: from where it stands to its last step, with saves, signals and numbers gone wrong."""

import resource
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from autoshard.errors import AutoshardError, NotFinite, RunFailed
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.run.activity import RankActivity, activity_folder
from autoshard.run.folder import PLAN, TRAINING
from autoshard.run.protocol import HOST, Batch, Builds, Engine, Evaluates, Run, StepReport
from autoshard.run.reports import EvaluatedStep, RunReport, SavedStep, Started, TimedStep, phase_of
from autoshard.runtime.checkpoint.agreed import from_first_rank
from autoshard.runtime.checkpoint.files import RunState
from autoshard.runtime.checkpoint.saver import CheckpointLabel, Saver
from autoshard.runtime.checkpoint.shelf import Shelf
from autoshard.runtime.data.batches import PrefetchLoader, Prepared, StepShape
from autoshard.runtime.evaluating import Evaluator, NothingCounted
from autoshard.runtime.forked import STOPS, handling
from autoshard.runtime.launch import only_extracts
from autoshard.runtime.machine import CUDA, adding_in_order, refuse_full_device
from autoshard.runtime.out_of_memory import explained_when_full
from autoshard.runtime.profiling import StepProfile
from autoshard.runtime.rescue import StateRescue, rescuing
from autoshard.runtime.restart import training_text
from autoshard.runtime.resume import begin, opened_data, require_storage, run_storage, usable
from autoshard.runtime.watchdog import Watch
from autoshard.units import counted

Say = Callable[[Started | TimedStep | EvaluatedStep | SavedStep | str], None]

_LONGEST = timedelta(hours=12)  # that ranks wait for each other; the watchdog ends steps that hang long before
_REPORTED = 1000  # steps of a report: the last ones
_RETRY_S = (10.0, 600.0)  # after a checkpoint that failed: at first, at most
_LOOK_S = 1.0  # while a rank waits for data or a save
_SLOW_S = 20.0  # for data, after which a rank says so


def train(plan: Plan, run: Run, build: Builds, say: Say, watch: Watch | None = None) -> RunReport:
    """Take the steps of a run on this rank, and say each when it is done; torch's world must be running.

    ``STOPS`` do not end the process at once: the step ends first, and the state is saved. Where ``watch`` sees ranks
    that hang, it saves the state before it ends them; so does a failure of any rank.
    """
    run = replace(run, activity=RankActivity(activity_folder(run.folder) / str(dist.get_rank())))
    signals: list[int] = []
    in_order = adding_in_order(run.device, asked=run.training.deterministic)
    with in_order, handling(lambda number, _: signals.append(number), *STOPS):
        loop = _Loop(plan, run, build, say, signals)
        with loop.loader, loop.rescued_by(watch) if watch and run.training.checkpoint.saves else nullcontext():
            return loop.run()


class _SignalCame(Exception):
    """A signal to some rank ends what all of them are at."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class _Loop:
    """A run under way."""

    def __init__(self, plan: Plan, run: Run, build: Builds, say: Say, signals: list[int]) -> None:
        self._plan, self._run, self._say, self._signals = plan, run, say, signals
        if run.device == CUDA:  # what is there, not what the cluster's file says
            refuse_full_device(plan, dist.get_rank(), torch.cuda.mem_get_info()[0])
        # Devices take no Python objects; saving talks while steps do. Loading and compiling may take hours.
        self._hosts: Any = dist.new_group(backend="gloo", timeout=_LONGEST)
        # The first rank has read the run's folder, which may lie on its machine alone.
        training, start = from_first_rank(lambda: (run.training, secrets.token_hex()), self._hosts)
        self._run = run = replace(run, training=training)
        self._rescue = StateRescue(start)
        self._saves, keeping = run.training.checkpoint.saves, run.training.checkpoint
        saving = dist.new_group(backend="gloo", timeout=_LONGEST) if self._saves else None
        if self._saves:
            require_storage(run, self._hosts)
        run.activity.act("the engine is built")
        with self._explaining("before its first step"):
            self._engine: Engine = build(plan, run)
            run.activity.act("the state is loaded")
            self._state, notes = begin(plan, run, self._engine, self._hosts)
        if not self._state.trackers:
            self._state = replace(self._state, trackers=run.trackers)
        source, self._state, of_data = opened_data(plan, run, self._state, self._hosts)
        notes = (*notes, *of_data)
        taken = [step for step in run.profile if step <= self._state.step]
        notes = (*notes, *(f"step {step} is not recorded: it was taken before this start" for step in taken))
        say(Started(step=self._state.step, notes=notes, trackers=self._state.trackers))
        label = CheckpointLabel(
            model=plan.model.name, candidate=str(plan.candidate),
            texts={PLAN: dump(plan), TRAINING: training_text(run.training)} if dist.get_rank() == 0 else {},
        )  # fmt: skip
        shelf = Shelf(storage=run_storage(run))
        steps = from_first_rank(lambda: usable(shelf.steps), self._hosts) if self._saves else []
        self._saver = Saver(shelf, run.folder / "spool", steps, keeping=keeping, group=saving, label=label)
        self._saved_state = self._saving_state = self._state
        self._saved_at_s, self._retry_s = time.monotonic(), 0.0
        self._stopped = 0  # the signal that ends the run
        self._owes = False  # a save that was due while another one was under way
        self._failure, self._num_taken = "", 0
        self.loader = PrefetchLoader(source, StepShape.of(plan), self._state.next_sample)
        self._evaluator = Evaluator.of(plan, run.training) if run.training.eval.sets else None

    def run(self) -> RunReport:
        """Take all steps that are left."""
        steps: deque[TimedStep] = deque(maxlen=_REPORTED)
        self._stopped, _, _ = self._agree()  # a signal may have come while the state was loaded
        if self._state.unjudged and not self._stopped:
            self._state = replace(self._state, unjudged=False)
            self._judge()
        while self._state.step < self._run.training.steps and not self._stopped:
            before = self._state
            prepared, self._stopped = self._data()
            if prepared is None:
                break
            timed, report, (self._stopped, saving, due) = self._step(prepared)
            steps.append(timed)
            self._say(timed)
            if not report.updated:
                self._refuse_nonfinite(report, before)
            if self._saver.busy and not saving:
                self._conclude()
            is_saved = self._judge()
            due = due and not is_saved
            self._owes = bool(due)
            if due and not self._saver.busy:
                self._owes = False
                self._begin_save()
        self._run.activity.act("the end of the run")
        self._save_last()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, self._engine.measured(), self._hosts)
        return RunReport(steps=tuple(steps), ranks=tuple(ranks), signal=self._stopped, unsaved=self._failure)

    def _judge(self) -> bool:
        """Evaluate the model on the evaluation sets if that is due; save the best so far, and say whether a save began.

        All ranks know the same loss, so they decide alike. What a signal or a failure breaks off, the next start does.
        """
        judging, step = self._run.training.eval, self._state.step
        if self._evaluator is None or not judging.is_due(step, self._run.training.steps):
            return False
        assert isinstance(self._engine, Evaluates), "other engines were refused"
        before, self._state = self._state, replace(self._state, unjudged=True)
        try:
            with self._explaining(f"in the evaluation after step {step}"):
                evaluated, self._state = self._evaluator.judged(self._engine, before, self._run.activity, self._read)
        except _SignalCame as came:
            self._stopped = came.number
            return False
        except NothingCounted as error:
            raise RunFailed(f"{error}{self._saved()}") from error
        self._say(evaluated)
        if not (evaluated.best and judging.keep_best and self._saves):
            return False
        if self._saver.busy:
            self._conclude("tries again")
        self._begin_save()
        return True

    def _read(self, prepare: Callable[[], tuple[Batch, ...]]) -> tuple[Batch, ...]:
        """Prepare a batch on all ranks; a signal, or what one of them cannot read, ends the evaluation on all."""
        batch, failure = tuple[Batch, ...](), None
        try:
            batch = prepare()
        except Exception as error:
            failure = error
        self._run.activity.wait("all ranks to be ready")
        signs = torch.tensor([self._signals[0] if self._signals else 0, bool(failure)], dtype=torch.int64)
        dist.all_reduce(signs, op=dist.ReduceOp.MAX, group=self._hosts)
        signaled, failed = signs.tolist()
        if signaled or failed:
            self._run.activity.begin(0)
        if signaled:
            raise _SignalCame(signaled)
        if failed:
            self._end_unread(failure)
        return batch

    def _data(self) -> tuple[Prepared | None, int]:
        """Return the data of the next step when all ranks have theirs; None at a signal, and which one it is.

        Storage that is slow is no hang: it is said, and waited for. A rank that gives up, or that cannot read its data,
        ends the run, which is saved.
        """
        number, activity = self._state.step + 1, self._run.activity
        activity.begin(number)
        start_s, ready = time.monotonic(), self._is_data_ready(number)
        activity.wait("all ranks to be ready")
        failure, late = self.loader.failure, not ready and not self._signals
        signaled = self._signals[0] if self._signals else 0
        signs = torch.tensor([signaled, not ready, late and dist.get_rank() + 1, bool(failure)], dtype=torch.int64)
        dist.all_reduce(signs, op=dist.ReduceOp.MAX, group=self._hosts)
        signaled, missing, late, failed = signs.tolist()
        if not missing and not failed:
            prepared = self.loader.next()
            return replace(prepared, waited_s=prepared.waited_s + time.monotonic() - start_s), 0
        activity.begin(0)
        if signaled:
            return None, signaled
        if failed:
            self._end_unread(failure)
        limit_s = self._run.training.watchdog.data_s
        remedy = "Look at the storage of the data, or set a longer watchdog.data_s"
        raise RunFailed(f"rank {late - 1} got no data for step {number} in {limit_s:.0f} s{self._saved()}. {remedy}")

    def _end_unread(self, failure: Exception | None) -> NoReturn:
        """Save the state, and end the run on all ranks with why the first of those that failed cannot read its data."""
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, failure and _reason(failure), self._hosts)
        raise RunFailed(f"{next(filter(None, reasons))}{self._saved()}") from failure

    def _saved(self) -> str:
        """Save the state, and say so at the end of a sentence."""
        self._save_last()
        return f"; the state of step {self._saved_state.step} is saved" if self._saves and not self._failure else ""

    def _is_data_ready(self, number: int) -> bool:
        """Wait for this rank's data of a step, and say that it takes long; until a signal comes or its time is over."""
        watching, start_s, slow_s = self._run.training.watchdog, time.monotonic(), _SLOW_S
        self._run.activity.wait("the data of this step", of_storage=True)
        while not self.loader.is_ready(_LOOK_S):
            waited_s = time.monotonic() - start_s
            if self._signals or (waited_s > watching.data_s and not watching.off):
                return False
            if waited_s > slow_s:
                limit = "" if watching.off else f"; the run ends after {watching.data_s:.0f} s (watchdog.data_s)"
                self._say(f"step {number} has waited {waited_s:.0f} s for its data{limit}")
                slow_s *= 4
        return True

    def _step(self, prepared: Prepared) -> tuple[TimedStep, StepReport, tuple[int, int, int]]:
        """Take one step; the clock runs from when all ranks are ready until the last is done."""
        training, state, device = self._run.training, self._state, self._run.device
        number, activity = state.step + 1, self._run.activity
        rate = training.rate(number)
        start_s = time.perf_counter()
        activity.act("the step of the engine")
        with self._explaining(f"in step {number}"), StepProfile(self._run, number, dist.get_rank()) as profile:
            report = self._engine.step(prepared.batches, rate, self._allows)
        activity.wait("all ranks to end the step")
        agreed = self._agree()
        time_s = time.perf_counter() - start_s
        activity.begin(0)
        if recorded := profile.write():
            self._say(f"step {number}: {recorded}")
        counts = any(batch["token_weight"].any() for batch in prepared.batches)
        if not counts:
            none = f"step {number} counts no token: none of its samples has an answer, so it has no loss"
            self._say(f"{none}. Only decay, moments and losses of routers move weights")
        num_tokens = sum(batch["tokens"].size for batch in prepared.batches)
        self._state = replace(
            state, step=number, num_updates=state.num_updates + report.updated, next_sample=prepared.next_sample,
            num_tokens=state.num_tokens + num_tokens,
        )  # fmt: skip
        self._rescue.end_changing()
        of_device = device != HOST and hasattr(torch.accelerator, "max_memory_allocated")
        timed = TimedStep(
            number=number, loss=report.loss if counts else None, norm=report.norm, time_s=time_s, num_tokens=num_tokens,
            learning_rate=rate,
            waited_s=prepared.waited_s, updated=report.updated, router=report.router, norms=report.norms,
            memory_bytes=torch.accelerator.max_memory_allocated() if of_device
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            phase=phase_of(self._num_taken, compiles=self._plan.engine == "nxd" and device != HOST),
        )  # fmt: skip
        self._num_taken += 1
        return timed, report, agreed

    def _explaining(self, doing: str) -> AbstractContextManager[None]:
        """Return a context in which a device that is full ends the run with what to do about it."""
        return explained_when_full(self._plan, dist.get_rank(), self._run.device, self._run.activity, doing)

    def _allows(self, report: StepReport) -> bool:
        """Let the state change if the gradient is finite, and when no save reads the state any more."""
        if not report.finite and not only_extracts():  # numbers are not real then, and every graph is wanted
            return False
        self._run.activity.wait("the checkpoint to be copied", of_storage=True)
        self._saver.wait_copied()
        self._run.activity.wait("")
        self._rescue.begin_changing()
        return True

    def rescued_by(self, watch: Watch) -> AbstractContextManager[None]:
        """Return a context in which the state of the last step is saved before a hang or a failure ends the run."""
        watch.rescue = self._save_state
        return rescuing(self._rescue, watch, self._run.activity)

    def _save_state(self) -> str:
        """Save the state of the last step from another thread, and say what became of it: the run is ended after it."""
        if self._saver.busy:  # what is copied already is worth waiting for
            _, failure = self._saver.ended()
            self._saved_state = self._saved_state if failure else self._saving_state

        def save() -> str:
            self._saver.begin(self._state, self._engine.pieces(), prunes=False, alone=True)
            return self._saver.ended()[1]

        step, newest = self._state.step, self._saved_state.step
        if self._state == self._saved_state:
            return f"the state of step {step} is saved"
        if not (reason := self._rescue.save(step, save)):
            return f"the state of step {step} was saved before"
        return f"the state was not saved: {reason}{f'; that of step {newest} is' if newest else ''}"

    def _agree(self) -> tuple[int, int, int]:
        """Return on all ranks which signal one of them got, whether one still saves, and whether a save is due."""
        signaled = self._signals[0] if self._signals else 0
        due = dist.get_rank() == 0 and self._is_due()  # the first rank's clock and counts decide
        signs = torch.tensor([signaled, self._saver.busy and not self._saver.done, due], dtype=torch.int64)
        dist.all_reduce(signs, op=dist.ReduceOp.MAX, group=self._hosts)
        signaled, saving, due = signs.tolist()
        return signaled, saving, due

    def _is_due(self) -> bool:
        keeping, since_s = self._run.training.checkpoint, time.monotonic() - self._saved_at_s
        if not self._saves:
            return False
        if self._retry_s:
            return since_s > self._retry_s
        number = self._state.step + 1  # the step that ends now
        by_steps = keeping.every_steps is not None and number % keeping.every_steps == 0
        return self._owes or by_steps or (keeping.every_minutes is not None and since_s > 60 * keeping.every_minutes)

    def _conclude(self, then: Literal["goes on", "tries again", "ends"] = "goes on") -> None:
        """Take note of how a save ended; after a failure training goes on, and the next try comes soon."""
        while not self._saver.done:  # the thread that saves has its own patience
            self._run.activity.wait("the checkpoint to be saved", of_storage=True)
            self._saver.wait(_LOOK_S)
        saved, self._failure = self._saver.ended()
        self._saved_at_s = time.monotonic()
        if self._failure:
            first_s, most_s = _RETRY_S
            self._retry_s = min(most_s, 2 * self._retry_s or first_s)
            if self._state.best_step == saved.step:  # the best one is that of the best checkpoint, which stays
                before = self._saved_state
                best = {name: getattr(before, name) for name in ("best_step", "best_loss", "judged_by")}
                self._state = replace(self._state, **best)
            soon = f". The next try is in {self._retry_s:.0f} s or at the end"
            again = {"goes on": soon, "tries again": ". The next try begins", "ends": ""}[then]
            self._say(f"step {saved.step} was not saved: {self._failure}{again}")
            return
        self._retry_s, self._saved_state = 0.0, self._saving_state
        self._say(saved)

    def _save_last(self, *, prunes: bool = True) -> None:
        """Save the state, unless it is saved already."""
        if self._saver.busy:
            self._conclude("tries again")
        if self._saves and (self._saved_state != self._state or self._failure):
            self._begin_save(prunes=prunes)
            self._conclude("ends")

    def _begin_save(self, *, prunes: bool = True) -> None:
        """Begin to save the state; one that is yet to be judged is saved again, and until then the one before stays."""
        self._saving_state = self._state
        self._saver.begin(self._state, self._engine.pieces(), prunes=prunes and not self._state.unjudged)

    def _refuse_nonfinite(self, report: StepReport, before: RunState) -> None:
        """End the run after numbers that are not finite, unless such steps may be skipped and some are left to skip."""
        training, state = self._run.training, self._state
        samples = f"its samples are {before.next_sample} to {state.next_sample - 1}"
        samples = f"{samples}, {StepShape.of(self._plan).micro_batch} in each micro-batch"
        what = f"step {state.step}: loss {report.loss}, gradient norm {report.norm}. {'; '.join(report.suspects)}"
        num_skipped = state.step - state.num_updates
        if training.on_nonfinite == "skip" and num_skipped <= training.skip_budget:
            self._say(f"{what}. The update was skipped, {num_skipped} of at most {training.skip_budget}; {samples}")
            return
        self._state = before if training.on_nonfinite == "stop" else state
        self._save_last(prunes=False)  # the step after it may fail again
        budget = (
            f", and {counted(training.skip_budget, 'step')} had been skipped" if training.on_nonfinite == "skip" else ""
        )
        remedy = "Lower learning_rate, look at these samples, or set on_nonfinite to skip"
        raise NotFinite(f"{what}. Nothing was updated{budget}; {samples}. {remedy}")


def _reason(error: Exception) -> str:
    """Say in a line why something could not be read."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the data'}: cannot be read: {error.strerror}"
    return str(error) if isinstance(error, AutoshardError) else f"{type(error).__name__}: {error}"
