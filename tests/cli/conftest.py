"""What tests of commands share: an empty folder, and a line typed as a user types it."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from autoshard.cli import main

Typed = Callable[[str], tuple[int, str, str]]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Return a function that types a line after ``autoshard``: its exit code, what it printed, and its complaints."""

    def run(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(shlex.split(line))
        out, err = capsys.readouterr()
        return code, out, err

    return run
