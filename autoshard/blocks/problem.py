"""The input of the block solver: a block on a mesh with a memory limit, and what its operations cost there."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.choices import Atoms, OpChoice
from autoshard.cost.collective import Number
from autoshard.cost.compute import Rates
from autoshard.errors import nearest, require
from autoshard.graph.block import Block, Saved
from autoshard.graph.kinds.attention import KEYS_DIM, SCORES
from autoshard.graph.op import Call, Op
from autoshard.layout.change_prices import LayoutGraph, Matrix, Prices
from autoshard.layout.layout import Collective, Cuts, Layout, whole_size
from autoshard.layout.legal import cut_operations
from autoshard.layout.redistribute import Change
from autoshard.layout.table import TableSetting
from autoshard.spec.workload import DTYPE_BYTES, Dtype

Column = NDArray[np.float64]  # one number per choice; in columns of meshes, a row of them
_NEVER = 1e6  # times the work: there is always another choice
AtRest = Callable[[str, Layout, Atoms], Layout]  # of a weight that is used in a layout and rests over atoms
Seconds = Callable[[Collective, Any], Any]  # a Collective and a rank's bytes where messages are largest; or columns


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProblem:
    """A block with its sizes, the mesh, prices, and the cuts that its operations may choose from.

    Sizes, atoms and prices may be columns of as many meshes, all of which are solved at once.

    ``boundary`` is the layout of the hidden state between blocks, in both directions. ``allowed`` lists the cuts of
    some operations; all others may have any legal one. ``tied`` operations have the choices of others, and choose as
    these do. ``memory_limit_bytes`` counts, on one rank, what the block keeps
    from forward to backward and ``state_bytes_per_weight`` for every weight, of ``frozen`` ones what they are; with
    ``cuts_rest`` a weight may rest in pieces on the ranks that use the same part of it.
    """

    block: Block
    sizes: Mapping[str, Number]
    atoms: Mapping[str, Number]
    boundary: Cuts
    rates: Rates
    seconds: Seconds
    num_micro_batches: Number = 1  # over which the reduction of weight gradients is spread
    keeps_gathered: bool = True  # whether backward finds what forward gathered, or gathers again
    allowed: Mapping[str, tuple[Cuts, ...]] = field(default_factory=dict[str, tuple[Cuts, ...]])
    memory_limit_bytes: float = math.inf
    state_bytes_per_weight: float = 0.0
    frozen: frozenset[str] = frozenset()  # inputs that are weights without a gradient
    at_rest: "AtRest | None" = None  # where weights cannot rest in every layout
    cuts_rest: bool = False
    tied: Mapping[str, str] = field(default_factory=dict[str, str])  # operations that are cut like others
    few: "OperatorProblem | None" = None  # the same with only some of the columns

    def __post_init__(self) -> None:
        """Refuse cuts of operations that the block does not have, and numbers that make no sense."""
        names = [op.name for op in cut_operations(self.block)]
        require(
            *(
                (False, f"allowed.{name}", f"{self.block.kind} has no such operation. {nearest(name, names)}")
                for name in self.allowed
                if name not in names
            ),
            (
                bool(np.all(self.num_micro_batches >= 1)),
                "num_micro_batches",
                f"must be at least 1, not {self.num_micro_batches}",
            ),
            (self.memory_limit_bytes > 0, "memory_limit_bytes", f"must be positive, not {self.memory_limit_bytes}"),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """That of a column; empty for a single mesh."""
        return next((np.shape(size) for size in self.atoms.values()), ())

    @property
    def real_atoms(self) -> Atoms:
        """The atoms that cut anything, in some column."""
        return tuple(atom for atom, size in self.atoms.items() if np.any(np.asarray(size) > 1))

    def is_weight(self, tensor: str) -> bool:
        """Say whether a tensor is a weight, trained or frozen."""
        return self.block.tensors[tensor].role == "parameter" or tensor in self.frozen

    def table_setting(self, *, has_inputs: bool = False) -> TableSetting:
        """Return how a table of the block is read and lowered; ``has_inputs``: every rank has the inputs whole."""
        return TableSetting(
            atoms=self.atoms, price=self.price("bf16"), boundary=self.boundary, keeps_gathered=self.keeps_gathered,
            has_inputs=has_inputs,
        )  # fmt: skip

    def ranks(self, atoms: Sequence[str]) -> Number:
        """Return how many ranks a group over these atoms has."""
        return math.prod(self.atoms[atom] for atom in atoms)

    def stacked(self, numbers: Sequence[Number]) -> Column:
        """Return numbers, or columns, as one array with an axis for them first."""
        rows = [np.broadcast_to(number, self.shape) for number in numbers]
        return np.array(rows, np.float64).reshape(-1, *self.shape)

    def spread(self, mask: NDArray[Any]) -> NDArray[Any]:
        """Return what is the same in all columns with an axis for these."""
        return mask.reshape(mask.shape + (1,) * len(self.shape))

    def local_bytes(self, layout: Layout, dtype: Dtype) -> Number:
        """Return what the largest rank holds of a tensor in a layout; padding counts."""
        total: Number = DTYPE_BYTES[dtype]
        for dim, cut in layout.dims:
            size = whole_size(self.sizes, dim, layout.cuts, self.ranks)
            total = total * (-(-size // self.ranks(cut)) if cut else size)
        return total

    def price(self, dtype: Dtype) -> Callable[[Change], Any]:
        """Return the price in seconds of single changes of the layout of a tensor of this format; slices are free."""
        local_bytes = cache(partial(self.local_bytes, dtype=dtype))

        def seconds(change: Change) -> Number:
            if change.collective.kind == "slice":
                return np.zeros(self.shape) if self.shape else 0.0
            largest = np.maximum(local_bytes(change.before), local_bytes(change.after))
            return self.seconds(change.collective, largest)

        return seconds

    def prices(self, dtype: Dtype) -> Prices:
        """Return the same for all changes between layouts at once."""

        def seconds(problem: OperatorProblem, graph: LayoutGraph) -> Matrix:
            sizes = problem.stacked([problem.local_bytes(layout, dtype) for layout in graph.layouts])
            seconds = np.zeros((len(graph.before), *problem.shape))
            for number, collective in enumerate(graph.collectives):
                if collective.kind != "slice":
                    places = np.flatnonzero(graph.group == number)
                    largest = np.maximum(sizes[graph.before[places]], sizes[graph.after[places]])
                    seconds[places] = problem.seconds(collective, largest)
            return seconds

        few = partial(seconds, self.few) if self.few else None
        return Prices(of_change=self.price(dtype), of_graph=partial(seconds, self), few=few, shape=self.shape)


def roofline_s(problem: OperatorProblem, part: Op, choices: Sequence[Cuts]) -> Column:
    """Return the time of one operation: that of the slowest of matrix unit, vector unit and memory."""
    block, rates = problem.block, problem.rates
    whole = (part.kind.ring_dim,) if part.kind.ring_dim else ()  # a ring meets every key
    call = Call(
        inputs=tuple(block.tensors[name] for name in part.inputs),
        outputs=tuple(block.tensors[name] for name in part.outputs),
        sizes=local_columns(problem, choices, whole),
    )
    matrix_s = part.kind.matrix_flops(call) / rates.matrix_flops_per_s
    vector_s = part.kind.vector_flops(call) / rates.vector_flops_per_s
    memory_s = part.kind.traffic_bytes(call) / rates.memory_bytes_per_s
    kernel_s = np.maximum(np.maximum(matrix_s, vector_s), memory_s)  # one for all choices where none cuts its dims
    return np.broadcast_to(kernel_s, (len(choices), *problem.shape))


def ring_of_s(problem: OperatorProblem, part: Op, cuts: Cuts) -> Number:
    """Return the time of one ring: all keys, values and gradients of them that the operation reads or makes go around.

    Every rank has all positions from the start.
    """
    dim = part.kind.ring_dim
    atoms = tuple(cuts.get(dim, ()))
    if not atoms:
        return 0.0
    ring = Collective(kind="permute", dim=dim, atoms=atoms)
    tensors = [problem.block.tensors[name] for name in (*part.inputs, *part.outputs)]
    sent = [tensor for tensor in tensors if {dim, "kv_heads"} <= set(tensor.dims)]
    layouts = [(OpChoice(cuts=cuts).layout(tensor.dims), tensor) for tensor in sent]
    return sum(problem.seconds(ring, problem.local_bytes(layout, tensor.dtype)) for layout, tensor in layouts)


def reduction_s(problem: OperatorProblem, weight: str, cuts: Cuts, pending: Sequence[str]) -> Number:
    """Return the time of summing a weight's gradient over ranks, once per step, as a share of one micro-batch."""
    if not pending or weight in problem.frozen:
        return 0.0
    tensor, total = problem.block.tensors[weight], problem.block.tensors[f"{weight}.sum"]
    layout = OpChoice(cuts=cuts).layout(tensor.dims)
    reduction = Collective(kind="all_reduce", dim=None, atoms=tuple(sorted(pending)))
    return problem.seconds(reduction, problem.local_bytes(layout, total.dtype)) / problem.num_micro_batches


