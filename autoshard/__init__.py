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
import autoshard.report
import autoshard.run
from autoshard.version import __version__

__all__ = [
    "__version__", "compare", "explain", "export", "import_", "load", "local", "plan", "read_decoder", "report", "run",
    "shard", "shard_block", "shard_module", "sharded_optimizer", "sharded_trainer", "verify",
]  # fmt: skip

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable

    from autoshard.blocks.shard_block import shard_block as shard_block
    from autoshard.modules.decoder.reading import read_decoder as read_decoder
    from autoshard.modules.local import local as local
    from autoshard.modules.running.optimizer import sharded_optimizer as sharded_optimizer
    from autoshard.modules.running.wholes import sharded_trainer as sharded_trainer
    from autoshard.modules.shard import shard_module as shard_module
    from autoshard.modules.sharded import shard as shard
    from autoshard.search.ask.api import plan as plan
    from autoshard.verbs import (
        compare as compare,
        explain as explain,
        export as export,
        import_ as import_,
        load as load,
        report as report,
        run as run,
        verify as verify,
    )


class _CallablePackage(types.ModuleType):
    """A folder and a verb that share a name, as ``autoshard/plan`` and ``autoshard.plan(...)``: this makes both work.

    What the verb needs is imported when it is first called, so that ``import autoshard`` stays cheap.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the verb, whose signature and docstring this has."""
        from autoshard.errors import nearest

        parameters = self.__signature__.parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for name in () if takes_any else options:
            if name not in parameters:
                raise TypeError(f"{self.__name__}() has no argument {name!r}. {nearest(name, list(parameters))}")
        return _verb(self.__name__)(*args, **options)

    @property
    def __signature__(self) -> "inspect.Signature":
        from inspect import signature

        return signature(_verb(self.__name__))

    @property
    def __doc__(self) -> str | None:  # pyright: ignore
        return _verb(self.__name__).__doc__


_VERBS = {"plan": "autoshard.search.ask.api", "report": "autoshard.verbs", "run": "autoshard.verbs"}


def _verb(package: str) -> "Callable[..., Any]":
    name = package.removeprefix("autoshard.")
    return getattr(importlib.import_module(_VERBS[name]), name)


# What shards blocks, and modules with torch, is imported when it is first asked for.
_PLACES = {
    "local": "autoshard.modules.local",
    "read_decoder": "autoshard.modules.decoder.reading",
    "shard": "autoshard.modules.sharded",
    "shard_block": "autoshard.blocks.shard_block",
    "shard_module": "autoshard.modules.shard",
    "sharded_optimizer": "autoshard.modules.running.optimizer",
    "sharded_trainer": "autoshard.modules.running.wholes",
    **dict.fromkeys(("compare", "explain", "export", "import_", "load", "verify"), "autoshard.verbs"),
}


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """Name what is public, also before it is imported."""
    return sorted(__all__)


if not TYPE_CHECKING:
    for package in (autoshard.plan, autoshard.report, autoshard.run):
        package.__class__ = _CallablePackage
