"""``autoshard`` whose data of a step comes late on a rank."""

import os
import sys
import time
from typing import Any

import torch.distributed as dist

from autoshard.cli import main
from autoshard.runtime import train
from autoshard.runtime.data.batches import Samples

RANK, SAMPLE, SECONDS = (f"AUTOSHARD_SOAK_{name}" for name in ("RANK", "SAMPLE", "SECONDS"))


class LateSource:
    """Sleeps on a rank before it gives the samples from a number on, once."""

    def __init__(self, source: Any) -> None:
        self._source, self._has_slept = source, False

    def samples(self, first: int, count: int) -> Samples:
        is_late = first >= int(os.environ[SAMPLE]) and dist.get_rank() == int(os.environ[RANK])
        if is_late and not self._has_slept:
            self._has_slept = True
            time.sleep(float(os.environ[SECONDS]))
        return self._source.samples(first, count)


if __name__ == "__main__":
    _opened_data = train.opened_data

    def opened_late(*given: Any) -> Any:
        source, *rest = _opened_data(*given)
        return LateSource(source), *rest

    train.opened_data = opened_late
    sys.exit(main())
