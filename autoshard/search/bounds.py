"""What a step takes at least, for many candidates at once, before anything is known of their stages.

The layers of a pipeline are given to its ranks as their memory allows: those that recompute least first, each rank as
many as could fit if it held no others. The work that results is then spread in perfect balance, over a pipeline that
waits no longer than its schedule must. Every step of this errs to the fast side.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from autoshard.cost.pipeline import Sends
from autoshard.cost.step import rank_update
from autoshard.cost.update import Turns, state_bytes
from autoshard.plan.candidate import Zero
from autoshard.plan.recompute import Recompute
from autoshard.schedule.builders import BUILDERS
from autoshard.schedule.schedule import Schedule
from autoshard.search.chosen import SURE
from autoshard.search.families import Family
from autoshard.search.fillings import Frame, Weights, states_bytes
from autoshard.search.ranges import ALL_RANGES
from autoshard.search.splits import MOST_RELIEVED, splits
from autoshard.spec.kernels import load_kernels

Column = Any
_FOREVER = 1e30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ideal:
    """What the layouts of a family take at least under a kind of ZeRO, whatever their schedule."""

    family: Family
    zero: Zero
    work_s: Column  # of a micro-batch on all ranks together; infinite where nothing fits
    plain_s: Column  # the same where nothing is computed again
    free_s: Column  # the same if memory had no end
    capacity: float
    update_s: Column  # what is no micro-batch's
    counts: Column  # micro-batches
    num_ranks: Column  # of the pipeline
    states_bytes: Column  # of the rank with the most layers
    saved_bytes: Column  # of a layer that keeps least
    forward_s: Column  # of the fastest layer
    pass_s: Column  # likewise forward and backward

    @classmethod
    def of(cls, family: Family, zero: Zero, capacity: float) -> "Ideal":
        """Work out what all schedules share."""
        rows, question = family.space.rows, family.question
        counts = question.workload.global_batch // (rows["dp"] * rows["mbs"])
        frame = family.frame(np.arange(len(counts)), Schedule(builder="1f1b", num_ranks=1, num_micro_batches=1), zero)
        work, plain, free = np.full((3, len(counts)), np.inf)
        rooms = _Rooms.of(frame, capacity)
        for ranks in sorted(set(rows["pp"].tolist())):
            mine = np.flatnonzero(rows["pp"] == ranks)
            work[mine], plain[mine], free[mine] = _work_s(family, rooms.layers(mine, ranks, counts[mine]), mine)
        share = -(-question.model.num_layers // rows["pp"])
        weights = {pending: share * number for pending, number in family.layer.weights.items()}
        update = _update_s(frame, weights, counts, share)
        return cls(
            family=family,
            zero=zero,
            work_s=work,
            plain_s=plain,
            free_s=free,
            capacity=capacity,
            update_s=update,
            counts=counts,
            num_ranks=rows["pp"],
            states_bytes=sum(state_bytes(weights, frame.setting, question.workload).values()),
            saved_bytes=family.layer.saved_bytes.min(axis=0),
            forward_s=family.layer.forward_s.min(axis=0),
            pass_s=family.layer.pass_s.min(axis=0),
        )

    def bound_s(self, builder: str, rows: Column, chunks: Column, allowed: Column, below_s: float) -> Column:
        """Bound some layouts run with a schedule, each with so many chunks per rank.

        ``allowed`` says which kinds of recompute each may use: [kind, layout]. Infinite where nothing fits; where that
        is not below what matters, the bound need not be the best one.
        """
        family, counts, ranks = self.family, self.counts[rows], self.num_ranks[rows]
        again = [number for number, kind in enumerate(family.kinds) if kind != Recompute()]
        only_plain = ~allowed[again].any(axis=0)
        work = self.work_s[rows]
        work[only_plain] = self.plain_s[rows][only_plain]
        if BUILDERS[builder].turns:  # its first rank holds embedding and head, and others may keep less than under 1F1B
            work = np.where(self._folds(rows, only_plain), self.free_s[rows], np.inf)
        held = _held_s(family, builder)[rows]
        if builder in ALL_RANGES:
            passes = _passes(builder, counts, ranks) * (work + 2 * (ranks - 1) * held)
            passes[~_keeps_all(self, builder, rows)] = np.inf
        else:
            passes = counts / ranks * work
            near = np.flatnonzero(passes + self.update_s[rows] < below_s)
            passes[near] = np.maximum(passes[near], self._listed_s(builder, rows[near], chunks[near], held[near]))
        fixed = family.fixed_s(rows, builder, chunks, self.zero)
        return (passes + self.update_s[rows] + fixed) * (1 - SURE)

    def _folds(self, rows: Column, only_plain: Column) -> Column:
        """Say where ZB-V may fit: its fullest rank holds an even share, and keeps chunks of every rank at a time."""
        family, ranks = self.family, self.num_ranks[rows]
        flight = np.where(self.counts[rows] >= 2 * ranks, 2 * ranks, 1)
        least = np.maximum(1, family.question.model.num_layers // (2 * ranks) - MOST_RELIEVED)
        plain = family.layer.saved_bytes[family.kinds.index(Recompute()), rows]
        saved = self.saved_bytes[rows]
        saved[only_plain] = plain[only_plain]
        return (self.states_bytes[rows] + flight * least * saved) * (1 - 1e-9) <= self.capacity

    def _listed_s(self, builder: str, rows: Column, chunks: Column, held: Column) -> Column:
        """Bound schedules whose stages are those of a list: by the last and the fullest rank of its best split."""
        family, layers = self.family, self.family.question.model.num_layers
        pinned = family.space.base.stages
        passes, head = self.pass_s[rows], family.head.pass_s[0][rows]
        ahead = self.forward_s[rows] if BUILDERS[builder].splits else passes
        found = np.full(len(rows), np.inf)
        ranks, counts = self.num_ranks[rows], self.counts[rows]
        shapes = ranks * (layers + 1) + chunks
        for shape in sorted(set(shapes.tolist())):
            mine = np.flatnonzero(shapes == shape)
            own, ahead_s, count, held_s = passes[mine], ahead[mine], counts[mine], held[mine]
            best = np.full(len(mine), np.inf)
            for ends in _ends(builder, divmod(shape, layers + 1), layers, pinned):
                full, last = (
                    before * ahead_s + count * (inside * own + sends * held_s) for before, inside, sends in ends
                )
                best = np.minimum(best, np.maximum(full, last + count * head[mine]))
            found[mine] = best
        return found


@cache
def _ends(
    builder: str, shape: tuple[int, int], num_layers: int, pinned: tuple[int, ...] | None
) -> list[list[tuple[float, float, int]]]:
    """Return for every split of a list the layers before, the layers and the sends of its fullest and its last rank."""
    schedule = Schedule(builder=builder, num_ranks=shape[0], num_chunks=shape[1], num_micro_batches=shape[0])
    sends, last = schedule.num_sends(), schedule.place_of(schedule.num_stages - 1)[0]
    found: list[list[tuple[float, float, int]]] = []
    for split in (pinned,) if pinned else splits(num_layers, schedule.num_stages):
        before, inside = _by_rank(schedule, split)
        ranks = (int(np.argmax(inside)), last)
        found.append([(float(before[rank]), float(inside[rank]), sends[rank]) for rank in ranks])
    return found


def _by_rank(schedule: Schedule, split: tuple[int, ...]) -> tuple[Column, Column]:
    """Return by rank the layers of the stages before its first one, and its own."""
    inside = np.zeros(schedule.num_ranks)
    first = np.full(schedule.num_ranks, schedule.num_stages)
    for stage, layers in enumerate(split):
        rank = schedule.place_of(stage)[0]
        inside[rank] += layers
        first[rank] = min(first[rank], stage)
    return np.concatenate([[0], np.cumsum(split)])[first], inside


def _passes(builder: str, counts: Column, ranks: Column) -> Column:
    """Return how often a step takes the work of one micro-batch at least, however that lies on the ranks.

    Paths that are no longer than those of ``path_weights``, in the mixture in which all layers weigh the same.
    """
    passes = (counts + ranks - 1) / ranks
    few = (counts <= ranks) & (builder != "gpipe")
    passes[few] = 1 + (counts[few] - 1) / (2 * ranks[few] - counts[few] + 1)
    return passes


def _held_s(family: Family, builder: str) -> Column:
    """Return for how long each message holds a rank."""
    question, count = family.question, len(family.layouts)
    send_s = np.broadcast_to(family.sends.send_s(family.boundary_bytes), count)
    kernels = load_kernels(question.kernels)
    hidden = kernels.hides_sends(builder)
    return np.broadcast_to(Sends(time_s=send_s, hidden=hidden, receives_apart=kernels.receives_apart).held_s, count)


def _keeps_all(ideal: Ideal, builder: str, rows: Column) -> Column:
    """Say where what GPipe keeps of all micro-batches fits, at the least that a layer keeps."""
    if builder != "gpipe":
        return np.ones(len(rows), dtype=bool)
    family = ideal.family
    layers = -(-family.question.model.num_layers // ideal.num_ranks[rows])
    kept = layers * ideal.counts[rows] * ideal.saved_bytes[rows]
    return kept <= ideal.capacity


def _work_s(family: Family, room: Column, mine: Column) -> tuple[Column, Column, Column]:
    """Return what one micro-batch costs on all ranks together at least, without recompute, and without limit."""
    passes, layers = family.layer.pass_s[:, mine], family.question.model.num_layers
    plain, order = family.kinds.index(Recompute()), passes.argsort(axis=0)
    sorted_room = np.take_along_axis(room, order[None], axis=1)
    most = np.minimum(np.maximum.accumulate(sorted_room, axis=1).sum(axis=0), layers)
    share = np.diff(most, axis=0, prepend=0.0)
    ends = (family.embed.pass_s[0] + family.head.pass_s[0])[mine]
    work = (share * np.take_along_axis(passes, order, axis=0)).sum(axis=0) + ends
    none = layers * passes[plain] + ends
    fits = room[:, plain].sum(axis=0) >= layers
    free = layers * passes.min(axis=0) + ends
    return np.where(most[-1] >= layers, work, np.inf), np.where(fits, none, np.inf), free


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rooms:
    """The room that the layouts of a family have for layers, and what each layer takes of it."""

    frame: Frame
    room: Column  # beside what every rank needs
    embed: Column  # states of a block
    layer: Column
    head: Column

    @classmethod
    def of(cls, frame: Frame, capacity: float) -> "_Rooms":
        """Work out what does not depend on how many ranks there are."""
        kernels = load_kernels(frame.question.kernels)
        gathered = 0.0 if frame.setting.zero != 3 else frame.layer.num_weights * 2.0
        room = capacity * (1 + 1e-9) - (kernels.workspace_bytes + kernels.runtime_bytes + gathered)
        embed, layer, head = (states_bytes(frame, block) for block in (frame.embed, frame.layer, frame.head))
        return cls(frame=frame, room=np.broadcast_to(room, frame.num_candidates), embed=embed, layer=layer, head=head)

    def layers(self, mine: Column, ranks: int, counts: Column) -> Column:
        """Return how many layers of each kind fit a rank at most: [rank, kind, candidate].

        Of each layer it keeps at least as many micro-batches as 1F1B, which keeps fewest (but for ZB-V).
        """
        number = np.arange(ranks)[:, None]
        flight = np.maximum(1, np.minimum(ranks - number, counts))[:, None]
        first, last = (number == 0)[:, None] * 1.0, (number == ranks - 1)[:, None] * 1.0
        head_saved = self.frame.head.saved_bytes[0][mine]
        ends = first * self.embed[mine] + last * (self.head[mine] + flight * head_saved)
        moment = np.maximum(0.0, self.frame.layer.moment_bytes[:, mine] - last * head_saved)
        each = self.layer[mine] + flight * self.frame.layer.saved_bytes[:, mine]
        return np.maximum(0.0, np.floor((self.room[mine] - ends - moment) / np.maximum(each, 1.0)))


def _update_s(frame: Frame, weights: Weights, counts: Column, layers: Column) -> Column:
    """Return what the step phase of a rank with these layers, and their weights, takes at least.

    Embedding and head may be there too: under ZeRO-3 they are more messages, but if they are small, messages of another
    size, which may go another way.
    """
    passes = np.full(len(counts), _FOREVER)  # behind which as much as possible hides

    def with_s(ends: int) -> Column:
        turns = Turns(num_micro_batches=counts, num_blocks=layers + ends)
        update = rank_update(frame.question, frame.setting, weights, passes, turns)
        return sum(np.broadcast_to(part, len(counts)) for part in update.seconds.values())

    return np.min([with_s(ends) for ends in (range(3) if frame.setting.zero == 3 else (0,))], axis=0)
