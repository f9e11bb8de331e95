"""Faults that are made to happen: after each, the next start goes on along the curve of an undisturbed run."""

import errno
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from autoshard.errors import RunFailed, Stopped
from autoshard.runtime import forked, resume, train as loop, watchdog
from autoshard.runtime.checkpoint import loading, saver
from autoshard.runtime.checkpoint.shelf import Shelf
from autoshard.runtime.checkpoint.storage import Storage
from autoshard.runtime.data.opened import source_of
from tests.runtime.training_cases import Trained, after_steps, plan_of, trained
from tests.slower import rest_is_slow

STEPS = 12
pytestmark = pytest.mark.ranks


def one_start(folder: Path, **options: Any) -> tuple[Trained, BaseException | None]:
    found = Trained()
    try:
        trained(plan_of("tp=1,pp=1,dp=2"), folder, STEPS, found=found, **({"every_steps": 2} | options))
    except (RunFailed, Stopped) as error:
        return found, error
    return found, None


def kill_soon(number: random.Random) -> Callable[[], None]:
    """Kill a rank of this process' next run at a random moment; return what calls that off."""
    which = number.randrange(2)

    def kill() -> None:
        ranks = sorted(active_children(), key=lambda one: one.name)
        if len(ranks) > which and (pid := ranks[which].pid):
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(number.uniform(0.1, 1.6), kill)
    timer.start()

    def call_off() -> None:
        timer.cancel()
        timer.join()

    return call_off


def killed_until_done(folder: Path, seed: int, num_kills: int, curve: dict[int, float]) -> None:
    number, killed, known, found = random.Random(seed), 0, 0, dict[int, float]()
    while True:
        call_off = kill_soon(number) if killed < num_kills else lambda: None
        start, error = one_start(folder)
        call_off()
        if start.said:
            assert start.started.step >= known, "no step is lost beyond the last checkpoint"
            numbers = [step.number for step in start.steps]
            assert numbers == list(range(start.started.step + 1, start.started.step + 1 + len(numbers)))
            found |= start.curve
            known = max([known, *start.saved_steps])
        if error is None:
            if killed >= num_kills or (known == STEPS and not list(start.steps)):
                break
            killed += known == STEPS  # a start that had nothing left to do
        else:
            killed += 1
    assert found == curve, "to the last bit"
    assert not active_children()


@pytest.mark.slow
def test_ranks_killed_at_random_moments_leave_the_curve_as_it_is(curve: dict[int, float], tmp_path: Path) -> None:
    killed_until_done(tmp_path, seed=1, num_kills=6, curve=curve)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    rest_is_slow(
        [
            (Storage, "writing", 2),  # a file of a rank
            (Storage, "rename", 2),  # before a checkpoint gets its name
            (Shelf, "prune", 2),  # after it has it
            (Shelf, "_remove_index", 1),  # while an old one goes
            (loading._Loading, "_take", 5),  # while one is loaded
            (saver.Saver, "wait_copied", 5),
        ],
        2,
    ),
)
def test_a_kill_inside_a_save_or_load_leaves_a_checkpoint_that_is_whole(
    owner: Any, name: str, calls: int, curve: dict[int, float], tmp_path: Path
) -> None:
    if name == "_take":
        one_start(tmp_path, every_steps=3)
        (tmp_path / "checkpoints" / "step-00000012").rename(tmp_path / "gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dies_at(getattr(owner, name), calls))
        start, error = one_start(tmp_path)
        assert isinstance(error, RunFailed) and "SIGKILL" in str(error)
    again, error = one_start(tmp_path)
    assert error is None and again.started.step >= max([0, *start.saved_steps])
    assert again.curve == {step: curve[step] for step in range(again.started.step + 1, STEPS + 1)}


def dies_at(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Let a rank die without a word in a call of a function; forks count their own calls."""
    left = [calls]

    def dying(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    return dying


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", rest_is_slow([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], 1, 2))
def test_a_signal_saves_the_step_that_it_met(number: signal.Signals, tmp_path: Path) -> None:
    """Of schedulers, of Slurm's users (``sbatch --signal=USR1@90``), and of a terminal that is closed."""
    found = Trained()
    with after_steps(found, 3, lambda: os.kill(os.getpid(), number)):
        trained(plan_of("tp=1,pp=1,dp=2"), tmp_path, 10**6, found=found, every_steps=10**5)
    assert found.report is not None and found.report.signal == number
    last = found.steps[-1].number
    assert last >= 3 and found.saved_steps == [last]


def test_only_a_later_second_signal_stops_ranks_before_they_have_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``timeout`` sends two at once: to its child, and to the group of processes of both."""
    ranks = forked._Ranks(tmp_path, 30.0, lambda rank, code: "")
    for _ in range(2):
        ranks.pass_on(signal.SIGTERM, None)
    monkeypatch.setattr(forked, "_AGAIN_S", 0.0)
    time.sleep(0.01)
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM, and the last state was not saved: a second signal came$"):
        ranks.pass_on(signal.SIGTERM, None)


def test_a_closed_terminal_ends_no_run_under_nohup() -> None:
    with forked.handling(lambda *_: None, signal.SIGHUP):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with forked.handling(lambda *_: None, *forked.STOPS):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGHUP, before)


def test_ranks_that_do_not_heed_a_signal_are_stopped_when_their_grace_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loop._Loop, "_save_last", lambda _: time.sleep(60))
    found = Trained()
    with after_steps(found, 2, terminate), pytest.raises(Stopped) as caught:
        trained(plan_of("tp=1,pp=1,dp=2"), tmp_path, 10**6, found=found, grace_seconds=1.0)
    assert caught.value.exit_code == 143 and not active_children()
    assert "the ranks did not end their step and save it within 1 s (checkpoint.grace_seconds)" in str(caught.value)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_with_what_all_wait_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watchdog, "_LEAST_S", 2.0)
    monkeypatch.setattr(watchdog, "_UNKNOWN_S", 6.0)
    found = Trained()

    def stop() -> None:
        os.kill(next(one.pid for one in active_children() if one.name == "rank 1" and one.pid), signal.SIGSTOP)

    with after_steps(found, 4, stop), pytest.raises(RunFailed) as caught:
        trained(plan_of("tp=2,pp=1,dp=1,mbs=2"), tmp_path, 10**6, found=found, watch=True, to="none")
    assert "rank 1 (pipeline rank 0" in str(caught.value).splitlines()[0]
    assert "stopped by a signal" in str(caught.value)
    assert re.search(r"rank 0 .*: waits for .*(over tp of ranks \(0, 1\)|all ranks to)", str(caught.value))
    assert not active_children()


class Unreadable:
    """Data that one rank cannot read from a sample on."""

    def __init__(self, source: Any, first: int) -> None:
        self._source, self._first = source, first

    def samples(self, first: int, count: int) -> Any:
        if first >= self._first and dist.get_rank() == 1:
            raise OSError(errno.EIO, "Input/output error", "web.bin")
        return self._source.samples(first, count)


@pytest.mark.slow
def test_data_that_one_rank_cannot_read_ends_the_run_after_a_save(
    curve: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(resume, "source_of", lambda *given: Unreadable(source_of(*given), first=12))
        start, error = one_start(tmp_path, every_steps=None)
    assert isinstance(error, RunFailed) and start.saved_steps == [3]
    assert str(error) == "web.bin: cannot be read: Input/output error; the state of step 3 is saved"
    again, error = one_start(tmp_path)
    assert error is None and start.curve | again.curve == curve and again.started.step == 3
