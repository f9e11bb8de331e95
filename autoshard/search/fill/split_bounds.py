"""Bounds of all splits of the layers of one candidate over its stages, by flows through its schedule.

Given the order of actions, the time of a step is the length of the longest path through them. The length of a path
adds up passes of each stage and sends. A flow is a weighted average of paths. The length of each path, and so of each
flow, is a lower bound for every split, linear in the layers of stages. Good flows are found where fractions of layers
balance the stages. A flow belongs to a schedule: it bounds the step for any times of the passes.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.stages import PASSES, Sends
from autoshard.cost.step import pipeline_delays
from autoshard.schedule.builders import builders
from autoshard.schedule.counts import counts_of
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import long_paths
from autoshard.schedule.waves import Delays, Floats, Ints
from autoshard.search.fill.game import game
from autoshard.search.fill.split_times import SplitTimes, least_for_all, rank_totals
from autoshard.search.fill.stage_options import NEVER

_SHARES = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 1.0])[:, None]  # of one rank's path in its flow with all paths
_LEARN_S = (5e-4, 1.7e-6)  # measured 2026-11 on one core of a cloud machine
_SOFTNESS = 0.3  # of the forward pass of a stage: paths that are so much shorter matter little less
_STEP = 0.2  # of the layers of a stage, given away if it is on all long paths twice as much as others
_ROUNDS = 4  # in which numbers of layers are excluded
_PRICES = 24  # of a layer, among which the best is taken


@dataclass(slots=True)
class SplitSearch:
    """What a search for splits has found, and the time it has left, for all of its candidates together.

    Flows are rows by schedule: how often each runs F, I and W of every stage, and its sends. First come
    the flows of all actions of one rank, then their average; a candidate that finds more flows adds its best one.
    """

    flows: dict[Schedule, Floats] = field(default_factory=dict[Schedule, Floats])
    seconds_left: float = np.inf  # by an estimate that is the same on every machine
    useless: set[Schedule] = field(default_factory=set[Schedule])  # of which no more flows are looked for

    @property
    def known(self) -> "SplitSearch":
        """The same flows, without time to find more."""
        return replace(self, seconds_left=0.0)

    def use(self, schedule: Schedule, start_s: float, pass_s: float) -> None:
        """Count the time of a simulation: its start, and each pass of a stage; later micro-batches are alike."""
        count = min(schedule.num_micro_batches, 3 * schedule.num_ranks)
        self.seconds_left -= start_s + pass_s * schedule.num_stages * count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PathBounds:
    """Flows as linear functions of the layers of stages, each with its fastest recompute.

    ``best`` is about that weighted average of them whose least value over all splits is largest.
    """

    fixed_s: Floats  # [flow]: with no layer anywhere
    layer_s: Floats  # [flow, stage]: for each layer
    runs: Floats  # [sort, flow, stage]: how often it runs what is computed again
    best: Floats  # [flow]


class SplitBounds:
    """Bounds of all splits of one candidate, better with every flow that is found."""

    def __init__(self, times: SplitTimes, splits: SplitSearch) -> None:
        self._times, self.schedule, self._known, self._extra_s = times, times.schedule, splits, times.again_s
        self._num_layers, self._stages = times.num_layers, counts_of(self.schedule).stages
        self._started, self._totals = times.started, rank_totals(self.schedule, times.num_layers)
        self._embed, self._layer, self._head = times.embed, times.layer, times.head
        if self.schedule not in splits.flows:
            rows = _rank_flows(self.schedule, replace(times.sends, time_s=np.ones(1)))
            splits.flows[self.schedule] = np.concatenate([rows, rows.mean(axis=0, keepdims=True)])
        self._rows = splits.flows[self.schedule]
        self._own = len(self._rows)  # this many rows come from other candidates
        self.layers = self.balanced = self.even  # fractions that are balanced, as far as is known

    @property
    def even(self) -> Floats:
        """Fractions of layers with which all stages take equally long."""
        ends = np.zeros(self.schedule.num_stages)
        ends[0] += self._embed.sum() / self._layer.sum()
        ends[-1] += self._head.sum() / self._layer.sum()
        return self._rounded_up((self._num_layers + ends.sum()) / len(ends) - ends)  # the head may exceed its share

    def learn(self, layers: Floats) -> Floats:
        """Find a flow along long paths for some layers, whole or fractions; return what a layer of each stage adds."""
        again_s = self._again_s(layers)
        work_s = self._layer[:, None] * layers + self._started[:, None]
        work_s[:, 0] += self._embed
        work_s[:, -1] += self._head
        work_s[1] += again_s * layers
        forward, inputs, weight = work_s[..., None]
        sends = self._times.sends
        delays = pipeline_delays(self.schedule, sends, np.array([inputs + weight, forward, inputs, weight]))
        sent = _unit_delays(self.schedule, sends.hidden, sends.receives_apart)
        passes, waits = long_paths(self.schedule, delays, sent, _SOFTNESS * float(forward.mean()))
        flow = np.concatenate([passes.reshape(1, -1), waits[:, None]], axis=1)
        self._rows = np.concatenate([self._rows, flow])
        self._known.use(self.schedule, *_LEARN_S)
        return self._layer @ passes[0] + again_s * passes[0, 1]

    def balance(self, steps: int) -> None:
        """Move fractions of layers off the stages that long paths run most often, and find flows on the way."""
        for _ in range(steps):
            added_s = self.learn(self.layers)
            mean_s = max(float(added_s @ self.layers) / self._num_layers, 1e-30)
            self.layers = self._rounded_up(self.layers * np.exp(-_STEP * (added_s / mean_s - 1)))

    def _rounded_up(self, layers: Floats) -> Floats:
        """Return fractions in these proportions that add up to all layers, each at least one."""
        free = np.maximum(layers - 1, 1e-9)
        return 1 + free * ((self._num_layers - len(layers)) / free.sum())

    def _again_s(self, layers: Floats) -> Floats:
        """Return the recompute of each layer of a stage in a micro-batch, where ranks have so many layers."""
        least_s: Floats = np.min(self._extra_s, axis=0)
        totals = layers[self._stages].sum(axis=1)
        fits, again_s = np.isfinite(least_s), np.zeros(len(totals))
        for rank, extra_s in enumerate(np.where(fits, least_s, least_s[fits].max(initial=0))):
            again_s[rank] = np.interp(totals[rank], self._totals, extra_s)
        return (again_s / totals)[counts_of(self.schedule).ranks]

    def paths(self) -> PathBounds:
        """Return the known flows and the best flow, which other candidates get if this candidate found any flow."""
        passes = self._rows[:, :-1].reshape(len(self._rows), len(PASSES), -1)
        fixed_s = passes[:, :, 0] @ self._embed + passes[:, :, -1] @ self._head
        fixed_s += self._rows[:, -1] * self._times.sends.time_s + passes.sum(axis=2) @ self._started
        layer_s, num_free = np.einsum("jps,p->js", passes, self._layer), self._num_layers - self.schedule.num_stages
        runs = self._times.again_runs(passes)
        near_s = layer_s + runs.min(axis=0) * self._again_s(self.layers)  # as if each layer computed as much again
        payoff, flows = (fixed_s + near_s.sum(axis=1))[:, None] + num_free * near_s, self._known.flows[self.schedule]
        if len(self._rows) == len(flows):
            best = np.eye(len(payoff))[payoff.min(axis=1).argmax()]
        else:
            best, shares = game(payoff)
            self.balanced = 1.0 + num_free * shares
            self._known.flows[self.schedule] = np.concatenate([flows[: self._own], best[None] @ self._rows])
        return PathBounds(fixed_s=fixed_s, layer_s=layer_s, runs=runs, best=best)

    def bound_s(self, paths: PathBounds, below_s: float) -> float:
        """Return a lower bound of all micro-batches, for any split; infinite if none fits in memory.

        Numbers of layers with which some rank alone takes ``below_s`` need not be looked at again.
        """
        again_s, bound_s, by_rank_s = self._extra_s.copy(), 0.0, 0.0
        for number in range(_ROUNDS):
            flow = paths.best if number != 1 else np.eye(len(paths.best))[len(counts_of(self.schedule).stages)]
            least_s, own_s = self._least_by_rank_s(paths, flow, again_s)
            by_rank_s = np.maximum(by_rank_s, own_s)
            least_s = max(least_s, least_for_all(by_rank_s, self._totals, self._num_layers))
            bound_s = max(bound_s, min(least_s, below_s) if bound_s else least_s)
            fits = np.isfinite(again_s.min(axis=0))
            beyond = fits & (by_rank_s >= below_s)
            if bound_s >= below_s or (number > 1 and not beyond.any()):
                break
            again_s[:, beyond | self._left_over(fits & ~beyond)] = np.inf
        return bound_s

    def _left_over(self, fits: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Say for which layers of a rank the others cannot have all the rest, given the numbers that each may have."""
        most, fewest = (
            np.where(fits, self._totals, 0).max(axis=1),
            np.where(fits, self._totals, self._num_layers).min(axis=1),
        )
        rest = self._num_layers - self._totals
        return (rest > (most.sum() - most)[:, None]) | (rest < (fewest.sum() - fewest)[:, None])

    def _least_by_rank_s(self, paths: PathBounds, flow: Floats, again_s: Floats) -> tuple[float, Floats]:
        """Return the least time of all micro-batches, and that if a rank has so many layers: [rank, total].

        ``again_s`` is the recompute of ranks, infinite where they cannot have so many layers. For each rank and number
        of layers, flows of the rank's own path with the best flow say what that takes at least. The layers of
        other ranks cost each what makes the least of the whole as large as can be (Lagrange).
        """
        stages: Ints = self._stages
        more = self._totals - stages.shape[1]
        fits: NDArray[np.bool_] = np.isfinite(np.min(again_s, axis=0))
        if not fits.any(axis=1).all():
            return np.inf, np.full(fits.shape, np.inf)
        again_s, unfit_s = np.where(np.isfinite(again_s), again_s, 0.0), np.where(np.isfinite(again_s), 0.0, NEVER)
        num_free, ranks = self._num_layers - self.schedule.num_stages, np.arange(len(stages))[:, None]
        whole_s = paths.fixed_s + paths.layer_s.sum(axis=1)
        best_s, best_runs, best_whole_s = flow @ paths.layer_s, flow @ paths.runs, flow @ whole_s
        best_again_s = (best_runs[:, stages].min(axis=2)[..., None] * again_s + unfit_s).min(axis=0)
        own_s = best_s[stages].min(axis=1)[:, None] * more + best_again_s
        price_s, least_s = _best_price(np.where(fits, own_s, np.inf), more, num_free)
        number = paths.layer_s[:, stages].sum(axis=2).argmax(axis=0)  # the path of each rank
        alone_s, best_shares = paths.layer_s[number], 1 - _SHARES
        each_s = _SHARES * alone_s[:, None] + best_shares * best_s  # [rank, share, stage]
        runs = _SHARES * paths.runs[:, number][:, :, None] + best_shares * best_runs[:, None, None]
        rank_s = each_s[ranks, :, stages].min(axis=1)[..., None]
        rank_runs = runs[:, ranks, :, stages].min(axis=1)  # [rank, sort, share]
        by_sort_s = rank_runs[..., None] * again_s.swapaxes(0, 1)[:, :, None] + unfit_s.swapaxes(0, 1)[:, :, None]
        rank_again_s = by_sort_s.min(axis=1)  # [rank, share, total]
        alone_s[ranks, stages] = np.inf
        elsewhere_s = alone_s.min(axis=1)[:, None, None] * np.maximum(num_free - more, 1e-30)
        cost = _SHARES * (whole_s[number][:, None, None] + np.where(num_free > more, elsewhere_s, 0.0))
        besides_s = price_s * (num_free - more) + least_s.sum() - least_s[:, None]
        cost = cost + best_shares * (best_whole_s + besides_s)[:, None] + rank_s * more + rank_again_s
        by_rank_s: Floats = np.where(fits, cost.max(axis=1), np.inf)
        return float(best_whole_s) + num_free * price_s + float(least_s.sum()), by_rank_s


