"""``python -m benchmarks``: what it prints and logs, and how processes are measured."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from autoshard.commands import progress
from autoshard.errors import InputError, RunFailed
from benchmarks.__main__ import main
from benchmarks.measure import counted_off, interleave, measure, warm_environment, yardstick_s
from benchmarks.result import Result
from tests.runtime.metrics.offline import records, wandb_environment

STAND_IN = """
import sys, benchmarks.__main__ as main
from benchmarks.result import Result
idle = lambda: Result(name="idle", value=0.125, unit="s", bar=1.0, holds=True, extras={"case": "word " * 60})
late = lambda: Result(name="late", value=2.0, unit="s", bar=1.0, holds=False)
if __name__ == "__main__":
    main.BENCHMARKS = {"idle": "stand_in:idle", "late": "stand_in:late"}
    sys.exit(main.main(["all", "--wandb"]))
"""


@pytest.fixture(autouse=True)
def two_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "stand_in", raising=False)
    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", {"idle": "stand_in:idle", "late": "stand_in:late"})


def test_json_is_one_object_and_comes_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["idle", "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last) == ["name", "value", "unit", "bar", "holds", "case"]


def test_all_is_a_table_with_whole_figures_and_a_bar_that_does_not_hold_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([]) == main(["all"]) == 0
    table = capsys.readouterr().out
    assert all(f" {shown} " in table for shown in ("idle", "0.125", "yes", "late", "NO"))
    assert table.count("word ") >= 60


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("idle --rows .", "idle has no use for measured rows"),
        ("idle --write", "idle has no use for tables on pages"),
        ("none", "there is no benchmark 'none'"),
    ],
)
def test_what_a_benchmark_has_no_use_for_is_refused(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2 and says in capsys.readouterr().err


def test_wandb_is_asked_for_by_name_when_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["idle", "--wandb"]) == 2
    assert "pip install 'autoshard[wandb]'" in capsys.readouterr().err


@pytest.mark.slow
def test_wandb_gets_every_result_as_a_run_of_one_group(tmp_path: Path) -> None:
    env = wandb_environment(tmp_path, PYTHONWARNINGS="default")
    command = [sys.executable, "stand_in.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kept offline. To send all, type: wandb sync" in done.stderr
    found = [records(file, tmp_path) for file in tmp_path.rglob("offline-run-*/run-*.wandb")]
    runs = [next(one["run"] for one in part if "run" in one) for part in found]
    (group,) = {run["run_group"] for run in runs}
    assert sorted(run["display_name"] for run in runs) == sorted(["idle", "late", group])
    assert {run["project"] for run in runs} == {"autoshard"}
    items = {run["display_name"]: part for run, part in zip(runs, found, strict=True)}
    (late,) = [one["history"]["item"] for one in items["late"] if "history" in one]
    assert (late["value"], late["bar"], late["holds"]) == (2.0, 1.0, False)
    (table,) = [one["history"]["item"] for one in items[group] if "history" in one]
    assert table["table.nrows"] == 2


def test_every_registered_benchmark_can_be_imported() -> None:
    assert benchmarks.BENCHMARKS
    assert all(callable(pkgutil.resolve_name(target)) for target in benchmarks.BENCHMARKS.values())


def test_an_extra_may_not_hide_a_field() -> None:
    with pytest.raises(InputError, match="value would hide"):
        Result(name="x", value=1.0, unit="s", bar=None, holds=True, extras={"value": 2.0})


BUSY = "import time\nwhile time.process_time() < 0.5: pass\n"


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code]


def test_cpu_seconds_are_those_of_the_command_and_its_children_not_of_the_clock(tmp_path: Path) -> None:
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}], check=True)"
    assert measure(python(parent), cwd=tmp_path).cpu_s >= 0.5
    assert measure(python("import time; time.sleep(0.8)"), cwd=tmp_path).cpu_s < 0.5


def test_the_peak_is_that_of_the_command_and_not_of_the_measuring_process(tmp_path: Path) -> None:
    ballast = bytearray(200_000_000)
    ballast[::4096] = b"x" * len(ballast[::4096])
    small = measure(python("pass"), cwd=tmp_path).peak_bytes
    large = measure(python("x = bytearray(100_000_000)"), cwd=tmp_path).peak_bytes
    assert small < 100_000_000 and large - small == pytest.approx(100_000_000, rel=0.05)


def test_a_command_that_fails_is_an_error_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"exit code 7:\nno such model"):
        measure(python("import sys; print('no such model'); sys.exit(7)"), cwd=tmp_path)
    with pytest.raises(RunFailed, match="`no-such-program` could not be started"):
        measure(["no-such-program"], cwd=tmp_path)


def test_rounds_visit_every_command_in_turn_and_drop_the_first(tmp_path: Path) -> None:
    commands = {name: python(f"open('order', 'a').write({name!r})") for name in ("a", "b")}
    rounds = interleave(commands, rounds=1, cwd=tmp_path)
    assert (tmp_path / "order").read_text() == "abab" and [list(used) for used in rounds] == [["a", "b"]]
    assert yardstick_s() > 0


def test_the_environment_imports_from_the_given_root_with_warm_bytecode(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("x = 1\n")
    env = warm_environment(tmp_path, tmp_path / "cache")
    measure([sys.executable, "-c", "import only_here"], cwd=Path("/"), env=env)
    assert list((tmp_path / "cache").rglob("only_here*.pyc"))


def test_long_work_says_where_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_LINE_S", 0.0)
    assert list(counted_off("ab", "question")) == ["a", "b"]
    assert capsys.readouterr().err == "question 1 of 2\nquestion 2 of 2\n"
