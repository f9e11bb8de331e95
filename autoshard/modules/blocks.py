"""A captured program as a block of the graph: named dims, regions of torch functions, products, rows."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autoshard.graph.block import Block
from autoshard.graph.builder import BlockBuilder, finish
from autoshard.graph.kinds.indexing import Lookup
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.pointwise import Add
from autoshard.graph.op import Dims
from autoshard.modules.dims import Dim, Position, factors, match_sizes, shown_hint
from autoshard.modules.grouping import outside_reads, regions
from autoshard.modules.program import Read, Traced, TracedProgram, TracedStep, free_name
from autoshard.modules.region import Alias, Local, Positions, Region
from autoshard.modules.repeats import merge_dims, tied_operations
from autoshard.spec.kernels import load_kernels
from autoshard.spec.workload import Dtype, Precision

_KERNELS = "torch_engine"  # of which no entry is used: what a traced operation keeps follows from its gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedBlock:
    """A module as a block, the sizes of its dims in the example inputs, and the shapes of what goes in and out."""

    block: Block
    sizes: Mapping[str, int]
    dims: Mapping[str, Positions]  # by tensor, as torch sees it: of parameters and inputs
    results: Mapping[str, tuple[str, Positions]]  # by place in what the module returns, or path of a buffer: a tensor
    modules: Mapping[str, tuple[str, Positions]]  # the results of submodules, by path
    paths: Mapping[str, str]  # of the submodules that do the operations
    tied: Mapping[str, str]  # operations that are cut like others: those of equal submodules


def traced_block(program: TracedProgram, precision: Precision) -> TracedBlock:
    """Write a program down as one block."""
    return ProgramWriter(program, BlockBuilder(precision), named_dims(program)).block()


def named_dims(program: TracedProgram) -> Mapping[Dim, str]:
    """Name all dims of a program; those of equal submodules get the same names."""
    merge_dims(regions(program))
    return _named(program)


class ProgramWriter:
    """Writes the operations of a program into a block, whose dims have these names."""

    def __init__(self, program: TracedProgram, builder: BlockBuilder, names: Mapping[Dim, str]) -> None:
        self.program, self.b, self.names = program, builder, names
        self.groups = regions(program)
        self.results: dict[str, tuple[str, Positions]] = {}
        self.paths: dict[str, str] = {}  # of the submodules that do the operations
        self.written: dict[Traced, str] = {}
        self.returned: dict[Traced, str] = {}
        self.aliases: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}

    @property
    def arriving(self) -> list[Traced]:
        """The values that no operation makes."""
        return [value for value in self.program.values if value.origin != "made"]

    def write(self) -> Mapping[str, bool]:
        """Write all operations; return by tensor of a result whether a gradient begins there."""
        program = self.program
        uses = Counter(value for steps in self.groups for value, _ in outside_reads(steps))
        returned = Counter(result.read.value for result in program.results if result.read)
        for value in self.arriving:
            self._declare(value, uses[value] + (returned[value] > 0))
        self.paths |= {op.name: "" for op in self.b.ops}
        for steps in self.groups:
            self._emit(steps)
            self.paths |= {op.name: steps[-1].path for op in self.b.ops if op.name not in self.paths}
        gives: dict[str, bool] = {}  # whether a gradient begins there
        for result in program.results:
            if result.read:
                name = self._result(result.read.value, is_read=result.is_seeded and uses[result.read.value] > 0)
                gives[name] = gives.get(name, False) or result.is_seeded
                self.results[result.name] = name, self._positions(result.read.positions)
        return gives

    def laid_out(self) -> Mapping[str, Positions]:
        """Return how torch sees parameters and inputs, by tensor."""
        return {value.name: self._positions(value.positions) for value in self.arriving}

    def block(self) -> TracedBlock:
        """Return the block."""
        program, gives = self.program, self.write()
        carried = (value for value in self.arriving if value.origin == "carried")
        block = finish(
            self.b, "module", replace(load_kernels(_KERNELS), kernels=()), gives=tuple(gives),
            takes=tuple(value.name for value in carried if value in program.trained),
            constant=[name for name, is_seeded in gives.items() if not is_seeded],
        )  # fmt: skip
        sizes = {name: dim.size for dim, name in self.names.items()}
        modules = {
            path: (self.written[read.value], self._positions(read.positions))
            for path, read in program.modules.items()
            if read.value in self.written and self.written[read.value] in block.tensors
        }
        return TracedBlock(
            block=block, sizes=sizes, dims=self.laid_out(), results=self.results, modules=modules,
            paths=self.paths, tied=tied_operations(block, self.paths),
        )  # fmt: skip

    def _declare(self, value: Traced, uses: int) -> None:
        dims, b, trained = self._dims(value.dims), self.b, value in self.program.trained
        if value.origin == "parameter":
            name = b.add(value.name, dims, b.precision.weights, "parameter" if trained else "input")
            self.written[value] = b.emit(f"{name}_used", Alias(), name) if uses > 1 else name
        elif trained:
            self.written[value] = b.add(value.name, dims, self._dtype(value))
        else:
            self.written[value] = b.add(value.name, dims, self._dtype(value), "input")

    def _result(self, value: Traced, *, is_read: bool) -> str:
        """Return the tensor of a result; an alias of it where operations of the module read the value too."""
        tensor = self.written[value]
        if is_read or (value.origin != "made" and tensor == value.name):
            if value not in self.returned:
                self.returned[value] = self.b.emit(f"{tensor}_returned", Alias(), tensor)
            return self.returned[value]
        return tensor

    def _emit(self, steps: Sequence[TracedStep]) -> None:
        """Emit one step, or several as a region."""
        last = steps[-1]
        name = last.name
        outside = list(outside_reads(steps).values())
        inputs = [self._read(read) for read in outside]
        dims = self._dims(last.makes.dims)
        if last.sort == "product":
            self.b.emit(name, Einsum(dims=dims), *inputs)
        elif last.sort == "rows" and not _in_factors(last):
            self.b.emit(name, Lookup(), *inputs)
        elif added := self._added(steps, outside, inputs):
            self.b.emit(name, Add(), *added)
        else:
            self.b.emit(name, self._region(name, steps, outside), *inputs)
        self.written[last.makes] = name

    def _added(self, steps: Sequence[TracedStep], reads: Sequence[Read], inputs: Sequence[str]) -> list[str]:
        """Return both tensors of a plain addition, the one with all dims first; none for any other step."""
        step, dims = steps[-1], self._dims(steps[-1].makes.dims)
        plain = step.function in (torch.add, torch.ops.aten.add.Tensor) and not step.keywords
        if len(steps) > 1 or len(inputs) != 2 or not plain or len(step.reads) != 2:
            return []
        both = sorted(zip(reads, inputs, strict=True), key=lambda pair: self._dims(pair[0].dims) != dims)
        return [name for _, name in both] if self._dims(both[0][0].dims) == dims else []

    def _region(self, name: str, steps: Sequence[TracedStep], outside: Sequence[Read]) -> Region:
        number = {(read.value, tuple(read.renamed.items())): place for place, read in enumerate(outside)}
        number |= {(step.makes, ()): len(outside) + place for place, step in enumerate(steps)}
        functions = tuple(
            Local(
                name=step.name,
                function=step.function,
                arguments=step.arguments,
                keywords=step.keywords,
                reads=tuple(
                    (
                        number[read.value, tuple(read.renamed.items())],
                        self._dims(read.dims),
                        self._positions(read.positions),
                    )
                    for read in step.reads
                ),
                gives=self._positions(step.makes.positions),
                products=tuple(self._dims(factors(dims)) for dims in step.products),
            )
            for step in steps
        )
        whole = {dim for step in steps for dim in step.whole_leaves()}
        whole |= {dim for step in steps[:-1] for dim in factors(step.summed)}  # no sum waits inside
        whole |= {dim for step in steps for dim in _in_factors(step)}
        shown = {*steps[-1].makes.dims, *(dim for read in outside for dim in read.dims)}
        return Region(
            name=name, locals=functions, dims=self._dims(steps[-1].makes.dims),
            dtype=self._dtype(steps[-1].makes), format=steps[-1].makes.format,
            whole=self._dims(sorted(whole & shown, key=lambda dim: self.names[dim])),
            empty=self._dims(sorted((dim for dim in shown if not dim.size), key=lambda dim: self.names[dim])),
        )  # fmt: skip

    def _read(self, read: Read) -> str:
        """Return the tensor that a step reads; an alias of it where the step has other names for the dims."""
        tensor = self.written[read.value]
        pairs = zip(read.value.dims, read.dims, strict=True)
        renamed = tuple((self.names[old], self.names[new]) for old, new in pairs if old is not new)
        if not renamed:
            return tensor
        if (tensor, renamed) not in self.aliases:
            alias = self.b.emit(free_name(f"{tensor}_as_{renamed[0][1]}", self.b.tensors), Alias(), tensor)
            self.aliases[tensor, renamed] = self.b.deliver_as(alias, f"{alias}_out", renamed)
        return self.aliases[tensor, renamed]

    def _dtype(self, value: Traced) -> Dtype:
        return "int64" if value.is_index else "fp32" if value.is_wide else self.b.precision.activations

    def _dims(self, dims: Sequence[Dim]) -> Dims:
        return tuple(self.names[dim] for dim in dims)

    def _positions(self, positions: Sequence[Position]) -> Positions:
        return tuple(self._dims(factors(position)) for position in positions)


def _in_factors(step: TracedStep) -> Position:
    """Return the dims of a table's rows where they are a product, of which no part has its rows side by side."""
    rows = factors(step.reads[0].positions[0]) if step.sort == "rows" else ()
    return rows if len(rows) > 1 else ()


