"""``autoshard`` with every graph of the nxd engine waited for and timed: ``python -m benchmarks.trainium.timed run``.

A graph is named by the function of the engine that ends it: a micro-batch, the reduction with loss and norm, the
update. Waiting keeps the host from running ahead, so that steps are slower than those of a plain run.
"""

# pyright: basic
# Neuron's packages are not installed where types are checked.

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autoshard.cli import main

GRAPHS = {"_one_by_one": "micro_batch", "ask": "reduction", "step": "update", "__init__": "tables", "restored": "state"}
ENDING = ".graphs.jsonl"  # of a file beside the folder of the run, by rank 0


@contextmanager
def timing(note: Callable[[str, float], None], wait: Callable[[], None]) -> Iterator[None]:
    """Let each graph that the engine ends be run and waited for at once, and note its name and its seconds."""
    engine: Any = importlib.import_module("autoshard.engine.nxd.engine")
    plain, last = engine.named, [time.perf_counter()]

    def named(name: str) -> Any:
        if name != "mark_step":
            return plain(name)

        def end_graph() -> None:
            plain(name)()
            wait()
            now = time.perf_counter()
            note(GRAPHS.get(sys._getframe(1).f_code.co_name, "other"), now - last[0])
            last[0] = now

        return end_graph

    engine.named = named
    try:
        yield
    finally:
        engine.named = plain


def graphs_beside(folder: Path) -> Path:
    """Return where the seconds of the graphs of a run are kept."""
    return folder.with_name(folder.name + ENDING)


def _run(arguments: list[str]) -> int:
    file = graphs_beside(Path(arguments[arguments.index("--out") + 1]))
    leads = os.environ.get("RANK", "0") == "0"

    def note(name: str, seconds: float) -> None:
        if leads:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps([name, seconds]) + "\n")

    def wait() -> None:
        importlib.import_module("torch_xla.core.xla_model").wait_device_ops()

    with timing(note, wait):
        return main(arguments)


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
