"""A decoder as its code computes it, in lines."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.errors import in_range, require


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedDecoder:
    """A decoder as its code computes it, where the options of a card do not say it: a line per forward operation.

    The head ends where the logits are made; the loss follows. ``sizes`` are those of dims that no card has, and
    ``unlifted`` says what of the code is not in the lines, or only as work of which nothing else is known.
    """

    embed: tuple[str, ...]
    layer: tuple[str, ...]
    head: tuple[str, ...]
    sizes: Mapping[str, int] = field(hash=False)
    num_parameters: int
    unlifted: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of all parts."""
        return (*self.embed, *self.layer, *self.head)

    def __post_init__(self) -> None:
        empty = [name for name in ("embed", "layer", "head") if not getattr(self, name)]
        require(
            *((False, name, "must have at least one line") for name in empty),
            *((size >= 1, f"sizes.{dim}", f"must be at least 1, not {size}") for dim, size in self.sizes.items()),
            *in_range(self, "num_parameters", low=1),
        )
