"""Parameters of a sharded module on one rank: how they rest, and how their gradients come to rest, in buckets."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.distributed.tensor.placement_types import Placement  # pyright: ignore[reportMissingTypeStubs]

from autoshard.engine.torch.collectives import span_inside
from autoshard.engine.torch.execution import RankStep
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.world import Arrival, World
from autoshard.layout.layout import Layout
from autoshard.layout.program import Communicate, Value
from autoshard.modules.region import Positions
from autoshard.run.placement import MeshRank, dims_of
from autoshard.spec.workload import Dtype

# As much as DistributedDataParallel sums at a time: enough to fill a network, little enough to begin early.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, kw_only=True)
class RestingWeight:
    """A parameter as it rests on this rank, and the collectives between rest and the program.

    ``gathers`` bring the parameter into each layout in which the program reads it. ``reduced`` bring its gradient from
    the layout in which the program computes it to rest; frozen parameters have no ``computed`` gradient.
    """

    name: str
    path: str
    positions: Positions
    rest: Layout
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]  # of the part that rests on this rank, along dims
    local_shape: tuple[int, ...]  # and as torch sees it
    gathers: Mapping[str, tuple[Communicate, ...]]  # by value of the program
    computed: Value | None
    dtype: Dtype  # of the gradient
    reduced: tuple[Communicate, ...]

    @cached_property
    def held(self) -> str:
        """The value of the part that rests on this rank, as torch sees it."""
        return f"{self.name} at rest, as torch sees it"

    @property
    def start(self) -> str:
        """The value of that part along dims."""
        return f"{self.name} at rest"

    @cached_property
    def gradient(self) -> str:
        """The value of the gradient of that part, as torch sees it."""
        return f"{self.name} at rest, gradient as torch sees it"

    @property
    def unreduced(self) -> str:
        """The value of the gradient before the first collective, along the dims of the parameter at rest."""
        return self.reduced[0].reads.name if self.reduced else f"{self.name} at rest, gradient"

    def opened(self) -> RankStep:
        """Return the step that lays the part out along dims. As a step it is one view with those that follow."""
        return RankStep(run=lambda part: (part.view(self.shape),), reads=(self.held,), writes=(self.start,))

    def folded(self) -> RankStep:
        """Return the step that lays the gradient out as torch sees the part."""
        end = self.reduced[-1].writes.name if self.reduced else self.unreduced
        return RankStep(
            run=lambda gradient: (gradient.reshape(self.local_shape),), reads=(end,), writes=(self.gradient,)
        )

    def laid_out(self) -> RankStep:
        """Return the step that brings the computed gradient into the order of the parameter's dims."""
        assert self.computed, "a frozen parameter has no gradient"
        now = dims_of(self.computed.layout)
        order = [now.index(dim) for dim in dims_of(self.rest)]
        return RankStep(
            run=lambda gradient: (gradient.permute(order),), reads=(self.computed.name,), writes=(self.unreduced,)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBucket:
    """Gradients that one collective sums, for each rank whole or its part; it runs while others are computed."""

    weights: tuple[RestingWeight, ...]
    atoms: tuple[str, ...]
    axes: tuple[int | None, ...]  # along which each weight is cut into parts; None: it stays whole
    before: tuple[tuple[int, ...], ...]  # shapes
    count: int  # of ranks

    def __or__(self, more: "GradientBucket") -> "GradientBucket":
        """Return the bucket with the weights of both."""
        weights, axes, before = self.weights + more.weights, self.axes + more.axes, self.before + more.before
        return replace(self, weights=weights, axes=axes, before=before)

    @property
    def name(self) -> str:
        """The value that stands for what is under way."""
        return f"gradients under way to {self.weights[0].name}"

    def begin(self, world: World) -> RankStep:
        """Return the step that lays the gradients side by side and begins to sum them."""
        group, scatters = world.group(self.atoms), self.axes[0] is not None
        assert group, "a sum is between several ranks"

        def side_by_side(*gradients: torch.Tensor) -> torch.Tensor:
            if not scatters:
                return torch.cat([gradient.reshape(-1) for gradient in gradients])
            parts = [gradient.movedim(axis or 0, 0) for gradient, axis in zip(gradients, self.axes, strict=True)]
            return torch.cat([part.reshape(self.count, -1) for part in parts], 1).view(-1)

        def run(*gradients: torch.Tensor) -> Sequence[Arrival]:
            flat = side_by_side(*gradients)
            return (group.begin_reduce_scatter(flat) if scatters else group.begin_all_reduce(flat),)

        return RankStep(
            run=run, reads=tuple(weight.unreduced for weight in self.weights), writes=(self.name,),
            stand_in=lambda first, *_: (first.new_empty(0),),
        )  # fmt: skip

    def arrive(self) -> RankStep:
        """Return the step that waits for the sums and takes them apart."""
        shapes = [weight.shape for weight in self.weights]
        moved = [
            shape if axis is None else (shape[axis], *shape[:axis], *shape[axis + 1 :])
            for shape, axis in zip(shapes, self.axes, strict=True)
        ]

        seen = [weight.local_shape for weight in self.weights]
        counts = [math.prod(shape) for shape in shapes]

        def run(arrival: Arrival) -> Sequence[torch.Tensor]:
            return [
                part.view(end) if axis is None else part.view(shape).movedim(0, axis).reshape(end)
                for part, shape, axis, end in zip(arrival().split(counts), moved, self.axes, seen, strict=True)
            ]

        return RankStep(
            run=run, reads=(self.name,), writes=tuple(weight.gradient for weight in self.weights),
            stand_in=lambda arrival: [arrival.new_empty(shape) for shape in seen],
        )  # fmt: skip


def gradient_buckets(
    weights: Iterable[RestingWeight], world: World, place: MeshRank, formats: Formats
) -> Iterator[GradientBucket]:
    """Collect weights, in the order in which their gradients are computed, whose gradients one collective may sum."""
    filling: dict[object, GradientBucket] = {}
    for weight in weights:
        bucket = _alone(weight, world, place)
        if bucket is None:
            continue
        key = bucket.atoms, bucket.axes[0] is None, weight.dtype
        if key in filling:
            bucket = filling.pop(key) | bucket
        num_bytes = sum(map(math.prod, bucket.before)) * formats.of(weight.dtype).itemsize
        if num_bytes < BUCKET_BYTES:
            filling[key] = bucket
        else:
            yield bucket
    yield from filling.values()


def _alone(weight: RestingWeight, world: World, place: MeshRank) -> GradientBucket | None:
    """Return the bucket of one weight; None if its gradient needs no sum, or several steps, or has uneven parts."""
    if [change.collective.kind for change in weight.reduced] not in (["all_reduce"], ["reduce_scatter"]):
        return None
    (change,) = weight.reduced
    before, after, group = change.reads.layout, change.writes.layout, world.group(change.collective.atoms)
    assert group, "a sum is between several ranks"
    axis = None if change.collective.kind == "all_reduce" else dims_of(before).index(change.collective.dim or "")
    shape, count = place.shape(before), len(group.ranks)
    if axis is not None:
        size = shape[axis] // count
        spans = [span_inside(place.at(rank), axis, before, after) for rank in group.ranks]
        if spans != [(number * size, (number + 1) * size) for number in range(count)]:
            return None
    return GradientBucket(weights=(weight,), atoms=change.collective.atoms, axes=(axis,), before=(shape,), count=count)
