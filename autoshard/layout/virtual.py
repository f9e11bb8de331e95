"""Tensors on virtual ranks: every rank's array, and every collective executed literally as defined."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.graph.op import Array, Dims
from autoshard.layout.collective import Collective
from autoshard.layout.layout import Layout
from autoshard.layout.shards import VirtualMesh, block_bounds

Shards = tuple[Array, ...]  # one array per rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Runs collectives among virtual ranks; a dim's block sizes follow from its full size."""

    mesh: VirtualMesh
    sizes: Mapping[str, int]

    def scatter(self, array: Array, dims: Dims, layout: Layout) -> Shards:
        """Give every rank its part of a whole array; where a sum is pending, one rank of each group has all of it."""
        cuts = dict(layout.dims)
        shards: list[Array] = []
        for rank in range(self.mesh.num_ranks):
            block = tuple(slice(*self.mesh.bounds(rank, self.sizes[dim], cuts[dim])) for dim in dims)
            here = self.mesh.coordinates(rank)
            first = all(here.get(atom, 0) == 0 for atom in layout.sums)
            shards.append(array[block] if first else np.zeros_like(array[block]))
        return tuple(shards)

    def gather(self, shards: Shards, dims: Dims, layout: Layout) -> Array:
        """Return the whole array that the ranks hold together, and check that replicas are equal."""
        cuts = dict(layout.dims)
        shape = [self.sizes[dim] for dim in dims]
        whole, seen = np.zeros(shape), np.zeros(shape, dtype=bool)
        for rank, shard in enumerate(self._resolved(shards, layout)):
            block = tuple(slice(*self.mesh.bounds(rank, self.sizes[dim], cuts[dim])) for dim in dims)
            held, known = whole[block], seen[block]
            assert held.shape == shard.shape, f"rank {rank} holds {shard.shape}, its block is {held.shape}"
            assert np.allclose(held[known], shard[known], rtol=1e-9, atol=1e-12), f"rank {rank} differs"
            whole[block], seen[block] = shard, True
        assert seen.all(), "some elements lie on no rank"
        return whole

    def check(self, shards: Shards, layout: Layout) -> None:
        """Verify that every rank holds as much as the layout says."""
        held = [self.mesh.all_bounds(self.sizes[dim], cut) for dim, cut in layout.dims]
        for rank, shard in enumerate(shards):
            expected = tuple(stop - start for start, stop in (bounds[rank] for bounds in held))
            assert shard.shape == expected, f"rank {rank} holds {shard.shape}, {layout} says {expected}"

    def run(self, collective: Collective, shards: Shards, dims: Dims) -> Shards:
        """Execute one collective over arrays of these dims."""
        results: list[Array] = list(shards)
        for group in self.mesh.groups(collective.atoms):
            made = self._exchanged(collective, [shards[rank] for rank in group], dims)
            for rank, result in zip(group, made, strict=True):
                results[rank] = result
        return tuple(results)

    def _exchanged(self, collective: Collective, parts: Sequence[Array], dims: Dims) -> Sequence[Array]:
        """Return what the members of one group hold after a collective."""
        axis, atoms = dims.index(collective.dim) if collective.dim else 0, collective.atoms
        match collective.kind:
            case "all_gather":
                return [np.concatenate(parts, axis=axis)] * len(parts)
            case "all_reduce":
                return [_sum(parts)] * len(parts)
            case "all_reduce_max":
                return [np.max(np.stack(parts), axis=0)] * len(parts)
            case "reduce_scatter":
                return self._split(_sum(parts), axis, atoms)
            case "slice":
                return [self._split(part, axis, atoms)[number] for number, part in enumerate(parts)]
            case "all_to_all":
                assert collective.to_dim, "an all_to_all goes to another dim"
                split = [self._split(part, dims.index(collective.to_dim), atoms) for part in parts]
                return [np.concatenate([blocks[number] for blocks in split], axis=axis) for number in range(len(parts))]
            case _:
                raise AssertionError(f"{collective} is not between the ranks of a group")

    def _split(self, array: Array, axis: int, atoms: Sequence[str]) -> list[Array]:
        """Cut an array into one block per member of a group over atoms, in the group's order."""
        counts = [self.mesh.size((atom,)) for atom in atoms]
        blocks: list[Array] = []
        for index in np.ndindex(*counts):
            start, stop = block_bounds(array.shape[axis], list(zip(counts, index, strict=True)))
            blocks.append(array[(slice(None),) * axis + (slice(start, stop),)])
        return blocks

    def _resolved(self, shards: Shards, layout: Layout) -> Shards:
        for atoms, kind in ((layout.sums, "all_reduce"), (layout.maxima, "all_reduce_max")):
            if atoms:
                collective = Collective.parse(f"{kind} /{'.'.join(atoms)}")
                shards = self.run(collective, shards, ())
        return shards


def _sum(parts: Sequence[Array]) -> Array:
    return np.sum(np.stack(parts), axis=0)
