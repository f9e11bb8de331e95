"""One block on one rank: its program executed literally, forward and backward, instruction by instruction."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.engine.place import Place, dims_of
from autoshard.engine.programs import BlockProgram
from autoshard.engine.torch.collectives import communication
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.kernels import Kernel, Local, kernel
from autoshard.engine.torch.kernels.products import adding
from autoshard.engine.torch.kernels.rotations import Rotations
from autoshard.engine.torch.ring import around
from autoshard.engine.torch.world import World
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.layout.program import (
    Communicate,
    Compute,
    CountOnce,
    Given,
    Instruction,
    Sum,
    Value,
    read_by,
    written_by,
)
from autoshard.schedule.action import ActionKind

Values = dict[str, torch.Tensor]  # what a rank holds while a program runs, by the values' names
Giving = Callable[[str], torch.Tensor]  # what is there before a block starts, by tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all blocks of a rank share: where it stands, its groups, formats, and the positions of the sequence."""

    world: World
    place: Place
    formats: Formats
    positions: torch.Tensor  # of the whole sequence, in the order in which it is cut
    rotations: Rotations


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """An instruction, ready to run: what it reads and writes, and what nobody reads after it."""

    run: Kernel | None  # None: takes what is given
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    drops: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Executes a block's program on one rank; a part of it for each kind of action."""

    place: Place
    parts: BlockProgram
    steps: Mapping[str, tuple[_Step, ...]]
    made: Mapping[str, Mapping[str, str]]  # by kind of action the results, by tensor
    handed_back: str | None
    waiting: frozenset[str]  # values that I leaves for W

    @classmethod
    def of(cls, bench: Bench, parts: BlockProgram) -> "BlockRun":
        """Make ready what every action runs."""
        results = {value.name for value in parts.program.results.values()}
        waiting = frozenset(name for entry in parts.part("W") for name in read_by(entry))
        later = {
            "F": {name for entry in parts.backward for name in read_by(entry)} | {_handed_on(parts).name},
            "B": results,
            "I": waiting | results,
            "W": results,
        }
        entries = {kind: _with_weights(parts, parts.part(kind)) for kind in later}
        steps = {kind: tuple(_steps(bench, parts, entries[kind], kept)) for kind, kept in later.items()}
        made = {kind: {tensor: value.name for tensor, value in parts.made(kind).items()} for kind in later}
        return cls(
            place=bench.place, parts=parts, steps=steps, made=made, handed_back=parts.handed_back, waiting=waiting
        )

    def forward(self, giving: Giving) -> tuple[torch.Tensor, Values]:
        """Run the forward pass; return what is handed on, and all values that backward reads."""
        values: Values = {}
        self._execute("F", giving, values)
        name = _handed_on(self.parts).name
        read = any(name in step.reads for step in self.steps["B"])
        return (values[name] if read else values.pop(name)), values

    def backward(self, kind: ActionKind, giving: Giving, values: Values) -> Values:
        """Run the backward pass (B) or a half of it (I, W); return what it makes.

        That is by tensor sums of gradients, and what is handed back.
        """
        self._execute(kind, giving, values)
        results = {tensor: values[name] for tensor, name in self.made[kind].items()}
        if kind == "I":
            for name in values.keys() - self.waiting:
                del values[name]
        return results

    def _execute(self, kind: str, giving: Giving, values: Values) -> None:
        for step in self.steps[kind]:
            if step.run is None:
                values[step.writes[0]] = giving(step.reads[0])
            else:
                made = step.run(*[values[name] for name in step.reads])
                for name, tensor, shape in zip(step.writes, made, step.shapes, strict=True):
                    assert tensor.shape == shape, f"{name} is {tuple(tensor.shape)}, not {shape}"
                    values[name] = tensor
            for name in step.drops:
                del values[name]


def _handed_on(parts: BlockProgram) -> Value:
    return parts.program.results[parts.handed_on]


