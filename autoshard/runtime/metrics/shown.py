"""How far trackers have the steps of a run, so that what a kill took from them is shown after the next start."""

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from autoshard.files import replace_text
from autoshard.run.folder import METRICS, TRACKED
from autoshard.runtime.metrics.log import records_in
from autoshard.spec.files import json_line

# W&B writes what it was handed after 1 s, or after 15 s where it does not know that setting; TensorBoard at once.
_WRITTEN_S = 20.0


class ShownSteps:
    """The last step of a run that each tracker has for certain, in a file of the run's folder.

    What ``metrics.jsonl`` has after that, up to the step from which a run continues, is missing there.
    """

    def __init__(self, folder: Path, num_done: int) -> None:
        self._folder, self._path, self._num_done = folder, folder / TRACKED, num_done
        content = json_line(self._path.read_bytes()) if self._path.is_file() else None
        steps_of_trackers = cast(dict[str, object], content) if isinstance(content, dict) else {}
        self._until = {key: min(step, num_done) for key, step in steps_of_trackers.items() if type(step) is int}
        self._handed = defaultdict[str, deque[tuple[float, int]]](deque)  # when, and which step
        self._saved_s = time.monotonic()
        self._lock = threading.Lock()

    def until(self, key: str) -> int:
        """Return the step up to which a tracker has all, or can have all."""
        return self._until.get(key, 0) if (self._folder / METRICS).is_file() else self._num_done

    def missing(self, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the steps of earlier starts that a tracker does not have for certain, with their fields."""
        after = self.until(key)
        for step, fields in records_in(self._folder):
            if step > self._num_done:  # of this start
                return
            if step > after:
                yield step, fields

    def hand(self, key: str, step: int) -> None:
        """Note that a tracker was handed a step, and that it has written what it was handed a while ago."""
        now_s, handed = time.monotonic(), self._handed[key]
        handed.append((now_s, step))
        with self._lock:  # every tracker has a thread
            while handed[0][0] <= now_s - _WRITTEN_S:
                self._until[key] = handed.popleft()[1]
            if now_s - self._saved_s >= _WRITTEN_S:
                self._save()

    def end(self, key: str) -> None:
        """Note that a tracker has written all that it was handed."""
        with self._lock:
            if handed := self._handed.pop(key, None):
                self._until[key] = handed[-1][1]
                self._save()

    def _save(self) -> None:
        """Write the file; without it, a tracker gets more steps a second time."""
        with suppress(OSError):
            replace_text(self._path, json.dumps(self._until) + "\n")
        self._saved_s = time.monotonic()
