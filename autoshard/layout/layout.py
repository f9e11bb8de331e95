"""Which part of a tensor a rank holds (Layout), one communication (Collective), and all cuts of a model (Cutting)."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np

from autoshard.errors import Fault, InputError, in_range, nearest, require

Cuts = Mapping[str, tuple[str, ...]]
_WHOLE: Mapping[str, tuple[str, ...]] = {"dp": ("edp", "ep"), "tp": ("kv", "rep")}
_SURE = 1 - 1e-12  # the share of a count that no rounding makes more than it is
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
        cutting = [atom for _, atoms in self.dims for atom in atoms]
        if len(dict(self.dims)) < len(self.dims) or len(set(cutting)) < len(cutting):  # searches make many thousands
            names = [dim for dim, _ in self.dims]
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
        uses = ([atom for _, cut in self.dims for atom in cut], self.sums, self.maxima)
        named = dict.fromkeys(atom for use in uses for atom in use)
        known_names = [*atoms, *(axis for axis, parts in _WHOLE.items() if atoms.keys() >= {*parts})]
        messages = [f"unknown atom {name!r}. {nearest(name, known_names)}" for name in named if name not in atoms]
        twice = [atom for atom in named if atoms.get(atom, 1) > 1 and sum(atom in use for use in uses) > 1]
        if twice:
            messages.append(f"an atom both cuts and is pending: {twice}")
        faults = [Fault(where="", message=message) for message in messages]
        if sizes is None:
            return tuple(faults)
        for dim, cut in self.dims:
            parts = math.prod(atoms.get(atom, 1) for atom in cut)
            if dim not in sizes:
                faults.append(Fault(where=dim, message=f"no such dim. {nearest(dim, list(sizes))}"))
            elif parts > sizes[dim]:
                cannot = f"{sizes[dim]} cannot be cut into {parts} ({show_atoms(cut)})"
                faults.append(Fault(where=dim, message=f"{cannot}. Use atoms whose product is at most {sizes[dim]}"))
        return tuple(faults)


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
        part: parts for parts in _WHOLE.values() for part in parts if sum(atoms.get(atom, 0) > 1 for atom in parts) == 1
    }
    return tuple(part for atom in cut for part in beside.get(atom, (atom,)))


def own_axes(names: Sequence[str], atoms: Mapping[str, int]) -> tuple[str, ...]:
    """Replace atoms by their axis if the mesh has that axis undivided, as meshes of modules without a card may.

    >>> own_axes(("edp", "ep", "kv", "rep"), {"dp": 2, "kv": 2, "rep": 2})
    ('dp', 'kv', 'rep')
    """
    axes = list(names)
    for axis, parts in _WHOLE.items():
        place = axes.index(parts[0]) if parts[0] in axes else -1
        if axis in atoms and axes[place : place + len(parts)] == [*parts]:
            axes[place : place + len(parts)] = [axis]
    return tuple(axes)


@dataclass(frozen=True, slots=True)
class DimSizes(Mapping[str, Any]):
    """The sizes of all dims of a mixture whose experts are not equally busy.

    ``imbalance`` says how many more tokens than the mean the busiest expert gets. Experts are taken to be busy
    independently of each other but for their sum: the mean over the experts of a rank strays less from the mean.
    """

    sizes: Mapping[str, Any]
    imbalance: float

    def __getitem__(self, dim: str) -> Any:
        return self.sizes[dim]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def slots(self, ranks: Any) -> Any:
        """Return the size of ``slots`` as the busiest of so many ranks fills them, each of which has other experts.

        >>> [float(DimSizes({"experts": 9, "slots": 100}, 0.5).slots(ranks)) for ranks in (1, 3, 9)]
        [100.0, 125.0, 150.0]
        """
        share = np.minimum(1, (ranks - 1) / (self["experts"] - 1)) ** 0.5  # more ranks than experts: one, or none
        return -(-self["slots"] * (1 + self.imbalance * share) * _SURE // 1)  # a part of a slot is a slot, cut or not


def whole_size(sizes: Mapping[str, Any], dim: str, cuts: Cuts, ranks: Callable[[Sequence[str]], Any]) -> Any:
    """Return the size of a dim before it is cut, as the busiest rank has it; ``ranks`` counts those over some atoms."""
    if dim == "slots" and cuts.get("experts") and isinstance(sizes, DimSizes):
        return sizes.slots(ranks(cuts["experts"]))
    return sizes[dim]


def local_sizes(sizes: Mapping[str, Any], cuts: Cuts, atoms: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sizes of one rank's share, rounded up; numbers or columns of numbers alike.

    >>> local_sizes({"seq": 10, "hidden": 8}, {"seq": ("cp", "kv")}, {"cp": 2, "kv": 2})
    {'seq': 3, 'hidden': 8}
    """

    def ranks(over: Sequence[str]) -> Any:
        return math.prod(atoms[atom] for atom in over)

    whole = {dim: whole_size(sizes, dim, cuts, ranks) for dim in sizes}
    return {dim: -(-size // ranks(cuts[dim])) if cuts.get(dim) else size for dim, size in whole.items()}


def _parse_atoms(text: str) -> tuple[str, ...]:
    return tuple(atom for name in text.split(".") if name for atom in _WHOLE.get(name, (name,)))


Frozen = tuple[tuple[str, tuple[str, ...]], ...]  # Cuts in one order, so that equal ones are equal keys


@dataclass(frozen=True, slots=True)
class Cutting:
    """The cuts of every forward operation by block kind, and of the hidden state between blocks; made by ``of``.

    It names atoms, never their sizes: one cutting serves every mesh.

    >>> cutting = Cutting.of({"layer": {"up": {"ffn": ("kv", "rep"), "seq": ()}}}, {"seq": ("kv", "rep")})
    >>> cutting.block("layer"), cutting.only({"kv"}).block("layer")
    ({'up': {'ffn': ('kv', 'rep')}}, {'up': {'ffn': ('kv',)}})
    """

    blocks: tuple[tuple[str, tuple[tuple[str, Frozen], ...]], ...]
    between: Frozen

    @classmethod
    def of(cls, blocks: Mapping[str, Mapping[str, Cuts]], boundary: Cuts) -> "Cutting":
        """Return the cutting with these cuts, which may come in any order."""
        frozen_cuts = {kind: tuple((name, _frozen(cuts)) for name, cuts in ops.items()) for kind, ops in blocks.items()}
        return cls(tuple(frozen_cuts.items()), _frozen(boundary))

    @property
    def boundary(self) -> Cuts:
        """The cut of the hidden state between blocks."""
        return dict(self.between)

    def block(self, kind: str) -> Mapping[str, Cuts]:
        """Return the cuts of one block's operations; dims that are whole are left out."""
        return {name: dict(cuts) for name, cuts in dict(self.blocks)[kind]}

    def alone(self, kind: str) -> "Cutting":
        """Return the part about one block."""
        return Cutting(tuple(ops for ops in self.blocks if ops[0] == kind), self.between)

    def only(self, atoms: frozenset[str] | set[str]) -> "Cutting":
        """Return the part about some atoms."""
        blocks = {kind: {name: _only(cuts, atoms) for name, cuts in ops} for kind, ops in self.blocks}
        return Cutting.of(blocks, _only(self.between, atoms))


def _frozen(cuts: Cuts) -> Frozen:
    return tuple(sorted((dim, tuple(atoms)) for dim, atoms in cuts.items() if atoms))


def _only(cuts: Frozen, atoms: frozenset[str] | set[str]) -> Cuts:
    return {dim: tuple(atom for atom in cut if atom in atoms) for dim, cut in cuts}


CollectiveKind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_reduce_max", "all_to_all", "permute", "slice", "send"
]
_COLLECTIVE = re.compile(
    r"(?:(?P<repeat>\d+) x )?(?P<kind>[a-z_]+) (?P<dim>\w+)?(?:>(?P<to_dim>\w+))?/(?P<atoms>[\w.]+)"
)


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
        if self.atoms and self.repeat >= 1 and (self.to_dim is None or self.kind == "all_to_all"):
            return  # searches make many thousands
        require(
            (bool(self.atoms), "atoms", f"{self.kind} needs some to act over"),
            *in_range(self, "repeat", low=1),
            (
                self.to_dim is None or self.kind == "all_to_all",
                "to_dim",
                f"is of an all_to_all only, not of {self.kind}",
            ),
        )

    @classmethod
    def parse(cls, text: str) -> "Collective":
        """Read the text form."""
        match = _COLLECTIVE.fullmatch(text.strip())
        if match is None or match["kind"] not in get_args(CollectiveKind):
            raise InputError.of("", f"{text!r} is not a collective. Write it like 'all_gather seq/tp'")
        kind, repeat = cast(CollectiveKind, match["kind"]), int(match["repeat"] or 1)
        atoms = _parse_atoms(match["atoms"])
        return cls(kind=kind, dim=match["dim"], atoms=atoms, repeat=repeat, to_dim=match["to_dim"])

    def __str__(self) -> str:
        """Print the text form."""
        times = f"{self.repeat} x " if self.repeat > 1 else ""
        to_dim = f">{self.to_dim}" if self.to_dim else ""
        return f"{times}{self.kind} {self.dim or ''}{to_dim}/{show_atoms(self.atoms)}"
