"""What is printed may be lost: a full disk, or a reader that is gone, ends no run."""

import io
import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.commands.running.lasting import LastingOutput
from tests.runtime.cases import read_metrics, write_tiny


def unread() -> io.TextIOWrapper:
    """A pipe whose reader is gone, as after ``| head``."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


def on_full_disk() -> io.TextIOWrapper:
    return Path("/dev/full").open("w", buffering=1, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("opened", "code"), [(unread, 0), (on_full_disk, 3)])
def test_a_run_whose_output_cannot_be_written_goes_on_to_its_end(
    opened, code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path, "tp=1,pp=1,dp=1")
    with opened() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["run", "tiny.json", "--steps", "3", "--out", "run"]) == code
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()
    said = capsys.readouterr().err
    assert said.count("warning: the output cannot be written") == 1
    assert ("autoshard: the output: No space left on device" in said) == bool(code)


def test_only_lines_that_somebody_waits_for_are_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for opened, failure in ((unread, ""), (on_full_disk, "the output: No space left on device")):
        with opened() as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            with LastingOutput() as output:
                sys.stdout.write("a step\n")
                sys.stdout.write("another step\n")
                sys.stdout.flush()
            assert output.failure == failure and sys.stdout is stream
            stream.write("what Python has kept of them has somewhere to go\n")
        assert capsys.readouterr().err.count("warning: the output cannot be written") == 1
    with LastingOutput() as output:
        sys.stdout.write("as ever\n")
    assert capsys.readouterr().out == "as ever\n" and not output.failure


def test_nobody_waits_for_the_lines_of_a_terminal_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    window, terminal = pty.openpty()
    with os.fdopen(terminal, "w", buffering=1) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        with LastingOutput() as output:
            sys.stdout.write("a step\n")
            os.close(window)
            sys.stdout.write("another step\n")
    assert not output.failure


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_whose_terminal_is_closed_is_saved_and_ends_by_that_signal(tmp_path: Path) -> None:
    write_tiny(tmp_path, "tp=1,pp=1,dp=1")
    command = [sys.executable, "-m", "autoshard", "run", "tiny.json", "--steps", "100000", "--out", "run"]
    process, window = pty.fork()
    if not process:
        os.chdir(tmp_path)
        os.execv(sys.executable, command)
    shown = b""
    while b"step " not in shown:
        shown += os.read(window, 4096)
    os.close(window)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:08}").is_dir()
