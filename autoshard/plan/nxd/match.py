"""A block on its way to forms: what each of its entries sends over tp, and what the layers of NxD send there."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from autoshard.errors import Fault
from autoshard.graph.block import Block
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Dims, Op, Tensor
from autoshard.layout.layout import Cuts
from autoshard.layout.program import Compute, Program

Layer = Literal[
    "GQAQKVColumnParallelLinear",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "ParallelEmbedding",
    "parallel_cross_entropy",
    "MoE",
    "leaf",  # the decoder's own module stays, with a rank's part of its parameters
]
Plain = int | bool | float | str | tuple[int, ...]
Argument = Plain | Mapping[str, Plain]  # of the layer, or of one that it is made of
TP = ("kv", "rep")  # the atoms of tp


@dataclass(frozen=True, slots=True, kw_only=True)
class FormPiece:
    """A rank's part of one of our tensors: a slice along the cut dims, with dims grouped into the axes of NxD's tensor.

    Which slice is a rank's follows from its place among the ranks of its tp group, in NxD's order. The dims of the axes
    may stand in another order than ``dims``, which is that of our tensor.
    """

    tensor: str
    dims: Dims
    axes: tuple[Dims, ...]
    cuts: Cuts = field(hash=False)  # by atoms of tp


@dataclass(frozen=True, slots=True, kw_only=True)
class FormParameter:
    """A parameter of the layer: pieces behind each other along one axis, and what its gradient needs.

    ``split`` is the axis that tp cuts. ``summed`` says that ranks of tp have only parts of the gradient. ``copies`` is
    the number of ranks that hold the same values of a cut parameter; only one of them counts in the norm.
    """

    name: str
    pieces: tuple[FormPiece, ...]
    axis: int = 0
    split: int | None = None
    summed: bool = False
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One layer, the leaves that it replaces, in order, and what it is made with."""

    layer: Layer
    leaves: tuple[str, ...]
    arguments: Mapping[str, Argument] = field(hash=False)
    parameters: tuple[FormParameter, ...]


@dataclass(frozen=True, slots=True, order=True)
class Send:
    """A collective as it is compared: over which atoms that are longer than 1, in no order."""

    kind: str
    dim: str | None
    atoms: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.dim or ''}/{'.'.join(self.atoms)}"


Lists = Mapping[str, tuple[Send, ...]]  # pass -> what is sent, in order


@dataclass(kw_only=True)
class BlockMatch:
    """A block on its way to forms: which of its entries belong to a layer, and what is wrong."""

    block: Block
    program: Program
    sizes: Mapping[str, int]  # of all dims, vocab padded
    atoms: Mapping[str, int]  # of tp, longer than 1
    dtype: str
    sent: Mapping[str, Lists] = field(init=False)
    matched: set[str] = field(default_factory=set[str])
    faults: list[Fault] = field(default_factory=list[Fault])

    def __post_init__(self) -> None:
        sends_by_entry: dict[str, dict[str, list[Send]]] = {}
        for change in self.program.collectives():
            tp_atoms = tuple(sorted(self.atoms.keys() & set(change.collective.atoms)))
            if tp_atoms:
                sends = sends_by_entry.setdefault(change.entry, {}).setdefault(change.pass_, [])
                sends.append(Send(change.collective.kind, change.collective.dim, tp_atoms))
        self.sent = {
            entry: {name: _joined(sends) for name, sends in lists.items()} for entry, lists in sends_by_entry.items()
        }
        self.operations = tuple(op for op in self.block.select("micro_batch", "F") if not isinstance(op.kind, Deliver))
        self.computes = {
            entry.op.name: entry
            for entry in self.program.instructions
            if isinstance(entry, Compute) and entry.op.pass_ == "F" and not entry.op.again
        }

    def whole(self, kind: str, dim: str | None = None) -> Send:
        """Return a collective over all of tp."""
        return Send(kind, dim, tuple(sorted(self.atoms)))

    def size(self, dims: Sequence[str]) -> int:
        """Return the product of the sizes of dims."""
        return math.prod(self.sizes[dim] for dim in dims)

    def dims(self, op: Op) -> Dims:
        """Return the dims of an operation's result."""
        return self.block.tensors[op.outputs[0]].dims

    def weights(self, op: Op) -> tuple[Tensor, ...]:
        """Return the parameters that an operation reads."""
        return tuple(self.block.tensors[name] for name in op.inputs if self.block.tensors[name].role == "parameter")

    def piece(self, op: Op, weight: Tensor, axes: tuple[Dims, ...] | None = None) -> FormPiece:
        """Return a rank's part of a weight, its dims grouped into axes, or each for itself."""
        alone = tuple((dim,) for dim in weight.dims)
        return FormPiece(tensor=weight.name, dims=weight.dims, axes=axes or alone, cuts=self.cuts(op, weight))

    def is_summed(self, weight: Tensor) -> bool:
        """Whether the plan leaves a sum over tp pending in a weight's gradient."""
        return bool(set(TP).intersection(self.program.results[f"{weight.name}.sum"].layout.sums))

    def cuts(self, op: Op, tensor: Tensor) -> Cuts:
        """Return how tp cuts a tensor that an operation reads or makes."""
        cuts = self.computes[op.name].cuts
        tp_cuts = {dim: tuple(atom for atom in cuts.get(dim, ()) if atom in TP) for dim in tensor.dims}
        return {dim: atoms for dim, atoms in tp_cuts.items() if atoms}

    def before(self, op: Op) -> str:
        """Return the entry that delivers an operation's first input."""
        return next(operation.name for operation in self.block.ops if op.inputs[0] in operation.outputs)

    def after(self, op: Op) -> str:
        """Return the entry that takes an operation's result on; the carried one is delivered where the block ends."""
        readers = (reader for reader in self.block.select("micro_batch", "F") if op.outputs[0] in reader.inputs)
        return next((reader.name for reader in readers if isinstance(reader.kind, Deliver)), f"{op.outputs[0]}_out")

    def is_sequence(self, entry: str) -> bool:
        """Whether an entry gathers or scatters the sequence."""
        return any(send.dim == "seq" for send in self.sent.get(entry, {}).get("F", ()))

    def match(self, entry: str, layer: str, **lists: Sequence[Send]) -> None:
        """Compare the lists of an entry with what a layer sends there."""
        self.matched.add(entry)
        have, need = self.sent.get(entry, {}), {name: tuple(sends) for name, sends in lists.items() if sends}
        if {name: sends for name, sends in have.items() if sends} != need:
            self.fault(entry, f"{layer} sends {lists_text(need)}, but the table lists {lists_text(have)}")

    def fault(self, entry: str, message: str) -> None:
        """Note what is wrong with an entry."""
        self.faults.append(Fault(where=entry, message=message))


def _joined(sends: Sequence[Send]) -> tuple[Send, ...]:
    joined: list[Send] = []
    for (kind, dim), group in groupby(sends, key=lambda send: (send.kind, send.dim)):
        run = list(group)
        atoms = [atom for send in run for atom in send.atoms]
        is_repeated = len(set(atoms)) < len(atoms)  # several collectives, not one in parts
        joined += run if is_repeated else [Send(kind, dim, tuple(sorted(atoms)))]
    return tuple(joined)


def lists_text(lists: Lists) -> str:
    """Print lists as the table does, without the entry."""
    return "; ".join(f"{name} {', '.join(map(str, sends))}" for name, sends in lists.items() if sends) or "nothing"
