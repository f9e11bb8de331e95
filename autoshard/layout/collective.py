"""One communication between the ranks of a group, as a value with a text form."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from autoshard.errors import InputError, require
from autoshard.layout.layout import Layout, show_atoms

CollectiveKind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_reduce_max", "all_to_all", "permute", "slice", "send"
]
_TEXT = re.compile(r"(?:(?P<repeat>\d+) x )?(?P<kind>[a-z_]+) (?P<dim>\w+)?(?:>(?P<to_dim>\w+))?/(?P<atoms>[\w.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One communication: its kind, dim and atoms, and how often a ring repeats it.

    An all-to-all takes a cut from one dim to another; a slice is free: each rank keeps its block of what all have.

    >>> str(Collective.parse("3 x permute kv_seq/cp"))
    '3 x permute kv_seq/cp'
    >>> Collective.parse("all_reduce /tp").atoms
    ('kv', 'rep')
    >>> Collective.parse("all_to_all seq>kv_heads/cp").to_dim
    'kv_heads'
    """

    kind: CollectiveKind
    dim: str | None
    atoms: tuple[str, ...]
    repeat: int = 1
    to_dim: str | None = None

    def __post_init__(self) -> None:
        """Refuse a collective over nothing, and an all-to-all that goes nowhere."""
        require(
            (bool(self.atoms), "collective", f"{self.kind} needs atoms to act over"),
            (self.repeat >= 1, "collective", f"repeat must be at least 1, not {self.repeat}"),
            (
                self.to_dim is None or self.kind == "all_to_all",
                "collective",
                f"only an all_to_all goes from dim to dim, not {self.kind}",
            ),
        )

    @classmethod
    def parse(cls, text: str) -> "Collective":
        """Read the text form."""
        match = _TEXT.fullmatch(text.strip())
        kind = next((known for known in get_args(CollectiveKind) if match and known == match["kind"]), None)
        if match is None or kind is None:
            raise InputError.of("", f"{text!r} is not a collective. Write it like 'all_gather seq/tp'")
        atoms = Layout.parse(f"[x/{match['atoms']}]").dims[0][1]
        return cls(kind=kind, dim=match["dim"], atoms=atoms, repeat=int(match["repeat"] or 1), to_dim=match["to_dim"])

    def __str__(self) -> str:
        """Print the text form."""
        times = f"{self.repeat} x " if self.repeat > 1 else ""
        to_dim = f">{self.to_dim}" if self.to_dim else ""
        return f"{times}{self.kind} {self.dim or ''}{to_dim}/{show_atoms(self.atoms)}"
