"""Changes of the layers and the recompute of the stages of a plan, many of which are priced at once.

They know nothing of bounds, of balance, or of what the search has tried: every change is priced as ``--at`` prices it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.cost.stages import PipelineBlocks, StageOptions, price_stages
from autoshard.plan.recompute import Recompute
from autoshard.schedule.counts import counts_of
from autoshard.schedule.waves import Ints
from autoshard.search.bound.points import Solution
from autoshard.search.fill.stage_filling import Goal
from autoshard.search.fill.stage_options import StageChoices, StageFilling, timed_options

_WHOLE = 1 << 30  # layers of a chunk that recompute at most, where all do
_BATCH = 256  # changes that are priced together
_SEVERAL = (2, 3, 4)  # changes at once, drawn at random
_FEW = 16  # new ones in a batch that is drawn
_TIE = 1e-8  # relative: times that differ by less count as equal
# A layer from a stage to another, and 0; or behind all stages a rank, a kind of recompute, and as ``Fillings.most``.
Change = tuple[int, int, int]
Drawn = list[list[Change]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fillings:
    """Some ways to fill the stages of one point: [filling, stage] and [filling, rank]."""

    layers: Ints
    kind: Ints  # of recompute
    most: Ints  # layers of a chunk that recompute, _WHOLE for all

    def only(self, numbers: Ints) -> "Fillings":
        """Return some of the fillings, or one several times."""
        return Fillings(layers=self.layers[numbers], kind=self.kind[numbers], most=self.most[numbers])

    @property
    def keys(self) -> list[bytes]:
        """Return what tells each from all others."""
        return [row.tobytes() for row in np.concatenate([self.layers, self.kind, self.most], axis=1)]


@dataclass(frozen=True, kw_only=True, eq=False)
class FillingChanges:
    """The changes of the stages of a solution that its Rules and pins allow, and their prices."""

    solution: Solution
    goal: Goal

    @cached_property
    def blocks(self) -> PipelineBlocks:
        """The blocks of the solution in its pipeline."""
        return self.solution.point.blocks

    @cached_property
    def choices(self) -> StageChoices:
        """What its stages may choose from."""
        return self.solution.point.choices

    @cached_property
    def is_free(self) -> bool:
        """Say whether its ranks may recompute otherwise; what is pinned stays, and its layers stay with it."""
        return self.choices.recompute is None

    @cached_property
    def batch_s(self) -> float:
        """Seconds of a batch by an estimate that is the same on every machine (measured 2026-11 on a cloud machine)."""
        schedule = self.blocks.schedule
        count = min(schedule.num_micro_batches, 3 * schedule.num_ranks)
        return 8e-3 + (1.2e-7 * count + 1e-6) * schedule.num_stages * _BATCH

    def single(self, filling: StageFilling) -> list[Change]:
        """List all single changes."""
        layers, stages = filling.stages(0), range(self.blocks.schedule.num_stages)
        moved = [] if self.choices.stages or not self.is_free else [
            (source, target, 0) for source, target in itertools.permutations(stages, 2) if layers[source] > 1
        ]  # fmt: skip
        return moved + [(len(layers) + rank, kind, most) for rank, kind, most in self._again(max(layers))]

    def _again(self, most_layers: int) -> Iterator[Change]:
        """Yield what each rank may recompute: a kind, and how many layers of a chunk at most."""
        allowed, kinds = self.choices.allowed[:, 0], self.choices.kinds
        full, plain = Recompute(kind="full"), kinds.index(Recompute())
        for rank in range(self.blocks.schedule.num_ranks if self.is_free else 0):
            for number in np.flatnonzero(allowed).tolist():
                yield rank, number, _WHOLE
                if kinds[number] == full and allowed[plain] and self.choices.partly:
                    yield from ((rank, number, most) for most in range(1, most_layers))

    def start(self, filling: StageFilling) -> Fillings:
        """Return a filling of the solution as one that can be changed."""
        stages = counts_of(self.blocks.schedule).stages
        recomputed, plain = filling.recomputed[stages, 0], filling.plain[stages, 0]  # [rank, chunk]
        partly = (recomputed > 0) & (plain > 0)
        kind = np.where(recomputed.any(axis=1), filling.kind[stages, 0].max(axis=1), self._plain)
        kinds = np.where(recomputed > 0, filling.kind[stages, 0], -1).max(axis=1)
        most = np.where(partly.any(axis=1), np.where(partly, recomputed, 0).max(axis=1), _WHOLE)
        layers = (filling.recomputed + filling.plain)[:, 0]
        return Fillings(layers=layers[None], kind=np.where(kinds >= 0, kinds, kind)[None], most=most[None])

    @property
    def _plain(self) -> int:
        return self.choices.kinds.index(Recompute())

    def changed(self, filling: StageFilling, drawn: Drawn) -> Fillings:
        """Return fillings with some single changes each."""
        fillings = self.start(filling).only(np.zeros(len(drawn), dtype=np.int64))
        num_stages = self.blocks.schedule.num_stages
        for number, changes in enumerate(drawn):
            for first, second, most in changes:
                if first < num_stages:
                    fillings.layers[number, first] -= 1
                    fillings.layers[number, second] += 1
                else:
                    fillings.kind[number, first - num_stages], fillings.most[number, first - num_stages] = second, most
        return fillings.only(np.flatnonzero(fillings.layers.min(axis=1) >= 1))

    def drawn(self, single: list[Change], rng: np.random.Generator) -> Drawn:
        """Draw a batch of several changes at once."""
        places: list[list[int]] = rng.integers(len(single), size=(_BATCH, max(_SEVERAL))).tolist()
        counts: list[int] = rng.choice(_SEVERAL, size=_BATCH).tolist()
        return [[single[place] for place in row[:count]] for row, count in zip(places, counts, strict=True)]

    def best(self, fillings: Fillings) -> StageFilling | None:
        """Price some fillings, and return the fastest that fits; None where none does."""
        if not len(fillings.layers):
            return None
        schedule, stages = self.blocks.schedule, counts_of(self.blocks.schedule).stages
        ends = np.cumsum(fillings.layers, axis=1)
        first = self.blocks.order.alike(ends - fillings.layers, fillings.layers)

        def by_chunk(column: Ints) -> Ints:
            return column[:, stages].swapaxes(0, 1)  # [rank, filling, chunk]

        count, kind = by_chunk(fillings.layers), fillings.kind.T[:, :, None] + 0 * by_chunk(fillings.layers)
        recomputed = np.minimum(fillings.most.T[:, :, None], count)
        options = StageOptions(
            kind=kind,
            recomputed=recomputed,
            plain=count - recomputed,
            plain_kind=self._plain,
            first=by_chunk(first + 0 * fillings.layers),
        )
        prices, host = price_stages(self.blocks, options), self.blocks.question.cluster.rank_host_bytes
        fits = np.where((prices.peak_bytes <= self.goal.capacity) & (prices.host_bytes <= host), 1, 0)
        fitting = np.flatnonzero(np.broadcast_to(fits, (*count.shape[:2], 1)).min(axis=0)[:, 0])
        if not len(fitting):
            return None
        option = np.broadcast_to(fitting, (schedule.num_ranks, len(fitting)))
        timed = timed_options(self.blocks, options, prices, (option, np.zeros_like(fitting)))
        return timed.only(np.array([int(timed.time_s.argmin())]))


def improved(solution: Solution, goal: Goal, most_changes: int, most_s: float) -> tuple[Solution, int]:
    """Return the best solution that changes of layers and recompute lead to, and the number of changes priced.

    All single changes come first if there is time for them, then several at once; each gain is a new start. No change
    is priced twice. It ends early where hardly any others are drawn.
    """
    changes, filling = FillingChanges(solution=solution, goal=goal), solution.filling
    rng, left_s, priced = np.random.default_rng(0), most_s, {changes.start(filling).keys[0]}
    single = changes.single(filling)
    order, place = rng.permutation(len(single)), 0
    while single and len(priced) <= most_changes and left_s > 0:
        drawn: Drawn = [[single[number]] for number in order[place : place + _BATCH].tolist()]
        place += _BATCH
        fillings = changes.changed(filling, drawn or changes.drawn(single, rng))
        new = {key: number for number, key in enumerate(fillings.keys) if key not in priced}
        fillings = fillings.only(np.array([*new.values()], dtype=np.int64)[: most_changes + 1 - len(priced)])
        priced |= {*fillings.keys}
        best, left_s = changes.best(fillings), left_s - changes.batch_s
        if best and best.time_s[0] < filling.time_s[0] * (1 - _TIE):
            filling = best
            single = changes.single(filling)
            order, place = rng.permutation(len(single)), 0
        elif not drawn and len(new) < _FEW:
            break
    if filling is solution.filling:
        return solution, len(priced) - 1
    filling = replace(filling, bound=np.minimum(solution.filling.bound, filling.time_s))
    return replace(solution, filling=filling, value=float(filling.time_s[0])), len(priced) - 1
