"""The folder of a run: one run at a time, one model, and no start without end."""

import math
import os
import shutil
import signal
import threading
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest

from autoshard.cli import main
from autoshard.commands.running.execution import Execution, RunDisplay
from autoshard.errors import InputError, RunFailed
from autoshard.plan.codec import dump
from autoshard.run.protocol import Run
from autoshard.run.reports import Started, TimedStep
from autoshard.runtime import folder
from autoshard.runtime.folder import allow_attempts, count_attempt, locked, note_stepped, refuse_other_run
from autoshard.runtime.metrics.log import MetricsLog
from autoshard.runtime.restart import start_before, training_text
from autoshard.spec.training import Training
from tests.runtime.cases import children_of, started, tiny_plan, wait_until, write_tiny


@pytest.mark.ranks
def test_a_folder_is_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder, "_FREED_S", 0.2)
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path, "tp=1,pp=1,dp=1")
    words = ["run", "tiny.json", "--steps", "1", "--out", str(tmp_path / "run")]
    for code in (2, 0):
        with locked(tmp_path / "run") if code else nullcontext():
            assert main(words) == code
        said = capsys.readouterr().err
        assert not code or (
            f"--out {tmp_path / 'run'}: process {os.getpid()} on " in said and "is running in it" in said
        )


@pytest.mark.slow
@pytest.mark.ranks
def test_a_start_waits_until_what_a_kill_has_orphaned_is_gone(tmp_path: Path) -> None:
    write_tiny(tmp_path, "tp=1,pp=1,dp=1")
    with ExitStack() as held:
        held.enter_context(locked(tmp_path / "run"))
        with started(tmp_path, "run", "tiny.json", "--steps", "1", "--out", "run") as process:
            threading.Timer(4.0, held.close).start()
            said = process.communicate(timeout=400)[1]
    assert process.returncode == 0, said


@pytest.mark.ranks
def test_a_start_that_its_ranks_or_another_start_refuses_leaves_plan_and_options_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = tiny_plan("tp=1,pp=1,dp=1")
    (tmp_path / "adamw.json").write_text(dump(plan))
    (tmp_path / "sgd.json").write_text(dump(replace(plan, workload=replace(plan.workload, optimizer="sgd"))))
    first, run = ["run", "sgd.json", "--out", "run", "--steps", "1"], tmp_path / "run"
    with ExitStack() as held:  # a start that waits finds what the other one has done meanwhile
        held.enter_context(locked(run))
        files = {run / "plan.json": dump(plan), run / "training.json": training_text(Training())}
        change = threading.Timer(1.0, lambda: [*starmap(Path.write_text, files.items()), held.close()])
        change.start()
        assert main(first) == 3 and "another start has changed run" in capsys.readouterr().err
        change.join()
        assert all(path.read_text() == text for path, text in files.items())
    shutil.rmtree(run)
    assert main(first) == 0
    before = {path: path.read_text() for path in files}
    assert main(["run", "adamw.json", "--out", "run", "--steps", "2"]) == 2
    assert "does not fit: moment1/" in capsys.readouterr().err
    assert all(path.read_text() == text for path, text in before.items())


def test_another_model_and_other_files_are_refused(tmp_path: Path) -> None:
    plan = tiny_plan("tp=1,pp=1,dp=1")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds files, and none is the plan.json of a run"):
        refuse_other_run(tmp_path, None, plan)
    (tmp_path / "plan.json").write_text(dump(plan))
    before = start_before(tmp_path, None).plan
    refuse_other_run(tmp_path, before, tiny_plan("tp=1,pp=1,dp=2"))
    with pytest.raises(InputError, match=r"holds a run of another model \(ffn 384, now 256\)"):
        refuse_other_run(tmp_path, before, replace(plan, model=replace(plan.model, ffn=256)))


def test_starts_that_come_no_further_are_counted(tmp_path: Path) -> None:
    def three_times() -> None:
        for _ in range(3):
            count_attempt(tmp_path, 40, most=3)
        with pytest.raises(RunFailed, match=r"3 starts after step 40 came to no step.*type --resume 40"):
            count_attempt(tmp_path, 40, most=3)

    for _ in range(9):  # killed after a step each time: preempted, and no fault of the run
        count_attempt(tmp_path, 40, most=3)
        note_stepped(tmp_path, 41)
    three_times()
    count_attempt(tmp_path, 50, most=3)
    allow_attempts(tmp_path)
    three_times()
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"from": 4')  # a kill while it was written
    with pytest.raises(RunFailed):
        count_attempt(tmp_path, 40, most=3)


