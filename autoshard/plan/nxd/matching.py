"""A block on its way to forms: what each of its entries sends over tp, and what layers have claimed of that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from autoshard.errors import Fault
from autoshard.graph.block import Block
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Op, Tensor
from autoshard.layout.layout import Cuts
from autoshard.layout.program import Compute, Program

TP = ("kv", "rep")  # the atoms of tp


@dataclass(frozen=True, slots=True, order=True)
class Send:
    """A collective as it is compared: over which atoms that are longer than 1, in no order."""

    kind: str
    dim: str | None
    atoms: tuple[str, ...]

    def __str__(self) -> str:
        """Print as the table does."""
        return f"{self.kind} {self.dim or ''}/{'.'.join(self.atoms)}"


Lists = Mapping[str, tuple[Send, ...]]  # pass -> what is sent, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What forms are made for: sizes of all dims (vocab padded), atoms of tp longer than 1, formats."""

    sizes: Mapping[str, int]
    atoms: Mapping[str, int]  # of tp
    dtype: str

    @property
    def tp(self) -> int:
        """Ranks of a tp group."""
        return self.atoms.get("kv", 1) * self.atoms.get("rep", 1)

    def whole(self, kind: str, dim: str | None = None) -> Send:
        """Return a collective over all of tp."""
        return Send(kind, dim, tuple(sorted(self.atoms)))

    def size(self, dims: Sequence[str]) -> int:
        """Return the product of the sizes of dims."""
        found = 1
        for dim in dims:
            found *= self.sizes[dim]
        return found


@dataclass(kw_only=True)
class Matching:
    """A block on its way to forms: what has been claimed by one, and what is wrong."""

    block: Block
    program: Program
    setting: Setting
    computes: Mapping[str, Compute]
    sent: Mapping[str, Lists]
    claimed: set[str] = field(default_factory=set[str])
    faults: list[Fault] = field(default_factory=list[Fault])

    def operations(self) -> tuple[Op, ...]:
        """Return the forward operations that compute."""
        return tuple(op for op in self.block.select("micro_batch", "F") if not isinstance(op.kind, Deliver))

    def weights(self, op: Op) -> tuple[Tensor, ...]:
        """Return the parameters that an operation reads."""
        return tuple(self.block.tensors[name] for name in op.inputs if self.block.tensors[name].role == "parameter")

    def cuts(self, op: Op, tensor: Tensor) -> Cuts:
        """Return how tp cuts a tensor that an operation reads or makes."""
        cuts = self.computes[op.name].cuts
        found = {dim: tuple(atom for atom in cuts.get(dim, ()) if atom in TP) for dim in tensor.dims}
        return {dim: atoms for dim, atoms in found.items() if atoms}

    def before(self, op: Op) -> str:
        """Return the entry that delivers an operation's first input."""
        return next(one.name for one in self.block.ops if op.inputs[0] in one.outputs)

    def after(self, op: Op) -> str:
        """Return the entry that takes an operation's result on; the carried one is delivered where the block ends."""
        readers = (one for one in self.block.select("micro_batch", "F") if op.outputs[0] in one.inputs)
        return next((one.name for one in readers if isinstance(one.kind, Deliver)), f"{op.outputs[0]}_out")

    def is_sequence(self, entry: str) -> bool:
        """Whether an entry gathers or scatters the sequence."""
        return any(send.dim == "seq" for send in self.sent.get(entry, {}).get("F", ()))

    def claim(self, entry: str, what: str, **lists: Sequence[Send]) -> None:
        """Hold the lists of an entry against what a layer sends."""
        self.claimed.add(entry)
        have, need = self.sent.get(entry, {}), {name: tuple(sends) for name, sends in lists.items() if sends}
        if {name: sends for name, sends in have.items() if sends} != need:
            message = f"{what} sends {shown(need)}, but the table lists {shown(have)}"
            self.faults.append(Fault(where=entry, message=message))


def sent_over(program: Program, atoms: frozenset[str]) -> Mapping[str, Lists]:
    """Return what every entry sends over tp, chains of one kind along one dim taken together."""
    found: dict[str, dict[str, list[Send]]] = {}
    for change in program.collectives():
        mine = tuple(sorted(atoms.intersection(change.collective.atoms)))
        if mine:
            sends = found.setdefault(change.entry, {}).setdefault(change.pass_, [])
            sends.append(Send(change.collective.kind, change.collective.dim, mine))
    return {entry: {name: _joined(sends) for name, sends in lists.items()} for entry, lists in found.items()}


def _joined(sends: Sequence[Send]) -> tuple[Send, ...]:
    runs = [list(run) for _, run in groupby(sends, key=lambda send: (send.kind, send.dim))]
    joined: list[Send] = []
    for run in runs:
        atoms = [atom for send in run for atom in send.atoms]
        if len(set(atoms)) < len(atoms):  # several collectives, not one in parts
            joined.extend(run)
        else:
            joined.append(Send(run[0].kind, run[0].dim, tuple(sorted(atoms))))
    return tuple(joined)


def shown(lists: Lists) -> str:
    """Print lists as the table does, without the entry."""
    return "; ".join(f"{name} {', '.join(map(str, sends))}" for name, sends in lists.items() if sends) or "nothing"
