"""What a pipeline is made of, for pricing: stages with their layers, sends, buckets, the schedule."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from autoshard.cost.block import PASSES, BlockCost
from autoshard.cost.collective import Number
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.spec.kernels import Kernels

Price = Callable[[str, Recompute], BlockCost]  # block kind and recompute -> cost
PARTS = ("compute", "waiting", "tp", "cp", "ep")
_AS_IT_IS = Recompute()  # embedding and head compute nothing again


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What a stage holds: how many layers of each kind of recompute, and whether it is the first or the last."""

    layers: tuple[tuple[Recompute, int], ...]
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, num_layers: int, drop: Recompute, *, is_first: bool, is_last: bool) -> "StageLayers":
        """Split a stage's layers by kind of recompute: ``full:K`` is full for K layers and none for the rest."""
        kinds = Counter(drop.of_layer(index) for index in range(num_layers))
        return cls(layers=tuple(kinds.items()), is_first=is_first, is_last=is_last)

    def contents(self) -> list[tuple[str, Recompute, int]]:
        """List its blocks: kind, recompute, how many."""
        contents = [("layer", drop, count) for drop, count in self.layers]
        if self.is_first:
            contents.insert(0, ("embed", _AS_IT_IS, 1))
        if self.is_last:
            contents.append(("head", _AS_IT_IS, 1))
        return contents


@dataclass(frozen=True, slots=True, kw_only=True)
class Sends:
    """What handing the hidden state on costs, once: on its way, the one who sends, and the one who receives."""

    time_s: Number
    hidden: bool  # both compute meanwhile
    receives_apart: bool  # otherwise a rank receives while it sends the other way

    @classmethod
    def of(cls, time_s: Number, schedule: Schedule, kernels: Kernels) -> "Sends":
        """Take from a platform's table how it sends in a schedule."""
        hidden = kernels.hides_sends(schedule.builder)
        return cls(time_s=time_s, hidden=hidden, receives_apart=kernels.receives_apart)

    @property
    def receive_s(self) -> Number:
        """What the receiver is held for after the message has come; a lone all-gather of two holds either of them."""
        return self.time_s if self.receives_apart and not self.hidden else 0.0 * self.time_s

    @property
    def held_s(self) -> Number:
        """For how long a rank does nothing else for each message that it sends, and the one the other way."""
        return 0.0 * self.time_s if self.hidden else self.time_s + self.receive_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How stages follow each other: schedule, what each stage holds, the hidden state between them, buckets."""

    schedule: Schedule
    stages: tuple[StageLayers, ...]
    boundary_bytes: Number
    sends: "Sends"
    bucket_bytes: Number  # of the data-parallel buckets that stand ready


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """One micro-batch through one stage, by pass."""

    forward_s: Number
    input_s: Number
    weight_s: Number

    @classmethod
    def of_all(cls, stages: Iterable[StageLayers], price: Price) -> "dict[StageLayers, StageSeconds]":
        """Add up the blocks of every stage that differs from the others."""

        @cache
        def by_pass(kind: str, drop: Recompute) -> tuple[Number, ...]:
            seconds = price(kind, drop).seconds
            return tuple(sum(seconds[name].values()) for name in PASSES)

        found: dict[StageLayers, StageSeconds] = {}
        for stage in dict.fromkeys(stages):
            blocks = [(count, by_pass(kind, drop)) for kind, drop, count in stage.contents()]
            forward, inputs, weights = (sum(count * own[number] for count, own in blocks) for number in range(3))
            found[stage] = cls(forward_s=forward, input_s=inputs, weight_s=weights)
        return found

    @property
    def whole_s(self) -> Number:
        """All of it."""
        return self.forward_s + self.input_s + self.weight_s

    def of_kind(self, kind: str) -> Number:
        """Return the seconds of a kind of action; B is I and W, one after the other."""
        by_kind = {"F": self.forward_s, "I": self.input_s, "W": self.weight_s, "B": self.input_s + self.weight_s}
        return by_kind[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """One micro-batch through all stages of one pipeline rank."""

    seconds: Mapping[str, Number]
    sent_bytes: Mapping[str, Number]
    saved_bytes: tuple[Number, ...]  # by chunk
    waiting_bytes: tuple[Number, ...]  # by chunk, what is left of that between I and W
    head_bytes: tuple[Number, ...]  # of what is saved, what the head keeps: mostly logits
    head_waiting_bytes: tuple[Number, ...]
    alike: bool  # whether its chunks hold the same
    num_blocks: int
    working_bytes: Number
    placeholder_bytes: Number
    weights: Mapping[tuple[str, ...], Number]
    tied_apart: Mapping[tuple[str, ...], Number]  # of these, what another rank has as well
    largest_block: Number  # weights of its largest block

    @property
    def time_s(self) -> Number:
        """Forward and backward of all its stages."""
        return sum(self.seconds.values())


def rank_cost(stages: tuple[StageLayers, ...], price: Price, *, splits: bool = False) -> RankCost:
    """Add up the blocks of a rank's stages; ``splits`` says whether backward is split, so that W comes later."""
    seconds: dict[str, Number] = dict.fromkeys(PARTS, 0.0)
    sent: dict[str, Number] = defaultdict(float)
    for stage in stages:
        for kind, drop, count in stage.contents():
            cost = price(kind, drop)
            for part in PARTS:
                seconds[part] = seconds[part] + count * cost.part_s(part)
            for axis, size in cost.sent_bytes.items():
                sent[axis] = sent[axis] + count * size
    weights, largest = _weights(stages, price)
    is_end = any(stage.is_first for stage in stages) != any(stage.is_last for stage in stages)
    kinds = {kind: price(kind, drop) for stage in stages for kind, drop, _ in stage.contents()}
    return RankCost(
        seconds=seconds,
        sent_bytes=sent,
        saved_bytes=tuple(_saved(stage, price) for stage in stages),
        waiting_bytes=tuple(_waiting(stage, price) for stage in stages),
        head_bytes=tuple(_saved(stage, price, "head") for stage in stages),
        head_waiting_bytes=tuple(_waiting(stage, price, "head") for stage in stages),
        alike=len(set(stages)) == 1,
        num_blocks=sum(count for stage in stages for _, _, count in stage.contents()),
        working_bytes=np.max([_working(stage, price, splits=splits) for stage in stages], axis=0),
        placeholder_bytes=sum(cost.placeholder_bytes for cost in kinds.values()),
        weights=weights,
        tied_apart=price("head", Recompute()).tied_weights if is_end else {},
        largest_block=largest,
    )