def _named(program: TracedProgram) -> Mapping[Dim, str]:
    """Name all dims, after the inputs and the modules that have them."""
    reads = [read for step in program.steps for read in step.reads]
    renames = [pair for read in reads for pair in read.renamed.items()]
    before = -1
    while before != (before := sum(len(factors(pair)) for pair in renames)):  # a split of one may split another
        for old, new in renames:
            match_sizes(old, new)
    names: dict[Dim, str] = {}
    all_dims = [*(value.dims for value in program.values), *(read.dims for read in reads)]
    all_dims += [factors(step.whole) for step in program.steps] + [
        factors(dims) for step in program.steps for dims in step.products
    ]
    hidden = _hidden(program)
    for dim in (dim for dims in all_dims for dim in dims):
        if dim not in names:
            hint = "hidden" if dim is hidden else shown_hint(dim)
            count = sum(re.fullmatch(rf"{hint}(_\d+)?", name) is not None for name in names.values())
            names[dim] = f"{hint}_{count + 1}" if count else hint
    return names


def _hidden(program: TracedProgram) -> Dim | None:
    """Return the dim that clearly most parameters share, as a hidden size is, unless the user has named it."""
    parameters = [value for value in program.values if value.origin == "parameter"]
    shared = Counter(dim for value in parameters for dim in value.dims).most_common(2)
    if not shared or shared[0][0].is_given or 2 * shared[0][1] <= len(parameters):
        return None
    next_count = shared[1][1] if len(shared) > 1 else 0  # in small modules both dims of a product are as frequent
    return shared[0][0] if 2 * shared[0][1] >= 3 * next_count else None
