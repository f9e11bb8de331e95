"""What somebody who waits for a run sees, and what is kept of it meanwhile."""

import io
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from autoshard.commands.running import steps as module
from autoshard.commands.running.execution import Execution, RunDisplay
from autoshard.commands.running.steps import StepDisplay
from autoshard.errors import InputError
from autoshard.run.folder import EVALUATIONS, METRICS
from autoshard.run.protocol import Run
from autoshard.run.reports import EvaluatedStep, SavedStep, Started, TimedStep
from autoshard.runtime.launch import Placing, launch
from autoshard.runtime.metrics import log
from autoshard.spec.training import Evaluating, Tracking, Training
from tests.runtime.cases import read_metrics, tiny_plan
from tests.runtime.metrics.test_trackers import Kept

PLAN = tiny_plan("tp=1,pp=1,dp=1")


def step(number: int, time_s: float = 0.25, **fields) -> TimedStep:
    return TimedStep(**({"number": number, "loss": 1.0, "norm": 1.0, "time_s": time_s, "num_tokens": 64} | fields))


def display(folder: Path, num_steps: int, *, plan=PLAN, silent: bool = False, num_done: int = 0, **track):
    training = Training(steps=num_steps, track=Tracking(**track))
    return StepDisplay(plan, training, folder, platform="local", silent=silent, num_done=num_done)


def show_all(folder: Path, numbers: range, *, silent: bool = False, num_done: int = 0, **fields) -> list[dict]:
    with display(folder, numbers[-1], silent=silent, num_done=num_done) as show:
        for number in numbers:
            show(step(number, **fields))
    return read_metrics(folder / METRICS)


def printed(capsys: pytest.CaptureFixture[str]) -> list[int]:
    lines = capsys.readouterr().out.splitlines()
    return [int(line.removeprefix("step").split("/")[0]) for line in lines if line.startswith("step")]


def test_elsewhere_than_on_a_terminal_the_first_hundred_steps_are_lines_and_then_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(show_all(tmp_path, range(1, 131))) == 130
    assert printed(capsys) == [*range(1, 101), 130], "the last always"
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    show_all(tmp_path, range(1, 131))
    assert printed(capsys) == list(range(1, 131))


def test_a_step_without_an_update_is_always_a_line_and_so_is_the_last_of_a_run_that_breaks_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), display(tmp_path, 1000) as show:
        for number in range(1, 121):
            show(step(number, loss=math.nan, updated=False) if number == 110 else step(number))
        raise KeyboardInterrupt
    assert printed(capsys) == [*range(1, 101), 110, 120]


def test_a_terminal_has_one_line_that_fits_and_warnings_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=72, color_system=None)
    monkeypatch.setattr(module, "make_console", lambda: terminal)
    monkeypatch.setattr(module, "_FRAME_S", 0.0)
    show_all(tmp_path, range(1, 31), time_s=9.0)
    lines = [line.rpartition("\x1b[2K")[2] for line in file.getvalue().split("\n")]
    assert all(len(line) <= 72 for line in lines if line.startswith("step"))
    assert "warning: step 20: the last 20 steps took 9.00 s (median), outside the predicted" in file.getvalue()
    assert lines[-2].startswith("step 30/30   loss 1.0000")


def test_silence_keeps_all_and_says_only_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(show_all(tmp_path, range(1, 31), silent=True, time_s=9.0)) == 30
    said = capsys.readouterr()
    assert not said.out and said.err.count("warning: ") == 1 == said.err.count("\n")


def test_a_run_that_goes_on_has_every_step_once(tmp_path: Path) -> None:
    show_all(tmp_path, range(1, 31), silent=True)
    found = show_all(tmp_path, range(21, 41), silent=True, num_done=20, time_s=0.5)
    assert [one["step"] for one in found] == list(range(1, 41))
    assert [one["time_s"] for one in found] == [0.25] * 20 + [0.5] * 20
    (tmp_path / f".{METRICS}.{os.getpid()}.partial").mkdir()
    with pytest.raises(InputError, match="cannot be written: Is a directory"):
        display(tmp_path, 50)


