"""The last save of ranks that wait for each other for ever, or for one that fails: from another thread than steps.

It is made if the state is whole on all ranks.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from autoshard.errors import RunFailed
from autoshard.run.activity import RankActivity
from autoshard.runtime.watchdog import Watch

_LOOK_S = 1.0  # for a call of another rank
_ANSWER = timedelta(seconds=30)  # that ranks get to say that they can save
_CHANGING = -1  # the step of a rank whose state is being updated


class StateRescue:
    """Knows when the state may be saved by another thread than the one that takes steps.

    A hang in a forward pass, a backward pass or a reduction leaves the state of the step before on every rank. Their
    host sides can still talk, as they do when a device's library hangs.
    """

    def __init__(self, start: str) -> None:
        """Make a group of its own; every rank of the world does, with the same name of this start of the run."""
        self._group: Any = dist.new_group(backend="gloo", timeout=_ANSWER)
        self._store: Any = distributed_c10d._get_default_store()
        self._failed = f"autoshard/failed/{start}"
        self._deciding = threading.Lock()
        self._is_changing = False

    def begin_changing(self) -> None:
        """Let the state change from now on; wait for ever once it is being saved, since the run ends then."""
        with self._deciding:
            self._is_changing = True

    def end_changing(self) -> None:
        """Say that the state is whole again."""
        self._is_changing = False

    def call(self) -> None:
        """Call all ranks to save the state: this one fails, and the others wait for it."""
        self._store.set(self._failed, "")

    def is_called(self) -> bool:
        """Say whether some rank has called."""
        return self._store.check([self._failed])

    def save(self, step: int, save: Callable[[], str]) -> str:
        """Save the state of a step if all ranks can, and say why they could not; the run ends afterwards."""
        if not self._deciding.acquire(timeout=_ANSWER.total_seconds()):
            return "it is being updated"
        here = _CHANGING if self._is_changing else step
        bounds = torch.tensor([here, -here])
        try:
            dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=self._group)
        except RuntimeError:
            return "not all ranks answered"
        least, most = int(bounds[0]), -int(bounds[1])
        return "ranks were updating it" if least == _CHANGING or least != most else save()


@contextmanager
def rescuing(rescue: StateRescue, watch: Watch, activity: RankActivity) -> Iterator[None]:
    """Save the state of the last step where the block fails, on this rank or another; the failure says so.

    Ranks that have failed together, and have saved, find nothing to do.
    """
    ended = threading.Event()
    threading.Thread(target=_heed, args=(rescue, watch, ended), daemon=True, name="calls of ranks").start()
    try:
        yield
    except Exception as error:
        activity.begin(0)
        activity.act("the end of the run, which has failed")
        activity.wait("the state to be saved", of_storage=True)
        rescue.call()
        said = watch.rescued()
        if isinstance(error, RunFailed) and said not in str(error):
            raise type(error)(f"{error}; {said}") from error
        if not isinstance(error, RunFailed):
            error.add_note(said)
        raise
    finally:
        ended.set()


def _heed(rescue: StateRescue, watch: Watch, ended: threading.Event) -> None:
    """Save the state when a rank calls, until the block has ended; the store may be gone with the rank that has it."""
    with suppress(dist.DistError):
        while not ended.wait(_LOOK_S):
            if rescue.is_called():
                watch.rescued()
                return
