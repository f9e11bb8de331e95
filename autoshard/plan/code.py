"""What a plan says of a decoder's own code: where it is, which program it must be, and how its blocks are cut."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.errors import require
from autoshard.spec.repeats import expand_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCode:
    """The code that a run executes in the place of a plan's lines, which the search has priced.

    Its blocks are the embedding, kinds of layers, which ``order`` lists, and the head; ``fingerprints`` has the hash of
    each for a sequence of the plan. If a run cannot train it, ``unrun`` says why, and the other fields are empty.
    """

    source: str  # FILE.py:FUNCTION
    order: str = ""  # layer*3/layer_2
    fingerprints: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    strategies: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]], hash=False)
    own_loss: bool = False  # whether the code returns its loss, and no logits
    unrun: str = ""

    def __post_init__(self) -> None:
        is_whole = bool(self.unrun) or bool(self.order and self.fingerprints and self.strategies)
        require(
            (bool(self.source), "source", "says where the code is: FILE.py:FUNCTION"),
            (is_whole, "strategies", "is empty, and nothing says why. Make the plan again"),
        )

    @property
    def layer_order(self) -> tuple[str, ...]:
        """The kind of every layer."""
        return expand_counts(self.order) if self.order else ()
