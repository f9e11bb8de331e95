"""A loader that prepares the next steps while one runs."""

import threading
import time
from dataclasses import dataclass
from queue import Empty, Full, Queue

from autoshard.engine.base import Batch
from autoshard.runtime.data.batches import SampleSource, StepShape, batches

_AHEAD = 2  # steps: one slow read is hidden behind a whole step
_LOOK_S = 0.1  # how often a thread that waits for room looks whether it is still wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The batches of a step."""

    batches: tuple[Batch, ...]
    first_sample: int
    next_sample: int  # the whole state of the loader: a loader that starts there goes on exactly
    waited_s: float  # how long the step had to wait for them


class PrefetchLoader:
    """Reads ahead in a thread of its own; a step is asked for by ``next``. Leave it by ``close``, or as a context.

    What goes wrong in the thread is raised by the ``next`` that asks for the step which could not be made.
    """

    def __init__(self, source: SampleSource, shape: StepShape, first_sample: int = 0, ahead: int = _AHEAD) -> None:
        self._source, self._shape, self._next_sample = source, shape, first_sample
        self._made: Queue[tuple[Batch, ...] | BaseException] = Queue(maxsize=ahead)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._prepare, args=(first_sample,), name="loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> "PrefetchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self) -> Prepared:
        """Return the next step; a failed loader fails again whenever it is asked."""
        start_s = time.perf_counter()
        while True:
            try:
                made = self._made.get(timeout=_LOOK_S)
                break
            except Empty:
                assert not self._left.is_set(), "the loader was closed"
        waited_s = time.perf_counter() - start_s
        if isinstance(made, BaseException):
            self._made.put(made)
            raise made
        first, self._next_sample = self._next_sample, self._next_sample + self._shape.num_samples
        return Prepared(batches=made, first_sample=first, next_sample=self._next_sample, waited_s=waited_s)

    def close(self) -> None:
        """End the thread."""
        self._left.set()
        self._thread.join()

    def _prepare(self, first_sample: int) -> None:
        while not self._left.is_set():
            try:
                made: tuple[Batch, ...] | BaseException = batches(self._source, first_sample, self._shape)
            except BaseException as error:  # to be raised where the step is asked for
                made = error
            self._hand_over(made)
            if isinstance(made, BaseException):
                return
            first_sample += self._shape.num_samples

    def _hand_over(self, made: tuple[Batch, ...] | BaseException) -> None:
        while not self._left.is_set():
            try:
                self._made.put(made, timeout=_LOOK_S)
                return
            except Full:
                continue
