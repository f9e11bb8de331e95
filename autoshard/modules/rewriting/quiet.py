"""What torch prints and logs while it exports a module."""

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOUD = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


@contextmanager
def quietly() -> Iterator[None]:
    """Let torch print neither its graph, of one or two hundred lines, nor a warning or its stack before it raises."""
    place: Any = importlib.import_module("torch.export._trace")
    levels = {logger: logger.level for logger in map(logging.getLogger, _LOUD)}
    try:
        place.print = lambda *_, **__: None
        for logger in levels:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():  # tensors in attributes are refused here, but those that hooks compute
            warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")
            yield
    finally:
        del place.print
        for logger, level in levels.items():
            logger.setLevel(level)
