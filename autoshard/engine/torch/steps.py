"""Instructions of a block on one rank, each prepared to run: its kernel, its group, its shapes, the values it drops."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from autoshard.engine.observing import Observation, observation_behind
from autoshard.engine.programs import BlockProgram
from autoshard.engine.routing import CountRows, Routing, dispatches, holds_rows, moves_rows, works_by_expert
from autoshard.engine.rows import is_wide, read_whole, runs_of, token_cuts
from autoshard.engine.torch.collectives import around_ring, communication
from autoshard.engine.torch.execution import ANY_COUNT, FewRows, RankStep, dropping, num_rows
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.joint import Joint, joint_products
from autoshard.engine.torch.kernels import Kernel, KernelContext, Rotations, kernel_of
from autoshard.engine.torch.kernels.grouped import rounds_experts
from autoshard.engine.torch.kernels.kernel import laid_out
from autoshard.engine.torch.kernels.matrices import GRADIENTS, VALUES, Multiplier, Smaller
from autoshard.engine.torch.kernels.products import adding
from autoshard.engine.torch.kernels.router import observing
from autoshard.engine.torch.kernels.sinks import counting_sinks
from autoshard.engine.torch.routed import counting, exchange, sharing_counts
from autoshard.engine.torch.world import World
from autoshard.graph.block import Block
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.kinds.sinks import without_sinks
from autoshard.graph.op import Op
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
    in_fp8: bool = False  # whether products with the weights of layers have factors in FP8

    def bounds(self, compute: Compute) -> Mapping[str, tuple[int, int]]:
        """Return which part of each cut dim this rank computes."""
        return {dim: self.mesh_rank.dim_bounds(dim, atoms) for dim, atoms in compute.cuts.items() if atoms}

    def smaller(self, block: Block, op: Op) -> Smaller | None:
        """Return the formats of the factors of a product, where these are not those of the tensors.

        Products of experts have one, where the device has any, and gradients of their weights keep that of the tensors.
        """
        if not self.in_fp8 or op.source not in block.weight_products:
            return None
        if op.source in block.expert_products:
            return (VALUES, VALUES) if op.pass_ != "W" and rounds_experts(self.formats.device) else None
        first, second = (GRADIENTS if block.tensors[name].role == "gradient" else VALUES for name in op.inputs)
        return first, second

    def multiplier(self, block: Block, op: Op) -> Multiplier:
        """Return how this rank multiplies the factors of a product."""
        return Multiplier(self.formats.device, self.smaller(block, op))

    def numbers(self, tensor: str, layout: Layout) -> torch.Tensor:
        """Return this rank's part of positions, or of what numbers a dim."""
        ((start, stop),) = self.mesh_rank.bounds(layout)
        return self.positions[start:stop] if tensor in POSITIONS else torch.arange(start, stop)

    def sizes(self, compute: Compute) -> Mapping[str, int]:
        """Return the size of every dim of an operation's tensors on this rank."""
        local = {dim: stop - start for dim, (start, stop) in self.bounds(compute).items()}
        few = {} if self.rows is None else {"batch": 1, "seq": self.rows}
        return {**self.mesh_rank.sizes, **local, **few}


def steps_of(context: RankContext, parts: BlockProgram, kind: str, read_later: set[str]) -> Iterator[RankStep]:
    """Prepare the instructions of an action; a value is dropped after its last reader, unless it is ``read_later``.

    Weights are not held between actions: each action takes them from outside again.
    """
    weights, instructions = {tensor.name for tensor in parts.block.parameters}, parts.instructions(kind)
    present = {name for entry in instructions if isinstance(entry, Given) for name in written_by(entry)}
    missing = {name for entry in instructions for name in read_by(entry)} - present
    inputs = (entry for entry in parts.program.instructions if isinstance(entry, Given))
    again = (entry for entry in inputs if entry.value.tensor in weights and entry.value.name in missing)
    read_later = read_later - weights
    joint = Joint(entries=(*again, *instructions))
    if context.joins and kind in "FB":
        multiplier = partial(context.multiplier, parts.block)
        joint = joint_products((context.mesh_rank, context.formats, multiplier), parts, joint.entries, read_later)
    return dropping(tuple(_local_steps(context, parts, joint, read_later)), read_later)


