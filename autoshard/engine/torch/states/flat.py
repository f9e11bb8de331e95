"""Weights side by side in flat tensors, and the step phase of each: reduced, clipped, updated, gathered.

Weights whose gradients await the same ranks lie in one flat tensor, a bucket of the plan each, and so do their
gradients: blocks see views of them, collectives the whole.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby

import torch

from autoshard.engine.torch.formats import Formats, own, sum_of_squares, wide
from autoshard.engine.torch.kernels import Kernel, KernelContext, kernel_of
from autoshard.engine.torch.states.rounding import chunks, round_into
from autoshard.engine.torch.states.weight import Tied, Weight
from autoshard.engine.torch.world import Arrival, RankGroup, World
from autoshard.graph.op import Array, Update
from autoshard.plan.candidate import Zero
from autoshard.run.placement import StatePart, StatePiece, placed_boxes
from autoshard.spec.mesh import COPIES, PARTS

Tensors = Mapping[str, torch.Tensor]
_PARTS: tuple[StatePart, ...] = ("weight", "moment1", "moment2")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroups:
    """Among the ranks over which the batch is spread for a weight, those that share it; None for a rank alone."""

    spread: RankGroup | None  # all of them
    shards: RankGroup | None  # those that share one copy of the states
    holders: RankGroup | None  # those that share one copy of the weight, where it rests in pieces
    copies: RankGroup | None = None  # those that hold the same piece of the states
    parts: RankGroup | None = None  # those that hold the same piece of the weight, in one copy of the states

    @classmethod
    def of(cls, world: World, weight: Weight) -> "StateGroups":
        """Return the groups of this rank."""
        whole = world.group(weight.spread, "dp")
        if weight.copies * weight.parts == 1:
            return cls(spread=whole, shards=whole, holders=whole)
        spread = weight.spread
        atoms = {"shards": (*spread, *PARTS), "holders": spread, "copies": COPIES, "parts": PARTS}
        return cls(spread=whole, **{name: world.groups.get(("divided", *names)) for name, names in atoms.items()})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flat:
    """Weights whose gradients are reduced over the same ranks, side by side, with this rank's optimizer state.

    Under ZeRO-3 values and sums are this rank's pieces too, padded with zeros; values are gathered to run a block.
    """

    weights: tuple[Weight, ...]
    values: torch.Tensor
    sums: torch.Tensor
    summed: RankGroup | None
    groups: StateGroups
    zero: Zero
    tied: Tied
    num_replicas: int
    master: torch.Tensor | None  # None: the values themselves are updated
    moments: tuple[torch.Tensor, ...]
    stepping: Mapping[Update, Kernel]  # one flat has weights that decay and weights that do not

    @classmethod
    def of(cls, world: World, weights: Sequence[Weight], blocks: Mapping[str, Array], formats: Formats) -> "Flat":
        """Lay weights with these blocks side by side, without memory of earlier steps."""
        first = weights[0]
        groups = StateGroups.of(world, first)
        master = first.dtype("master", formats)
        arrays, dtype = [blocks[weight.instance] for weight in weights], first.block.tensors[first.name].dtype
        values = torch.cat([formats.tensor(array, dtype).reshape(-1) for array in arrays])
        exact = torch.cat([own(array, device=formats.staging).reshape(-1) for array in arrays])
        updated = _piece(exact if master else values, groups.shards if first.zero else None)
        num_sums = len(updated) if first.zero == 3 else len(values)
        if first.zero == 3 and groups.shards:  # its piece of the states lies in that of the values
            values = _piece(_padded(values, len(groups.shards.ranks)), groups.holders)
        moment, num_moments = first.dtype("moment1", formats), first.optimizer.num_moments
        context = KernelContext(formats=formats)
        calls = {
            weight.optimizer: weight.block.call(weight.block.op(f"{weight.name}.update"), weight.mesh_rank.sizes)
            for weight in weights
        }
        return cls(
            weights=tuple(weights),
            values=values,
            sums=torch.zeros(num_sums, dtype=first.dtype("sum", formats), device=formats.device),
            summed=world.group(first.summed, "tp"),
            groups=groups,
            zero=first.zero,
            tied=first.tied,
            num_replicas=first.replica[1],
            master=updated.to(formats.device, master, copy=True) if master else None,
            moments=tuple(torch.zeros(len(updated), dtype=moment, device=formats.device) for _ in range(num_moments)),
            stepping={kind: kernel_of(kind, call, context) for kind, call in calls.items()},
        )

    @property
    def shared(self) -> RankGroup | None:
        """The group whose ranks share the optimizer's work."""
        return self.groups.shards if self.zero else None

    @property
    def parted(self) -> RankGroup | None:
        """The group whose ranks each hold a piece of the sums (ZeRO-3); None if these and the values stay whole."""
        return self.groups.shards if self.zero == 3 else None

    @property
    def renewed(self) -> RankGroup | None:
        """The group whose ranks each update a part of the values that this rank holds; None if it updates them all."""
        return self.groups.parts if self.parted else self.shared

    def begin_opening(self) -> Arrival:
        """Begin to gather values that rest in pieces; a rank may hold all of them, though not of the sums."""
        holders = self.groups.holders
        return holders.begin_all_gather(self.values) if holders else lambda: self.values

    def views(self, flat: torch.Tensor) -> Tensors:
        """Return the part of each weight in opened values or sums, in the shape of the weight, by instance."""
        counts = [math.prod(weight.shape) for weight in self.weights]
        parts = flat[: sum(counts)].split(counts)
        return {weight.instance: part.view(weight.shape) for weight, part in zip(self.weights, parts, strict=True)}

    def begin_reducing(self) -> Arrival:
        """Sum over ranks with copies of weights; begin to sum over the batch: all, or under ZeRO-1 a padded piece.

        Ranks that hold the same piece add up what each copy's ranks have summed.
        """
        copies = self.groups.copies
        if self.summed:
            self.summed.all_reduce(self.sums)
        if self.parted:
            return copies.begin_all_reduce(self.sums) if copies else lambda: self.sums
        if self.shared:
            arrive = self.shared.begin_reduce_scatter(_padded(self.sums, len(self.shared.ranks)))
            return (lambda: copies.all_reduce(arrive())) if copies else arrive
        if self.groups.spread:
            return self.groups.spread.begin_all_reduce(self.sums)
        return lambda: self.sums

    def square(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the squared norm of this rank's piece, on its device."""
        return sum_of_squares(piece)

    def share(self, square: float) -> float:
        """Return the share that this rank adds to the squared norm of all ranks: replicas count once."""
        return square / self.num_replicas if self.counts else 0.0

    @property
    def counts(self) -> bool:
        """Whether its gradient is part of the norm: it is the owner of its weights, which gradients train."""
        return self.tied != "copy" and self.weights[0].optimizer.clipped

    def squares(self, piece: torch.Tensor) -> Iterator[tuple[Weight, torch.Tensor]]:
        """Yield what this rank adds to the squared norm of each weight, of which it has a range in a piece."""
        for weight, (low, high), first in self.ranges(len(piece)) if self.counts else ():
            yield weight, sum_of_squares(piece[first : first + high - low]) / self.num_replicas

    def update(self, piece: torch.Tensor, scalars: Mapping[str, float]) -> None:
        """Take a step with this rank's piece of the gradient, and gather the new values."""
        updated = self.updated()
        states, width = (updated, *self.moments), wide(updated[:0]).dtype
        if any(state.dtype != width for state in (*states, piece)):
            self._step_widened(states, piece, scalars)
        else:
            for kind, group in groupby(self.ranges(len(updated)), key=lambda weight_range: weight_range[0].optimizer):
                places = [(first, first + high - low) for _, (low, high), first in group if low < high]
                if places:
                    where = slice(places[0][0], places[-1][1])
                    self._step(kind, (state[where] for state in (*states, piece)), scalars)
        self._publish(updated)

    def _step(self, kind: Update, tensors: Iterable[torch.Tensor], scalars: Mapping[str, float]) -> None:
        """Take a step of a weight and its moments, in place, by its gradient."""
        self.stepping[kind](*tensors, *(scalars[name] for name in kind.scalars))

    def _step_widened(self, states: Sequence[torch.Tensor], piece: torch.Tensor, scalars: Mapping[str, float]) -> None:
        """Take a step in the format of statistics, chunk by chunk; what is kept in BF16 is rounded by chance.

        Rounded to the nearest, a weight would lose small steps, and a mean of squares would never fall.
        """
        update = int(scalars["step_number"])
        for weight, (low, high), first in self.ranges(len(piece)):
            for start, stop in chunks(low, high):
                where = slice(first + start - low, first + stop - low)
                exact = [wide(state[where]) for state in (*states, piece)]
                self._step(weight.optimizer, exact, scalars)
                for part, state, numbers in zip(_PARTS, states, exact, strict=False):
                    if state.dtype != numbers.dtype:
                        rounding = weight.rounding(part, update)
                        round_into(state[where], numbers, rounding.bits(weight.bounds, start, stop, state.device))

    def updated(self) -> torch.Tensor:
        """Return the tensor that this rank updates: its masters, its piece of the values, or all values."""
        if self.master is not None:
            return self.master
        return _piece(self.values, self.renewed)

    def _publish(self, updated: torch.Tensor) -> None:
        """Copy the numbers that this rank has updated to the values that blocks read."""
        if self.renewed:
            self.values.copy_(self.renewed.all_gather(updated.to(self.values.dtype))[: len(self.values)])
        elif self.master is not None:
            self.values.copy_(self.master)

    def state(self) -> Iterator[StatePiece]:
        """Yield the boxes of weights and moments that this rank updates, as views of their memory."""
        length, start = len(self.values), 0
        if self.renewed:
            length = max(1, -(-length // len(self.renewed.ranks)))  # as ``_piece`` pads it, without copying anything
            start = length * self.renewed.number
        updated = self.values[start : start + length] if self.master is None else self.master
        reads = bool(self.zero) or self.groups.spread is None or self.groups.spread.number == 0
        for part, memory in zip(_PARTS, (updated, *self.moments), strict=False):
            for weight, (low, high), first in self.ranges(length):
                for offsets, lengths, where in placed_boxes(weight.bounds, low, high):
                    yield StatePiece(
                        weight=weight.owner, part=part, whole=weight.whole, offsets=offsets,
                        memory=memory[first : first + high - low][where].view(lengths), saves=weight.saves, reads=reads,
                    )  # fmt: skip

    def restored(self) -> None:
        """Take over the numbers that were loaded into the views of ``state``."""
        if self.groups.spread and not self.zero:
            for state in (self.updated(), *self.moments):
                self.groups.spread.broadcast(state)
        self._publish(self.updated())

    def ranges(self, length: int) -> Iterator[tuple[Weight, tuple[int, int], int]]:
        """Yield which range of each weight lies in this rank's piece of a length, and where the range begins there."""
        start = length * (self.shared.number if self.shared else 0)
        offsets = accumulate((math.prod(weight.shape) for weight in self.weights), initial=0)
        for weight, offset in zip(self.weights, offsets, strict=False):
            low, high = (min(max(end - offset, 0), math.prod(weight.shape)) for end in (start, start + length))
            yield weight, (low, high), max(offset + low - start, 0)


def flats(
    world: World,
    weights: Iterable[Weight],
    blocks: Mapping[str, Array],
    formats: Formats,
    ties: Mapping[str, str],
    bucket_bytes: int,
) -> tuple[Flat, ...]:
    """Return flats of weights that are reduced over the same ranks, and have as many replicas and one optimizer.

    Weights with the same constants of the optimizer follow each other. A flat is full when its gradients take
    ``bucket_bytes``. ``ties`` is as in ``Store``.
    """
    read_twice = frozenset(ties.values())
    groups: dict[object, dict[Update, list[Weight]]] = {}
    sizes = defaultdict[object, int](int)
    key: tuple[object, ...] = ()
    for weight in weights:
        # ZeRO-3 opens block by block. What I adds to and what W adds to are opened at different times, and a table that
        # the head reads, too, at other times than the embedding's other weights.
        unit = [*weight.instance.split(".")[:2], weight.late, weight.instance in read_twice] if weight.zero == 3 else []
        dtypes = tuple(weight.dtype(part, formats) for part in ("", "sum", "master", "moment1"))
        ranks = weight.summed, weight.spread, weight.replicated
        form = (*unit, weight.tied, *ranks, type(weight.optimizer), dtypes)
        number = 0 if weight.zero == 3 else sizes[form] // bucket_bytes
        key = key if weight.follows else (number, *form)
        sizes[form] += math.prod(weight.shape) * (dtypes[1] or formats.of("fp32")).itemsize
        groups.setdefault(key, {}).setdefault(weight.optimizer, []).append(weight)
    return tuple(Flat.of(world, list(chain(*kinds.values())), blocks, formats) for kinds in groups.values())


def _piece(flat: torch.Tensor, shared: RankGroup | None) -> torch.Tensor:
    """Return this rank's piece of a tensor that several ranks share, padded with zeros."""
    if shared is None:
        return flat
    return _padded(flat, len(shared.ranks)).chunk(len(shared.ranks))[shared.number].clone()


def _padded(flat: torch.Tensor, count: int) -> torch.Tensor:
    """Add zeros until the ranks divide the length, or each has one element."""
    missing = -len(flat) % count if len(flat) else count
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