def _with_weights(parts: BlockProgram, entries: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Let a part take weights that another part took first: nobody keeps them meanwhile."""
    weights = {tensor.name for tensor in parts.block.parameters}
    taken = {name for entry in entries if isinstance(entry, Given) for name in written_by(entry)}
    read = {name for entry in entries for name in read_by(entry)}
    given = (entry for entry in parts.program.instructions if isinstance(entry, Given))
    missing = (entry for entry in given if entry.value.tensor in weights and entry.value.name in read - taken)
    return (*missing, *entries)


def _steps(bench: Bench, parts: BlockProgram, entries: Sequence[Instruction], kept: set[str]) -> Iterator[_Step]:
    """Make instructions ready; after its last reader a value goes, unless a later part wants it."""
    weights = {tensor.name for tensor in parts.block.parameters}
    kept = kept - weights
    tasks = tuple(_tasks(bench, parts, entries, kept))
    last: dict[str, int] = {}
    for number, task in enumerate(tasks):
        last |= dict.fromkeys(task.touched, number)
    for number, task in enumerate(tasks):
        yield _Step(
            run=task.run,
            reads=task.reads,
            writes=tuple(value.name for value in task.writes),
            shapes=tuple(bench.place.shape(value.layout) for value in task.writes),
            drops=tuple(name for name in task.touched if last[name] == number and name not in kept),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What runs as one: an instruction, or a product that adds to a sum of gradients by itself."""

    run: Kernel | None
    reads: tuple[str, ...]  # values; of what is given the tensor
    writes: tuple[Value, ...]

    @property
    def touched(self) -> Iterable[str]:
        """Every value that it reads or writes, once."""
        read = self.reads if self.run else ()
        return dict.fromkeys((*read, *(value.name for value in self.writes)))


def _tasks(bench: Bench, parts: BlockProgram, entries: Sequence[Instruction], kept: set[str]) -> Iterator[_Task]:
    """Yield what runs; a gradient that nothing but its sum reads is never held where one kernel can add it."""
    read = Counter(name for entry in entries for name in read_by(entry))
    made = {entry.writes[0].name: entry for entry in entries if isinstance(entry, Compute)}
    sums = [entry for entry in made.values() if isinstance(entry.op.kind, Accumulate)]
    alone = [entry for entry in sums if read[entry.reads[1].name] == 1 and entry.reads[1].name not in kept]
    added: dict[str, _Task] = {}
    for entry in alone:
        product = made.get(entry.reads[1].name)
        run = product and _adding(bench, parts, product, entry)
        if product and run:
            task = _Task(run=run, reads=(entry.reads[0].name, *read_by(product)), writes=entry.writes)
            added |= {entry.writes[0].name: task, product.writes[0].name: task}
    for entry in entries:
        name = written_by(entry)[0]
        if name not in added:
            reads = (entry.value.tensor,) if isinstance(entry, Given) else read_by(entry)
            yield _Task(run=_kernel(bench, parts, entry), reads=reads, writes=_made(entry))
        elif added[name].writes[0].name == name:
            yield added[name]


def _adding(bench: Bench, parts: BlockProgram, product: Compute, entry: Compute) -> Kernel | None:
    """Return what adds a product to a sum in one go; None where it is no product, or of another format."""
    if not isinstance(product.op.kind, Einsum):
        return None
    call = parts.block.call(product.op, _sizes(bench, product))
    dtypes = {bench.formats.of(parts.block.tensors[value.tensor].dtype) for value in (*product.reads, *entry.writes)}
    return adding(product.op.kind, call) if len(dtypes) == 1 else None


def _made(entry: Instruction) -> tuple[Value, ...]:
    match entry:
        case Given(value=value):
            return (value,)
        case Compute(writes=writes):
            return writes
        case _:
            return (entry.writes,)


def _kernel(bench: Bench, parts: BlockProgram, entry: Instruction) -> Kernel | None:
    match entry:
        case Given():
            return None
        case Compute():
            return _compute(bench, parts, entry)
        case Communicate():
            change = communication(bench.world, bench.place, entry)
            return lambda block: (change(block),)
        case CountOnce(atoms=atoms):
            first = bench.place.is_first(atoms)
            return lambda block: (block if first else torch.zeros_like(block),)
        case Sum(reads=reads, writes=writes):
            return _sum(reads, writes)


def _compute(bench: Bench, parts: BlockProgram, compute: Compute) -> Kernel:
    local = Local(formats=bench.formats, bounds=_bounds(bench, compute), rotations=bench.rotations)
    found = kernel(compute.op.kind, parts.block.call(compute.op, _sizes(bench, compute)), local)
    return around(bench.world, bench.place, compute, found, bench.positions) if compute.ring else found


def _bounds(bench: Bench, compute: Compute) -> Mapping[str, tuple[int, int]]:
    """Return which part of each cut dim this rank computes."""
    return {dim: bench.place.dim_bounds(dim, atoms) for dim, atoms in compute.cuts.items() if atoms}


def _sizes(bench: Bench, compute: Compute) -> Mapping[str, int]:
    parts = {dim: stop - start for dim, (start, stop) in _bounds(bench, compute).items()}
    return {**bench.place.sizes, **parts}


def _sum(reads: Sequence[Value], writes: Value) -> Kernel:
    target = dims_of(writes.layout)
    orders = [[dims_of(value.layout).index(dim) for dim in target] for value in reads]

    def add(*blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moved = [block.permute(order) for block, order in zip(blocks, orders, strict=True)]
        total = moved[0] + moved[1]
        for block in moved[2:]:
            total += block
        return (total,)

    return add
