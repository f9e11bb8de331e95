"""What it costs to go on with a run under another plan: bytes of its state that ranks must be given, and seconds."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.errors import require
from autoshard.graph.kinds.optimizer import UPDATES
from autoshard.layout.layout import Layout
from autoshard.layout.shards import block_bounds, boxes_of
from autoshard.plan.lowering import KINDS, split_pending
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_programs, step_of
from autoshard.spec.cluster import Cluster
from autoshard.spec.workload import DTYPE_BYTES, Workload

# Assumed, since no plan says where its checkpoints lie. FSx for Lustre (PERSISTENT-1000) gives 1,000 MB/s of disk
# throughput for each TiB of a file system: docs.aws.amazon.com/fsx/latest/LustreGuide/ssd-storage.html, 2026-11.
_STORAGE_TIB = 12
STORAGE_BYTES_PER_S = _STORAGE_TIB * 1000e6
STORAGE = f"FSx for Lustre of {_STORAGE_TIB} TiB at 1000 MB/s per TiB"

Boxes = tuple[tuple[tuple[int, int], ...], ...]  # of each box where it starts and stops along every dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """The state of a run (weights as they are updated, moments) on its way from one plan to another.

    A rank keeps its number, so that nodes which are gone were the last ones. What ranks lack could only be sent if the
    others had kept their memory; a run that starts again reads its checkpoint.
    """

    state_bytes: int  # each number once: what a checkpoint holds, and what is read of it
    read_s: float  # from storage, no faster than nodes take it
    held_bytes: int  # by all ranks under the new plan, copies counted
    lacking_bytes: int  # of these, what the rank of the same number does not hold under the old plan
    busiest_node_bytes: int  # the most that a single node lacks
    send_s: float | None  # what the busiest node waits for that; None: a single node has no network


def resuming(old: Plan, new: Plan) -> Resuming:
    """Compare what every rank holds of the state under two plans of one model."""
    require((old.model == new.model, "model", f"{new.model.name} is not the {old.model.name} whose state there is"))
    before, after = _Holding(old), _Holding(new)
    per_number, ranks = _number_bytes(new.workload), range(new.mesh.num_ranks)
    held = [after.num_held(rank) * per_number for rank in ranks]
    kept = [_num_kept(before, after, rank) * per_number for rank in ranks]
    size = new.cluster.ranks_per_node
    by_node = [sum(held[first : first + size]) - sum(kept[first : first + size]) for first in ranks[::size]]
    state, link = new.model.num_parameters * per_number, _node_bytes_per_s(new.cluster)
    rate = min(STORAGE_BYTES_PER_S, link * new.cluster.num_nodes) if link else STORAGE_BYTES_PER_S
    return Resuming(
        state_bytes=state,
        read_s=state / rate,
        held_bytes=sum(held),
        lacking_bytes=sum(by_node),
        busiest_node_bytes=max(by_node),
        send_s=max(by_node) / link if link else None,
    )


def _number_bytes(workload: Workload) -> int:
    """Return the bytes of the state for each weight."""
    precision, moments = workload.precision, UPDATES[workload.optimizer].num_moments
    return DTYPE_BYTES[precision.masters or precision.weights] + moments * DTYPE_BYTES[precision.moments]


def _node_bytes_per_s(cluster: Cluster) -> float | None:
    """Return what a node receives from others at most; None where there is no network."""
    link = cluster.links[-1]
    return (
        link.bandwidth_bytes_per_s * cluster.ranks_per_node / link.ranks_per_port if link.domain == "cluster" else None
    )


class _Holding:
    """What the ranks of a plan hold of its state: blocks of weights, and pieces of these in storage order under ZeRO.

    The pieces are of single weights; that an engine lays weights side by side before it cuts them changes which bytes a
    rank has, not how many.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._sizes = plan, step_of(plan).sizes(1)
        programs, graph = plan_programs(plan), step_of(plan).graph
        self._layouts: Mapping[str, Layout] = {
            f"{kind}.{tensor.name}": programs[kind].results[f"{tensor.name}.sum"].layout
            for kind in KINDS
            for tensor in graph.block(kind).parameters
        }
        kinds = {name: name.partition(".")[0] for name in self._layouts if name not in graph.tied}
        self._kinds = {**kinds, **dict.fromkeys(graph.tied.values(), "tied")}  # held by the first stage and the last
        self._boxes: dict[object, Boxes] = {}

    @cached_property
    def _blocks(self) -> tuple[frozenset[str], ...]:
        """The blocks of every pipeline rank: ``layer.3``."""
        found: list[set[str]] = [set() for _ in range(self._plan.mesh.size("pp"))]
        for stage in self._plan.stages:
            last = stage.first_layer + stage.num_layers
            found[stage.rank] |= {f"layer.{number}" for number in range(stage.first_layer, last)}
            found[stage.rank] |= {"embed.0", "tied.0"} if stage.first_layer == 0 else set()
            found[stage.rank] |= {"head.0", "tied.0"} if last == self._plan.model.num_layers else set()
        return tuple(map(frozenset, found))

    def blocks(self, rank: int) -> frozenset[str]:
        """Return the blocks that a rank holds, or has a part of; none of a rank that there is not."""
        mesh = self._plan.mesh
        return self._blocks[mesh.coordinates(rank).get("pp", 0)] if rank < mesh.num_ranks else frozenset()

    def counts(self, blocks: frozenset[str]) -> Mapping[str, int]:
        """Return how often each weight is among these blocks."""
        kinds = [block.partition(".")[0] for block in blocks]
        return {name: count for name, kind in self._kinds.items() if (count := kinds.count(kind))}

    def num_held(self, rank: int) -> int:
        """Count the weights of which a rank holds the state."""
        return sum(
            count * sum(map(_volume, self.boxes(rank, name))) for name, count in self.counts(self.blocks(rank)).items()
        )

    def boxes(self, rank: int, name: str) -> Boxes:
        """Return which part of a weight a rank holds in every block of the kind."""
        place, mesh = self._plan.mesh.coordinates(rank), self._plan.mesh
        layout = self._layouts[name]
        shards = split_pending(layout.sums)[0] if self._plan.zero else ()
        atoms = (*(atom for _, cut in layout.dims for atom in cut), *shards)
        key = (name, *(place.get(atom, 0) for atom in atoms))
        if key not in self._boxes:
            bounds = [
                block_bounds(self._sizes[dim], [(mesh.size(atom), place.get(atom, 0)) for atom in cut])
                for dim, cut in layout.dims
            ]
            number, count = 0, 1
            for atom in shards:
                number, count = number * mesh.size(atom) + place.get(atom, 0), count * mesh.size(atom)
            self._boxes[key] = tuple(_piece(bounds, number, count))
        return self._boxes[key]


def _piece(bounds: Sequence[tuple[int, int]], number: int, count: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the boxes of one of so many equal pieces of a block, in storage order."""
    shape = [stop - start for start, stop in bounds]
    whole = math.prod(shape)
    length = -(-whole // count)
    for offsets, lengths in boxes_of(shape, min(number * length, whole), min((number + 1) * length, whole)):
        firsts = [start + offset for (start, _), offset in zip(bounds, offsets, strict=True)]
        yield tuple((first, first + size) for first, size in zip(firsts, lengths, strict=True))


def _num_kept(before: _Holding, after: _Holding, rank: int) -> int:
    """Count the weights whose state a rank holds under both plans."""
    shared = after.counts(before.blocks(rank) & after.blocks(rank))
    return sum(count * _overlap(before.boxes(rank, name), after.boxes(rank, name)) for name, count in shared.items())


def _overlap(some: Boxes, others: Boxes) -> int:
    """Count what two sets of boxes have in common; those of one set do not overlap."""
    pairs = itertools.product(some, others)
    return sum(_volume([(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, two, strict=True)]) for one, two in pairs)


def _volume(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(max(0, stop - start) for start, stop in box)
