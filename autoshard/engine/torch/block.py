"""One block on one rank: its program executed literally, forward and backward, instruction by instruction."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.engine.place import Place, dims_of
from autoshard.engine.programs import BlockProgram, read_by, written_by
from autoshard.engine.torch.collectives import communication
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.kernels import Kernel, Local, kernel
from autoshard.engine.torch.kernels.rotations import Rotations
from autoshard.engine.torch.ring import around
from autoshard.engine.torch.world import World
from autoshard.layout.program import Communicate, Compute, CountOnce, Given, Instruction, Sum, Value
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

    @classmethod
    def of(cls, bench: Bench, parts: BlockProgram) -> "BlockRun":
        """Make ready what every action runs."""
        results = {value.name for value in parts.program.results.values()}
        later = {
            "F": {name for entry in parts.backward for name in read_by(entry)} | {_handed_on(parts).name},
            "B": results,
            "I": {name for entry in parts.part("W") for name in read_by(entry)} | results,
            "W": results,
        }
        entries = {kind: _with_weights(parts, parts.part(kind)) for kind in later}
        steps = {kind: tuple(_steps(bench, parts, entries[kind], kept)) for kind, kept in later.items()}
        made = {kind: {tensor: value.name for tensor, value in parts.made(kind).items()} for kind in later}
        return cls(place=bench.place, parts=parts, steps=steps, made=made, handed_back=parts.handed_back)

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
        return {tensor: values[name] for tensor, name in self.made[kind].items()}

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


def _steps(bench: Bench, parts: BlockProgram, entries: Sequence[Instruction], kept: set[str]) -> Iterable[_Step]:
    """Make instructions ready; after its last reader a value goes, unless a later part wants it."""
    weights = {tensor.name for tensor in parts.block.parameters}
    kept = kept - weights
    last: dict[str, int] = {}
    for number, entry in enumerate(entries):
        last |= dict.fromkeys((*read_by(entry), *written_by(entry)), number)
    for number, entry in enumerate(entries):
        touched = dict.fromkeys((*read_by(entry), *written_by(entry)))
        yield _Step(
            run=_kernel(bench, parts, entry),
            reads=(entry.value.tensor,) if isinstance(entry, Given) else read_by(entry),
            writes=written_by(entry),
            shapes=tuple(bench.place.shape(value.layout) for value in _made(entry)),
            drops=tuple(name for name in touched if last[name] == number and name not in kept),
        )


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
    bounds = {dim: bench.place.dim_bounds(dim, atoms) for dim, atoms in compute.cuts.items() if atoms}
    sizes = {**bench.place.sizes, **{dim: stop - start for dim, (start, stop) in bounds.items()}}
    local = Local(formats=bench.formats, bounds=bounds, rotations=bench.rotations)
    found = kernel(compute.op.kind, parts.block.call(compute.op, sizes), local)
    return around(bench.world, bench.place, compute, found, bench.positions) if compute.ring else found


def _sum(reads: Sequence[Value], writes: Value) -> Kernel:
    target = dims_of(writes.layout)
    orders = [[dims_of(value.layout).index(dim) for dim in target] for value in reads]

    def add(*blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moved = [block.permute(order) for block, order in zip(blocks, orders, strict=True)]
        total = moved[0]
        for block in moved[1:]:
            total = total + block
        return (total,)

    return add