def gathered_s(problem: OperatorProblem, weight: str, choice: OpChoice, rest: Sequence[str]) -> Number:
    """Return the time of gathering a weight that rests in pieces, forward and backward, and of scattering its gradient.

    The sums over ``rest`` are made in every micro-batch; what else the gradient awaits is summed once per step.
    """
    tensor = problem.block.tensors[weight]
    layout = choice.layout(tensor.dims)
    gather = Collective(kind="all_gather", dim=None, atoms=tuple(rest))
    every_s = 2 * problem.seconds(gather, problem.local_bytes(layout, tensor.dtype))
    if weight in problem.frozen:
        return every_s
    total = problem.block.tensors[f"{weight}.sum"]
    scatter = Collective(kind="reduce_scatter", dim=None, atoms=tuple(rest))
    pending = sorted(choice.awaited(tensor.dims) - set(rest))
    once_s = reduction_s(problem, weight, choice.cuts, pending) / problem.ranks(rest)
    return once_s + every_s + problem.seconds(scatter, problem.local_bytes(layout, total.dtype))


def resting_bytes(problem: OperatorProblem, weight: str, layout: Layout, rest: Atoms) -> Number:
    """Return the memory of a weight that is used in a layout, of its gradient and of its optimizer state."""
    tensor = problem.block.tensors[weight]
    if problem.at_rest:
        count = problem.local_bytes(problem.at_rest(weight, layout, rest), "fp8")  # a byte each
    else:
        count = np.ceil(problem.local_bytes(layout, "fp8") / problem.ranks(rest))
    return count * (DTYPE_BYTES[tensor.dtype] if weight in problem.frozen else problem.state_bytes_per_weight)


