"""What stands still is told apart: slow storage, a suspended machine, a stopped rank, a hang of all."""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from autoshard.errors import RunFailed, Stopped
from autoshard.run.activity import RankActivity, activity_folder, read_status
from autoshard.runtime import forked, resume, train as loop, watchdog
from autoshard.runtime.checkpoint.shelf import newest
from autoshard.runtime.checkpoint.storage import Storage
from autoshard.runtime.data.batches import Samples
from autoshard.runtime.data.opened import source_of
from autoshard.runtime.watchdog import Watch
from autoshard.spec.training import Watching
from tests.runtime.training_cases import Trained, after_steps, before_steps, plan_of, trained
from tests.slower import rest_is_slow

TWO = "tp=1,pp=1,dp=2"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_LEAST_S", 2.0)
    monkeypatch.setattr(watchdog, "_UNKNOWN_S", 6.0)
    monkeypatch.setattr(loop, "_SLOW_S", 0.5)


class SlowSource:
    """Sleeps on one rank before it gives the samples of a step."""

    def __init__(self, source: Any, rank: int, at_sample: int, sleeps_s: float) -> None:
        self.source, self.rank, self.at_sample, self.sleeps_s = source, rank, at_sample, sleeps_s

    def samples(self, first: int, count: int) -> Samples:
        if first == self.at_sample and dist.get_rank() == self.rank:
            time.sleep(self.sleeps_s)
        return self.source.samples(first, count)


def with_slow_data(patch: pytest.MonkeyPatch, rank: int, sleeps_s: float, step: int = 5) -> None:
    """Let the data of a step come late on a rank."""
    plan = plan_of(TWO)
    at_sample = (step - 1) * plan.workload.global_batch
    patch.setattr(resume, "source_of", lambda *args: SlowSource(source_of(*args), rank, at_sample, sleeps_s))


