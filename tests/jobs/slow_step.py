"""For --extend: a step that takes longer than torchrun and Slurm wait by themselves, as those of large models do."""

import sys
import time
from typing import Any

from autoshard.cost.terms import CostTerm

DELAY_S = 42.0  # of the second step and those after it

waiting = CostTerm(name="waiting", seconds=lambda columns: DELAY_S + 0.0 * columns.dp, source="this test")

if sys.argv[1:2] == ["run"]:  # a rank: only there is torch at hand
    from autoshard.engine.torch.engine import TorchEngine

    _step, _steps = TorchEngine.step, list[None]()

    def _slowly(engine: Any, *given: Any) -> Any:
        _steps.append(None)
        until_s = time.monotonic() + (DELAY_S if len(_steps) > 2 else 0.0)  # the first of all is the rehearsal
        while time.monotonic() < until_s:
            time.sleep(0.1)
        return _step(engine, *given)

    TorchEngine.step = _slowly  # type: ignore[method-assign]
