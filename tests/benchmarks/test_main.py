import json
import pkgutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

import benchmarks
from autoshard.errors import InputError
from benchmarks.__main__ import main
from benchmarks.result import Result
from tests.runtime.metrics.offline import records, wandb_environment

IDLE = Result(name="idle", value=0.5, unit="s", bar=1.0, holds=True, extras={"yardstick_s": 0.1})
TWO = """
import json, sys, types
import benchmarks.__main__ as main
from benchmarks.result import Result
made = [json.loads(text) for text in ({idle!r}, {late!r})]
fields = ("name", "value", "unit", "bar", "holds")
results = [Result(**{{key: one[key] for key in fields}}) for one in made]
sys.modules["stand_in"] = module = types.ModuleType("stand_in")
vars(module).update(idle=lambda: results[0], late=lambda: results[1])
main.BENCHMARKS = {{"idle": "stand_in:idle", "late": "stand_in:late"}}
sys.exit(main.main(["all", "--wandb"]))
"""
LATE = Result(name="late", value=2.0, unit="s", bar=1.0, holds=False)


@pytest.fixture(autouse=True)
def two_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("stand_in")
    vars(stand_in).update(idle=lambda: IDLE, late=lambda: LATE)
    monkeypatch.setitem(sys.modules, "stand_in", stand_in)
    registry: Mapping[str, str] = {"idle": "stand_in:idle", "late": "stand_in:late"}
    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", registry)


def test_json_is_one_object_and_comes_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["idle", "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last) == ["name", "value", "unit", "bar", "holds", "yardstick_s"]


@pytest.mark.parametrize("arguments", [[], ["all"]])
def test_all_is_a_table_and_a_bar_that_does_not_hold_is_no_failure(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "idle" in table and "late" in table and "NO" in table and "yardstick_s 0.1" in table


def test_however_much_there_is_to_say_figures_are_shown_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    many = Result(name="wordy", value=0.125, unit="of it", bar=0.5, holds=True, extras={"case": "word " * 60})
    monkeypatch.setattr("stand_in.idle", lambda: many)
    assert main(["idle"]) == 0
    table = capsys.readouterr().out
    assert all(f" {shown} " in table for shown in ("wordy", "0.125", "0.5", "yes")) and table.count("word ") >= 60


def test_wandb_is_asked_for_by_name_when_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["idle", "--wandb"]) == 2
    assert "pip install 'autoshard[wandb]'" in capsys.readouterr().err


@pytest.mark.slow
def test_wandb_gets_every_result_as_a_run_of_one_group(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO.format(idle=IDLE.as_json(), late=LATE.as_json()), encoding="utf-8")
    env = wandb_environment(tmp_path, PYTHONWARNINGS="default")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True)
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
