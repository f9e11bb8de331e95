import sys
from pathlib import Path

import pytest

from autoshard.errors import RunFailed
from benchmarks.measure import interleave, measure, warm_environment, yardstick_s

BUSY = "import time\nwhile time.process_time() < 0.2: pass\n"


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code]


def test_cpu_seconds_are_those_of_the_command_not_of_the_clock(tmp_path: Path) -> None:
    assert measure(python(BUSY), cwd=tmp_path).cpu_s >= 0.2
    assert measure(python("import time; time.sleep(0.3)"), cwd=tmp_path).cpu_s < 0.2


def test_cpu_seconds_include_children(tmp_path: Path) -> None:
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}], check=True)"
    assert measure(python(parent), cwd=tmp_path).cpu_s >= 0.2


def test_the_peak_is_that_of_the_command(tmp_path: Path) -> None:
    small = measure(python("pass"), cwd=tmp_path).peak_bytes
    large = measure(python("x = bytearray(100_000_000)"), cwd=tmp_path).peak_bytes
    assert large - small == pytest.approx(100_000_000, rel=0.05)


def test_the_memory_of_the_measuring_process_does_not_count(tmp_path: Path) -> None:
    ballast = bytearray(200_000_000)
    ballast[::4096] = b"x" * len(ballast[::4096])
    assert measure(python("pass"), cwd=tmp_path).peak_bytes < 100_000_000


def test_a_command_that_fails_is_an_error_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"exit code 7:\nno such model"):
        measure(python("import sys; print('no such model'); sys.exit(7)"), cwd=tmp_path)
    with pytest.raises(RunFailed, match="`no-such-program` could not be started"):
        measure(["no-such-program"], cwd=tmp_path)


def test_rounds_visit_every_command_in_turn_and_drop_the_first(tmp_path: Path) -> None:
    note = "open('order', 'a').write({!r})"
    commands = {name: python(note.format(name)) for name in ("a", "b")}
    rounds = interleave(commands, rounds=2, cwd=tmp_path)
    assert (tmp_path / "order").read_text() == "ababab"
    assert [list(used) for used in rounds] == [["a", "b"], ["a", "b"]]


def test_the_environment_imports_from_the_given_root_with_warm_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "only_here.py").write_text("x = 1\n")
    measure(
        [sys.executable, "-c", "import only_here"],
        cwd=Path("/"),
        env=warm_environment(tmp_path, tmp_path / "cache"),
    )
    assert list((tmp_path / "cache").rglob("only_here*.pyc"))


def test_the_yardstick_takes_time() -> None:
    assert yardstick_s() > 0
