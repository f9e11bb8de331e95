"""What it costs to go on with a run under another plan: bytes of its state that ranks must be given, and seconds."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import require
from autoshard.graph.kinds.optimizer import UPDATES
from autoshard.layout.layout import Layout
from autoshard.layout.shards import block_bounds, boxes_of
from autoshard.plan.lowering import KINDS, split_pending
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_programs, step_of
from autoshard.spec.workload import DTYPE_BYTES

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
    before, after = _StateOfPlan(old), _StateOfPlan(new)
    precision, cluster, ranks = new.workload.precision, new.cluster, range(new.mesh.num_ranks)
    moments_bytes = UPDATES[new.workload.optimizer].num_moments * DTYPE_BYTES[precision.moments]
    per_number = DTYPE_BYTES[precision.masters or precision.weights] + moments_bytes
    held = [per_number * after.num_held(rank) for rank in ranks]
    lacking = [held[rank] - per_number * after.num_kept(before, rank) for rank in ranks]
    by_node = [sum(lacking[first : first + cluster.ranks_per_node]) for first in ranks[:: cluster.ranks_per_node]]
    state, link = new.model.num_parameters * per_number, cluster.links[-1]
    node_bytes_per_s = link.bandwidth_bytes_per_s * cluster.ranks_per_node / link.ranks_per_port
    networked = link.domain == "cluster"
    return Resuming(
        state_bytes=state,
        read_s=state / min(STORAGE_BYTES_PER_S, node_bytes_per_s * cluster.num_nodes if networked else math.inf),
        held_bytes=sum(held),
        lacking_bytes=sum(by_node),
        busiest_node_bytes=max(by_node),
        send_s=max(by_node) / node_bytes_per_s if networked else None,
    )


class _StateOfPlan:
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
        self._blocks: list[set[str]] = [set() for _ in range(plan.mesh.size("pp"))]  # layer.3, by pipeline rank
        for stage in plan.stages:
            last = stage.first_layer + stage.num_layers
            own = self._blocks[stage.rank]
            own |= {f"layer.{number}" for number in range(stage.first_layer, last)}
            own |= {"embed.0", "tied.0"} if stage.first_layer == 0 else set()
            own |= {"head.0", "tied.0"} if last == plan.model.num_layers else set()

    def num_held(self, rank: int) -> int:
        """Count the weights of which a rank holds the state."""
        counts = self._counts(self._blocks_of(rank))
        return sum(count * sum(map(_volume, self._parts(rank, name))) for name, count in counts.items())

    def num_kept(self, before: "_StateOfPlan", rank: int) -> int:
        """Count the weights whose state a rank holds under another plan as well."""
        found = 0
        for name, count in self._counts(before._blocks_of(rank) & self._blocks_of(rank)).items():
            for one, two in itertools.product(before._parts(rank, name), self._parts(rank, name)):
                shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, two, strict=True)]
                found += count * _volume(shared)  # boxes of one plan do not overlap
        return found

    def _blocks_of(self, rank: int) -> set[str]:
        """Return the blocks that a rank holds, or has a part of; none of a rank that there is not."""
        mesh = self._plan.mesh
        return self._blocks[mesh.coordinates(rank).get("pp", 0)] if rank < mesh.num_ranks else set()

    def _counts(self, blocks: set[str]) -> Mapping[str, int]:
        """Return how often each weight is among these blocks."""
        kinds = [block.partition(".")[0] for block in blocks]
        return {name: count for name, kind in self._kinds.items() if (count := kinds.count(kind))}

    def _parts(self, rank: int, name: str) -> Boxes:
        """Return which part of a weight a rank holds in every block of the kind."""
        place, mesh, layout = self._plan.mesh.coordinates(rank), self._plan.mesh, self._layouts[name]
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


def _volume(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(max(0, stop - start) for start, stop in box)
