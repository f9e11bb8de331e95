"""Instructions of a block on one rank, each prepared to run: its kernel, its group, its shapes, the values it drops."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from autoshard.engine.programs import BlockProgram
from autoshard.engine.routing import CountRows, Routing, dispatches, holds_rows, moves_rows, multiplies
from autoshard.engine.rows import is_wide, read_whole, runs_of, token_cuts
from autoshard.engine.torch.collectives import around_ring, communication
from autoshard.engine.torch.execution import ANY_COUNT, FewRows, RankStep, dropping, num_rows
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.joint import Joint, joint_products
from autoshard.engine.torch.kernels import Kernel, KernelContext, Rotations, kernel_of
from autoshard.engine.torch.kernels.kernel import laid_out
from autoshard.engine.torch.kernels.products import adding, adds_wide
from autoshard.engine.torch.routed import counting, exchange
from autoshard.engine.torch.world import World
from autoshard.graph.block import Block
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.layout.layout import Layout
from autoshard.layout.program import (
    Communicate,
    Compute,
    CountOnce,
    Given,
    Instruction,
    Sum,
    Value,
    inputs_of,
    read_by,
    values_read,
    values_written,
    written_by,
)
from autoshard.run.placement import MeshRank, dims_of

POSITIONS = ("positions", "key_positions")  # which the plan orders
COUNTS = ("columns", "kv_numbers", "group_numbers")  # that number what lies along a dim
NUMBERS = (*POSITIONS, *COUNTS)  # which no batch brings; they lie on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What all blocks of a rank share: its place on the mesh, its groups, formats, and positions of the sequence."""

    world: World
    mesh_rank: MeshRank
    formats: Formats
    positions: torch.Tensor  # of the whole sequence, in the order in which it is cut
    rotations: Rotations
    packed: bool = False  # as kernels know it
    rows: int | None = None  # how many tokens are computed at a time, if not all of a micro-batch
    joins: bool = False  # whether products of one tensor with several weights are one

    def bounds(self, compute: Compute) -> Mapping[str, tuple[int, int]]:
        """Return which part of each cut dim this rank computes."""
        return {dim: self.mesh_rank.dim_bounds(dim, atoms) for dim, atoms in compute.cuts.items() if atoms}

    def numbers(self, tensor: str, layout: Layout) -> torch.Tensor:
        """Return this rank's part of positions, or of what numbers a dim."""
        ((start, stop),) = self.mesh_rank.bounds(layout)
        return self.positions[start:stop] if tensor in POSITIONS else torch.arange(start, stop)

    def sizes(self, compute: Compute) -> Mapping[str, int]:
        """Return the sizes of all dims as this rank computes."""
        own = {dim: stop - start for dim, (start, stop) in self.bounds(compute).items()}
        few = {} if self.rows is None else {"batch": 1, "seq": self.rows}
        return {**self.mesh_rank.sizes, **own, **few}


def steps_of(context: RankContext, parts: BlockProgram, kind: str, kept: set[str]) -> Iterator[RankStep]:
    """Prepare instructions; a value is dropped after its last reader, unless a later part reads it.

    Weights are not kept between parts: each takes them again.
    """
    weights, own = {tensor.name for tensor in parts.block.parameters}, parts.instructions(kind)
    taken = {name for entry in own if isinstance(entry, Given) for name in written_by(entry)}
    missing = {name for entry in own for name in read_by(entry)} - taken
    given = (entry for entry in parts.program.instructions if isinstance(entry, Given))
    again = (entry for entry in given if entry.value.tensor in weights and entry.value.name in missing)
    kept = kept - weights
    joint = Joint(entries=(*again, *own))
    if context.joins and kind in "FB":
        joint = joint_products(context.mesh_rank, context.formats, parts, joint.entries, kept)
    return dropping(tuple(_local_steps(context, parts, joint, kept)), kept)


