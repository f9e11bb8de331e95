"""What a run is trained on: sets of tokens and their weights, as a recipe says it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
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

    def seen_from(self, folder: Path) -> "DataSpec":
        """Return the same sets for a recipe in this folder: a path that is not here may stand beside the recipe."""
        return replace(self, sets={_seen_from(folder, name): weight for name, weight in self.sets.items()})


def _seen_from(folder: Path, name: str) -> str:
    beside = folder / name
    return name if _is_there(Path(name)) or not _is_there(beside) else str(beside)


def _is_there(path: Path) -> bool:
    return path.exists() or path.with_name(f"{path.name}.idx").exists()
