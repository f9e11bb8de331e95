"""What other programs use of this machine's processors: counted beside our own, and said where a run was slow."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from autoshard.report.run import run_json, run_sheet
from autoshard.report.sheet import Node
from autoshard.run.other_programs import BusyProcessors, OtherPrograms, ProcessorTime
from tests.report.printed import printed
from tests.report.test_run import PLAN, report

_TICKS = os.sysconf("SC_CLK_TCK")


def proc_of(folder: Path, busy: int, processes: dict[int, tuple[int, int]]) -> Path:
    """A /proc with so many busy ticks, and processes by number with their parents and ticks."""
    (folder / "stat").write_text(f"cpu  {busy} 0 0 5000 60 0 0 70 9 0\ncpu0 1 1 1 1\n")
    for number, (parent, ticks) in processes.items():
        (folder / str(number)).mkdir(exist_ok=True)
        line = f"{number} (a) b (c) S {parent} 1 1 0 -1 4194304 1 0 0 0 {ticks} 0 0 0 20 0 1 0 100\n"
        (folder / str(number) / "stat").write_text(line)
    return folder


def test_processes_that_descend_from_this_one_are_ours_and_idle_time_is_no_work(tmp_path: Path) -> None:
    us = os.getpid()
    processes = {1: (0, 500), us: (1, 20), 900001: (us, 30), 900002: (900001, 7), 900003: (1, 1000)}
    now = ProcessorTime.now(proc_of(tmp_path, 4000, processes))
    assert now and (now.all_s, now.ours_s) == (4000 / _TICKS, 57 / _TICKS)
    assert ProcessorTime.now(tmp_path / "none") is None


def _spin(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="only Linux counts what all programs use")
def test_what_this_process_starts_is_not_counted_and_what_ends_meanwhile_stays_ours() -> None:
    programs = OtherPrograms()
    programs.begin()
    assert programs.busy() is None, "ranks that others started would count as other programs"
    rank = get_context("fork").Process(target=_spin, args=(0.6,))
    rank.start()
    begin = ProcessorTime.now()
    programs.begin()
    rank.join()
    end, busy = ProcessorTime.now(), programs.busy()
    assert begin and end and busy and busy.of == os.cpu_count()
    assert end.ours_s - begin.ours_s == pytest.approx(0.6, abs=0.25)
    assert end.all_s - begin.all_s >= 0.8 * (end.ours_s - begin.ours_s)


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="only Linux counts what all programs use")
def test_a_program_that_this_process_has_not_started_is_counted() -> None:
    spin = "import time\nwhile time.process_time() < 0.8: pass"
    double = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {spin!r}])"
    rank = get_context("fork").Process(target=time.sleep, args=(1.0,))
    rank.start()
    programs = OtherPrograms()
    programs.begin()
    subprocess.run([sys.executable, "-c", double], check=True)  # its parent has ended: the program is nobody's child
    rank.join()
    busy = programs.busy()
    assert busy and busy.used > 0.2


def test_the_sheet_of_a_run_names_them_where_they_are_worth_a_word() -> None:
    quiet, loud = (BusyProcessors(used=used, of=2) for used in (0.04, 1.25))
    for programs, words in ((None, ""), (quiet, ""), (loud, "other programs used 1.2 of the 2 processors")):
        answer = run_json(PLAN, replace(report(5, 5, 5, 5), other_programs=programs))
        text = printed(run_sheet(PLAN, Node(answer), comparable=True))
        assert ("other programs" in text) == bool(words) and words in text
