"""What a run is trained on: sets of tokens and their weights, as a recipe says it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoshard.errors import require

LossOn = Literal["all", "answers"]
Check = Literal["sizes", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Sets of tokens by folder, and how they are read; without a set the tokens are synthetic.

    Args:
        sets: A folder of `autoshard tokenize`, a prefix of .bin and .idx, or a small .txt file, each with its weight.
        loss_on: Which tokens count in the loss: all, or only the answers of conversations.
        check: What is looked at before the run: sizes of all files, or in full every byte.
    """

    sets: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    loss_on: LossOn = "all"
    check: Check = "sizes"

    def __post_init__(self) -> None:
        """Refuse weights that are no weights."""
        require(
            *(
                (math.isfinite(weight) and weight > 0, f"sets.{name}", f"must weigh more than 0, not {weight}")
                for name, weight in self.sets.items()
            ),
            (
                self.loss_on == "all" or bool(self.sets),
                "loss_on",
                "answers need a set of conversations. Make one with autoshard tokenize --chat",
            ),
        )
