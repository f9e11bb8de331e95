"""Which part of a tensor a rank holds: each dim cut over atoms, and atoms over which a sum is still pending."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import Fault, InputError, nearest, require

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
        """Refuse a dim that stands twice and an atom that cuts twice; ``faults`` checks what depends on the mesh."""
        names = [dim for dim, _ in self.dims]
        cutting = [atom for _, atoms in self.dims for atom in atoms]
        if len(set(names)) < len(names) or len(set(cutting)) < len(cutting):  # searches make many thousands
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

    @property
    def cuts(self) -> Cuts:
        """The dims that are cut, with their atoms."""
        return {dim: cut for dim, cut in self.dims if cut}

    def named(self, dims: Sequence[str]) -> "Layout":
        """Return the same layout under other names of the dims, which correspond by their positions."""
        renamed = tuple((dim, cut) for dim, (_, cut) in zip(dims, self.dims, strict=True))
        return Layout(dims=renamed, sums=self.sums, maxima=self.maxima)

    def faults(self, atoms: Mapping[str, int], sizes: Mapping[str, int] | None = None) -> tuple[Fault, ...]:
        """Return all faults of the layout on a mesh of these atoms, for dims of these sizes if they are known.

        >>> layout = Layout.parse("[batch/dp, seq/cp] +ep")
        >>> for fault in layout.faults({"edp": 2, "ep": 2}, {"batch": 2, "seq": 8}):
        ...     print(fault)
        unknown atom 'cp'. Known: dp, edp, ep.
        an atom both cuts and is pending: ['ep']
        batch: 2 cannot be cut into 4 (dp). Use atoms whose product is at most 2
        """
        known = [*atoms, *(axis for axis, parts in _WHOLE.items() if atoms.keys() >= {*parts})]
        found = [f"unknown atom {name!r}. {nearest(name, known)}" for name in self._atoms() if name not in atoms]
        twice = self._cutting_and_pending(atoms)
        if twice:
            found.append(f"an atom both cuts and is pending: {twice}")
        plain = [Fault(where="", message=message) for message in found]
        return (*plain, *(fault for dim, cut in self.dims for fault in _dim_faults(dim, cut, atoms, sizes)))

    def local_shape(self, sizes: Mapping[str, int], atoms: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the largest share, which every rank reserves; what does not divide is rounded up.

        >>> Layout.parse("[seq/cp, hidden]").local_shape({"seq": 10, "hidden": 8}, {"cp": 4})
        (3, 8)
        """
        local = local_sizes({dim: sizes[dim] for dim, _ in self.dims}, dict(self.dims), atoms)
        return tuple(local[dim] for dim, _ in self.dims)

    def _atoms(self) -> tuple[str, ...]:
        """Return every atom that it names, once."""
        cutting = [atom for _, cut in self.dims for atom in cut]
        return tuple(dict.fromkeys((*cutting, *self.sums, *self.maxima)))

    def _cutting_and_pending(self, atoms: Mapping[str, int]) -> list[str]:
        """Return the atoms that both cut and are pending; one of size 1 does neither."""
        cutting = {atom for _, cut in self.dims for atom in cut}
        uses = (cutting, set(self.sums), set(self.maxima))
        return [atom for atom in self._atoms() if atoms.get(atom, 1) > 1 and sum(atom in use for use in uses) > 1]


def show_atoms(atoms: Sequence[str]) -> str:
    """Print atoms, whole axes as such.

    >>> show_atoms(("cp", "kv", "rep")), show_atoms(("kv",))
    ('cp.tp', 'kv')
    """
    text = f".{'.'.join(atoms)}."
    for axis, parts in _WHOLE.items():
        text = text.replace(f".{'.'.join(parts)}.", f".{axis}.")
    return text.strip(".")


def whole_axes(cut: Sequence[str], atoms: Mapping[str, int]) -> tuple[str, ...]:
    """Put an atom of size 1, which cuts nothing, beside the other atom of its axis, so that the axis is printed whole.

    >>> whole_axes(("cp", "kv"), {"cp": 2, "kv": 2, "rep": 1})
    ('cp', 'kv', 'rep')
    """
    beside = {
        part: parts for parts in _WHOLE.values() for part in parts if sum(atoms.get(each, 0) > 1 for each in parts) == 1
    }
    return tuple(each for atom in cut for each in beside.get(atom, (atom,)))


def local_sizes(sizes: Mapping[str, Any], cuts: Cuts, atoms: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sizes of one rank's share, rounded up; numbers or columns of numbers alike.

    >>> local_sizes({"seq": 10, "hidden": 8}, {"seq": ("cp", "kv")}, {"cp": 2, "kv": 2})
    {'seq': 3, 'hidden': 8}
    """
    return {
        dim: -(-size // math.prod(atoms[atom] for atom in cuts[dim])) if cuts.get(dim) else size
        for dim, size in sizes.items()
    }


def _dim_faults(
    dim: str, cut: Sequence[str], atoms: Mapping[str, int], sizes: Mapping[str, int] | None
) -> Iterator[Fault]:
    """Yield the fault of one dim: it is unknown, or has fewer elements than parts."""
    if sizes is None:
        return
    parts = math.prod(atoms.get(atom, 1) for atom in cut)
    if dim not in sizes:
        yield Fault(where=dim, message=f"no such dim. {nearest(dim, list(sizes))}")
    elif parts > sizes[dim]:
        cannot = f"{sizes[dim]} cannot be cut into {parts} ({show_atoms(cut)})"
        yield Fault(where=dim, message=f"{cannot}. Use atoms whose product is at most {sizes[dim]}")


def _parse_atoms(text: str) -> tuple[str, ...]:
    return tuple(atom for name in text.split(".") if name for atom in _WHOLE.get(name, (name,)))
