"""What W&B keeps where it has no key, read by its own reader."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.runtime.cases import environment


def wandb_environment(folder: Path, **more: str) -> dict[str, str]:
    """Nothing of a user's own settings, keys and folders."""
    kept = {name: value for name, value in environment().items() if not name.startswith("WANDB_")}
    own = {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "CACHE", "DATA")}
    return kept | own | {"HOME": str(folder), "WANDB_ERROR_REPORTING": "false", "PYTHONWARNINGS": "error"} | more


def records(file: Path, folder: Path) -> list[dict[str, Any]]:
    """What W&B's own reader finds in the file of a run: ``wandb leet inspect --json``, without Python before it."""
    package = find_spec("wandb")
    assert package and package.origin
    reader = [str(Path(package.origin).parent / "bin" / "wandb-core"), "leet", "inspect", "-no-observability", "-json"]
    command = [*reader, "-run-file", str(file), str(file.parents[1])]
    done = subprocess.run(command, env=wandb_environment(folder), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