def _local_steps(context: RankContext, parts: BlockProgram, joint: Joint, kept: set[str]) -> Iterator[RankStep]:
    """Yield the steps; a gradient that only its sum reads is never held where one kernel can add it."""
    entries, routing = joint.entries, routing_of(context, parts)
    num_readers = Counter(name for entry in entries for name in read_by(entry))
    made = {one.writes[0].name: one for one in entries if isinstance(one, Compute) and id(one) not in joint.instead}
    alone = {name for name, entry in made.items() if num_readers[name] == 1} - kept
    added = dict(_added(context, parts, entries, {name: made[name] for name in made if name in alone}))
    own = {name for name in alone if made[name].op.kind.owns_result}
    every = tuple(runs_of(entries))
    for number, (entry, *others) in enumerate(every):
        if token_cuts(entry):
            yield _by_rows(context, parts, (entry, *others), read_whole(every[number + 1 :]) | kept)
            continue
        if id(entry) in joint.instead:
            yield from joint.instead[id(entry)]
            continue
        writes = values_written(entry)
        adds, names = writes[0].name in added, written_by(entry)
        if routing and dispatches(entry) and not entry.op.again:
            yield _count(context, routing)
        if adds:
            run, reads = added[names[0]]
        elif routing and (found := _routed(context, parts, routing, entry)):
            run, reads = found
        else:
            run, reads = kernel_for(context, parts.block, entry, own), read_by(entry)
        if isinstance(entry, Given):
            reads = (entry.value.tensor,)
        if reads or not adds:
            yield RankStep(
                entry=entry, run=run, reads=reads, writes=names, adds=adds and isinstance(entry, Compute),
                shapes=tuple(_shape(context, routing, value) for value in writes),
                counted=routing is not None and routing.exchanges and (multiplies(entry) or moves_rows(entry)),
            )  # fmt: skip
        yield from joint.behind.get(id(entry), ())


def _by_rows(
    context: RankContext, parts: BlockProgram, entries: Sequence[Instruction], wanted: Collection[str]
) -> RankStep:
    """Return a step that executes a run for a few rows at a time, and makes the ``wanted`` values."""
    taken = tuple(value.name for value in inputs_of(entries))
    made = {value.name: value for entry in entries for value in values_written(entry) if value.name in wanted}
    num_readers = Counter(name for entry in entries for name in read_by(entry))
    wide = next(value for entry in entries for value in (*values_read(entry), *values_written(entry)) if is_wide(value))
    batch, positions, width = context.mesh_rank.shape(wide.layout)
    rows = num_rows(batch * positions, width, context.formats.device)
    few = replace(context, rows=rows)
    own = {
        value.name
        for entry in entries
        for value in values_written(entry)
        if isinstance(entry, Compute) and entry.op.kind.owns_result and num_readers[value.name] == 1
    } - made.keys()
    steps: list[RankStep] = []
    for entry in entries:
        values = values_written(entry)
        shapes = tuple((1, rows, *context.mesh_rank.shape(value.layout)[2:]) for value in values)
        one = RankStep(
            entry=entry, run=kernel_for(few, parts.block, entry, own), reads=read_by(entry), writes=written_by(entry),
            shapes=shapes,
        )  # fmt: skip
        steps.append(one)
        if made.keys() & set(one.writes):
            (name,) = one.writes
            place = f"{name}.all"
            steps.append(replace(one, run=_written, reads=(place, name), writes=(place,)))
    found = FewRows(
        steps=tuple(dropping(steps, ())), reads=(*taken, *(f"{name}.all" for name in made)), rows=rows,
        dtypes=tuple(context.formats.of(parts.block.tensors[value.tensor].dtype) for value in made.values()),
    )  # fmt: skip
    shapes = tuple(context.mesh_rank.shape(value.layout) for value in made.values())
    run = partial(found.run, shapes)
    return RankStep(entry=entries[-1], run=run, reads=taken, writes=tuple(made), shapes=shapes, few=found)


def _written(place: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor]:
    return (place.copy_(value),)


def routing_of(context: RankContext, parts: BlockProgram) -> Routing | None:
    """Return the routing of a block's experts that drop nothing, if it has any."""
    return Routing.of(context.mesh_rank, parts.program) if context.packed else None


def _shape(context: RankContext, routing: Routing | None, value: Value) -> tuple[int, ...]:
    shape = context.mesh_rank.shape(value.layout)
    if not routing or not holds_rows(value):
        return shape
    rows = routing.num_rows(value.layout)
    return (1, ANY_COUNT if rows is None else rows, *shape[2:])


def _count(context: RankContext, routing: Routing) -> RankStep:
    """Return the step that counts rows."""
    entry, place = CountRows(reads=routing.chosen, writes=routing.made), routing.place
    ends = [(len(range(*place.bounds(layout)[0])),) for layout in routing.multiplied]
    counts = [(place.sizes["experts"], place.sizes["slots"])] if routing.exchanges else []
    return RankStep(
        entry=entry, run=counting(context.world, routing), reads=(routing.chosen.name,), writes=entry.writes,
        shapes=(*counts, *ends), counted=routing.exchanges,
    )  # fmt: skip


