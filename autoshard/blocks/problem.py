"""What the search for the cuts of a block is asked, and what each of its operations may choose from."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.blocks.places import op_places
from autoshard.cost.compute import Rates
from autoshard.errors import InputError, nearest, require
from autoshard.graph.block import Block
from autoshard.graph.kinds.pointwise import Reduce
from autoshard.graph.op import Dims, Op, Tensor
from autoshard.layout.collective import Collective
from autoshard.layout.layout import Cuts, Layout, show_atoms
from autoshard.layout.legal import cut_operations, op_dims, together
from autoshard.layout.redistribute import Change, Price, Sizes
from autoshard.layout.states import Matrix, Net, NetPrice
from autoshard.spec.workload import DTYPE_BYTES, Dtype

Seconds = Callable[[Collective, Any], Any]  # a Collective and a rank's bytes where messages are largest; or columns
Atoms = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProblem:
    """Which block, of which sizes, on a mesh of which atoms; what things cost; what is pinned.

    ``boundary`` is the layout of what neighbouring blocks hand over, in both directions. ``memory_limit_bytes`` counts,
    on one rank, what the block keeps from forward to backward and ``state_bytes_per_weight`` for every weight it holds;
    with ``cuts_rest`` a weight may rest in pieces on the ranks that use the same part of it.
    """

    block: Block
    sizes: Sizes
    atoms: Mapping[str, int]
    boundary: Cuts
    rates: Rates
    seconds: Seconds
    pins: Mapping[str, Cuts] = field(default_factory=dict[str, Cuts])
    num_micro_batches: int = 1  # over which the reduction of weight gradients is spread
    second_per_byte: float = 0.0  # price of a byte that the memory limit counts
    keeps_gathered: bool = True  # whether backward finds what forward gathered, or gathers again
    allowed: Mapping[str, tuple[Cuts, ...]] = field(default_factory=dict[str, tuple[Cuts, ...]])  # else all legal ones
    memory_limit_bytes: float = math.inf
    state_bytes_per_weight: float = 0.0
    cuts_rest: bool = False

    def __post_init__(self) -> None:
        """Refuse pins of operations that the block does not have, and numbers that make no sense."""
        known = [op.name for op in cut_operations(self.block)]
        unknown = [("pins", name) for name in self.pins if name not in known]
        unknown += [("allowed", name) for name in self.allowed if name not in known]
        require(
            *(
                (False, f"{given}.{name}", f"{self.block.kind} has no such operation. {nearest(name, known)}")
                for given, name in unknown
            ),
            (self.num_micro_batches >= 1, "num_micro_batches", f"must be at least 1, not {self.num_micro_batches}"),
            (self.memory_limit_bytes > 0, "memory_limit_bytes", f"must be positive, not {self.memory_limit_bytes}"),
        )

    @property
    def real_atoms(self) -> Atoms:
        """The atoms that cut anything."""
        return tuple(atom for atom, size in self.atoms.items() if size > 1)

    def ranks(self, atoms: Sequence[str]) -> int:
        """Return how many ranks a group over these atoms has."""
        return math.prod(self.atoms[atom] for atom in atoms)

    def local_bytes(self, layout: Layout, dtype: Dtype) -> int:
        """Return what the largest rank holds of a tensor in a layout; padding counts."""
        total = DTYPE_BYTES[dtype]
        for dim, cut in layout.dims:
            total *= -(-self.sizes[dim] // self.ranks(cut)) if cut else self.sizes[dim]
        return total

    def price(self, dtype: Dtype) -> Price:
        """Return what single changes of the layout of a tensor with this format cost in seconds; slices are free."""
        held: dict[Layout, int] = {}

        def local_bytes(layout: Layout) -> int:
            if layout not in held:
                held[layout] = self.local_bytes(layout, dtype)
            return held[layout]

        def seconds(change: Change) -> float:
            if change.collective.kind == "slice":
                return 0.0
            return self.seconds(change.collective, max(local_bytes(change.before), local_bytes(change.after)))

        return seconds

    def prices(self, dtype: Dtype) -> NetPrice:
        """Return the same for all changes of a net at once."""

        def seconds(net: Net) -> Matrix:
            held = np.array([self.local_bytes(layout, dtype) for layout in net.layouts], dtype=np.float64)
            found = np.full((net.size, net.size), np.inf)
            for collective, before, after in net.groups:
                largest = np.maximum(held[before], held[after])
                cost_s = 0.0 if collective.kind == "slice" else self.seconds(collective, largest)
                found[before, after] = np.minimum(found[before, after], cost_s)
            return found

        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class OpChoice:
    """How an operation and its gradients run: cuts, and atoms over which a sum passes through, forward and backward."""

    cuts: Cuts
    passed: Atoms = ()
    passed_back: Atoms = ()

    @property
    def busy(self) -> frozenset[str]:
        """The atoms that cut a dim."""
        return frozenset(atom for cut in self.cuts.values() for atom in cut)

    def layout(self, dims: Dims, sums: Sequence[str] = ()) -> Layout:
        """Return how it cuts a tensor of these dims."""
        cuts = tuple((dim, tuple(self.cuts.get(dim, ()))) for dim in dims)
        return Layout(dims=cuts, sums=tuple(sorted(sums)))

    def lost(self, dims: Dims) -> frozenset[str]:
        """Return the atoms that cut only dims that a tensor of these dims lacks: a sum is pending over them."""
        return self.busy - {atom for dim in dims for atom in self.cuts.get(dim, ())}


def op_choices(
    block: Block, op: Op, atoms: Sequence[str], allowed: Sequence[Sequence[str]] | None = None
) -> tuple[Cuts, ...]:
    """Return every legal cut of an operation, with each atom in one of the places that are allowed to it.

    Each atom cuts one dim or none; atoms of one dim do so in the mesh's order.
    """
    found: list[Cuts] = []
    for places in itertools.product(*(allowed or [op_places(block, op, atom) for atom in atoms])):
        cuts = {dim: tuple(atom for atom, at in zip(atoms, places, strict=True) if at == dim) for dim in places if dim}
        cuts |= {dim: together(cuts, others) for dim, others in op.kind.tied_dims()}
        found.append({dim: cut for dim, cut in cuts.items() if cut})
    return tuple(found)


def all_choices(problem: OperatorProblem, op: Op, *, forward: bool, backward: bool) -> tuple[OpChoice, ...]:
    """Return what an operation may choose: legal cuts that agree with its pin, and sums that pass where they may."""
    listed = problem.allowed.get(op.name)
    cuts: Sequence[Cuts] = op_choices(problem.block, op, problem.real_atoms) if listed is None else listed
    if op.name in problem.pins:  # which need not name dims that follow from others
        tied = {dim: () for dim, _ in op.kind.tied_dims()}
        wanted = real_cuts({**problem.pins[op.name], **tied})
        cuts = [each for each in cuts if real_cuts({**each, **tied}) == wanted]
        if not cuts:
            raise InputError.of(f"pins.{op.name}", _no_such_cut(problem, op))
    found: list[OpChoice] = []
    for each in cuts:
        free = [atom for atom in problem.real_atoms if atom not in {atom for cut in each.values() for atom in cut}]
        ahead = subsets(free) if forward else ((),)
        back = tuple(subsets(free)) if backward else ((),)
        found += [OpChoice(cuts=each, passed=one, passed_back=two) for one in ahead for two in back]
    return tuple(found)


def _no_such_cut(problem: OperatorProblem, op: Op) -> str:
    """Say why a pin is no choice, and what is."""
    bound = {*op.kind.whole_dims(), *dict(op.kind.tied_dims())}
    free = [dim for dim in sorted(op_dims(problem.block, op)) if dim not in bound]
    cuts = ", ".join(f"{dim}/{show_atoms(cut)}" for dim, cut in problem.pins[op.name].items() if cut)
    return (
        f"[{cuts}] is not a choice here. Cut {', '.join(free)} over {', '.join(problem.real_atoms)}, each atom once, "
        "several atoms of one dim in the mesh's order"
    )


def made_layout(op: Op, tensors: Mapping[str, Tensor], tensor: str, choice: OpChoice) -> Layout:
    """Return how an operation leaves a result: what cuts a dim that it has lost is pending, and what passes through."""
    dims = tensors[tensor].dims
    read = {dim for name in op.inputs for dim in tensors[name].dims}
    lost = {atom for dim in read for atom in choice.cuts.get(dim, ())} & choice.lost(dims)
    index = op.outputs.index(tensor)
    passes = any(index in outputs for outputs in op.kind.linear_through().values())
    plain = choice.layout(dims, sorted({*lost, *(choice.passed if passes else ())}))
    if isinstance(op.kind, Reduce) and op.kind.function == "max":
        return Layout(dims=plain.dims, maxima=plain.sums)
    return plain


def subsets(atoms: Sequence[str]) -> Iterator[Atoms]:
    """Yield every subset, the smaller first.

    >>> list(subsets(("a", "b")))
    [(), ('a',), ('b',), ('a', 'b')]
    """
    for count in range(len(atoms) + 1):
        yield from itertools.combinations(atoms, count)


def real_cuts(cuts: Cuts) -> dict[str, Atoms]:
    """Return only the dims that are cut."""
    return {dim: tuple(cut) for dim, cut in cuts.items() if cut}
