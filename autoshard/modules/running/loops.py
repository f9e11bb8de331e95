"""What loops of others ask of a module, as those of accelerate and transformers; and a word while people wait."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from autoshard.errors import require

_MOMENT_S = 2.0
_FORMATS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def format_of_accelerate() -> torch.dtype | None:
    """Return the format in which accelerate lets its modules compute, as it was asked; None for their own."""
    state: Any = sys.modules.get("accelerate.state")
    if state is None or not state.AcceleratorState._shared_state:
        return None
    precision = state.AcceleratorState().mixed_precision
    formats = ", ".join(_FORMATS)
    require((precision in _FORMATS, "mixed_precision", f"is {precision}; a sharded module knows {formats}"))
    return _FORMATS[precision]


def in_fp32(results: Any) -> Any:
    """Return results whose tensors of 16 bits are in FP32, as accelerate hands them on."""

    def widened(value: Any) -> Any:
        is_short = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if is_short else value

    return tree_map(widened, results)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say on rank 0 what is done, if it takes longer than a moment, and how long it took."""
    start_s, is_told = time.monotonic(), threading.Event()

    def tell() -> None:
        is_told.set()
        sys.stderr.write(f"autoshard: {what}; this is done once ...\n")
        sys.stderr.flush()

    timer = threading.Timer(_MOMENT_S, tell)
    timer.daemon = True
    if not dist.is_initialized() or dist.get_rank() == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if is_told.is_set():
            sys.stderr.write(f"autoshard: ... took {time.monotonic() - start_s:.0f} s\n")
