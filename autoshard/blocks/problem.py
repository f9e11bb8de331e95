"""The input of the block solver: a block on a mesh with a memory limit, and what its operations cost there."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.choices import Atoms, OpChoice
from autoshard.cost.compute import Rates
from autoshard.errors import nearest, require
from autoshard.graph.block import Block, Saved
from autoshard.graph.kinds.attention import SCORES
from autoshard.graph.op import Call, Op
from autoshard.layout.layout import Collective, Cuts, Layout
from autoshard.layout.legal import cut_operations
from autoshard.layout.redistribute import Change, LayoutGraph, Matrix, MatrixPrice, Price, Sizes
from autoshard.layout.sharding import RING_DIM, RINGS
from autoshard.spec.workload import DTYPE_BYTES, Dtype

Column = NDArray[np.float64]  # one number per choice
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


def roofline_s(problem: OperatorProblem, part: Op, choices: Sequence[Cuts]) -> Column:
    """Return the time of one operation: that of the slowest of matrix unit, vector unit and memory."""
    block, rates = problem.block, problem.rates
    whole = (RING_DIM,) if isinstance(part.kind, RINGS) else ()  # a ring meets every key
    call = Call(
        inputs=tuple(block.tensors[name] for name in part.inputs),
        outputs=tuple(block.tensors[name] for name in part.outputs),
        sizes=local_columns(problem, choices, whole),
    )
    matrix_s = part.kind.matrix_flops(call) / rates.matrix_flops_per_s
    vector_s = part.kind.vector_flops(call) / rates.vector_flops_per_s
    memory_s = part.kind.traffic_bytes(call) / rates.memory_bytes_per_s
    return np.maximum(np.maximum(matrix_s, vector_s), memory_s)  # a number where no choice cuts its dims


def ring_of_s(problem: OperatorProblem, part: Op, cuts: Cuts) -> float:
    """Return the time of one ring: all keys, values and gradients of them that the operation reads or makes go around.

    Every rank has all positions from the start.
    """
    atoms = tuple(cuts.get(RING_DIM, ()))
    if not atoms or not isinstance(part.kind, RINGS):
        return 0.0
    ring = Collective(kind="permute", dim=RING_DIM, atoms=atoms)
    tensors = [problem.block.tensors[name] for name in (*part.inputs, *part.outputs)]
    sent = [tensor for tensor in tensors if {RING_DIM, "kv_heads"} <= set(tensor.dims)]
    layouts = [(OpChoice(cuts=cuts).layout(tensor.dims), tensor) for tensor in sent]
    return sum(problem.seconds(ring, problem.local_bytes(layout, tensor.dtype)) for layout, tensor in layouts)


def reduction_s(problem: OperatorProblem, weight: str, cuts: Cuts, pending: Sequence[str]) -> float:
    """Return the time of summing a weight's gradient over ranks, once per step, as a share of one micro-batch."""
    if not pending:
        return 0.0
    tensor, total = problem.block.tensors[weight], problem.block.tensors[f"{weight}.sum"]
    layout = OpChoice(cuts=cuts).layout(tensor.dims)
    reduction = Collective(kind="all_reduce", dim=None, atoms=tuple(sorted(pending)))
    return problem.seconds(reduction, problem.local_bytes(layout, total.dtype)) / problem.num_micro_batches


def gathered_s(problem: OperatorProblem, weight: str, choice: OpChoice, rest: Sequence[str]) -> float:
    """Return the time of gathering a weight that rests in pieces, forward and backward, and of scattering its gradient.

    The sums over ``rest`` are made in every micro-batch; what else the gradient awaits is summed once per step.
    """
    tensor, total = problem.block.tensors[weight], problem.block.tensors[f"{weight}.sum"]
    layout = choice.layout(tensor.dims)
    gather = Collective(kind="all_gather", dim=None, atoms=tuple(rest))
    scatter = Collective(kind="reduce_scatter", dim=None, atoms=tuple(rest))
    others = sorted(choice.awaited(tensor.dims) - set(rest))
    once_s = reduction_s(problem, weight, choice.cuts, others) / problem.ranks(rest)
    every_s = 2 * problem.seconds(gather, problem.local_bytes(layout, tensor.dtype))
    return once_s + every_s + problem.seconds(scatter, problem.local_bytes(layout, total.dtype))


def state_bytes(problem: OperatorProblem, weight: str, choice: OpChoice, rest: Sequence[str]) -> float:
    """Return the memory of a weight, its gradient and its optimizer state."""
    layout = choice.layout(problem.block.tensors[weight].dims)
    count = problem.local_bytes(layout, "fp8")  # a byte each
    return problem.state_bytes_per_weight * math.ceil(count / problem.ranks(rest))


def kept_bytes(problem: OperatorProblem, entry: Saved, choices: Sequence[OpChoice]) -> Column:
    """Return the memory of what a kernel keeps, as the operation that made it is cut; scores have one for every key."""
    keys = problem.sizes[RING_DIM] if entry.tensor.dims == SCORES else 1
    dims = tuple(dim for dim in entry.tensor.dims if keys == 1 or dim != RING_DIM)
    layouts = [choice.layout(dims) for choice in choices]
    return np.array([float(keys * problem.local_bytes(layout, entry.tensor.dtype)) for layout in layouts])


def local_columns(problem: OperatorProblem, choices: Sequence[Cuts], whole: Sequence[str] = ()) -> dict[str, Any]:
    """Return a rank's sizes of all dims, a column each where some choice cuts the dim."""
    columns: dict[str, Any] = {}
    for dim, size in problem.sizes.items():
        shares = [1 if dim in whole else problem.ranks(cuts.get(dim, ())) for cuts in choices]
        cut = any(share > 1 for share in shares)
        columns[dim] = np.ceil(size / np.array(shares, dtype=np.float64)) if cut else size
    return columns


def weights_of(problem: OperatorProblem, op: Op) -> tuple[str, ...]:
    """Return the weights that an operation reads."""
    return tuple(name for name in op.inputs if problem.block.tensors[name].role == "parameter")
