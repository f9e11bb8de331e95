"""One step of a pipeline rank: a pass of one micro-batch through one stage."""

import re
from dataclasses import dataclass
from typing import Literal, cast

from autoshard.errors import InputError, require

ActionKind = Literal["F", "B", "I", "W"]
_TEXT = re.compile(r"([FBIW])([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """``F`` forward, ``B`` whole backward, ``I`` and ``W`` its halves (input and weight gradients).

    >>> str(Action(kind="F", stage=3, micro_batch=0)), Action.parse("B3.0").stage
    ('F3.0', 3)
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        require(
            (self.kind in ("F", "B", "I", "W"), "kind", f"must be F, B, I or W, not {self.kind}"),
            (self.stage >= 0, "stage", f"must be at least 0, not {self.stage}"),
            (self.micro_batch >= 0, "micro_batch", f"must be at least 0, not {self.micro_batch}"),
        )

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read the text form, for example ``F3.0``: forward of stage 3, micro-batch 0."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise InputError.of("", f"{text!r} is not an action. Write F<stage>.<micro-batch>, or B, I, W: F3.0")
        kind, stage, micro_batch = match.groups()
        return cls(kind=cast(ActionKind, kind), stage=int(stage), micro_batch=int(micro_batch))

    def __str__(self) -> str:
        """Print the text form."""
        return f"{self.kind}{self.stage}.{self.micro_batch}"


ActionLists = tuple[tuple[Action, ...], ...]  # one list per pipeline rank, in the order of execution
