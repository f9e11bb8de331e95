"""Suites of parts: each runs alone, one that fails is named with its reason, and the others go on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from autoshard.errors import InputError
from benchmarks.guarded import Part, Setting, Suite, measure
from benchmarks.result import Result


def found(name: str, value: float = 1.0) -> Result:
    return Result(name=name, value=value, unit="s", bar=None, holds=True)


def raising(_: Setting) -> Iterator[Result]:
    yield found("before")
    raise ValueError("the device is on fire")


def dying(_: Setting) -> Iterator[Result]:
    yield found("last")
    os.write(2, b"these are its last words")
    os.abort()


def hanging(setting: Setting) -> Iterator[Result]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (setting.folder / "pid").write_text(str(child.pid))
    yield found("early")
    time.sleep(600)


def part(name: str, run: object, limit_minutes: float = 5) -> Part:
    return Part(name=name, measures=f"how {name} is", minutes=1, limit_minutes=limit_minutes, run=run)  # type: ignore[arg-type]


def of_machine(setting: Setting) -> Sequence[Part]:
    if setting.machine == "none":
        raise InputError.of("machine", "there is no accelerator here")
    good = part("good", lambda given: [found("good", 2.0 if given.dry else 3.0)])
    slow = part("slow", hanging, limit_minutes=0.2)
    return [part("raises", raising), part("dies", dying), slow, good]


SUITE = Suite(name="stand_in", parts=of_machine, opening=lambda setting, parts: f"{len(parts)} parts, $ 7")
WHERE = "tests.benchmarks.test_guarded:SUITE"


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().split()[2] != "Z"


@pytest.mark.slow
def test_parts_that_fail_are_named_with_their_reason_and_leave_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(WHERE, ["stand_in", "--json", "--dry-run", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    before, raised, last, died, early, slow, good = lines(said.out)
    assert raised == {"name": "raises", "failed": "ValueError: the device is on fire"}
    assert "on fire" in (tmp_path / "raises.log").read_text() and before["name"] == "before"
    assert last["name"] == "last" and "ended with exit code -6" in str(died["failed"])
    assert "these are its last words" in (tmp_path / "dies.log").read_text()
    assert early["name"] == "early" and "it took more than 0.2 minutes" in str(slow["failed"])
    assert not is_alive(int((tmp_path / "pid").read_text())), "what a part started ends with it"
    assert good["value"] == 2.0
    assert said.err.startswith("4 parts, $ 7\n") and "1 of 4 parts ended well" in said.err


def test_parts_are_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(WHERE, ["stand_in", "--parts", "good", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("good: 3 s")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--parts", "goood"], "--parts: there is no part 'goood' here. Did you mean good?"),
        (["--machine", "x"], "--machine: is the machine that --dry-run plays; leave it out, or add that"),
        (["--dry-run", "--machine", "none"], "machine: there is no accelerator here"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(WHERE, ["stand_in", *words, "--out", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.strip() == says and not (tmp_path / "none").exists()
