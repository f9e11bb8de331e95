"""How a watched run looks in a terminal."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.text import Text

from autoshard.cli import main
from autoshard.report.watch.progress import RunProgress
from autoshard.report.watch.terminal import progress_report
from autoshard.run.reports import RouterReport
from tests.report.printed import printed
from tests.report.watch.made_runs import FROM, NOW, made_run, seen, steps_of
from tests.runtime.cases import environment


@pytest.mark.parametrize("width", [50, 80, 200])
def test_every_line_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.chdir(tmp_path)
    made_run(Path("far"), steps_of(40, loss=lambda n: float("nan") if n == 40 else 3.0 - n / 50), host="far")
    lines = printed(progress_report(seen(Path("far"))), width=width).splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for words in ("running step 40 of 100 (40%)", "left 30 s", "step 40: loss nan", "checkpoint none yet"):
        assert words in text
    assert "1.00, inside" in text and "it runs on far" in text and "█" in text


def test_what_routers_did_in_the_last_step_is_shown(tmp_path: Path) -> None:
    router = RouterReport(busiest=1.53, entropy=1.9, dropped=0.125)
    made_run(tmp_path / "mixture", steps_of(40, router=router))
    made_run(tmp_path / "dense", steps_of(40))
    text = printed(progress_report(seen(tmp_path / "mixture")), width=100)
    assert "experts     1.53 x the mean in the busiest, dropped 12.5% of choices" in text
    assert "experts" not in printed(progress_report(seen(tmp_path / "dense")), width=100)


def test_failures_are_shown_once(tmp_path: Path) -> None:
    ends = [{"failed": f"rank {n} died\nby {n}", "at": NOW - 100 + n} for n in range(2)]
    made_run(tmp_path, steps_of(40, age_s=90), notes=(FROM, ends[0], FROM, ends[1]))
    text = printed(progress_report(seen(tmp_path)), width=100)
    assert text.count("rank 1 died") == text.count("rank 0 died") == text.count("by 1") == 1 and "by 0" not in text
    assert "starts      2: from the beginning, from the beginning; 2 failed" in text


def test_the_command_prints_one_picture_and_says_by_its_code_whether_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path / "good", steps_of(100), notes=(FROM, {"ended": "", "at": NOW}))
    made_run(tmp_path / "bad", steps_of(40))
    assert main(["watch", str(tmp_path / "good")]) == 0
    assert "ended       step 100 of 100 (100%)" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "bad"), "--once"]) == 1
    assert "killed " in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "bad"), "--json"]) == 1
    assert '"state": "killed"' in capsys.readouterr().out
    assert main(["watch", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "bad"), "--every", "0"]) == 2


def test_it_needs_no_torch(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(100), notes=(FROM, {"ended": "", "at": NOW}))
    code = "import sys; sys.modules['torch'] = None; from autoshard.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "watch", str(tmp_path)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "ended " in done.stdout, done.stderr


def test_a_terminal_is_drawn_on_until_the_run_is_over_also_while_its_folder_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made_run(tmp_path / "run", steps_of(40), host="far")
    shown, pauses = list[RunProgress](), iter((tmp_path / "away", folder))

    def sleep(_: float) -> None:
        """Take the folder away at the first pause; at the second one it is back, and the run has ended."""
        to = next(pauses)
        (folder if to != folder else tmp_path / "away").rename(to)
        made_run(to, steps_of(100), notes=(FROM, {"ended": "", "at": NOW}), host="far")

    def report(one: RunProgress) -> Text:
        shown.append(one)
        return Text(one.state)

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("autoshard.commands.watch.time", SimpleNamespace(sleep=sleep, time=lambda: NOW))
    monkeypatch.setattr("autoshard.commands.watch.progress_report", report)
    assert main(["watch", str(folder)]) == 0
    assert [one.state for one in shown] == ["running", "running", "ended"]
    assert "cannot be read just now" in shown[1].remarks[0] and not shown[2].remarks
