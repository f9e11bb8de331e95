"""``autoshard`` that dies of SIGKILL before its n-th change of a file in a folder."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

NUMBER, FOLDER = "AUTOSHARD_SOAK_NUMBER", "AUTOSHARD_SOAK_FOLDER"
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.link")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def die_at(number: int, folder: str) -> None:
    """Die before a change; forks go on with the count of their parent."""
    count = 0

    def heed(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        changes = event in _CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES)
        if changes and isinstance(arguments[0], str | Path) and str(Path(arguments[0]).absolute()).startswith(folder):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(heed)


if __name__ == "__main__":
    from autoshard.cli import main

    die_at(int(os.environ[NUMBER]), os.environ[FOLDER])
    sys.exit(main())
