"""Whoever waits sees how far a search has come, and gets what it has when it is stopped."""

import os
import signal
import sys
import time

import pytest

from autoshard.commands import progress as progress_module
from autoshard.commands.progress import watching
from autoshard.search.pool import SearchProgress
from tests.cli.conftest import Typed

HALF = SearchProgress(num_done=5, num_points=10, best=2.0, bound=1.5)


def test_a_line_is_drawn_where_somebody_looks_and_after_a_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with watching(None, str) as watch:
        assert watch(HALF) == ""
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress_module, "_PATIENCE_S", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with watching(None, lambda value: f"{value} s") as watch:
        assert watch(HALF) == "" and watch(HALF) == ""
    out, err = capsys.readouterr()
    assert out == "" and "best 2.0 s, bound 1.5 s, 5 points open" in err


def test_time_that_is_over_stops_a_search_that_says_so(typed: Typed, monkeypatch: pytest.MonkeyPatch):
    question = "plan --model tiny-llama --cluster local --time-limit 1 --global-batch 8"
    times = iter([0.0, *[9.0] * 1000])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(times))
    code, out, _ = typed(question)
    assert code == 0 and "(stopped after 1 s)" in " ".join(out.split())


def test_ctrl_c_stops_a_search_at_its_next_step_and_a_second_one_at_once():
    before = signal.getsignal(signal.SIGINT)
    with watching(None, str) as watch:
        assert watch(HALF) == ""
        os.kill(os.getpid(), signal.SIGINT)
        assert watch(HALF) == "interrupted"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_search_that_comes_to_no_next_step_ends_within_a_second_of_ctrl_c():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt), watching(None, str):
        os.kill(os.getpid(), signal.SIGINT)
        start_s = time.monotonic()
        while time.monotonic() < start_s + 1.0:
            pass
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0
