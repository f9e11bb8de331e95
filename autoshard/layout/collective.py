"""One communication between the ranks of a group, as a value with a text form."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from autoshard.errors import InputError
from autoshard.layout.layout import Layout, show_atoms

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "send"]
_TEXT = re.compile(r"(?:(?P<repeat>\d+) x )?(?P<kind>[a-z_]+) (?P<dim>\w+)?/(?P<atoms>[\w.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What a group does, along which dim, over which atoms, how often.

    >>> str(Collective.parse("3 x permute kv_seq/cp"))
    '3 x permute kv_seq/cp'
    >>> Collective.parse("all_reduce /tp").atoms
    ('kv', 'rep')
    """

    kind: CollectiveKind
    dim: str | None
    atoms: tuple[str, ...]
    repeat: int = 1

    @classmethod
    def parse(cls, text: str) -> "Collective":
        """Read the text form."""
        match = _TEXT.fullmatch(text.strip())
        kind = next((known for known in get_args(CollectiveKind) if match and known == match["kind"]), None)
        if match is None or kind is None:
            raise InputError.of("", f"{text!r} is not a collective. Write it like 'all_gather seq/tp'")
        atoms = Layout.parse(f"[x/{match['atoms']}]").dims[0][1]
        return cls(kind=kind, dim=match["dim"], atoms=atoms, repeat=int(match["repeat"] or 1))

    def __str__(self) -> str:
        """Print the text form."""
        times = f"{self.repeat} x " if self.repeat > 1 else ""
        return f"{times}{self.kind} {self.dim or ''}/{show_atoms(self.atoms)}"
