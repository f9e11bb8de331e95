"""Which engine executes a plan on this machine."""

from collections.abc import Callable
from importlib import import_module

from autoshard.engine.base import Builds, Measured
from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from autoshard.plan.rules.columns import Engine


def builder(engine: Engine = "torch") -> Builds:
    """Return how an engine is built; importing it takes seconds, and must come before ranks are forked."""
    require_torch()
    if engine == "nxd":
        from autoshard.engine.nxd.engine import build as build_nxd

        return build_nxd
    from autoshard.engine.torch.engine import build

    return build


def counter() -> Callable[[Plan, int], Measured]:
    """Return what counts a step of one rank without the others."""
    require_torch()
    from autoshard.engine.torch.fake import counted

    return counted


def require_torch() -> None:
    """Refuse to execute a plan without torch, and say how to install it."""
    try:
        import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "is not installed, and plans are executed with it. Type: pip install 'autoshard[torch]'"
        raise InputError.of("torch", f"{message}. Planning works without") from None
