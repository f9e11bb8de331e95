"""SIGKILL at every change of a file in a start: the next start goes on, and no file is cut off."""

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoshard.cli import main
from autoshard.commands.running import execution
from autoshard.plan.codec import dump
from autoshard.run.reports import Started
from autoshard.runtime.folder import note_stepped
from tests.runtime.cases import environment, read_metrics, tiny_plan
from tests.soak import dying, starts

pytestmark = pytest.mark.ranks
BEFORE, AFTER = ("run", "before.json", "--out", "run", "--steps", "3"), ("run", "after.json", "--out", "run")
WHOLE = ("plan.json", "training.json")
FIRST = 3  # steps of the run before it is started again


def in_fork(body: Callable[[], int]) -> int:
    """Call a function in a fork of this process; its answer, or the signal it died of as a negative number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork with threads
        pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def up_to_its_first_step(given: Any, *_: Any) -> None:
    """In the place of ranks: a start writes all that it writes before its first step."""
    display = execution.RunDisplay(given)
    with display:
        display(Started(step=FIRST, notes=(), trackers=()))
        note_stepped(given.run.folder, FIRST + 1)


def texts_of(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in WHOLE}


def records_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of three steps with a checkpoint, which another plan and other options go on with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before.json").write_text(dump(tiny_plan("tp=1,pp=1,dp=1", seq_len=8)))
    (tmp_path / "after.json").write_text(dump(tiny_plan("tp=1,pp=1,dp=2", seq_len=8)))
    assert main(list(BEFORE)) == 0
    return tmp_path / "run"


@pytest.mark.slow
def test_a_kill_at_any_change_of_a_file_in_a_start_is_survived(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_with_restarts", up_to_its_first_step)
    words = [*AFTER, "--steps", "5", "--learning-rate", "0.01"]

    def dies_at(number: int) -> int:
        dying.die_at(number, str(run))
        return main(words)

    old, pristine = texts_of(run), run.with_name("pristine")
    shutil.copytree(run, pristine)
    assert in_fork(lambda: main(words)) == 0
    new, number, code = texts_of(run), 0, -signal.SIGKILL
    assert all(old[name] != new[name] for name in WHOLE)
    while code == -signal.SIGKILL:
        number += 1
        shutil.rmtree(run)
        shutil.copytree(pristine, run)
        code = in_fork(lambda: dies_at(number))  # noqa: B023
        assert all(text in (old[name], new[name]) for name, text in texts_of(run).items()), f"change {number}"
        assert in_fork(lambda: main(words)) == 0, f"after a kill at change {number}"
        assert texts_of(run) == new and records_of(run)[-1]["stepped"] == FIRST + 1
        assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == list(range(1, FIRST + 1))
        assert not list(run.glob(".*.partial"))
    assert code == 0 and number > 8, f"the start has changed {number - 1} files"


@pytest.mark.slow
def test_a_kill_at_any_change_of_a_file_in_a_first_start_is_survived(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "_with_restarts", lambda *_: None)

    def dies_at(number: int) -> int:
        dying.die_at(number, str(run))
        return main(list(AFTER))

    number, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        number += 1
        shutil.rmtree(run)
        code = in_fork(lambda: dies_at(number))  # noqa: B023
        assert in_fork(lambda: main(list(AFTER))) == 0, f"after a kill at change {number}"
        assert all(map(json.loads, texts_of(run).values()))
    assert code == 0 and number > 5, f"the start has changed {number - 1} files"


@pytest.mark.thorough
def test_the_command_line_goes_on_after_a_kill_at_a_change_of_a_file(run: Path) -> None:
    steps = FIRST

    def typed(module: str, **more: str) -> "subprocess.CompletedProcess[str]":
        words = [sys.executable, "-m", module, *AFTER, "--steps", str(steps)]
        return subprocess.run(
            words, cwd=run.parent, env=environment(**more), capture_output=True, text=True, check=False
        )

    for number in range(1, 22, 3):
        steps += 2
        done = typed("tests.soak.dying", **{dying.NUMBER: str(number), dying.FOLDER: str(run)})
        assert done.returncode in (-signal.SIGKILL, 3), done.stderr  # of a rank, it is the run's failure
        done = typed("autoshard.cli")
        assert done.returncode == 0, f"after a kill at change {number}: {done.stderr}"
        assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == list(range(1, steps + 1))


@pytest.mark.slow
def test_ranks_whose_torchrun_was_killed_save_their_step_and_leave_the_folder(tmp_path: Path) -> None:
    run, steps = starts.tiny_run(tmp_path / "0", "tp2", "torchrun", "--steps", "15"), 15
    with run.typed() as start:
        starts.until(lambda: run.steps_since(start.at_s) >= 2, start)
        pids = starts.processes_of(start.process.pid)
        start.process.kill()
        assert len(pids) == 3 and not starts.to_the_end(run) and not starts.live_on(pids)
    records = records_of(run.out)
    assert [record["ended"] for record in records if "ended" in record] == ["SIGTERM", ""], records
    assert [step for step, *_ in run.curve()] == list(range(1, steps + 1))
