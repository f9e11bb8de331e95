"""What the process of a search does: it answers a question in events, the last of which is final.

A search that takes long splits in two, as a process forks: one half stops, and shows the best plan so far; the other
goes on as if nothing had happened. So the first answer costs the last one no time but that of another core.
"""

import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from autoshard.blocks.explain import explain
from autoshard.commands.exploring.asking import Controls, PaneQuestion, read_question
from autoshard.commands.progress import search_state
from autoshard.cost.doubt import compared
from autoshard.cost.timeline import rank_times, timeline_of
from autoshard.errors import AutoshardError, InputError, NoPlan, inside
from autoshard.extensions import load_extension
from autoshard.plan.codec import dump, load
from autoshard.plan.found import search_record
from autoshard.plan.plan import Plan
from autoshard.report.page.explorer import Shown, answer_fragment, difference_fragment
from autoshard.report.page.plan_page import plan_page
from autoshard.report.page.shown import ShownPlan, page_json
from autoshard.report.sheet import Node
from autoshard.report.structured import comparison_json
from autoshard.search.ask.answers import answers_of
from autoshard.search.ask.no_plan import smallest_lines, unanswered, why_none, why_none_yet
from autoshard.search.ask.planner import SearchResult, search
from autoshard.search.bound.watch import Look
from autoshard.units import format_bytes, format_seconds

Event = dict[str, Any]  # its kind, whether it is the final one, and what is shown
Send = Callable[[Event], None]
Task = Callable[..., None]  # takes two ways to send: of the search, and of the half that stops; then what it works on

_FIRST_S = (0.6, 3.0)  # after which a search that goes on shows what it has
_LATER = 1.25  # times the moment when it showed something last: it shows a plan that is better
_FRAME_S = 0.25
_LATER_VENDOR = "it follows"  # as it takes up to a second
_NO_PLAN_YET = "no plan yet: none that was tried fits in memory"
_NOBODY_LISTENS = (BrokenPipeError, ConnectionResetError)
_TERMINATED = 128 + signal.SIGTERM


def work(
    pipes: tuple[Connection, Connection], extensions: Sequence[Path], task: Task, arguments: Sequence[Any]
) -> None:
    """Do a task in a process and in a group of its own, so that both halves of a search can be ended at once."""
    os.setpgid(0, 0)
    (last, early), lock = pipes, get_context("fork").Lock()

    def send_early(event: Event) -> None:
        with lock:  # halves that stopped at several moments may send at once
            early.send(event)

    try:
        for path in extensions:
            load_extension(path)
        task(last.send, send_early, *arguments)
    except AutoshardError as error:
        last.send(refusal(error))
    except _NOBODY_LISTENS:
        os._exit(1)


def refusal(error: AutoshardError, *, final: bool = True) -> Event:
    """Return an error as an event: what is wrong, line by line."""
    faults = [" ".join(str(fault).split()) for fault in error.faults] if isinstance(error, InputError) else []
    return {"kind": "refused", "final": final, "lines": faults or str(error).splitlines()}


class _SplittingWatch:
    """Watches a search: says how far it is, and splits it from time to time."""

    def __init__(self, question: PaneQuestion, send: Send) -> None:
        self._start_s = self._said_s = time.monotonic()
        self._limit_s, self._send = question.options.time_limit, send
        self._moments = [moment for moment in _FIRST_S if not self._limit_s or moment < self._limit_s]
        self._shown, self.shown_s = math.inf, 0.0  # how good the plan is that was shown last, and when that was
        self._show = format_bytes if question.request.objective == "memory" else format_seconds
        self._halves: list[int] = []  # the processes that stopped, to show what they had
        self.stopped = ""  # in such a process: why

    def __call__(self, look: Look) -> str:
        """Return why the search stops, or nothing."""
        now_s = time.monotonic()
        waited_s = now_s - self._start_s
        if self.stopped:
            return self.stopped
        if self._limit_s and waited_s > self._limit_s:
            return f"stopped after {self._limit_s:g} s"
        if now_s - self._said_s > _FRAME_S:
            self._said_s = now_s
            state = look()
            self._send({"kind": "progress", "final": False, "text": search_state(state, waited_s, self._show)})
            if not self._moments and state.best < self._shown and waited_s > _LATER * self.shown_s:
                self._moments = [waited_s]
        if self._moments and waited_s >= self._moments[0]:
            self._moments = [moment for moment in self._moments if moment > waited_s]
            best = look().best
            if not self._halves or best < self._shown:  # or else the half before shows the same
                self._shown, self.shown_s = best, waited_s
                self._split(waited_s)
        return self.stopped

    def stay_whole(self) -> None:
        """Split no more: what is searched for from now on is not the answer."""
        self._moments, self._shown = [], -math.inf

    def end_halves(self) -> None:
        """End the processes that stopped, whatever they show."""
        with _no_signal_to_end():
            while self._halves:
                process = self._halves.pop()
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)

    def _split(self, waited_s: float) -> None:
        with _no_signal_to_end():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork with threads
                process = os.fork()
            if process:
                self._halves.append(process)
            else:
                self.stopped = f"it goes on after {waited_s:.1f} s"


