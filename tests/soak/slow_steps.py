"""For --extend: steps from the second on take seconds, as long as a file is there; the plan knows how many."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from autoshard.cost.terms import CostTerm

SECONDS, WHILE = "AUTOSHARD_SOAK_SECONDS", "AUTOSHARD_SOAK_WHILE"
_DELAY_S = float(os.environ.get(SECONDS, "0"))

waiting = CostTerm(name="waiting", seconds=lambda columns: _DELAY_S + 0.0 * columns.dp, source="this hunt")

if sys.argv[1:2] == ["run"]:  # a rank: only there is torch at hand
    from autoshard.engine.torch.engine import TorchEngine

    _step, _steps = TorchEngine.step, list[None]()

    def _slowly(engine: Any, *given: Any) -> Any:
        _steps.append(None)
        until_s = time.monotonic() + (_DELAY_S if len(_steps) > 1 and Path(os.environ[WHILE]).exists() else 0.0)
        while time.monotonic() < until_s:
            time.sleep(0.1)
        return _step(engine, *given)

    TorchEngine.step = _slowly  # type: ignore[method-assign]
