"""Real runs, watched from outside while they go on, stop, hang and are killed."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.report.watch.content import read_run
from autoshard.report.watch.progress import RunProgress, progress_of
from tests.runtime.cases import children_of, started, wait_until, write_tiny

pytestmark = pytest.mark.ranks
ENDLESS = ("run", "tiny.json", "--steps", "100000", "--out", "run")


def seen(folder: Path) -> RunProgress:
    return progress_of(read_run(folder), time.time())


@pytest.mark.slow
def test_a_run_is_seen_to_go_on_and_to_be_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path)
    (folder := tmp_path / "run").mkdir()
    assert seen(folder).state == "not begun"
    with started(tmp_path, *ENDLESS, "--checkpoint.every-steps", "5") as process:
        wait_until(lambda: bool((now := seen(folder)).step >= 8 and now.checkpoint), "a checkpoint is saved", process)
        now = seen(folder)
        assert now.state == "running" and now.num_ranks == 2 and now.num_steps == 100000 and now.starts == (0,)
        assert now.pace and now.pace.ratio and now.memory and now.left_s and len(now.losses) >= 8
        assert now.checkpoint and now.checkpoint.num_bytes > 2**20 and now.checkpoint.age_s < 60
        assert main(["watch", str(folder)]) == 0
        assert re.search(r"running +step \d+ of 100000", capsys.readouterr().out)
        process.kill()
        wait_until(lambda: seen(folder).state != "running", "its ranks have followed")
    now = seen(folder)
    assert now.state == "killed" and str(process.pid) in now.reason
    assert main(["watch", str(folder), "--once"]) == 1


@pytest.mark.slow
def test_a_run_is_stopped_and_goes_on_and_a_rank_that_is_stopped_is_named_then_and_afterwards(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    folder = tmp_path / "run"
    with started(tmp_path, *ENDLESS) as process:
        wait_until(lambda: folder.is_dir() and seen(folder).step >= 3, "steps are taken", process)
        process.terminate()
        assert process.wait(60) == 143
    now = seen(folder)
    assert (now.state, now.reason) == ("stopped", "by SIGTERM, before its last step")
    before = now.step
    with started(tmp_path, *ENDLESS) as process:
        wait_until(lambda: seen(folder).step >= before + 8, "the run goes on", process)
        assert len(seen(folder).starts) == 2
        stopped = children_of(process.pid)[1]
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: seen(folder).state != "running", "no step has ended for a while")
        now = seen(folder)
        assert now.state == "hangs" and "no step has ended for 1" in now.reason
        assert re.match(
            rf"rank 1 \(pipeline rank 0, process {stopped} on \S+, stopped by a signal, there for .* s\) ",
            now.behind[0],
        )
        assert now.behind[1].startswith("rank 0 in step ") and "waits for " in now.behind[1]
        assert process.wait(60) == 3
    now = seen(folder)
    assert now.state == "failed" and f"process {stopped}, stopped by a signal" in now.reason
