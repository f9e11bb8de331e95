"""Ranks with NxD or its stand-ins: forks of interpreters that have imported it, which a process can do only once."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from tests.neuron import standins
from tests.ranks.spawn import on_ranks


def import_nxd() -> None:
    """Import NxD and what of it takes seconds."""
    standins.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("autoshard.engine.nxd.engine", "neuronx_distributed.trainer", "neuronx_distributed.pipeline"):
            importlib.import_module(name)


def on_nxd_ranks(num_ranks: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``body(*args)`` on ranks that have NxD."""
    return on_ranks(num_ranks, body, *args, timeout_s=timeout_s, prepare=import_nxd)