def _rank_flows(schedule: Schedule, unit_sends: Sends) -> Floats:
    """Return the flow of each rank: all its actions, and before and behind them those of the stages before its first.

    They pass the first micro-batch to it, and the last one back, unless its weight gradients come later.
    """
    ranks, counts = np.arange(schedule.num_ranks), counts_of(schedule)
    passes = np.zeros((schedule.num_ranks, len(PASSES), schedule.num_stages))
    before = np.arange(schedule.num_stages) < counts.stages.min(axis=1)[:, None]
    passes[:, : 1 if builders()[schedule.builder].splits else len(PASSES)] += before[:, None]
    passes[ranks[:, None], :, counts.stages] = schedule.num_micro_batches
    sends = max(0, schedule.num_micro_batches - 1) * counts.sends[:, None] * unit_sends.blocked_s
    return np.concatenate([passes.reshape(len(ranks), -1), sends], axis=1)


def _best_price(own_s: Floats, more: Ints, num_free: int) -> tuple[float, Floats]:
    """Return a price of a layer, and the least cost of each rank beyond the price of its layers.

    ``own_s`` is the time of each rank by its layers; the price is one that makes the cost of all layers largest.
    """

    def beyond(prices: Floats) -> Floats:
        return (own_s - prices[:, None, None] * more).min(axis=2)  # [price, rank]

    both = np.isfinite(own_s[:, 1:]) & np.isfinite(own_s[:, :-1])
    steps = own_s[:, 1:][both] - own_s[:, :-1][both]
    low, high = float(steps.min(initial=0.0)), float(steps.max(initial=0.0))
    coarse = np.linspace(low, high, _PRICES)
    best = coarse[(coarse * num_free + beyond(coarse).sum(axis=1)).argmax()]
    fine = best + np.linspace(-1.0, 1.0, _PRICES) * (high - low) / (_PRICES - 1)
    least = beyond(fine)
    number = int((fine * num_free + least.sum(axis=1)).argmax())
    return float(fine[number]), least[number]


@lru_cache(maxsize=256)
def _unit_delays(schedule: Schedule, hidden: bool, receives_apart: bool) -> Delays:
    """Return the delays of a candidate whose passes take nothing, and each of its sends a second."""
    sends = Sends(time_s=np.ones(1), hidden=hidden, receives_apart=receives_apart)
    return pipeline_delays(schedule, sends, np.zeros((4, schedule.num_stages, 1)))
