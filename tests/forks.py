"""Commands of autoshard that need torch, each in a fork of an interpreter that has imported it.

A command is a process as a terminal starts it: with a folder, an environment, an exit code and what it printed. Its
imports took place once, which saves it five seconds of a processor.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from autoshard.cli import main

_ROOT = Path(__file__).parents[1]
_IMPORTED = ("torch._dynamo", "autoshard.engine.torch.engine", "autoshard.runtime.train")
_PATIENCE_S = 900.0


def typed_on_a_fork(words: Sequence[str], folder: Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Type words after ``autoshard`` in a folder; return the exit code, and what was printed and complained."""
    interpreter = _interpreter()
    assert interpreter.stdin and interpreter.stdout
    with tempfile.TemporaryDirectory() as place:
        printed, timer = Path(place) / "printed", threading.Timer(_PATIENCE_S, interpreter.kill)
        timer.start()
        try:
            print(json.dumps([[*words], str(folder), dict(env), str(printed)]), file=interpreter.stdin, flush=True)
            code = interpreter.stdout.readline()
        finally:
            timer.cancel()
        assert code, f"autoshard {' '.join(words)}: no end within {_PATIENCE_S} s"
        return int(code), printed.read_text(encoding="utf-8", errors="replace")


@cache
def _interpreter() -> "subprocess.Popen[str]":
    env, pipe = {**os.environ, "PYTHONPATH": str(_ROOT)}, subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "tests.forks"], cwd=_ROOT, env=env, stdin=pipe, stdout=pipe, text=True
    )


def serve() -> None:
    """Fork for each line of the input, and answer with the exit code of the fork."""
    for name in _IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        if not (child := os.fork()):
            words, folder, env, printed = json.loads(line)
            _surround(Path(folder), env, Path(printed))
            sys.argv = ["autoshard", *words]
            sys.exit(main(words))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


def _surround(folder: Path, env: Mapping[str, str], printed: Path) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    with Path(os.devnull).open("rb") as nothing, printed.open("wb") as out:
        for number, file in ((0, nothing), (1, out), (2, out)):
            os.dup2(file.fileno(), number)


if __name__ == "__main__":
    serve()
