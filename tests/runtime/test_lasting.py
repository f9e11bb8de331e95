"""What is printed may be lost: a full disk, or a reader that is gone or rests, ends no run."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.commands.running.lasting import LastingOutput
from tests.runtime.cases import read_metrics, started, wait_until, write_tiny


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


@contextmanager
def resting(patch: pytest.MonkeyPatch, terminal: bool) -> Iterator[Callable[[], str]]:
    """A reader of stdout that takes nothing until it is called, and then all there is."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcflow(writer, termios.TCOOFF)  # Ctrl-S

    def read() -> str:
        if terminal:
            termios.tcflow(writer, termios.TCOON)
        taken = b""
        while select.select([reader], [], [], 0.1)[0]:
            taken += os.read(reader, 2**16)
        return taken.decode().replace("\r\n", "\n")

    with os.fdopen(writer, "w", buffering=1) as stream:
        patch.setattr(sys, "stdout", stream)
        yield read
    os.close(reader)


@pytest.mark.parametrize("terminal", [False, True])
def test_no_line_waits_for_a_reader_that_rests_and_none_is_lost_soon(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"step {number}\n" for number in range(10_000)]  # more than a pipe or a terminal takes
    with resting(monkeypatch, terminal) as read, LastingOutput() as output:
        sys.stdout.write("before\n")
        for line in lines:
            sys.stdout.write(line)
        said = read()
        while not said.endswith(lines[-1]):
            sys.stdout.flush()
            said += read()
        assert said == "".join(["before\n", *lines]) and not output.failure


@pytest.mark.parametrize("ends", [False, True])
def test_of_what_nobody_reads_for_a_day_the_beginning_and_the_end_are_kept(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, said, reader = [f"{number} {'x' * 1000}\n" for number in range(2000)], list[str](), None
    with resting(monkeypatch, False) as read:
        with LastingOutput():
            for line in lines:
                sys.stdout.write(line)
            while not ends and (more := read()):
                said.append(more)
                sys.stdout.flush()
            if ends:  # which waits for the reader
                reader = threading.Thread(target=lambda: said.extend(iter(read, "")))
                reader.start()
        if reader:
            reader.join()
    match = re.fullmatch(r"(.*)\n(.*) KiB are missing here, .*? has all steps\n(.*)", "".join(said), re.DOTALL)
    assert match
    whole, begin, end = "".join(lines), match[1], match[3]
    assert whole.startswith(begin) and len(begin) > 1_000_000 and whole.endswith(end) and len(end) > 60_000
    assert float(match[2]) == pytest.approx((len(whole) - len(begin) - len(end)) / 1024, abs=0.01)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_that_nobody_reads_ends_when_somebody_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, "tp=1,pp=1,dp=1")
    with started(tmp_path, "run", "tiny.json", "--steps", "80", "--out", "run") as process:
        assert process.stdout
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        wait_until((tmp_path / "run" / "report.json").is_file, "all steps are done", process)
        out, _ = process.communicate()
    assert process.returncode == 0 and "\nstep 60/80 " in out and out.rstrip().endswith("--open"), out[-500:]


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
