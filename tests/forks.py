"""Commands of autoshard that need torch, each in a fork of an interpreter that has imported it.

A command is a process as a terminal starts it: a folder, an environment, an exit code and what it printed. Its imports
took place once, which saves it five seconds of a processor.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

from autoshard.cli import main

_IMPORTED = ("tests.forks", "torch._dynamo", "autoshard.engine.torch.engine", "autoshard.runtime.train")
_PATIENCE_S = 900.0


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    return context


def typed_on_a_fork(words: Sequence[str], folder: Path, env: Mapping[str, str]) -> tuple[int | None, str]:
    """Type words after ``autoshard`` in a folder; return the exit code, and what was printed and complained."""
    with tempfile.TemporaryDirectory() as place:
        printed = Path(place) / "printed"
        process = _context().Process(target=_type, args=([*words], folder, dict(env), printed))
        process.start()
        process.join(_PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        return process.exitcode, printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else ""


def _type(words: list[str], folder: Path, env: Mapping[str, str], printed: Path) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    with Path(os.devnull).open("rb") as nothing, printed.open("wb") as out:
        os.dup2(nothing.fileno(), 0)
        for number in (1, 2):
            os.dup2(out.fileno(), number)
    sys.argv = ["autoshard", *words]
    sys.exit(main(words))
