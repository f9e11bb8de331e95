"""Which part of a tensor each rank holds, and what is sent where two operations disagree.

>>> from autoshard.layout import propagate
>>> propagate.__module__
'autoshard.layout.propagation'
"""

from typing import TYPE_CHECKING, Any

__all__ = ["propagate"]

if TYPE_CHECKING:
    from autoshard.layout.propagation import propagate as propagate


def __getattr__(name: str) -> Any:
    """Import propagation when it is first asked for: the folder is imported far more often than that is used."""
    if name != "propagate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autoshard.layout.propagation import propagate

    return propagate
