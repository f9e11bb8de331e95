"""The last save of ranks that wait for each other for ever: from another thread, if the state is whole on all."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_ANSWER = timedelta(seconds=30)  # that ranks get to say that they can save
_CHANGING = -1  # the step of a rank whose state is being updated


class StateRescue:
    """Knows when the state may be saved by another thread than the one that takes steps.

    A hang in a forward pass, a backward pass or a reduction leaves the state of the step before on every rank. Their
    host sides can still talk, as they do when a device's library hangs.
    """

    def __init__(self) -> None:
        """Make a group of its own; every rank of the world does."""
        self._group: Any = dist.new_group(backend="gloo", timeout=_ANSWER)
        self._deciding = threading.Lock()
        self._is_changing = False

    def begin_changing(self) -> None:
        """Let the state change from now on; wait for ever once it is being saved, since the run ends then."""
        with self._deciding:
            self._is_changing = True

    def end_changing(self) -> None:
        """Say that the state is whole again."""
        self._is_changing = False

    def save(self, step: int, save: Callable[[], str]) -> str:
        """Save the state of a step if all ranks can, and say what became of it; the run ends afterwards."""
        if not self._deciding.acquire(timeout=_ANSWER.total_seconds()):
            return "the state was not saved: it is being updated"
        here = _CHANGING if self._is_changing else step
        bounds = torch.tensor([here, -here])
        try:
            dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=self._group)
        except RuntimeError:
            return f"the state was not saved: not all ranks answered within {_ANSWER.total_seconds():.0f} s"
        least, most = int(bounds[0]), -int(bounds[1])
        if least == _CHANGING or least != most:
            return "the state was not saved: ranks were updating it"
        failure = save()
        return f"the state was not saved: {failure}" if failure else f"the state of step {step} was saved before"