def kept_bytes(problem: OperatorProblem, entry: Saved, choices: Sequence[OpChoice]) -> Column:
    """Return the memory of what a kernel keeps, as the operation that made it is cut; scores have one for every key."""
    keys = problem.sizes[KEYS_DIM] if entry.tensor.dims == SCORES else 1
    dims = tuple(dim for dim in entry.tensor.dims if keys == 1 or dim != KEYS_DIM)
    layouts = [choice.layout(dims) for choice in choices]
    return problem.stacked([keys * problem.local_bytes(layout, entry.tensor.dtype) for layout in layouts])


def local_columns(problem: OperatorProblem, choices: Sequence[Cuts], whole: Sequence[str] = ()) -> dict[str, Any]:
    """Return a rank's sizes of all dims, a column each where some choice cuts the dim."""
    columns: dict[str, Any] = {}
    for dim, size in problem.sizes.items():
        cut = any(cuts.get(dim) or (dim == "slots" and cuts.get("experts")) for cuts in choices) and dim not in whole
        if cut:
            shares = problem.stacked([problem.ranks(cuts.get(dim, ())) for cuts in choices])
            sizes = problem.stacked([whole_size(problem.sizes, dim, cuts, problem.ranks) for cuts in choices])
            columns[dim] = np.ceil(sizes / shares) * (_uneven(problem, choices) if dim == "slots" else 1)
        else:
            columns[dim] = size
    return columns


def _uneven(problem: OperatorProblem, choices: Sequence[Cuts]) -> Column:
    """Return a factor that keeps choices from being taken in which ranks have different numbers of experts."""
    ranks = problem.stacked([problem.ranks(cuts.get("experts", ())) for cuts in choices])
    return np.where(problem.sizes["experts"] % ranks == 0, 1.0, _NEVER)


def weights_of(problem: OperatorProblem, op: Op) -> tuple[str, ...]:
    """Return the weights that an operation reads."""
    return tuple(name for name in op.inputs if problem.is_weight(name))