def _local_steps(context: RankContext, parts: BlockProgram, joint: Joint, read_later: set[str]) -> Iterator[RankStep]:
    """Yield the steps; a gradient that only its sum reads is never held where one kernel can add it."""
    entries, routing = joint.entries, routing_of(context, parts)
    num_readers = Counter(name for entry in entries for name in read_by(entry))
    makers = {
        entry.writes[0].name: entry
        for entry in entries
        if isinstance(entry, Compute) and id(entry) not in joint.instead
    }
    read_once = {name: entry for name, entry in makers.items() if num_readers[name] == 1 and name not in read_later}
    added = dict(_added(context, parts, entries, read_once))
    overwritable = {name for name, entry in read_once.items() if entry.op.kind.owns_result}
    runs = tuple(runs_of(entries))
    for number, (entry, *more) in enumerate(runs):
        if token_cuts(entry):
            yield _by_rows(context, parts, (entry, *more), read_whole(runs[number + 1 :]) | read_later)
            continue
        if id(entry) in joint.instead:
            yield from joint.instead[id(entry)]
            continue
        writes = values_written(entry)
        adds, names = writes[0].name in added, written_by(entry)
        yield from _shared_counts(context, routing, entry)
        if adds:
            run, reads = added[names[0]]
        elif routing and (by_counts := _routed(context, parts, routing, entry)):
            run, reads = by_counts
        else:
            run, reads = kernel_for(context, parts.block, entry, overwritable), read_by(entry)
        if isinstance(entry, Given):
            reads = (entry.value.name,)
        if reads or not adds:
            yield RankStep(
                entry=entry, run=run, reads=reads, writes=names, adds=adds and isinstance(entry, Compute),
                shapes=tuple(_shape(context, routing, value) for value in writes),
                counted=routing is not None and routing.exchanges and (works_by_expert(entry) or moves_rows(entry)),
            )  # fmt: skip
        yield from _counted(routing, names)
        if seen := observation_behind(entry, context.mesh_rank.sizes, packed=context.packed):
            yield _observe(context, seen)
        yield from joint.behind.get(id(entry), ())


def _by_rows(
    context: RankContext, parts: BlockProgram, entries: Sequence[Instruction], read_later: Collection[str]
) -> RankStep:
    """Return a step that executes a run for a few rows at a time, and writes the values that are ``read_later``."""
    reads = tuple(value.name for value in inputs_of(entries))
    results = {value.name: value for entry in entries for value in values_written(entry) if value.name in read_later}
    num_readers = Counter(name for entry in entries for name in read_by(entry))
    wide = next(value for entry in entries for value in (*values_read(entry), *values_written(entry)) if is_wide(value))
    batch, positions, width = context.mesh_rank.shape(wide.layout)
    rows = num_rows(batch * positions, width, context.formats.device)
    few = replace(context, rows=rows)
    overwritable = {
        value.name
        for entry in entries
        for value in values_written(entry)
        if isinstance(entry, Compute) and entry.op.kind.owns_result and num_readers[value.name] == 1
    } - results.keys()
    steps: list[RankStep] = []
    for entry in entries:
        shapes = tuple((1, rows, *context.mesh_rank.shape(value.layout)[2:]) for value in values_written(entry))
        run, writes = kernel_for(few, parts.block, entry, overwritable), written_by(entry)
        step = RankStep(entry=entry, run=run, reads=read_by(entry), writes=writes, shapes=shapes)
        steps.append(step)
        if results.keys() & set(writes):
            (name,) = writes
            place = f"{name}.all"
            steps.append(replace(step, run=_written, reads=(place, name), writes=(place,)))
    few_rows = FewRows(
        steps=tuple(dropping(steps, ())), reads=(*reads, *(f"{name}.all" for name in results)), rows=rows,
        dtypes=tuple(context.formats.of(parts.block.tensors[value.tensor].dtype) for value in results.values()),
    )  # fmt: skip
    shapes = tuple(context.mesh_rank.shape(value.layout) for value in results.values())
    run = partial(few_rows.run, shapes)
    return RankStep(entry=entries[-1], run=run, reads=reads, writes=tuple(results), shapes=shapes, few=few_rows)


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


def _counted(routing: Routing | None, written: Collection[str]) -> Iterator[RankStep]:
    """Yield the step that counts the rows of this rank's tokens, as soon as these have chosen."""
    if routing and routing.chosen.name in written:
        writes = (routing.rows,) if routing.exchanges else routing.made
        entry = CountRows(reads=routing.chosen, writes=writes)
        yield RankStep(
            entry=entry, run=counting(routing), reads=(routing.chosen.name,), writes=writes,
            shapes=((routing.place.sizes["experts"],),),
        )  # fmt: skip


def _shared_counts(context: RankContext, routing: Routing | None, entry: Instruction) -> Iterator[RankStep]:
    """Yield the step that tells ranks each other's counts, before tokens are copied to rows."""
    if routing and routing.exchanges and dispatches(entry) and not entry.op.again:
        place = routing.place
        ends = [(len(range(*place.bounds(layout)[0])),) for layout in routing.by_expert]
        yield RankStep(
            entry=CountRows(reads=routing.chosen, writes=routing.made), run=sharing_counts(context.world, routing),
            reads=(routing.rows,), writes=routing.made, counted=True,
            shapes=((place.sizes["experts"], place.sizes["slots"]), *ends),
        )  # fmt: skip


def _observe(context: RankContext, seen: Observation) -> RankStep:
    """Return the step that notes something for reports."""
    experts = context.mesh_rank.sizes["experts"]
    return RankStep(
        entry=seen, run=observing(seen, experts), reads=tuple(value.name for value in seen.reads),
        writes=(seen.writes,), shapes=((experts + 1 if seen.noted == "choices" else 1,),),
    )  # fmt: skip


