"""Run a lowered block on virtual ranks: local operations on shards, collectives as listed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.graph.block import Block
from autoshard.graph.kinds.attention import Attend
from autoshard.graph.kinds.experts import Slot, TokenGroup
from autoshard.graph.kinds.indexing import Lookup, Pick, document_positions
from autoshard.graph.kinds.sinks import sink_gradient, with_sinks, without_sinks
from autoshard.graph.op import Array, Dims
from autoshard.layout.layout import Collective
from autoshard.layout.program import Communicate, Compute, CountOnce, Given, Instruction, Program, Sum, Value
from autoshard.layout.shards import Executor, Shards, rank_bounds
from autoshard.spec.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Executes programs of one block on a virtual mesh."""

    block: Block
    mesh: Mesh
    sizes: Mapping[str, int]

    def run(self, program: Program, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute a program from whole arrays; return its results, whole again."""
        values = self.execute(program, arrays)
        return {
            tensor: self._executor.gather(values[value.name], _dims(value), value.layout)
            for tensor, value in program.results.items()
        }

    def execute(self, program: Program, arrays: Mapping[str, Array]) -> Mapping[str, Shards]:
        """Execute a program from whole arrays; return every value as the ranks hold it, by name."""
        values: dict[str, Shards] = {}
        for instruction in program.instructions:
            for value, shards in self._executed(instruction, arrays, values):
                self._executor.check(shards, value.layout)
                values[value.name] = shards
        return values

    def _executed(
        self, instruction: Instruction, sources: Mapping[str, Array], values: Mapping[str, Shards]
    ) -> Iterable[tuple[Value, Shards]]:
        match instruction:
            case Given(value=value):
                return [(value, self._executor.scatter(sources[value.tensor], _dims(value), value.layout))]
            case Compute(reads=reads, writes=writes):
                arrays = [values[value.name] for value in reads]
                return zip(writes, self._computed(instruction, arrays), strict=True)
            case Communicate(collective=collective, reads=reads, writes=writes):
                return [(writes, self._executor.run(collective, values[reads.name], _dims(reads)))]
            case CountOnce(atoms=atoms, reads=reads, writes=writes):
                ranks = (self.mesh.coordinates(rank) for rank in range(self.mesh.num_ranks))
                first = [all(rank.get(atom, 0) == 0 for atom in atoms) for rank in ranks]
                shards = zip(values[reads.name], first, strict=True)
                return [(writes, tuple(shard if keep else np.zeros_like(shard) for shard, keep in shards))]
            case Sum(reads=reads, writes=writes):
                orders = [[_dims(value).index(dim) for dim in _dims(writes)] for value in reads]
                parts = [
                    [shard.transpose(order) for shard in values[value.name]]
                    for value, order in zip(reads, orders, strict=True)
                ]
                return [(writes, tuple(np.sum(np.stack(shards), axis=0) for shards in zip(*parts, strict=True)))]

    @property
    def _executor(self) -> Executor:
        return Executor(mesh=self.mesh, sizes=self.sizes)

    def _computed(self, instruction: Compute, arrays: Sequence[Shards]) -> list[Shards]:
        if instruction.ring:
            return self._around_ring(instruction, [list(array) for array in arrays])
        results = [
            self._local(instruction, rank, [array[rank] for array in arrays]) for rank in range(self.mesh.num_ranks)
        ]
        return [tuple(result[index] for result in results) for index in range(len(instruction.writes))]

    def _local(self, instruction: Compute, rank: int, arrays: Sequence[Array]) -> tuple[Array, ...]:
        cuts = instruction.cuts.items()
        bounds = {dim: rank_bounds(self.mesh, self.sizes[dim], tuple(atoms))[rank] for dim, atoms in cuts if atoms}
        return evaluate_local(self.block, instruction, self.sizes, bounds, arrays)

    def _around_ring(self, instruction: Compute, arrays: list[list[Array]]) -> list[Shards]:
        """Compute an attention, or its gradient, part by part; sinks join when all keys were there."""
        kind, plain = instruction.op.kind, without_sinks(instruction.op.kind)
        around = self._ring_forward if isinstance(kind, Attend) else self._ring_backward
        if plain == kind:
            return around(instruction, arrays)
        *rest, sink = arrays
        results = around(replace(instruction, op=replace(instruction.op, kind=plain)), rest)
        if isinstance(kind, Attend):
            parts = (with_sinks(*part) for part in zip(*results, sink, strict=True))
            return [tuple(result) for result in zip(*parts, strict=True)]
        upstream, result, lse = (arrays[place] for place in (0, 6, 7))
        return [*results, tuple(sink_gradient(*part) for part in zip(upstream, result, lse, sink, strict=True))]

    def _ring_forward(self, instruction: Compute, arrays: list[list[Array]]) -> list[Shards]:
        """Let keys and values travel around the ring, hop by hop."""
        query, key, value, positions, key_positions, *more = arrays
        joined: list[tuple[Array, Array] | None] = [None] * self.mesh.num_ranks
        for hop in (None, *instruction.ring):
            if hop is not None:
                key, value, key_positions = (self._hop(part, hop) for part in (key, value, key_positions))
            for rank in range(self.mesh.num_ranks):
                parts = (query, key, value, positions, key_positions, *more)
                mixed, lse = self._local(instruction, rank, [part[rank] for part in parts])
                joined[rank] = joined_attention(joined[rank], (mixed, lse))
        return [tuple(part[index] for part in joined if part) for index in (0, 1)]

    def _ring_backward(self, instruction: Compute, arrays: list[list[Array]]) -> list[Shards]:
        """Let keys, values and their gradients travel around the ring, hop by hop."""
        upstream, query, key, value, positions, key_positions, result, lse, *more = arrays
        d_query = [np.zeros_like(array) for array in query]
        d_key, d_value = [np.zeros_like(array) for array in key], [np.zeros_like(array) for array in value]
        for hop in instruction.ring:
            for rank in range(self.mesh.num_ranks):
                parts = (upstream, query, key, value, positions, key_positions, result, lse, *more)
                gradients = self._local(instruction, rank, [part[rank] for part in parts])
                d_query[rank] = d_query[rank] + gradients[0]
                d_key[rank], d_value[rank] = d_key[rank] + gradients[1], d_value[rank] + gradients[2]
            key, value, key_positions = (self._hop(part, hop) for part in (key, value, key_positions))
            d_key, d_value = self._hop(d_key, hop), self._hop(d_value, hop)
        return [tuple(d_query), tuple(d_key), tuple(d_value)]

    def _hop(self, shards: Sequence[Array], hop: Collective) -> list[Array]:
        """Hand every rank's array to the next rank of its group."""
        moved = list(shards)
        for group in self.mesh.groups(hop.atoms):
            for member, rank in enumerate(group):
                moved[rank] = shards[group[member - 1]]
        return moved


def _dims(value: Value) -> Dims:
    return tuple(dim for dim, _ in value.layout.dims)


def evaluate_local(
    block: Block,
    compute: Compute,
    sizes: Mapping[str, int],
    bounds: Mapping[str, tuple[int, int]],
    arrays: Sequence[Array],
) -> tuple[Array, ...]:
    """Evaluate an operation on one rank's blocks; ``bounds`` gives start and stop of every dim that is cut.

    Indices count from the start of a block; values outside it count as zero.
    """
    kind = compute.op.kind
    call = block.call(compute.op, {**sizes, **{dim: stop - start for dim, (start, stop) in bounds.items()}})
    dim = kind.index_dim(call)
    if dim not in bounds:
        return kind.evaluate(call, *arrays)
    start, stop = bounds[dim]
    if start == stop:
        return (np.zeros([call.sizes[dim] for dim in call.outputs[0].dims]),)
    values, *where = arrays
    index = document_positions(*where)
    inside = (index >= start) & (index < stop)
    local = np.where(inside, index - start, 0)
    if isinstance(kind, Lookup | Pick):
        (looked_up,) = kind.evaluate(call, values, local)
        return (looked_up * inside.reshape(*inside.shape, *[1] * (looked_up.ndim - inside.ndim)),)
    mask = inside.reshape(*inside.shape, *[1] * (values.ndim - inside.ndim))
    return (kind.evaluate(call, values * mask, local)[0],)


def joined_attention(first: tuple[Array, Array] | None, second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Join two parts of an attention, each normalised on its own; a part that saw no key weighs nothing."""
    if first is None:
        return second
    (mixed, lse), (part, weight) = first, second
    top = np.maximum(lse, weight)
    reference = np.where(np.isfinite(top), top, 0)
    shares = np.exp(lse - reference), np.exp(weight - reference)
    total = shares[0] + shares[1]
    seen = np.where(total > 0, total, 1)
    joined = (mixed * shares[0][..., None] + part * shares[1][..., None]) / seen[..., None]
    return joined, np.where(total > 0, np.log(seen) + reference, -np.inf)


def queueing_apart(block: Block, program: Program, mesh: Mesh, sizes: Mapping[str, int]) -> Block:
    """Return the block that a program must equal on a mesh: its tokens are in the groups of the program.

    An expert's slots are cut as the tokens are, so every group of ranks has its share of them, and a token that finds
    it full is dropped. A program thereby says which tokens are dropped.
    """
    groups: dict[str, tuple[TokenGroup, ...]] = {}
    for entry in program.instructions:
        if isinstance(entry, Compute) and isinstance(entry.op.kind, Slot):
            dims = ("batch", "seq", "slots")
            bounds = (rank_bounds(mesh, sizes[dim], tuple(entry.cuts.get(dim, ()))) for dim in dims)
            token_groups = (
                TokenGroup(batch=batch, seq=seq, slots=slots) for batch, seq, slots in zip(*bounds, strict=True)
            )
            groups[entry.op.name] = tuple(dict.fromkeys(token_groups))
    ops = (replace(op, kind=Slot(groups=groups[op.name])) if op.name in groups else op for op in block.ops)
    return replace(block, ops=tuple(ops))