def test_a_file_that_cannot_be_written_is_told_once_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show = display(tmp_path, 3)
    os.dup2(os.open("/dev/full", os.O_WRONLY), show._log._file)
    with show:
        for number in range(1, 4):
            show(step(number))
    said = capsys.readouterr().out
    assert show.failure == f"{tmp_path / METRICS}: step 1 was not written: No space left on device"
    assert said.count("warning: ") == 1 and len([line for line in said.splitlines() if line[:4] == "step"]) == 3


@pytest.mark.ranks
def test_what_forked_ranks_say_is_shown_kept_and_tracked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def body(say) -> int:
        for number in range(1, 6):
            say(step(number, learning_rate=1e-3))
        return 7

    with display(tmp_path, 5, tensorboard=True) as show:
        assert launch(None, 2, body, show=show, placing=Placing(folder=tmp_path)) == 7
    assert printed(capsys) == [1, 2, 3, 4, 5]
    assert [one["learning_rate"] for one in read_metrics(tmp_path / METRICS)] == [1e-3] * 5
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("tokens_per_s")] == [1, 2, 3, 4, 5]
    (config,) = found.Tensors("configuration/text_summary")
    text = json.loads(config.tensor_proto.string_val[0])
    assert text["training"]["steps"] == 5 and text["candidate"] == str(PLAN.candidate)


def test_another_machine_is_not_compared(tmp_path: Path) -> None:
    with display(tmp_path, 1, plan=replace(PLAN, cluster=replace(PLAN.cluster, name="trn9")), silent=True) as show:
        show(step(1))
    (found,) = read_metrics(tmp_path / METRICS)
    assert found["mfu"] is None


def test_trackers_take_a_step_once_together_with_how_it_was_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B takes no step a second time, so an evaluation that came after its step was never shown there."""
    kept = Kept()
    monkeypatch.setattr(module, "trackers_of", lambda *_, **__: [kept])
    training = Training(steps=5, eval=Evaluating(sets={"judge": 1.0}, every_steps=2))
    with StepDisplay(PLAN, training, tmp_path, platform="local", silent=True) as show:
        for number in range(1, 5):
            show(step(number))
            if number == 2:
                show.evaluated(EvaluatedStep(number=2, loss=0.5, num_samples=4, time_s=0.1, best=True))
    steps = [heard for heard in kept.heard if isinstance(heard, tuple) and isinstance(heard[0], int)]
    assert [number for number, _ in steps] == [1, 2, 3, 4], "the last one too, whose evaluation was broken off"
    assert [values.get("eval/loss") for _, values in steps] == [None, 0.5, None, None]
    assert all(values["loss"] == 1.0 for _, values in steps)


def test_a_checkpoint_that_outlives_the_lines_of_its_steps_says_which_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_all(tmp_path, range(1, 6))
    capsys.readouterr()
    assert len(show_all(tmp_path, range(9, 11), num_done=8)) == 7
    assert "note: steps 6 to 8 are missing in metrics.jsonl, as after a power cut" in capsys.readouterr().out
    show_all(tmp_path, range(11, 13), num_done=10)
    assert "missing" not in capsys.readouterr().out, "it is said once"


def test_the_lines_of_a_saved_step_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list[Path]()
    monkeypatch.setattr(log, "bring_to_disk", kept.append)
    run = Run(folder=tmp_path, training=Training(steps=2, eval=Evaluating(sets={"a.txt": 1.0})))
    execution = Execution(plan=PLAN, notes=(), run=run, tried=True, restarts=0, json=True)
    with RunDisplay(execution) as shown:
        shown(Started(step=0, notes=(), trackers=()))
        shown(step(1))
        shown(SavedStep(step=1, time_s=0.1))
        assert kept == [tmp_path / METRICS, tmp_path / EVALUATIONS]