@pytest.mark.ranks
def test_full_disks_name_the_file_after_the_tables_and_notes_say_what_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = tiny_plan("tp=1,pp=1,dp=1")
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    for path in (tmp_path / "tiny.json", folder / "plan.json"):
        path.write_text(dump(replace(plan, workload=replace(plan.workload, optimizer="sgd"))))
    append = MetricsLog.append

    def append_to_full(self: MetricsLog, record: Any) -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), self._file)
        append(self, record)

    monkeypatch.setattr(MetricsLog, "append", append_to_full)
    (folder / "measured.jsonl").symlink_to("/dev/full")
    assert main(["run", "tiny.json", "--steps", "3", "--schedule.warm-up-steps", "9", "--adamw.beta1", "0.8"]) == 3
    said = capsys.readouterr()
    assert "Predicted and measured" in said.out and "saved step 3" in said.out
    assert "note: the warm-up of 9 steps does not end within 3 steps\n" in said.out
    assert "note: the options of adamw have no effect: the plan's optimizer is sgd\n" in said.out
    assert "runs/tiny/metrics.jsonl: step 1 was not written: No space left on device" in said.err
    assert "runs/tiny/measured.jsonl: No space left on device" in said.err


@pytest.mark.ranks
def test_a_run_whose_folder_is_deleted_says_so_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(dump(tiny_plan("tp=1,pp=1,dp=1")))
    append = MetricsLog.append

    def append_and_delete(self: MetricsLog, record: Any) -> None:
        append(self, record)
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)

    monkeypatch.setattr(MetricsLog, "append", append_and_delete)
    assert main(["run", "tiny.json", "--steps", "2"]) == 3
    said = capsys.readouterr()
    assert "runs/tiny was deleted while the run was on" in said.err and "\nwrote" not in said.out


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_are_started_again_from_the_newest_checkpoint_even_if_another_step_was_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, "tp=1,pp=1,dp=2")
    with started(tmp_path, "run", "tiny.json", "--steps", "4", "--checkpoint.every-steps", "2") as first:
        assert first.wait(120) == 0, first.communicate()[1]
    kept = tmp_path / "runs" / "tiny" / "checkpoints"

    def newest() -> int:
        return max(int(one.name.removeprefix("step-")) for one in kept.glob("step-*") if one.suffix != ".partial")

    words = ["--steps", "100000", "--checkpoint.every-steps", "5", "--resume", "2", "--restarts", "1"]
    with started(tmp_path, "run", "tiny.json", *words) as again:
        wait_until(lambda: newest() >= 10, "a checkpoint is saved")
        os.kill(children_of(again.pid)[0], signal.SIGKILL)
        known = newest()
        wait_until(lambda: newest() >= known + 10, "the run goes on")
        again.terminate()
        out, err = again.communicate(timeout=60)
    assert again.returncode == 143, err
    assert "SIGKILL" in out and "the ranks are started again, 0 times more without" in out
    begun = [int(line.split()[4]) for line in out.splitlines() if line.startswith("note: continues after step")]
    assert len(begun) == 2 and begun[0] == 2 and begun[1] >= 10, "not at step 2 again"


def test_a_full_disk_is_named_when_a_folder_is_locked(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to("/dev/full")
    with pytest.raises(OSError) as caught, locked(tmp_path):
        pass
    assert caught.value.filename == str(tmp_path / ".lock")


@pytest.mark.parametrize("updated", [False, True])
def test_a_step_that_updated_nothing_is_none_that_a_start_came_to(updated: bool, tmp_path: Path) -> None:
    """Else a scheduler would queue a run for ever whose loss is no number in the same step of every start."""
    plan = tiny_plan("tp=1,pp=1,dp=1")
    run = Run(folder=tmp_path, training=Training())
    execution = Execution(plan=plan, notes=(), run=run, tried=False, restarts=0, json=True)
    step = TimedStep(
        number=41, loss=math.nan, norm=1.0, time_s=0.1, num_tokens=8, learning_rate=1e-3, waited_s=0.0,
        updated=updated, memory_bytes=0, phase="warm-up",
    )  # fmt: skip
    refusal = nullcontext() if updated else pytest.raises(RunFailed, match="5 starts after step 40 came to no step")
    with refusal:
        for _ in range(6):
            with RunDisplay(execution) as display:
                display(Started(step=40, notes=(), trackers=()))
                display(step)