def answer_question(send: Send, send_early: Send, controls: Controls) -> None:
    """Search as ``autoshard plan`` does, and send the answer: first what is known early, then what is final."""
    question = read_question(controls.words)
    progress = _SplittingWatch(question, send)
    with _halves_of(progress):
        result = search(question.request, question.num_plans, progress, simple_within=question.options.simple_within)
        if progress.stopped:
            _show_early(question, result, progress, send_early)
        if not result.plans:
            if result.certificate.ended != "complete":
                raise NoPlan(why_none_yet(result.certificate.ended, result.nearest_miss))
            progress.stay_whole()
            send({"kind": "refused", "final": False, "lines": why_none(question.request, result).splitlines()})
            raise unanswered(question.request, result, helpful=True, watch=progress)
        send(_answer(question, result, final=True))


@contextmanager
def _no_signal_to_end() -> Iterator[None]:
    """Let a signal to end wait while the list of halves is not that of the processes: who ends would leave one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _halves_of(progress: _SplittingWatch) -> Iterator[None]:
    """End what stopped, when what went on has ended; in a process that stopped, end with the block whatever happens."""

    def terminate(*_: object) -> NoReturn:  # an exception might be raised where none can be handled
        progress.end_halves()
        os._exit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except BaseException as error:
        if progress.stopped:
            if not isinstance(error, _NOBODY_LISTENS):
                traceback.print_exc()
            os._exit(1)
        raise
    finally:
        progress.end_halves()
        signal.signal(signal.SIGTERM, before)


def _show_early(question: PaneQuestion, result: SearchResult, progress: _SplittingWatch, send: Send) -> NoReturn:
    """Send the best plan so far, or a plain one, or by how much these miss memory, and end this process."""
    why, is_plain = progress.stopped, not result.plans
    if is_plain:
        at_once = replace(question.request, effort=replace(question.request.effort, at_once=True))
        result = search(at_once, 1, lambda _: why, nearest=False, simple_within=question.options.simple_within)
    if result.plans:
        question = replace(question, choose=None)
        for shown in (replace(result, vendor=_LATER_VENDOR), result) if is_plain else (result,):
            send(_answer(question, shown, final=False) | {"after_s": progress.shown_s})
    elif result.nearest_miss:
        send({"kind": "refused", "final": False, "lines": [_NO_PLAN_YET, *smallest_lines(result.nearest_miss)]})
    sys.stderr.flush()
    os._exit(0)


def _answer(question: PaneQuestion, result: SearchResult, *, final: bool) -> Event:
    """Return the answers to a question as a part of a page, and the plan file that the command would write."""
    answers = answers_of(question.request, result, question.choose)
    with inside("--choose"):
        answer = answers.runnable(answers.name)
    plan = answer.plan
    shown = _shown(plan)
    data = Node(page_json([shown], (), None))
    html = answer_fragment(Shown(plan=shown, answers=answers, answer=answer, total_tokens=question.total_tokens), data)
    return {"kind": "answer", "final": final, "html": html.text, "plan": dump(plan)}


def _shown(plan: Plan, name: str = "plan", *, whole: bool = False) -> ShownPlan:
    return ShownPlan(
        name=name,
        plan=plan,
        timeline=timeline_of(plan),
        times=rank_times(plan),
        explanation=explain(plan) if whole else None,
        record=search_record(plan),
    )


def draw_whole(send: Send, _: Send, plan_text: str) -> None:
    """Send the page that ``autoshard report`` draws of a plan."""
    shown = _shown(load(plan_text), whole=True)
    send({"kind": "page", "final": True, "html": plan_page([shown], Node(page_json([shown], (), None)))})


def draw_difference(send: Send, _: Send, texts: Iterable[str]) -> None:
    """Send how the second of two plans differs from the first, as ``autoshard compare`` says it."""
    first, second = map(load, texts)
    difference = compared(first, second)
    html = difference_fragment(difference, Node(comparison_json(difference, [])))
    send({"kind": "difference", "final": True, "html": html.text})
