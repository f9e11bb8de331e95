"""Which layers each stage gets under any schedule: splits near the best balance are tried, and all are bounded."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.cost.stages import PipelineBlocks
from autoshard.plan.recompute import Recompute
from autoshard.schedule.counts import counts_of
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.fill.split_bounds import SplitBounds, SplitSearch
from autoshard.search.fill.split_times import SplitTimes, least_fullest_bytes, rank_ways
from autoshard.search.fill.stage_options import (
    NEVER,
    SURE,
    ChunkLayers,
    Effort,
    RankOptions,
    Split,
    StageChoices,
    StageFilling,
    near_even_splits,
)

_FEW = 3  # stages from which a layer is taken, or to which it is given
_FLOWS = 4  # that are found before a bound is asked for
_ROUNDS = 2
_TIME_S = (5e-3, 1.2e-7)  # of a batch of splits: measured 2026-11 on one core of a cloud machine
_WITHIN = 1.1  # of a limit: what moving layers one by one may gain
_ABOVE = 1 + 1e-9  # times a limit, so that what reaches it is not below it
_FIRST_FLOWS = 8
_NEARLY, _NEAR_FLOWS = 1.02, 16  # of a limit: a filling for which flows are looked for, and how many


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitFilling:
    """The splits of one candidate in a memory."""

    blocks: PipelineBlocks
    choices: StageChoices
    capacity: Floats
    search: SplitSearch

    def best_of(self, splits: Iterable[Split], best: StageFilling | None = None) -> StageFilling:
        """Return the fastest of some splits and the best filling so far, each with the fastest recompute that fits."""
        best = best or StageFilling.nothing(self.blocks.schedule.num_stages, np.full(1, np.inf))
        tried = list(dict.fromkeys(splits))
        options = self.options(tried) if tried else None
        fits = np.flatnonzero(options.least_s[..., 0].max(axis=0) < NEVER) if options else np.zeros(0, dtype=np.int64)
        if options and len(fits):
            self.search.use(self.blocks.schedule, _TIME_S[0], _TIME_S[1] * len(fits))
            timed = options.timed(options.best[:, fits, 0], np.zeros_like(fits))
            first = timed.only(np.array([int(timed.time_s.argmin())]))
            best = first if first.time_s[0] < best.time_s[0] else best
        return best

    def options(self, splits: Sequence[Split]) -> RankOptions:
        """Price all options of the ranks in some splits."""
        return RankOptions.of(self.blocks, self.choices, ChunkLayers.of_splits(self.blocks, splits), self.capacity)

    def starts(self, *shares: Floats) -> Iterator[Split]:
        """Yield splits to begin with: near-even ones, and those near some fractions of layers."""
        num_layers, stages = self.choices.num_layers, counts_of(self.blocks.schedule).stages
        for first, *between, last in near_even_splits(num_layers, stages.size) if stages.size > 1 else ():
            yield first, *between, last
            yield first, *reversed(between), last
        for share in shares:
            yield tuple(_rounded(share, num_layers).tolist())
            by_rank = share[stages]
            totals = _rounded(by_rank.sum(axis=1), num_layers, least=stages.shape[1])
            split = np.empty(stages.size, dtype=np.int64)
            for rank_stages, rank_shares, total in zip(stages, by_rank, totals.tolist(), strict=True):
                split[rank_stages] = _rounded(rank_shares * (total / rank_shares.sum()), total)
            yield tuple(split.tolist())

    def improved(self, best: StageFilling, bounds: SplitBounds) -> StageFilling:
        """Move layers from stages that add most to long paths to those that add least, as long as that is faster."""
        while self.search.seconds_left > 0:
            split = best.stages(0)
            order: list[int] = np.argsort(bounds.learn(self._layers(best)), kind="stable").tolist()
            sources = [stage for stage in reversed(order) if split[stage] > 1]
            tried = _moved(split, sources[:_FEW], order[:_FEW])
            for count in (min(number, len(sources)) for number in (2, 4, 8)):  # of stages at once
                several = np.array(split)
                several[sources[:count]] -= 1
                several[order[:count]] += 1
                tried.append(tuple(several.tolist()))
            improved = self.best_of(tried, best)
            if improved.time_s[0] >= best.time_s[0] * (1 - SURE):
                break
            best = improved
        return best

    def _layers(self, filling: StageFilling) -> Floats:
        """Return how many layers of each kind the stages of a filling have: [kind, stage], as bounds count them."""
        kinds, stages = self.choices.kinds, np.arange(len(filling.kind))
        layers = np.zeros((len(kinds) + 1, len(stages)))
        layers[filling.kind[:, 0], stages] += filling.recomputed[:, 0]
        layers[kinds.index(Recompute())] += filling.plain[:, 0]
        return layers

    def smallest(self) -> tuple[Split, float]:
        """Move layers off the fullest rank as long as it, or else the next fullest, holds less.

        Return also the bytes of the fullest rank then.
        """
        everything, stages = replace(self, capacity=np.full(1, np.inf)), counts_of(self.blocks.schedule).stages

        def smallest(splits: Sequence[Split]) -> tuple[Split, list[float], int]:
            held = everything.options(splits).least_bytes()[..., 0]  # [rank, split]
            falling = -np.sort(-held, axis=0)
            best = int(np.lexsort(falling[::-1])[0])
            return splits[best], falling[:, best].tolist(), int(held[:, best].argmax())

        split, held, fullest = smallest(list(self.starts()))
        while True:
            sources = [stage for stage in stages[fullest].tolist() if split[stage] > 1]
            tried = _moved(split, sources, range(len(split)))
            moved = smallest(tried) if tried else (split, held, fullest)
            if moved[1] >= held:
                return split, held[0]
            split, held, fullest = moved


def _moved(split: Split, sources: Sequence[int], targets: Sequence[int]) -> list[Split]:
    """List the splits in which one of these stages gives a layer to another."""
    return [
        tuple(num_layers - (stage == source) + (stage == target) for stage, num_layers in enumerate(split))
        for source in sources
        for target in targets
        if source != target
    ]


def _rounded(shares: Floats, total: int, least: int = 1) -> Ints:
    """Round to whole numbers that add up to a total."""
    rounded = np.maximum(np.floor(shares + 1e-9).astype(np.int64), least)
    over = shares - rounded
    while rounded.sum() != total:
        wants = int(np.sign(total - rounded.sum()))
        place = int(np.where((rounded > least) | (wants > 0), wants * over, -np.inf).argmax())
        rounded[place] += wants
        over[place] -= wants
    return rounded


def fill_splits(
    blocks: PipelineBlocks,
    choices: StageChoices,
    capacity: Floats,
    effort: Effort,
    limits: tuple[float, Floats, Floats],
    splits: SplitSearch,
) -> StageFilling:
    """Return the best filling of each candidate, with a bound of all splits.

    ``limits`` are the seconds below which a filling is wanted, the least time of a step beside its micro-batches, and
    any known bound of the step.
    """
    below_s, rest_s, least_s = limits
    if choices.ways is None:
        choices = replace(choices, ways=rank_ways(blocks, choices, capacity))
    return StageFilling.side_by_side(
        [
            _filled(candidate, effort, (below_s, float(rest_s[number]), float(least_s[number])))
            for number, candidate in enumerate(_each(blocks, choices, capacity, splits))
        ]
    )


def _each(
    blocks: PipelineBlocks, choices: StageChoices, capacity: Floats, splits: SplitSearch
) -> Iterator[SplitFilling]:
    for number in range(blocks.num_candidates):
        column = np.array([number])
        yield SplitFilling(
            blocks=blocks.only(column), choices=choices.only(column), capacity=capacity[column], search=splits
        )


def smallest_splits(
    blocks: PipelineBlocks, choices: StageChoices, capacity: Floats, below_bytes: float
) -> StageFilling:
    """Return a filling of little memory for each candidate; its bound is the least memory of any filling."""
    parts: list[StageFilling] = []
    least = least_fullest_bytes(blocks, choices) * (1 - SURE)
    for number, candidate in enumerate(_each(blocks, choices, capacity, SplitSearch())):
        bound = least[number : number + 1]
        filling = StageFilling.nothing(blocks.schedule.num_stages, np.where(bound <= candidate.capacity, bound, np.inf))
        if filling.bound[0] < below_bytes:
            split, held = candidate.smallest()
            if held <= candidate.capacity[0]:
                fits = replace(candidate, capacity=np.full(1, held * (1 + SURE)))
                filling = replace(fits.best_of([split]), bound=bound)
        parts.append(filling)
    return StageFilling.side_by_side(parts)


def split_bounds(
    blocks: PipelineBlocks, choices: StageChoices, limits: tuple[float, Floats], splits: SplitSearch
) -> Floats:
    """Return a lower bound of the step of each candidate, by the flows that are known.

    ``limits`` are the seconds below which it matters, and the least time of a step beside its micro-batches.
    """
    below_s, bounds_s = limits[0], list[float]()
    for times, rest_s in zip(SplitTimes.each(blocks, choices), limits[1].tolist(), strict=True):
        bounds = SplitBounds(times, splits, (below_s - rest_s) * _ABOVE)
        bounds.use_known()
        bounds_s.append(bounds.bound_s() + rest_s)
    return np.array(bounds_s) * (1 - SURE)


def _filled(candidate: SplitFilling, effort: Effort, limits: tuple[float, float, float]) -> StageFilling:
    """Bound all splits and try some, if any may be below a limit; then again with flows, if one nearly is."""
    schedule, splits, (below_s, rest_s, bound_s) = candidate.blocks.schedule, candidate.search, limits
    best = StageFilling.nothing(schedule.num_stages, np.full(1, np.inf))
    (times,) = SplitTimes.each(candidate.blocks, candidate.choices)
    bounds = SplitBounds(times, splits, (below_s - rest_s) * _ABOVE)
    for step in range(_ROUNDS):
        limit_s = min(below_s, float(best.time_s[0]) * (1 - effort.gap))
        near = best.time_s[0] < below_s * _NEARLY
        most = max(splits.most_flows, _NEAR_FLOWS if near else 0, 0 if step or bounds.knows_flows else _FIRST_FLOWS)
        if bound_s >= limit_s or (step and not most):
            break
        bound_s = _raised(bounds, splits, (bound_s, limit_s, rest_s), most)
        if bound_s >= limit_s:
            break
        best = candidate.best_of(candidate.starts(*bounds.shares), best)
        if not np.isfinite(min(below_s, best.time_s[0])):  # nothing is known to fit: begin where little is held
            best = candidate.best_of([candidate.smallest()[0]])
        if best.time_s[0] < below_s * _WITHIN:
            best = candidate.improved(best, bounds)
    return replace(best, bound=np.array([min(bound_s, float(best.time_s[0]))]))


def _raised(bounds: SplitBounds, splits: SplitSearch, seconds: tuple[float, float, float], most: int) -> float:
    """Raise a bound up to a limit, by so many flows at most, as long as these may raise it.

    Given are the bound, the limit, and the least time of a step beside its micro-batches.
    """
    bound_s, limit_s, rest_s = seconds
    bounds.below_s = min(bounds.below_s, (limit_s - rest_s) * _ABOVE)
    bounds.mix()
    bound_s = max(bound_s, (bounds.bound_s() + rest_s) * (1 - SURE))
    for _ in range(most // _FLOWS):
        if bound_s >= limit_s or splits.seconds_left <= 0 or not bounds.find_flows(_FLOWS // 2):
            break
        bound_s = max(bound_s, (bounds.bound_s() + rest_s) * (1 - SURE))
    return bound_s
