"""What every pipeline rank would take and hold, for many ways to fill its stages and many candidates at once.

Arrays have the axes rank, option, chunk, candidate, in this order; a mask or count leaves out those it does not need.
The formulas are those of a single plan (``cost/pipeline``, ``cost/memory``), so that both give the same numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.cost.block import PASSES, BlockCost, Setting
from autoshard.cost.memory import Holds, memory_parts
from autoshard.cost.pipeline import Sends
from autoshard.cost.setting import Question
from autoshard.cost.update import state_bytes
from autoshard.schedule.schedule import Schedule
from autoshard.search.columns import at
from autoshard.search.loads import held_of, loads_of, messages_of
from autoshard.spec.kernels import load_kernels

Column = Any
_ROUNDED = 64.0  # bytes that rounding up of shards may add to the states of a layer, by group of weights
Weights = Mapping[tuple[str, ...], Column]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """What a block takes and holds, its parts added up: a column per candidate, kinds of recompute before it."""

    forward_s: Column
    input_s: Column
    weight_s: Column
    saved_bytes: Column
    moment_bytes: Column  # beside all that is kept, while it is at work: with what is computed again
    waiting_bytes: Column  # instead of what is saved, from I to W
    placeholder_bytes: Column
    weights: Weights
    tied_weights: Weights

    @classmethod
    def of(cls, costs: Sequence[BlockCost], count: int) -> "Totals":
        """Add up the parts of a block under several kinds of recompute, which all have its weights."""

        def stacked(columns: Sequence[Column]) -> Column:
            return np.array([np.broadcast_to(column, count) for column in columns], dtype=np.float64)

        seconds = [[sum(cost.seconds[name].values()) for cost in costs] for name in PASSES]
        whole = costs[0]
        return cls(
            forward_s=stacked(seconds[0]),
            input_s=stacked(seconds[1]),
            weight_s=stacked(seconds[2]),
            saved_bytes=stacked([cost.saved_bytes for cost in costs]),
            moment_bytes=stacked([cost.working_bytes + cost.remade_bytes for cost in costs]),
            waiting_bytes=stacked([cost.waiting_bytes for cost in costs]),
            placeholder_bytes=stacked([cost.placeholder_bytes for cost in costs]),
            weights={pending: np.broadcast_to(number, count) for pending, number in whole.weights.items()},
            tied_weights={pending: np.broadcast_to(number, count) for pending, number in whole.tied_weights.items()},
        )

    def only(self, rows: Column) -> "Totals":
        """Return those of some candidates."""
        return Totals(
            forward_s=self.forward_s[:, rows],
            input_s=self.input_s[:, rows],
            weight_s=self.weight_s[:, rows],
            saved_bytes=self.saved_bytes[:, rows],
            moment_bytes=self.moment_bytes[:, rows],
            waiting_bytes=self.waiting_bytes[:, rows],
            placeholder_bytes=self.placeholder_bytes[:, rows],
            weights={pending: number[rows] for pending, number in self.weights.items()},
            tied_weights={pending: number[rows] for pending, number in self.tied_weights.items()},
        )

    @property
    def pass_s(self) -> Column:
        """Forward and backward."""
        return self.forward_s + self.input_s + self.weight_s

    @property
    def num_weights(self) -> Column:
        """Weights on the rank, those that are another block's as well included."""
        return sum(self.weights.values()) + sum(self.tied_weights.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """Candidates that share a schedule and ZeRO: what their blocks take and hold, and what lies between stages."""

    question: Question
    setting: Setting
    schedule: Schedule
    sends: Sends
    boundary_bytes: Column
    bucket_bytes: Column
    fixed_s: Column  # of every step, whatever its stages hold
    embed: Totals
    layer: Totals  # a kind of recompute per row, none among them
    head: Totals

    @property
    def num_candidates(self) -> int:
        """How many there are."""
        return self.layer.forward_s.shape[1]

    def only(self, rows: Column) -> "Frame":
        """Return some of them, or one many times."""
        sends = replace(self.sends, time_s=np.broadcast_to(self.sends.time_s, self.num_candidates)[rows])
        return replace(
            self,
            setting=at(self.setting, rows),
            sends=sends,
            boundary_bytes=self.boundary_bytes[rows],
            bucket_bytes=self.bucket_bytes[rows],
            fixed_s=self.fixed_s[rows],
            embed=self.embed.only(rows),
            layer=self.layer.only(rows),
            head=self.head.only(rows),
        )

    @property
    def hides_updates(self) -> bool:
        """Whether traffic of the step phase hides behind passes."""
        return ("unit" if self.setting.zero == 3 else "dp") in load_kernels(self.question.kernels).hides

    @property
    def hop_s(self) -> Column:
        """For how long each rank is held by sends of one micro-batch, by candidate."""
        return loads_of(self.schedule).sends[:, None] * np.broadcast_to(self.sends.held_s, self.num_candidates)


def states_bytes(frame: Frame, block: Totals) -> Column:
    """Return the states of a block at least: rounding, and weights that meet their copies, left out."""
    parts = state_bytes(block.weights, frame.setting, frame.question.workload)
    return np.maximum(0.0, sum(parts.values()) - _ROUNDED * len(block.weights))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fillings:
    """Options of every pipeline rank: how many layers each of its chunks has, of one kind of recompute and without."""

    kind: Column  # [rank or 1, option, chunk or 1]: the row among the kinds
    dropped: Column  # [rank or 1, option, chunk]: layers of this kind
    plain: Column  # likewise those that keep everything
    plain_kind: int  # the row of no recompute

    @property
    def num_layers(self) -> Column:
        """Layers of a rank, by option."""
        return (self.dropped + self.plain).sum(axis=2)

    def only(self, options: Column) -> "Fillings":
        """Return some options."""
        return replace(self, kind=self.kind[:, options], dropped=self.dropped[:, options], plain=self.plain[:, options])

    @classmethod
    def side_by_side(cls, parts: "Sequence[Fillings]") -> "Fillings":
        """Return the options of several as those of one."""
        kind, dropped, plain = (
            np.concatenate([getattr(one, name) for one in parts], axis=1) for name in ("kind", "dropped", "plain")
        )
        return cls(kind=kind, dropped=dropped, plain=plain, plain_kind=parts[0].plain_kind)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filled:
    """Seconds of one micro-batch by rank, option, chunk and candidate; peak memory by rank, option and candidate."""

    forward_s: Column
    input_s: Column
    weight_s: Column
    peak_bytes: Column
    weights: Weights

    def only(self, rows: Column) -> "Filled":
        """Return those of some candidates, or of one many times."""
        return Filled(
            forward_s=self.forward_s[..., rows],
            input_s=self.input_s[..., rows],
            weight_s=self.weight_s[..., rows],
            peak_bytes=self.peak_bytes[..., rows],
            weights={pending: number[..., rows] for pending, number in self.weights.items()},
        )

    @property
    def pass_s(self) -> Column:
        """Forward and backward of all chunks of a rank."""
        return (self.forward_s + self.input_s + self.weight_s).sum(axis=2)


def filled(frame: Frame, fillings: Fillings) -> Filled:
    """Price all options of all ranks."""
    schedule, mixture = frame.schedule, _Mixture.of(frame, fillings)
    weights = mixture.weights()
    keeps_outputs = load_kernels(frame.question.kernels).keeps_outputs
    holds = Holds(
        kept_bytes=_kept(schedule, mixture),
        logits_bytes=0.0,
        working_bytes=mixture.working(splits=schedule.splits_backward),
        num_messages=messages_of(schedule, keeps_outputs=keeps_outputs)[:, None, None],
        placeholder_bytes=mixture.placeholders(),
        weights=weights,
        largest_block=mixture.largest_block(),
    )
    parts = memory_parts(frame.question, frame.setting, holds, frame.boundary_bytes, frame.bucket_bytes)
    return Filled(
        forward_s=mixture.total("forward_s"),
        input_s=mixture.total("input_s"),
        weight_s=mixture.total("weight_s"),
        peak_bytes=sum(parts.values()),
        weights=weights,
    )


def _kept(schedule: Schedule, mixture: "_Mixture") -> Column:
    """Return the most that each rank keeps of micro-batches in flight, and between the halves of their backward."""
    sizes = mixture.total("saved_bytes")
    if schedule.splits_backward:
        sizes = np.concatenate([sizes, mixture.total("waiting_bytes")], axis=2)
    elif schedule.num_chunks == 1:
        return loads_of(schedule).flight[:, None, None] * sizes[:, :, 0]
    return np.stack([np.tensordot(own, sizes[rank], (1, 1)).max(axis=0) for rank, own in enumerate(held_of(schedule))])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mixture:
    """How many of each block every chunk has, ready to be multiplied."""

    frame: Frame
    kind: Column
    plain_kind: int
    dropped: Column  # [rank, option, chunk, 1]
    plain: Column
    first: Column  # [rank, 1, chunk, 1]: 1 where the embedding is
    last: Column  # likewise the head

    @classmethod
    def of(cls, frame: Frame, fillings: Fillings) -> "_Mixture":
        schedule = frame.schedule
        stage = loads_of(schedule).stages[:, None, :, None]
        shape = (schedule.num_ranks, *fillings.dropped.shape[1:])
        return cls(
            frame=frame,
            kind=fillings.kind,
            plain_kind=fillings.plain_kind,
            dropped=np.broadcast_to(fillings.dropped, shape)[..., None].astype(np.float64),
            plain=np.broadcast_to(fillings.plain, shape)[..., None].astype(np.float64),
            first=(stage == 0).astype(np.float64),
            last=(stage == schedule.num_stages - 1).astype(np.float64),
        )

    def total(self, name: str) -> Column:
        """Add up a number over the blocks of each chunk."""
        embed, layer, head = (getattr(block, name) for block in (self.frame.embed, self.frame.layer, self.frame.head))
        mixed = self.dropped * layer[self.kind] + self.plain * layer[self.plain_kind]
        return mixed + self.first * embed[0] + self.last * head[0]

    def working(self, *, splits: bool) -> Column:
        """Return what a rank needs at most beside all that it keeps: backward frees block after block, from the last.

        The same as ``cost/pipeline`` says of one stage.
        """
        embed, layer, head = self.frame.embed, self.frame.layer, self.frame.head
        blocks = (
            (self.last, head.moment_bytes[0], head.saved_bytes[0]),
            (self.plain, layer.moment_bytes[self.plain_kind], layer.saved_bytes[self.plain_kind]),
            (self.dropped, layer.moment_bytes[self.kind], layer.saved_bytes[self.kind]),
            (self.first, embed.moment_bytes[0], embed.saved_bytes[0]),
        )
        working: Column = 0.0
        freed: Column = 0.0
        for count, moment, saved in blocks:
            working = np.maximum(working, np.where(count > 0, moment - freed, 0.0))
            freed = freed if splits else freed + count * saved
        return working.max(axis=2)

    def placeholders(self) -> Column:
        """Return the buffers that stay once for every kind of block on a rank, whatever is computed again."""
        embed, layer, head = (one.placeholder_bytes for one in (self.frame.embed, self.frame.layer, self.frame.head))
        return layer[self.plain_kind] + self.first.any(axis=2) * embed[0] + self.last.any(axis=2) * head[0]

    def weights(self) -> Weights:
        """Return a rank's weights by the atoms that their gradients await; tied ones that meet count once."""
        layers = (self.dropped + self.plain).sum(axis=2)
        first, last = self.first.sum(axis=2), self.last.sum(axis=2)
        apart = 1.0 - first * last
        found: dict[tuple[str, ...], Column] = {}
        for count, block in ((layers, self.frame.layer), (first, self.frame.embed), (last, self.frame.head)):
            for own, factor in ((block.weights, 1.0), (block.tied_weights, apart)):
                for pending, number in own.items():
                    found[pending] = found.get(pending, 0.0) + factor * count * number
        return found

    def largest_block(self) -> Column:
        """Return the weights of a rank's largest block."""
        embed, layer, head = (block.num_weights for block in (self.frame.embed, self.frame.layer, self.frame.head))
        ends = np.maximum(self.first.any(axis=2) * embed, self.last.any(axis=2) * head)
        return np.maximum(layer, ends)
