"""What a plan says of a decoder's own code: where it is, which program it must be, and how its blocks are cut."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from autoshard.errors import require
from autoshard.extensions import from_folder
from autoshard.graph.op import Array
from autoshard.spec.record import option
from autoshard.spec.repeats import expand_counts


def data_key(argument: str) -> str:
    """Return what a batch calls the tensors that an argument takes."""
    return f"data.{argument}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataArgument:
    """A tensor that every sample brings: the argument that takes it, its shape without the batch, and its format.

    Whole numbers of the example inputs are below ``below``; where these have no numbers, it is 2.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # as torch names it: float32
    below: int = option(0)

    @property
    def is_whole(self) -> bool:
        """Whether its numbers are whole ones."""
        return self.below > 0

    def drawn(self, generator: np.random.Generator) -> Array:
        """Draw the tensor of a sample: normal numbers, whole ones below those of the example, or a coin for each."""
        if self.is_whole:
            return generator.integers(0, self.below, self.shape)
        if self.dtype == "bool":
            return np.asarray(generator.random(self.shape) < 1 / 2)
        return np.asarray(generator.standard_normal(self.shape, np.float32))


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
    data: tuple[DataArgument, ...] = option(())  # of samples that are no tokens

    def __post_init__(self) -> None:
        is_whole = bool(self.unrun) or bool(self.order and self.fingerprints and self.strategies)
        require(
            (bool(self.source), "source", "says where the code is: FILE.py:FUNCTION"),
            (is_whole, "strategies", "is empty, and nothing says why. Make the plan again"),
        )

    def in_folder(self, folder: Path) -> "PlannedCode":
        """Return it with the whole path of its file; a relative one leads from the folder."""
        return replace(self, source=from_folder(self.source, folder))

    @property
    def layer_order(self) -> tuple[str, ...]:
        """The kind of every layer."""
        return expand_counts(self.order) if self.order else ()
