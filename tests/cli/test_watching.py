"""Whoever waits sees how far a search has come, and gets what it has when it is stopped."""

import os
import signal
import sys
import time
from typing import Any

import pytest

from autoshard.commands import progress as progress_module
from autoshard.commands.progress import watching
from autoshard.schedule.waves import Floats
from autoshard.search.ask import no_plan, planner
from autoshard.search.ask.plain import Plain
from autoshard.search.bound.points import Points
from autoshard.search.bound.priced_layouts import LayoutPricer, PricedLayouts
from autoshard.search.bound.records import BestSolutions
from autoshard.search.bound.watch import SearchProgress, go_on
from autoshard.search.fill.stage_options import StageFilling
from tests.conftest import Typed

HALF = SearchProgress(num_done=5, num_points=10, best=2.0, bound=1.5)


def test_a_line_is_drawn_where_somebody_looks_and_after_a_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with watching(None, str) as watch:
        assert watch(lambda: HALF) == ""
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress_module, "_PATIENCE_S", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with watching(None, lambda value: f"{value} s") as watch:
        assert watch(lambda: HALF) == "" and watch(lambda: HALF) == ""
    out, err = capsys.readouterr()
    assert out == "" and "best 2.0 s, none can be below 1.5 s, 5 layouts open" in err


def test_time_that_is_over_stops_a_search_that_says_so(typed: Typed, monkeypatch: pytest.MonkeyPatch):
    question = "plan --model tiny-llama --cluster local --time-limit 1 --global-batch 8"
    now_s, keep = [0.0], BestSolutions.keep

    def kept_after_hours(best: BestSolutions, points: Points, found: StageFilling, values: Floats, **how: bool) -> None:
        keep(best, points, found, values, **how)
        now_s[0] = 9e3

    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(BestSolutions, "keep", kept_after_hours)
    assert "(stopped after 1 s)" in " ".join(typed.answer(question).split())
    now_s[0] = 0.0
    monkeypatch.setattr(BestSolutions, "keep", keep)
    price = LayoutPricer.priced

    def priced_for_hours(*arguments: Any, **options: Any) -> list[PricedLayouts]:
        now_s[0] = 9e3
        return price(*arguments, **options)

    monkeypatch.setattr(LayoutPricer, "priced", priced_for_hours)
    code, out, _ = typed(question)  # the plan that was made at once
    assert code == 0 and "(stopped after 1 s)" in " ".join(out.split()) and "recompute=full" in out
    now_s[0] = 0.0
    monkeypatch.setattr(planner, "plain_plan", lambda _: Plain())
    code, out, err = typed(question)
    assert code == 1 and not out and "stopped after 1 s, before any was found" in err


def test_an_answer_that_no_search_could_give_is_not_looked_for_longer_than_the_limit(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
):
    clock = iter(range(10**6))
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(clock) / 1e3)
    monkeypatch.setattr(no_plan, "any_plan", lambda _, watch: go_on(watch))
    code, _, err = typed("plan --model llama2-7b --cluster local --fix tp=1,pp=1 --time-limit 9")
    assert code == 1 and "none of the" in err and "9 s" not in err


def test_ctrl_c_stops_a_search_at_its_next_step_and_a_second_one_at_once():
    before = signal.getsignal(signal.SIGINT)
    with watching(None, str) as watch:
        assert watch(lambda: HALF) == ""
        os.kill(os.getpid(), signal.SIGINT)
        assert watch(lambda: HALF) == "interrupted"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_search_that_comes_to_no_next_step_ends_within_a_second_of_ctrl_c():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt), watching(None, str):
        os.kill(os.getpid(), signal.SIGINT)
        start_s = time.monotonic()
        assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1.0
        while time.monotonic() < start_s + 60.0:
            pass
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0
