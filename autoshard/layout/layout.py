"""Which part of a tensor a rank holds: each dim cut over atoms, and atoms over which a sum is still pending."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import InputError, require

Cuts = Mapping[str, tuple[str, ...]]
_WHOLE: Mapping[str, tuple[str, ...]] = {"dp": ("edp", "ep"), "tp": ("kv", "rep")}
_TEXT = re.compile(r"\[(?P<dims>[^\]]*)\](?: \+(?P<sums>[\w.]+))?(?: \^(?P<maxima>[\w.]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Per dim the atoms it is cut over, outermost first; pending sums and maxima.

    >>> layout = Layout.parse("[batch/dp, seq/cp.tp, hidden] +ep")
    >>> layout.dims[0], layout.sums
    (('batch', ('edp', 'ep')), ('ep',))
    >>> str(layout)
    '[batch/dp, seq/cp.tp, hidden] +ep'
    """

    dims: tuple[tuple[str, tuple[str, ...]], ...]
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a dim that stands twice and an atom that cuts twice."""
        names = [dim for dim, _ in self.dims]
        cutting = [atom for _, atoms in self.dims for atom in atoms]
        require(
            (len(set(names)) == len(names), "layout", f"a dim stands twice in {names}"),
            (len(set(cutting)) == len(cutting), "layout", f"an atom cuts twice in {cutting}"),
        )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read the text form."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise InputError.of("", f"{text!r} is not a layout. Write it like '[batch/dp, seq/cp.tp, hidden] +ep'")
        dims = [part.strip().partition("/") for part in match["dims"].split(",") if part.strip()]
        return cls(
            dims=tuple((dim, _parse_atoms(atoms)) for dim, _, atoms in dims),
            sums=_parse_atoms(match["sums"] or ""),
            maxima=_parse_atoms(match["maxima"] or ""),
        )

    def __str__(self) -> str:
        """Print the text form; an axis whose atoms all stand side by side is printed whole."""
        dims = ", ".join(f"{dim}/{show_atoms(atoms)}" if atoms else dim for dim, atoms in self.dims)
        sums = f" +{show_atoms(self.sums)}" if self.sums else ""
        maxima = f" ^{show_atoms(self.maxima)}" if self.maxima else ""
        return f"[{dims}]{sums}{maxima}"


def show_atoms(atoms: Sequence[str]) -> str:
    """Print atoms, whole axes as such.

    >>> show_atoms(("cp", "kv", "rep")), show_atoms(("kv",))
    ('cp.tp', 'kv')
    """
    text = f".{'.'.join(atoms)}."
    for axis, parts in _WHOLE.items():
        text = text.replace(f".{'.'.join(parts)}.", f".{axis}.")
    return text.strip(".")


def local_sizes(sizes: Mapping[str, Any], cuts: Cuts, atoms: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sizes of one rank's share, rounded up; numbers or columns of numbers alike.

    >>> local_sizes({"seq": 10, "hidden": 8}, {"seq": ("cp", "kv")}, {"cp": 2, "kv": 2})
    {'seq': 3, 'hidden': 8}
    """
    return {
        dim: -(-size // math.prod(atoms[atom] for atom in cuts[dim])) if cuts.get(dim) else size
        for dim, size in sizes.items()
    }


def _parse_atoms(text: str) -> tuple[str, ...]:
    return tuple(atom for name in text.split(".") if name for atom in _WHOLE.get(name, (name,)))
