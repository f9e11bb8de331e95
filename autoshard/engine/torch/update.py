"""A rank's weights and sums of gradients, as blocks see them, and the step phase: reduced, clipped, updated, gathered.

Weights whose gradients await the same ranks lie side by side in flat tensors, a bucket of the plan each, and so do
their gradients: blocks see views of them, collectives the whole. A bucket is reduced as soon as its last gradient is
there, while earlier layers are still in their backward pass.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import Literal

import torch

from autoshard.engine.torch.formats import Formats, own, wide
from autoshard.engine.torch.kernels import Kernel, KernelContext, kernel_of
from autoshard.engine.torch.rounding import RoundingBits, chunks, round_into
from autoshard.engine.torch.world import Arrival, RankGroup, World
from autoshard.graph.block import Block
from autoshard.graph.op import Array, Update
from autoshard.layout.layout import Layout
from autoshard.plan.candidate import Zero
from autoshard.run.placement import Bounds, MeshRank, StatePart, StatePiece, placed_boxes, saves_alone
from autoshard.spec.training import Training

Tensors = Mapping[str, torch.Tensor]
Tied = Literal["", "owner", "copy"]  # what a weight is of two on different stages that share their values


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight on this rank: its block, and the atoms over whose ranks its gradient waits to be summed."""

    instance: str  # as in ``OpGraph.instances``: ``layer.3.up.weight``
    owner: str  # the instance whose values it has: its own, but for a tied weight on another stage
    name: str  # in the block that says how it is updated: ``up.weight``
    block: Block
    layout: Layout  # of the weight, and of its gradient's sum
    mesh_rank: MeshRank
    summed: tuple[str, ...]  # atoms whose ranks hold copies that see only a part of the batch's keys or values
    spread: tuple[str, ...]  # atoms over which the batch is spread
    zero: Zero  # what each of those ranks has a piece of: nothing, the optimizer's state, or all of it
    training: Training
    late: bool = False  # whether its gradient is made by W, apart from I
    follows: bool = False  # whether it lies right behind the weight before it
    tied: Tied = ""

    @property
    def bounds(self) -> Bounds:
        """Which block of the weight this rank holds."""
        return self.mesh_rank.bounds(self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of that block."""
        return self.mesh_rank.shape(self.layout)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the weight over all ranks."""
        return tuple(self.mesh_rank.sizes[dim] for dim, _ in self.layout.dims)

    @property
    def alike(self) -> tuple[str, ...]:
        """Atoms along which the ranks of a stage update the same numbers: its replicas."""
        apart = {atom for _, atoms in self.layout.dims for atom in atoms} | set(self.spread if self.zero else ())
        return tuple(atom for atom, _ in self.mesh_rank.mesh.axes if atom not in {"pp", *apart})

    @property
    def saves(self) -> bool:
        """Whether this rank writes the weight to checkpoints. The replicas of a stage share its weights out evenly."""
        number, count = 0, 1
        for atom in self.alike:
            number, count = number + count * self.mesh_rank.coordinate(atom), count * self.mesh_rank.mesh.size(atom)
        return self.tied != "copy" and saves_alone(self.owner, number, count)

    @property
    def optimizer(self) -> Update:
        """The update of the weight, with the constants of the training."""
        kind = self.block.op(f"{self.name}.update").kind
        assert isinstance(kind, Update), f"{self.name} is updated by {kind}"
        return kind.with_constants(self.training.adamw)

    def dtype(self, part: str, formats: Formats) -> torch.dtype | None:
        """Return the format of the weight, its ``sum``, ``master`` or moments; None for those that it does not have."""
        tensor = self.block.tensors.get(f"{self.name}.{part}" if part else self.name)
        return None if tensor is None else formats.of(tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flat:
    """Weights whose gradients are reduced over the same ranks, side by side, with this rank's optimizer state.

    Under ZeRO-3 values and sums are this rank's pieces too, padded with zeros, which are gathered to run a block.
    """

    weights: tuple[Weight, ...]
    values: torch.Tensor
    sums: torch.Tensor
    summed: RankGroup | None
    spread: RankGroup | None
    zero: Zero
    tied: Tied
    num_copies: int
    master: torch.Tensor | None  # None: the values themselves are updated
    moments: tuple[torch.Tensor, ...]
    stepping: Mapping[Update, Kernel]  # one flat has weights that decay and weights that do not

    @classmethod
    def of(cls, world: World, weights: Sequence[Weight], blocks: Mapping[str, Array], formats: Formats) -> "Flat":
        """Lay weights with these blocks side by side, without memory of earlier steps."""
        first = weights[0]
        spread, master = world.group(first.spread, "dp"), first.dtype("master", formats)
        used = [formats.tensor(blocks[one.instance], first.block.tensors[first.name].dtype) for one in weights]
        values = torch.cat([one.reshape(-1) for one in used])
        exact = torch.cat([own(blocks[one.instance], device=formats.staging).reshape(-1) for one in weights])
        ours = _piece(exact if master else values, spread if first.zero else None)
        if first.zero == 3:
            values = _piece(values, spread)
        moment, context = first.dtype("moment1", formats), KernelContext(formats=formats)
        calls = {one.optimizer: one.block.call(one.block.op(f"{one.name}.update"), one.mesh_rank.sizes)
                 for one in weights}  # fmt: skip
        return cls(
            weights=tuple(weights),
            values=values,
            sums=torch.zeros(len(values), dtype=first.dtype("sum", formats), device=formats.device),
            summed=world.group(first.summed, "tp"),
            spread=spread,
            zero=first.zero,
            tied=first.tied,
            num_copies=world.num_ranks(first.alike),
            master=ours.to(formats.device, master, copy=True) if master else None,
            moments=tuple(
                torch.zeros(len(ours), dtype=moment, device=formats.device) for _ in range(first.optimizer.num_moments)
            ),
            stepping={kind: kernel_of(kind, call, context) for kind, call in calls.items()},
        )

    @property
    def shared(self) -> RankGroup | None:
        """The group whose ranks share the optimizer's work."""
        return self.spread if self.zero else None

    @property
    def parted(self) -> RankGroup | None:
        """The group whose ranks each hold a piece of values and sums (ZeRO-3); None if these stay whole."""
        return self.spread if self.zero == 3 else None

    def views(self, flat: torch.Tensor) -> Tensors:
        """Return by instance the part of each weight of opened values or sums, in its shape."""
        counts = [math.prod(one.shape) for one in self.weights]
        parts = flat[: sum(counts)].split(counts)
        return {one.instance: part.view(one.shape) for one, part in zip(self.weights, parts, strict=True)}

    def begin_reducing(self) -> Arrival:
        """Begin to sum the gradients over the ranks that wait for them, for this rank's piece, padded with zeros."""
        if self.summed:
            self.summed.all_reduce(self.sums)
        if self.shared and not self.parted:
            return self.shared.begin_reduce_scatter(_padded(self.sums, len(self.shared.ranks)))
        if self.spread and not self.parted:
            return self.spread.begin_all_reduce(self.sums)
        return lambda: self.sums

    def square(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the squared norm of this rank's piece, on its device."""
        flat = wide(piece)
        return torch.dot(flat, flat)

    def share(self, square: float) -> float:
        """Return the share that this rank adds to the squared norm of all ranks: replicas count once."""
        return 0.0 if self.tied == "copy" else square / self.num_copies

    def update(self, piece: torch.Tensor, scalars: Mapping[str, float]) -> None:
        """Take a step with this rank's piece of the gradient, and gather the new values."""
        mine = self._mine()
        if mine.dtype == torch.bfloat16:
            self._step_rounding(mine, piece, scalars)
        else:
            for kind, group in groupby(self.ranges(len(mine)), key=lambda found: found[0].optimizer):
                places = [(first, first + high - low) for _, (low, high), first in group if low < high]
                if places:
                    where = slice(places[0][0], places[-1][1])
                    self._step(kind, mine[where], where, piece, scalars)
        self._publish(mine)

    def _step(
        self, kind: Update, weight: torch.Tensor, where: slice, piece: torch.Tensor, scalars: Mapping[str, float]
    ) -> None:
        """Take a step of a part of this rank's piece, of weights and moments in place."""
        state = (one[where] for one in (*self.moments, piece))
        self.stepping[kind](weight, *state, *(scalars[name] for name in kind.scalars))

    def _step_rounding(self, mine: torch.Tensor, piece: torch.Tensor, scalars: Mapping[str, float]) -> None:
        """Take a step of BF16 weights without masters in FP32, chunk by chunk, and round by chance."""
        for weight, (low, high), first in self.ranges(len(mine)):
            rounding = RoundingBits(
                seed=weight.training.seed, update=int(scalars["step_number"]), weight=weight.owner, whole=weight.whole
            )
            for start, stop in chunks(low, high):
                where = slice(first + start - low, first + stop - low)
                exact = mine[where].float()
                self._step(weight.optimizer, exact, where, piece, scalars)
                round_into(mine[where], exact, rounding.bits(weight.bounds, start, stop, mine.device))

    def _mine(self) -> torch.Tensor:
        """Return the tensor that this rank updates: its masters, its piece of the values, or all values."""
        if self.master is not None:
            return self.master
        return self.values if self.parted else _piece(self.values, self.shared)

    def _publish(self, mine: torch.Tensor) -> None:
        """Copy the numbers that this rank has updated to the values that blocks read."""
        if self.shared and not self.parted:
            self.values.copy_(self.shared.all_gather(mine.to(self.values.dtype))[: len(self.values)])
        elif self.master is not None:
            self.values.copy_(self.master)

    def state(self) -> Iterator[StatePiece]:
        """Yield the boxes of weights and moments that this rank updates, as views of their memory."""
        length, start = len(self.values), 0
        if self.shared and not self.parted:
            length = max(1, -(-length // len(self.shared.ranks)))  # as ``_piece`` pads it, without copying anything
            start = length * self.shared.number
        mine = self.values[start : start + length] if self.master is None else self.master
        reads = bool(self.zero) or self.spread is None or self.spread.number == 0
        parts: tuple[StatePart, ...] = ("weight", "moment1", "moment2")
        for part, memory in zip(parts, (mine, *self.moments), strict=False):
            for weight, (low, high), first in self.ranges(length):
                for offsets, lengths, where in placed_boxes(weight.bounds, low, high):
                    yield StatePiece(
                        weight=weight.owner, part=part, whole=weight.whole, offsets=offsets,
                        memory=memory[first : first + high - low][where].view(lengths), saves=weight.saves, reads=reads,
                    )  # fmt: skip

    def restored(self) -> None:
        """Take over the numbers that were loaded into the views of ``state``."""
        if self.spread and not self.zero:
            for one in (self._mine(), *self.moments):
                self.spread.broadcast(one)
        self._publish(self._mine())

    def ranges(self, length: int) -> Iterator[tuple[Weight, tuple[int, int], int]]:
        """Yield which range of each weight lies in this rank's piece of a length, and where the range begins there."""
        start = length * (self.shared.number if self.shared else 0)
        ends = accumulate((math.prod(one.shape) for one in self.weights), initial=0)
        for weight, offset in zip(self.weights, ends, strict=False):
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
    """Lay weights side by side that are reduced over the same ranks, count alike in the norm, and have one optimizer.

    Weights that the optimizer treats alike follow each other. A flat is full when its gradients are ``bucket_bytes``.
    ``ties`` is as in ``Store``.
    """
    read_twice = frozenset(ties.values())
    groups: dict[object, dict[Update, list[Weight]]] = {}
    sizes = defaultdict[object, int](int)
    key: tuple[object, ...] = ()
    for one in weights:
        # ZeRO-3 opens block by block, what I adds to apart from what W adds to, and a table that the head reads, too,
        # apart from the embedding's other weights.
        unit = [*one.instance.split(".")[:2], one.late, one.instance in read_twice] if one.zero == 3 else []
        dtypes = tuple(one.dtype(part, formats) for part in ("", "sum", "master", "moment1"))
        alike = (*unit, one.tied, one.summed, one.spread, one.alike, type(one.optimizer), dtypes)
        full = 0 if one.zero == 3 else sizes[alike] // bucket_bytes
        key = key if one.follows else (full, *alike)
        sizes[alike] += math.prod(one.shape) * (dtypes[1] or formats.of("fp32")).itemsize
        groups.setdefault(key, {}).setdefault(one.optimizer, []).append(one)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWeights:
    """The values that a block may take while it runs, by the weights' names in the model."""

    weights: Tensors
    sums: Tensors
    pending: tuple[tuple[Flat, RankGroup, torch.Tensor], ...] = ()  # sums that go back into their flats


class Store:
    """All weights of a rank; ``ties`` maps a weight to the other one here whose memory it uses.

    Under ZeRO-3 the next block's weights arrive while a block runs, and the sums of the last block are sent.
    """

    def __init__(self, flats: Sequence[Flat], ties: Mapping[str, str]) -> None:
        """List once the weights that rest whole (``whole``), and by block those of which this rank has a piece."""
        self.flats, self.ties = flats, ties
        weights: dict[str, torch.Tensor] = {}
        sums: dict[str, torch.Tensor] = {}
        self._parted: dict[str, list[tuple[Flat, RankGroup]]] = defaultdict(list)
        self._flat_of: dict[str, Flat] = {}  # of weights whose gradients are reduced as soon as they are complete
        for flat in flats:
            names = {one.instance for one in flat.weights}
            names |= {other for other, owner in ties.items() if owner in names}
            if flat.parted:
                for block in {name.rsplit(".", 2)[0] for name in names}:
                    self._parted[block].append((flat, flat.parted))
            else:
                weights |= flat.views(flat.values)
                sums |= flat.views(flat.sums)
                self._flat_of |= dict.fromkeys(names, flat) if not flat.tied else {}
        self.whole = self._with_ties(weights, sums)
        self._incomplete: dict[Flat, set[str]] = {}
        self._reducing: dict[Flat, Arrival] = {}
        self._arriving: tuple[str, Sequence[Arrival]] = "", ()
        self._leaving: list[tuple[Flat, Arrival]] = []

    def clear(self) -> None:
        """Forget all gradients."""
        for flat in self.flats:
            flat.sums.zero_()
        self._incomplete = {flat: set[str]() for flat in self._flat_of.values()}
        for name, flat in self._flat_of.items():
            self._incomplete[flat].add(name)

    def opened(
        self, block: str, *, reads: bool, adds: Collection[str] = (), following: str | None = None
    ) -> OpenedWeights:
        """Gather what a block needs for an action that reads its weights, or adds to the gradients of some weights.

        The weights of the ``following`` block that reads its own begin to arrive.
        """
        values, sums = dict(self.whole.weights), dict(self.whole.sums)
        if reads:
            expected, arriving = self._arriving
            assert expected in ("", block), f"{expected} was to be next, not {block}"
            for (flat, _), arrive in zip(self._parted[block], arriving or self._begin_gathers(block), strict=True):
                values |= flat.views(arrive())
            self._arriving = (following, self._begin_gathers(following)) if following else ("", ())
        if not self._parted[block]:
            return self.whole
        pending: list[tuple[Flat, RankGroup, torch.Tensor]] = []
        owners = {self.ties.get(name, name) for name in adds}
        for flat, group in self._parted[block]:
            if owners.intersection(one.instance for one in flat.weights):
                pending.append((flat, group, flat.sums.new_zeros(len(flat.sums) * len(group.ranks))))
                sums |= flat.views(pending[-1][2])
        return self._with_ties(values, sums, *pending)

    def close(self, opened: OpenedWeights, complete: Collection[str] = ()) -> None:
        """Scatter sums that rest in pieces, and begin to reduce the buckets that the ``complete`` gradients fill."""
        self.take_back()
        self._leaving = [(flat, group.begin_reduce_scatter(sums)) for flat, group, sums in opened.pending]
        filled = {self._flat_of[name]: None for name in complete if name in self._flat_of}
        for name in complete:
            if name in self._flat_of:
                self._incomplete[self._flat_of[name]].discard(name)
        for flat in self.flats:  # all ranks begin in this order
            if flat in filled and not self._incomplete[flat]:
                self._reducing[flat] = flat.begin_reducing()

    def reduced(self) -> list[torch.Tensor]:
        """Return this rank's piece of every flat's gradient, summed over the ranks that wait for it."""
        begun = [self._reducing.pop(flat, None) or flat.begin_reducing() for flat in self.flats]
        return [arrive() for arrive in begun]

    def _begin_gathers(self, block: str) -> Sequence[Arrival]:
        return [group.begin_all_gather(flat.values) for flat, group in self._parted[block]]

    def take_back(self) -> None:
        """Add the sums that are on their way to where they rest."""
        for flat, arrive in self._leaving:
            flat.sums.add_(arrive())
        self._leaving = []

    def _with_ties(
        self, weights: Tensors, sums: Tensors, *pending: tuple[Flat, RankGroup, torch.Tensor]
    ) -> OpenedWeights:
        found = ({other: one[owner] for other, owner in self.ties.items() if owner in one} for one in (weights, sums))
        return OpenedWeights(weights={**weights, **next(found)}, sums={**sums, **next(found)}, pending=pending)
