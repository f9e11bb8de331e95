"""Run a lowered block on virtual ranks: local operations on shards, collectives as listed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.graph.block import Block
from autoshard.graph.kinds.attention import Attend, AttendGradient
from autoshard.graph.op import Array, Dims
from autoshard.layout.collective import Collective
from autoshard.layout.local import evaluate_local, joined_attention
from autoshard.layout.program import Communicate, Compute, CountOnce, Given, Instruction, Program, Sum, Value
from autoshard.layout.shards import VirtualMesh
from autoshard.layout.virtual import Executor, Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Executes programs of one block on a virtual mesh."""

    block: Block
    mesh: VirtualMesh
    sizes: Mapping[str, int]

    def run(self, program: Program, given: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute a program from whole arrays; return its results, whole again."""
        held = self.execute(program, given)
        return {
            tensor: self._executor.gather(held[value.name], self._dims(value), value.layout)
            for tensor, value in program.results.items()
        }

    def execute(self, program: Program, given: Mapping[str, Array]) -> Mapping[str, Shards]:
        """Execute a program from whole arrays; return every value as the ranks hold it, by name."""
        held: dict[str, Shards] = {}
        for instruction in program.instructions:
            for value, shards in self._executed(instruction, given, held):
                self._executor.check(shards, value.layout)
                held[value.name] = shards
        return held

    def _executed(
        self, instruction: Instruction, given: Mapping[str, Array], held: Mapping[str, Shards]
    ) -> Iterable[tuple[Value, Shards]]:
        match instruction:
            case Given(value=value):
                return [(value, self._executor.scatter(given[value.tensor], self._dims(value), value.layout))]
            case Compute(writes=writes):
                return zip(writes, self._compute(instruction, held), strict=True)
            case Communicate(collective=collective, reads=reads, writes=writes):
                dims = self._dims(reads)
                return [(writes, self._executor.run(collective, held[reads.name], dims, reads.layout))]
            case CountOnce(atoms=atoms, reads=reads, writes=writes):
                return [(writes, self._counted_once(held[reads.name], atoms))]
            case Sum(reads=reads, writes=writes):
                return [(writes, self._added(reads, held, self._dims(writes)))]

    @property
    def _executor(self) -> Executor:
        return Executor(mesh=self.mesh, sizes=self.sizes)

    def _dims(self, value: Value) -> Dims:
        return tuple(dim for dim, _ in value.layout.dims)

    def _counted_once(self, shards: Shards, atoms: Sequence[str]) -> Shards:
        places = [self.mesh.coordinates(rank) for rank in range(self.mesh.num_ranks)]
        first = [all(place.get(atom, 0) == 0 for atom in atoms) for place in places]
        return tuple(shard if keep else np.zeros_like(shard) for shard, keep in zip(shards, first, strict=True))

    def _added(self, reads: Sequence[Value], held: Mapping[str, Shards], dims: Dims) -> Shards:
        total: list[Array] = []
        for rank in range(self.mesh.num_ranks):
            parts = [
                held[value.name][rank].transpose([self._dims(value).index(dim) for dim in dims]) for value in reads
            ]
            total.append(np.sum(np.stack(parts), axis=0))
        return tuple(total)

    def _compute(self, instruction: Compute, held: Mapping[str, Shards]) -> list[Shards]:
        if instruction.ring:
            return self._ring(instruction, held)
        results = [
            self._local(instruction, rank, [held[value.name][rank] for value in instruction.reads])
            for rank in range(self.mesh.num_ranks)
        ]
        return [tuple(result[index] for result in results) for index in range(len(instruction.writes))]

    def _local(self, instruction: Compute, rank: int, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Evaluate an operation on one rank's blocks."""
        return evaluate_local(self.block, instruction, self.sizes, self._held(instruction, rank), arrays)

    def _held(self, instruction: Compute, rank: int) -> Mapping[str, tuple[int, int]]:
        """Return which part of every cut dim of an operation a rank holds."""
        cuts = instruction.cuts.items()
        return {dim: self.mesh.bounds(rank, self.sizes[dim], atoms) for dim, atoms in cuts if atoms}

    def _ring(self, instruction: Compute, held: Mapping[str, Shards]) -> list[Shards]:
        """Let keys and values (and, backward, their gradients) travel around the ring, hop by hop."""
        arrays = [list(held[value.name]) for value in instruction.reads]
        if isinstance(instruction.op.kind, Attend):
            return self._ring_forward(instruction, arrays)
        return self._ring_backward(instruction, arrays)

    def _ring_forward(self, instruction: Compute, arrays: list[list[Array]]) -> list[Shards]:
        query, key, value, positions, key_positions, *starts = arrays
        joined: list[tuple[Array, Array] | None] = [None] * self.mesh.num_ranks
        for hop in (None, *instruction.ring):
            if hop is not None:
                key, value, key_positions = (self._hop(part, hop) for part in (key, value, key_positions))
            for rank in range(self.mesh.num_ranks):
                parts = (query, key, value, positions, key_positions, *starts)
                mixed, lse = self._local(instruction, rank, [part[rank] for part in parts])
                joined[rank] = joined_attention(joined[rank], (mixed, lse))
        return [tuple(part[index] for part in joined if part) for index in (0, 1)]

    def _ring_backward(self, instruction: Compute, arrays: list[list[Array]]) -> list[Shards]:
        assert isinstance(instruction.op.kind, AttendGradient), f"{instruction.op.kind.label} is no ring"
        upstream, query, key, value, positions, key_positions, result, lse, *starts = arrays
        d_query = [np.zeros_like(array) for array in query]
        d_key, d_value = [np.zeros_like(array) for array in key], [np.zeros_like(array) for array in value]
        for hop in instruction.ring:
            for rank in range(self.mesh.num_ranks):
                parts = (upstream, query, key, value, positions, key_positions, result, lse, *starts)
                made = self._local(instruction, rank, [part[rank] for part in parts])
                d_query[rank] = d_query[rank] + made[0]
                d_key[rank], d_value[rank] = d_key[rank] + made[1], d_value[rank] + made[2]
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