def _routed(
    context: RankContext, parts: BlockProgram, routing: Routing, entry: Instruction
) -> tuple[Kernel | None, tuple[str, ...]] | None:
    """Return the kernel of an instruction that needs the counts of rows, and the names of all that it reads."""
    if multiplies(entry):
        return kernel_for(context, parts.block, entry, ()), (*read_by(entry), routing.ends(entry.reads[0].layout))
    if moves_rows(entry):
        return exchange(context.world, routing, entry), (*read_by(entry), routing.counts)
    return None


def _added(
    context: RankContext, parts: BlockProgram, entries: Sequence[Instruction], alone: Mapping[str, Compute]
) -> Iterator[tuple[str, tuple[Kernel, tuple[str, ...]]]]:
    """Yield, by value, the kernels that add a product to a sum, with their inputs; nothing for what these replace.

    ``alone`` are values that only one instruction reads: a sum of gradients over micro-batches, or of several readers.
    """
    for entry in entries:
        if isinstance(entry, Compute) and isinstance(entry.op.kind, Accumulate):
            (total, gradient), (name,) = read_by(entry), written_by(entry)
            product = alone.get(gradient)
            if product and (run := _adding(context, parts, product, entry.writes[0])):
                yield name, (run, (total, *read_by(product)))
                yield gradient, (run, ())
        elif isinstance(entry, Sum):
            products = [
                name for name in alone if name in read_by(entry) and _adding(context, parts, alone[name], entry.writes)
            ]
            for before, name in pairwise(products):
                run = _adding(context, parts, alone[name], entry.writes)
                assert run, "a product adds to a sum"
                yield name, (run, (before, *read_by(alone[name])))
            if products[1:]:
                reads = [value for value in entry.reads if value.name not in products[:-1]]
                yield entry.writes.name, (_sum(reads, entry.writes, products), tuple(value.name for value in reads))


def _adding(context: RankContext, parts: BlockProgram, product: Compute, total: Value) -> Kernel | None:
    """Return a kernel that adds a product to a sum in one call; None where it is no product, or has another format."""
    if not isinstance(product.op.kind, Einsum) or dims_of(product.writes[0].layout) != dims_of(total.layout):
        return None
    factors = {context.formats.of(parts.block.tensors[value.tensor].dtype) for value in product.reads}
    into = context.formats.of(parts.block.tensors[total.tensor].dtype)
    if factors != {into} and not (len(factors) == 1 and adds_wide(context.formats.device, *factors, into)):
        return None
    return adding(product.op.kind, parts.block.call(product.op, context.sizes(product)), packed=context.packed)


def kernel_for(context: RankContext, block: Block, entry: Instruction, own: Collection[str]) -> Kernel | None:
    """Return the kernel of an instruction; a sum may overwrite ``own`` values, which nothing else reads."""
    match entry:
        case Given():
            return None
        case Compute():
            local = KernelContext(
                formats=context.formats,
                bounds=context.bounds(entry),
                rotations=context.rotations,
                packed=context.packed,
            )
            found = kernel_of(entry.op.kind, block.call(entry.op, context.sizes(entry)), local)
            ring = entry.ring
            return around_ring(context.world, context.mesh_rank, entry, found, context.positions) if ring else found
        case Communicate():
            change = communication(context.world, context.mesh_rank, entry)
            return lambda block: (change(block),)
        case CountOnce(atoms=atoms):
            first = context.mesh_rank.is_first(atoms)
            return lambda block: (block if first else torch.zeros_like(block),)
        case Sum(reads=reads, writes=writes):
            return _sum(reads, writes, own)


def _sum(reads: Sequence[Value], writes: Value, own: Collection[str]) -> Kernel:
    """Return a kernel that adds values, in the memory of one of the first two if that may be overwritten."""
    dims = dims_of(writes.layout)
    lays = [laid_out(dims_of(value.layout), dims) for value in reads]
    if len(reads) == 1:
        return lambda block: (lays[0](block),)
    free = [value.name in own and dims_of(value.layout) == dims for value in reads[:2]]

    def add(*blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, *more = (lay(block) for lay, block in zip(lays, blocks, strict=True))
        total = first.add_(second) if free[0] else second.add_(first) if free[1] else first + second
        for block in more:
            total += block
        return (total,)

    return add
