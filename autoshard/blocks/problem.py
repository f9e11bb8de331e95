"""The input of the block solver: a block on a mesh, the prices of compute and communication, and a memory limit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from autoshard.blocks.choices import Atoms
from autoshard.cost.compute import Rates
from autoshard.errors import nearest, require
from autoshard.graph.block import Block
from autoshard.layout.layout import Collective, Cuts, Layout
from autoshard.layout.legal import cut_operations
from autoshard.layout.redistribute import Change, LayoutGraph, Matrix, MatrixPrice, Price, Sizes
from autoshard.spec.workload import DTYPE_BYTES, Dtype

Seconds = Callable[[Collective, Any], Any]  # a Collective and a rank's bytes where messages are largest; or columns


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProblem:
    """A block with its sizes, the mesh, prices, and the cuts that its operations may choose from.

    ``boundary`` is the layout of the hidden state between blocks, in both directions. ``allowed`` lists the cuts of
    some operations; all others may have any legal one. ``memory_limit_bytes`` counts, on one rank, what the block keeps
    from forward to backward and ``state_bytes_per_weight`` for every weight; with ``cuts_rest`` a weight may rest in
    pieces on the ranks that use the same part of it.
    """

    block: Block
    sizes: Sizes
    atoms: Mapping[str, int]
    boundary: Cuts
    rates: Rates
    seconds: Seconds
    num_micro_batches: int = 1  # over which the reduction of weight gradients is spread
    keeps_gathered: bool = True  # whether backward finds what forward gathered, or gathers again
    allowed: Mapping[str, tuple[Cuts, ...]] = field(default_factory=dict[str, tuple[Cuts, ...]])
    memory_limit_bytes: float = math.inf
    state_bytes_per_weight: float = 0.0
    cuts_rest: bool = False

    def __post_init__(self) -> None:
        """Refuse cuts of operations that the block does not have, and numbers that make no sense."""
        known = [op.name for op in cut_operations(self.block)]
        require(
            *(
                (False, f"allowed.{name}", f"{self.block.kind} has no such operation. {nearest(name, known)}")
                for name in self.allowed
                if name not in known
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
        """Return the price in seconds of single changes of the layout of a tensor of this format; slices are free."""
        local_bytes = cache(partial(self.local_bytes, dtype=dtype))

        def seconds(change: Change) -> float:
            if change.collective.kind == "slice":
                return 0.0
            return self.seconds(change.collective, max(local_bytes(change.before), local_bytes(change.after)))

        return seconds

    def prices(self, dtype: Dtype) -> MatrixPrice:
        """Return the same for all changes between layouts at once."""

        def seconds(graph: LayoutGraph) -> Matrix:
            sizes = np.array([self.local_bytes(layout, dtype) for layout in graph.layouts], dtype=np.float64)
            found = np.full((graph.size, graph.size), np.inf)
            for collective, before, after in graph.groups:
                largest = np.maximum(sizes[before], sizes[after])
                cost_s = 0.0 if collective.kind == "slice" else self.seconds(collective, largest)
                found[before, after] = np.minimum(found[before, after], cost_s)
            return found

        return seconds
