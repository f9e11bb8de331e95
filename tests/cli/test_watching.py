"""Whoever waits sees how far a search has come, and gets what it has when it is stopped."""

import os
import signal
import sys
from dataclasses import replace

import pytest

from autoshard.commands import progress as progress_module
from autoshard.commands.progress import watching
from autoshard.search.planner import search
from autoshard.search.pool import SearchProgress
from autoshard.spec.cluster_catalogue import load_cluster
from tests.search.brute_force import ask

HALF = SearchProgress(num_done=5, num_points=10, best=2.0, bound=1.5)


def test_nothing_is_drawn_where_nobody_looks_or_before_a_second(capsys: pytest.CaptureFixture[str]):
    with watching(None, str) as watch:
        assert watch(HALF) == ""
    assert capsys.readouterr() == ("", "")


def test_a_bar_shows_the_best_the_bound_and_what_is_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(progress_module, "_PATIENCE_S", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with watching(None, lambda value: f"{value} s") as watch:
        assert watch(HALF) == "" and watch(HALF) == ""
    out, err = capsys.readouterr()
    assert out == "" and "best 2.0 s, bound 1.5 s, 5 points open" in err


def test_time_that_is_over_stops_a_search_with_an_honest_gap():
    request = ask("tiny-llama", "local")
    whole = search(request)
    with watching(1e-9, str) as watch:
        found = search(request, 1, watch)
    assert found.certificate.ended == "stopped after 1e-09 s" and found.plans
    best, some = whole.plans[0].prediction, found.plans[0].prediction
    assert best and some
    assert found.certificate.bound <= best.step_time_s * (1 + 1e-9) <= some.step_time_s * (1 + 1e-9)
    assert 0 <= found.certificate.gap <= 1 and "(stopped after" in found.certificate.claim


def test_ctrl_c_stops_a_search_at_its_next_step_and_a_second_one_at_once():
    before = signal.getsignal(signal.SIGINT)
    with watching(None, str) as watch:
        assert watch(HALF) == ""
        os.kill(os.getpid(), signal.SIGINT)
        assert watch(HALF) == "interrupted"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_what_is_stopped_on_one_cluster_is_not_searched_on_the_next():
    request = ask("llama3-8b", "trn2.48xlarge")
    both = replace(request, other_lnc=(load_cluster("trn2.48xlarge", lnc=1),))
    seen: list[SearchProgress] = []

    def stop(progress: SearchProgress) -> str:
        seen.append(progress)
        return "stopped"

    found = search(both, 1, stop)
    assert len(seen) == 1 and found.certificate.ended == "stopped"
    best = search(both).plans[0].prediction
    assert best and found.certificate.bound <= best.step_time_s * (1 + 1e-9)
