"""Which engine executes a plan on this machine."""

from autoshard.engine.base import Builds
from autoshard.errors import InputError


def builder() -> Builds:
    """Return how the torch engine is built; importing it takes seconds, and must come before ranks are forked."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "is not installed, and plans are executed with it. Type: pip install 'autoshard[torch]'"
        raise InputError.of("torch", f"{message}. Planning works without") from None
    from autoshard.engine.torch.engine import build

    return build