def _saved(stage: StageLayers, price: Price, only: str = "") -> Number:
    """Return what a stage, or its blocks of one kind, keep of one micro-batch."""
    return sum(count * price(kind, drop).saved_bytes for kind, drop, count in stage.contents() if only in ("", kind))


def _waiting(stage: StageLayers, price: Price, only: str = "") -> Number:
    """Return what is left of that from I to W."""
    return sum(count * price(kind, drop).waiting_bytes for kind, drop, count in stage.contents() if only in ("", kind))


def _working(stage: StageLayers, price: Price, *, splits: bool) -> Number:
    """Return what a stage needs beside all that it keeps, at most.

    Backward runs from its last block to its first, and what a block kept is free when its turn is over.
    """
    working: Number = 0
    freed: Number = 0
    for kind, drop, count in reversed(stage.contents()):
        cost = price(kind, drop)
        working = np.maximum(working, cost.working_bytes + cost.remade_bytes - freed)
        freed = freed + (0 if splits else count * cost.saved_bytes)
    return working


def _weights(stages: tuple[StageLayers, ...], price: Price) -> tuple[Mapping[tuple[str, ...], Number], Number]:
    """Return a rank's weights, and how many its largest block has; tied ones that meet on one rank count once."""
    weights: dict[tuple[str, ...], Number] = defaultdict(int)
    largest: Number = 0
    meets = any(stage.is_first for stage in stages) and any(stage.is_last for stage in stages)
    for kind, drop, count in [entry for stage in stages for entry in stage.contents()]:
        cost = price(kind, drop)
        for pending, number in (*cost.weights.items(), *(() if meets else cost.tied_weights.items())):
            weights[pending] = weights[pending] + count * number
        largest = np.maximum(largest, sum(cost.weights.values()) + sum(cost.tied_weights.values()))
    return weights, largest
