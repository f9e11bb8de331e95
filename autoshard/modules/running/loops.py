"""What loops of others ask of a module: accelerate and what is built on it, such as the Trainer of transformers."""

import sys
from typing import Any

import torch
from torch.utils._pytree import tree_map

from autoshard.errors import require

_FORMATS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def format_of_accelerate() -> torch.dtype | None:
    """Return the format in which accelerate lets its modules compute, as it was asked; None for their own."""
    state: Any = sys.modules.get("accelerate.state")
    if state is None or not state.AcceleratorState._shared_state:
        return None
    precision = state.AcceleratorState().mixed_precision
    known = ", ".join(_FORMATS)
    require((precision in _FORMATS, "mixed_precision", f"is {precision}; a sharded module knows {known}"))
    return _FORMATS[precision]


def in_fp32(results: Any) -> Any:
    """Return results whose tensors of 16 bits are in FP32, as accelerate hands them on."""

    def widened(value: Any) -> Any:
        is_short = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if is_short else value

    return tree_map(widened, results)