def _routed(
    context: RankContext, parts: BlockProgram, routing: Routing, entry: Instruction
) -> tuple[Kernel | None, tuple[str, ...]] | None:
    """Return the kernel of an instruction that needs the counts of rows, and the names of all that it reads."""
    if works_by_expert(entry):
        return kernel_for(context, parts.block, entry, ()), (*read_by(entry), routing.ends(entry.reads[0].layout))
    if moves_rows(entry):
        return exchange(context.world, routing, entry), (*read_by(entry), routing.counts)
    return None


def _added(
    context: RankContext, parts: BlockProgram, entries: Sequence[Instruction], read_once: Mapping[str, Compute]
) -> Iterator[tuple[str, tuple[Kernel, tuple[str, ...]]]]:
    """Yield, by value, the kernels that add a product to a sum, with their inputs; nothing for what these replace.

    ``read_once`` has the makers of values that only one instruction reads, by value. That instruction may be a sum of
    gradients over micro-batches, or of several readers.
    """
    for entry in entries:
        if isinstance(entry, Compute) and isinstance(entry.op.kind, Accumulate):
            (total, gradient), (name,) = read_by(entry), written_by(entry)
            product = read_once.get(gradient)
            if product and (run := _adding(context, parts, product, entry.writes[0])):
                yield name, (run, (total, *read_by(product)))
                yield gradient, (run, ())
        elif isinstance(entry, Sum):
            terms = {name: product for name, product in read_once.items() if name in read_by(entry)}
            products = [name for name in terms if _adding(context, parts, terms[name], entry.writes)]
            for before, name in pairwise(products):
                run = _adding(context, parts, terms[name], entry.writes)
                assert run, "a product adds to a sum"
                yield name, (run, (before, *read_by(terms[name])))
            if products[1:]:
                reads = [value for value in entry.reads if value.name not in products[:-1]]
                yield entry.writes.name, (_sum(reads, entry.writes, products), tuple(value.name for value in reads))


def _adding(context: RankContext, parts: BlockProgram, product: Compute, total: Value) -> Kernel | None:
    """Return a kernel that adds a product to a sum in one call; None where it is no product, or has another format."""
    if not isinstance(product.op.kind, Einsum) or dims_of(product.writes[0].layout) != dims_of(total.layout):
        return None
    factors = {context.formats.of(parts.block.tensors[value.tensor].dtype) for value in product.reads}
    into = context.formats.of(parts.block.tensors[total.tensor].dtype)
    multiplier = context.multiplier(parts.block, product.op)
    if len(factors) > 1 or not multiplier.adds(factors.pop(), into):
        return None
    call = parts.block.call(product.op, context.sizes(product))
    return adding(product.op.kind, call, multiplier, packed=context.packed)


def kernel_for(context: RankContext, block: Block, entry: Instruction, overwritable: Collection[str]) -> Kernel | None:
    """Return the kernel of an instruction; a sum may overwrite ``overwritable`` values, which nothing else reads."""
    match entry:
        case Given():
            return None
        case Compute():
            local = KernelContext(
                formats=context.formats,
                bounds=context.bounds(entry),
                rotations=context.rotations,
                packed=context.packed,
                smaller=context.smaller(block, entry.op) if isinstance(entry.op.kind, Einsum) else None,
            )
            kind = without_sinks(entry.op.kind) if entry.ring else entry.op.kind  # sinks join when all keys were there
            kernel = kernel_of(kind, block.call(entry.op, context.sizes(entry)), local)
            if not entry.ring:
                return kernel
            around = around_ring(context.world, context.mesh_rank, entry, kernel, context.positions)
            return counting_sinks(entry.op.kind, around)
        case Communicate():
            change = communication(context.world, context.mesh_rank, entry)
            return lambda block: (change(block),)
        case CountOnce(atoms=atoms):
            first = context.mesh_rank.is_first(atoms)
            return lambda block: (block if first else torch.zeros_like(block),)
        case Sum(reads=reads, writes=writes):
            return _sum(reads, writes, overwritable)


def _sum(reads: Sequence[Value], writes: Value, overwritable: Collection[str]) -> Kernel:
    """Return a kernel that adds values, in the memory of one of the first two if that may be overwritten."""
    dims = dims_of(writes.layout)
    lays = [laid_out(dims_of(value.layout), dims) for value in reads]
    if len(reads) == 1:
        return lambda block: (lays[0](block),)
    free = [value.name in overwritable and dims_of(value.layout) == dims for value in reads[:2]]

    def add(*blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, *more = (lay(block) for lay, block in zip(lays, blocks, strict=True))
        total = first.add_(second) if free[0] else second.add_(first) if free[1] else first + second
        for block in more:
            total += block
        return (total,)

    return add
