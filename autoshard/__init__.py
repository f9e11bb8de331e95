"""autoshard: finds the fastest way to cut a training run over a cluster that fits in memory, and says why.

>>> import autoshard
>>> plan = autoshard.plan("tiny-llama", "local").plan
>>> plan.prediction.peak_bytes < plan.prediction.capacity_bytes
True
"""

import importlib
import types
from typing import TYPE_CHECKING, Any

import autoshard.plan
from autoshard.version import __version__

__all__ = [
    "__version__", "local", "plan", "read_decoder", "shard", "shard_block", "shard_module", "sharded_optimizer",
]  # fmt: skip

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable

    from autoshard.blocks.shard_block import shard_block as shard_block
    from autoshard.modules.decoder.reading import read_decoder as read_decoder
    from autoshard.modules.local import local as local
    from autoshard.modules.running.optimizer import sharded_optimizer as sharded_optimizer
    from autoshard.modules.shard import shard_module as shard_module
    from autoshard.modules.sharded import shard as shard
    from autoshard.search.ask.api import plan as plan


class _CallablePackage(types.ModuleType):
    """The folder ``autoshard/plan`` and the verb ``autoshard.plan(...)`` share a name; this makes both work.

    The planner is imported when it is first called, so that ``import autoshard`` stays cheap.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Search: see ``autoshard.search.ask.api.plan``, whose signature and docstring this has."""
        return _verb()(*args, **options)

    @property
    def __signature__(self) -> "inspect.Signature":
        from inspect import signature

        return signature(_verb())

    @property
    def __doc__(self) -> str | None:  # pyright: ignore
        return _verb().__doc__


def _verb() -> "Callable[..., Any]":
    from autoshard.search.ask.api import plan

    return plan


# What shards blocks, and modules with torch, is imported when it is first asked for.
_PLACES = {
    "local": "autoshard.modules.local",
    "read_decoder": "autoshard.modules.decoder.reading",
    "shard": "autoshard.modules.sharded",
    "shard_block": "autoshard.blocks.shard_block",
    "shard_module": "autoshard.modules.shard",
    "sharded_optimizer": "autoshard.modules.running.optimizer",
}


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


if not TYPE_CHECKING:
    autoshard.plan.__class__ = _CallablePackage