def steps_of(folder: Path) -> int:
    index = newest(Storage.of(str(folder / "checkpoints")))[0]
    assert index
    return index.state.step


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_slow_data_is_waited_for_and_said(
    rank: int, curve: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_slow_data(monkeypatch, rank, 6.0)
    found = trained(plan_of(TWO), tmp_path, 6, watch=True, every_steps=2)
    assert found.curve == {step: curve[step] for step in range(1, 7)}
    assert max(step.waited_s for step in found.steps) > 3.0
    assert ("step 5 has waited 1 s for its data; the run ends after 600 s" in found.notes) == (rank == 0)


@pytest.mark.slow
@pytest.mark.ranks
def test_data_that_never_comes_ends_the_run_with_its_state_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_slow_data(monkeypatch, 1, 10**6)
    with pytest.raises(RunFailed) as caught:
        trained(plan_of(TWO), tmp_path, 9, watch=True, watchdog=Watching(data_s=2.0))
    assert "rank 1 got no data for step 5 in 2 s; the state of step 4 is saved" in str(caught.value)
    assert steps_of(tmp_path) == 4


@pytest.mark.slow
@pytest.mark.ranks
def test_a_signal_ends_a_wait_for_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_slow_data(monkeypatch, 1, 10**6)
    found, begun_s = Trained(), time.monotonic()
    with after_steps(found, 4, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        trained(plan_of(TWO), tmp_path, 9, found=found, watch=True)
    assert found.report is not None and found.report.signal == signal.SIGTERM
    assert steps_of(tmp_path) == 4 and time.monotonic() - begun_s < 60


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_that_wait_for_each_other_save_the_step_before_they_are_ended(tmp_path: Path) -> None:
    """As when a library of devices hangs: all processes live, and their threads can talk."""

    def wait_for_ever(step: int) -> None:
        if step == 4 and dist.get_rank() == 1:
            time.sleep(10**6)

    with pytest.raises(RunFailed) as caught:
        trained(plan_of(TWO), tmp_path, 9, watch=True, build=before_steps(wait_for_ever))
    text = str(caught.value)
    assert re.match(r"no rank has moved for \d+ s \(limit 2 s\). rank 1 \(.*\) in step 4, .*: computes", text)
    assert "the state of step 3 was saved before" in text
    assert steps_of(tmp_path) == 3
    assert trained(plan_of(TWO), tmp_path, 5).started.step == 3


@pytest.mark.slow
@pytest.mark.ranks
def test_a_state_that_is_being_updated_is_not_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = loop._Loop._agree

    def agree(self: Any) -> Any:
        if self._state.step == 3 and dist.get_rank() == 1 and self._num_taken == 3:
            time.sleep(10**6)
        return real(self)

    monkeypatch.setattr(loop._Loop, "_agree", agree)
    with pytest.raises(RunFailed, match="the state was not saved: ranks were updating it"):
        trained(plan_of(TWO), tmp_path, 9, watch=True)


@pytest.mark.ranks
@pytest.mark.parametrize("phase", rest_is_slow(["its start", "the state is loaded"]))
def test_a_rank_that_is_stopped_in_the_start_is_reported(
    phase: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = RankActivity.act

    def act(self: RankActivity, action: str) -> None:
        real(self, action)
        if action == phase and os.environ.get("AUTOSHARD_TEST_RANK") == "1":
            os.kill(os.getpid(), signal.SIGSTOP)

    work = forked._work

    def numbered(rank: int, *args: Any) -> None:
        os.environ["AUTOSHARD_TEST_RANK"] = str(rank)
        work(rank, *args)

    monkeypatch.setattr(forked, "_work", numbered)
    monkeypatch.setattr(RankActivity, "act", act)
    with pytest.raises(RunFailed) as caught:
        trained(plan_of(TWO), tmp_path, 9, watch=True)
    assert "a rank has been stopped for" in str(caught.value)
    assert re.search(rf"rank 1 \(.*stopped by a signal\) in no step, {phase}", str(caught.value))
    assert not active_children()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_machine_that_was_suspended_goes_on(
    curve: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watchdog, "_ASLEEP_S", 2.5)
    found = Trained()

    def suspend() -> None:
        ranks = [child.pid for child in active_children() if child.name.startswith("rank") and child.pid]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                os.kill(rank, number)
            time.sleep(5.0 if number == signal.SIGSTOP else 0.0)

    with after_steps(found, 4, suspend):
        trained(plan_of(TWO), tmp_path, 9, found=found, watch=True, to="none")
    assert found.curve == {step: curve[step] for step in range(1, 10)}


@pytest.mark.ranks
@pytest.mark.parametrize("delay_ms", rest_is_slow([20, 0, 1, 2, 3, 5, 8, 60, 200], 1, 4))
def test_a_signal_in_the_start_ends_the_run_at_once(
    delay_ms: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between the fork of the first rank and the first step; what the run has done is nothing, or saved."""
    real, told = forked._Ranks.start, list[float]()

    def start(self: Any, *args: Any) -> None:
        parent = os.getpid()
        if os.fork() == 0:
            time.sleep(delay_ms / 1000)
            os.kill(parent, signal.SIGTERM)
            os._exit(0)
        told.append(time.monotonic())
        real(self, *args)

    monkeypatch.setattr(forked._Ranks, "start", start)
    found = Trained()
    try:
        trained(plan_of(TWO), tmp_path, 10**6, found=found, every_steps=10**6)
        assert found.report and found.report.signal == signal.SIGTERM
        assert found.saved_steps == [found.steps[-1].number] if list(found.steps) else not found.saved_steps
    except Stopped as error:
        assert error.exit_code == 143 and not list(found.steps)
    assert time.monotonic() - told[0] < 60 and not active_children()
    os.wait()


@pytest.mark.ranks
def test_a_disk_that_is_full_in_the_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(log: Path) -> None:
        raise OSError(28, os.strerror(28), str(log))

    monkeypatch.setattr(forked, "_print_into", full)
    with pytest.raises(RunFailed, match=r"logs/rank-[01].log: No space left on device"):
        trained(plan_of(TWO), tmp_path, 2)


# -- without processes ---------------------------------------------------------------------------------


def watched(folder: Path, *acts: Callable[[RankActivity], object], **options: Any) -> Watch:
    """A watch over as many ranks as there are acts, all of this process."""
    plan = plan_of(TWO)
    for rank, act in enumerate(acts):
        act(RankActivity(activity_folder(folder) / str(rank)))
    return Watch(folder, replace(plan, prediction=None), Watching(**options), here=True)


def moved_on(watch: Watch, patch: pytest.MonkeyPatch, *seconds: float) -> str:
    """What a watch says after so many seconds, a look after each."""
    clock, text = [time.monotonic()], ""
    patch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    for more_s in seconds:
        clock[0] += more_s
        text = watch.hung()
    patch.undo()
    return text


def in_step(activity: RankActivity) -> None:
    activity.begin(7)


def waits_for_data(activity: RankActivity) -> None:
    activity.begin(7)
    activity.wait("the data of this step", of_storage=True)


def test_limits_depend_on_what_is_waited_for(tmp_path: Path) -> None:
    seconds = [1.0] * 9
    with pytest.MonkeyPatch.context() as patch:
        assert "(limit 6 s)" in moved_on(watched(tmp_path, in_step, in_step), patch, *seconds)
        assert not moved_on(watched(tmp_path, in_step, waits_for_data), patch, *seconds)
        assert "(limit 7 s)" in moved_on(watched(tmp_path, in_step, waits_for_data, data_s=5.0), patch, *seconds)
        assert "(limit 3 s)" in moved_on(watched(tmp_path, in_step, in_step, step_s=3.0), patch, *seconds)
        assert not moved_on(watched(tmp_path, in_step, in_step, step_s=3.0, off=True), patch, *seconds)
        assert not moved_on(watched(tmp_path, in_step, in_step), patch, 1.0, 100.0, 1.0), "it did not run meanwhile"


def test_a_record_that_is_made_again_is_never_cut(tmp_path: Path) -> None:
    first = RankActivity(tmp_path / "0")
    first.begin(3)
    again = RankActivity(tmp_path / "0")
    again.wait("all ranks", of_storage=True)
    first.act("still mapped")
    status = read_status(tmp_path / "0")
    assert status and status.action == "still mapped" and not status.of_storage
