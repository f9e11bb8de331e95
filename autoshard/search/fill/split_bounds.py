"""Bounds of all splits of the layers of one candidate over its stages, by flows through its schedule.

Given the order of actions, the time of a step is the length of the longest path through them. The length of a path
adds up passes of each stage and sends. A flow is a weighted average of paths. The length of each path, and so of each
flow, is a lower bound for every split, linear in how many layers each stage has of each kind of recompute. A flow
belongs to a schedule: it bounds the step for any times of the passes.
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
from autoshard.search.fill.split_times import SplitTimes, least_for_all
from autoshard.search.fill.way_costs import FlowTimes, WayCosts, cheapest_totals

_SHARES = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 1.0])  # of one rank's path in its flow with all paths
_LEARN_S, _MIX_S = (1e-3, 8e-7), (1e-3, 1.2e-4)  # measured 2026-11 on one core of a cloud machine
_SOFTNESS = 0.03  # of the forward pass of a stage: paths that are so much shorter matter little less
_AHEAD = 0.3  # of the way from the best layers so far to those that balance the flows: where the next flow is found
_IN_TURN = 2  # flows that are found before all are mixed again
_MOVE = 0.05  # of the layers of a stage, given away if it is on all long paths twice as much as others
_ROUNDS = 4  # in which numbers of layers are excluded
_ANSWERS = 3  # of splits to a mixture of flows
_MORE_ANSWERS = 4  # than stages, that are kept
_CLOSE = 1e-5  # of a bound: what an answer has to take off
_LATEST = 4  # flows that are kept though the mixture has no part of them, and flows of others that are tried first
_CONVERGED = 1e-3  # of a bound: what further flows might add, to be worth their time
_PRICES = 24  # of a layer, among which the best is taken


@dataclass(slots=True)
class SplitSearch:
    """What a search for splits has found, and the time it has left, for all of its candidates together.

    Flows are rows by schedule: how often each runs F, I and W of every stage, and its sends. First come
    the flows of all actions of one rank, then their average; a candidate that finds more flows adds its best one.
    """

    flows: dict[Schedule, Floats] = field(default_factory=dict[Schedule, Floats])
    seconds_left: float = np.inf  # by an estimate that is the same on every machine
    most_flows: int = 64  # that are looked for for one candidate, beside those that are known

    @property
    def known(self) -> "SplitSearch":
        """The same flows, without time to find more."""
        return replace(self, seconds_left=0.0)

    def use(self, schedule: Schedule, start_s: float, pass_s: float) -> None:
        """Count the time of a simulation: its start, and each pass of a stage; later micro-batches are alike."""
        count = min(schedule.num_micro_batches, 3 * schedule.num_ranks)
        self.seconds_left -= start_s + pass_s * schedule.num_stages * count


class SplitBounds:
    """Bounds of all splits of one candidate, better with every flow that is found.

    What takes ``below_s``, a limit of all micro-batches that may fall, is not looked at again.
    """

    def __init__(self, times: SplitTimes, splits: SplitSearch, below_s: float) -> None:
        self._times, self.schedule, self._search, self.below_s = times, times.schedule, splits, below_s
        self._num_layers, self._stages = times.num_layers, counts_of(self.schedule).stages
        if self.schedule not in splits.flows:
            runs = _rank_flows(self.schedule, replace(times.sends, time_s=np.ones(1)))
            splits.flows[self.schedule] = np.concatenate([runs, runs.mean(axis=0, keepdims=True)])
        self._flows = FlowTimes.of(times, splits.flows[self.schedule])
        self._num_known = len(self._flows.runs)  # flows that other candidates have, too
        self._average = self._flows.mixed(np.eye(self._num_known)[len(self._stages)])
        self._mixture = self._average
        everything = WayCosts.of(times, np.inf)
        self._some_fit = bool(np.isfinite(self._slowest_s(everything, np.zeros(everything.fits_by_total.shape))))
        self._ways = WayCosts.of(times, below_s)
        self._fits: NDArray[np.bool_] = self._ways.fits_by_total  # [rank, total]
        self._by_rank_s: Floats = np.zeros(self._fits.shape)
        self._answers = np.zeros((0, *self._flows.layer_s.shape[1:]))  # short splits: [answer, kind, stage]
        self.best = self.balanced = np.zeros(self._flows.layer_s.shape[1:])  # layers, by kind and stage
        self._least_s, self.shortest_s = 0.0, np.inf  # of the mixture; of any flow for the layers it was found for

    @property
    def knows_flows(self) -> bool:
        """Say whether flows of this schedule were looked for."""
        return self._num_known > len(self._stages) + 1

    @property
    def shares(self) -> tuple[Floats, ...]:
        """Fractions of layers from which good splits are not far."""
        return *(layers.sum(axis=0) for layers in (self.balanced, self.best) if layers.any()), self._even

    @property
    def _even(self) -> Floats:
        """Fractions of layers with which all stages take equally long."""
        ends, layer_s = np.zeros(self.schedule.num_stages), self._times.kinds_s[-1].sum()
        ends[0] += self._times.embed.sum() / layer_s
        ends[-1] += self._times.head.sum() / layer_s
        free = np.maximum((self._num_layers + ends.sum()) / len(ends) - ends - 1, 1e-9)  # the head may exceed its share
        return 1 + free * ((self._num_layers - len(ends)) / free.sum())

    def learn(self, layers: Floats) -> Floats:
        """Find a flow along long paths for some layers, whole or fractions; return what a layer of each stage adds."""
        times = self._times
        layers_s = times.kinds_s.T @ layers  # [pass, stage]
        work_s = layers_s + times.started[:, None]
        work_s[:, 0] += times.embed
        work_s[:, -1] += times.head
        forward, inputs, weight = work_s[..., None]
        delays = pipeline_delays(self.schedule, times.sends, np.array([inputs + weight, forward, inputs, weight]))
        sent = _unit_delays(self.schedule, times.sends.hidden, times.sends.receives_apart)
        passes, waits = long_paths(self.schedule, delays, sent, _SOFTNESS * float(forward.mean()))
        runs = np.concatenate([passes.reshape(1, -1), waits[:, None]], axis=1)
        self._flows = self._flows.with_flow(FlowTimes.of(times, runs))
        self._search.use(self.schedule, *_LEARN_S)
        return (passes[0] * layers_s).sum(axis=0) / layers.sum(axis=0)

    def find_flows(self, count: int) -> bool:
        """Find flows between the layers with the shortest flow so far and those that balance all flows.

        Say whether more flows may raise the bound further.
        """
        goes_on = self.mix()
        for _ in range(count if goes_on else 0):
            layers = self.best + _AHEAD * (self.balanced - self.best) if self.best.any() else self._near_even()
            for _ in range(_IN_TURN):
                added_s = self.learn(layers)
                length_s = float(self._flows.lengths_s(layers[None])[-1, 0])
                if length_s < self.shortest_s:
                    self.best, self.shortest_s = layers, length_s
                layers = self._moved(layers, added_s)
            goes_on = self.mix()
            self._search.seconds_left -= _MIX_S[0] + _MIX_S[1] * self.schedule.num_stages
            if not goes_on:
                break
        known = self._search.flows[self.schedule]
        self._search.flows[self.schedule] = np.concatenate([known[: self._num_known], self._mixture.runs])
        return goes_on and self._least_s < self.shortest_s * (1 - _CONVERGED)

    def _moved(self, layers: Floats, added_s: Floats) -> Floats:
        """Move fractions of layers off the stages that long paths run most often."""
        counts = layers.sum(axis=0)
        moved = counts * np.exp(-_MOVE * (added_s * counts.sum() / (added_s @ counts) - 1))
        return layers * (moved * (counts.sum() / moved.sum()) / counts)

    def _near_even(self) -> Floats:
        """Return layers to begin with: about equally many on each stage."""
        own_s, totals = self._own_s(self._average), self._ways.totals
        off = np.abs(totals - self._num_layers / len(self._stages)) + np.zeros(own_s.shape)
        _, near = cheapest_totals(np.where(np.isfinite(own_s), off**2, np.inf), self._num_layers, int(totals[0]))
        return self._ways.layers(self._average.layer_s[0], near, spread=True)

    def mix(self) -> bool:
        """Find about that average of the flows whose least length is largest; say whether any split is left.

        It is a game: splits answer flows, until no split is shorter than those that are known.
        """
        answers, parts, shares = self._answers[self._are_left()], np.ones(1), np.ones(1)
        if not len(answers):
            answers = self.use_known()
        lengths_s = self._flows.lengths_s(answers)
        for _ in range(_ANSWERS if np.isfinite(self._least_s) else 0):
            shares, parts = game(lengths_s)
            before_s = (shares @ lengths_s).min()
            answer = self._try(self._flows.mixed(shares))
            answers = np.concatenate([answers, answer[None]])
            lengths_s = np.concatenate([lengths_s, self._flows.lengths_s(answer[None])], axis=1)
            if (shares @ lengths_s[:, -1]) >= before_s * (1 - _CLOSE):
                break
        if not np.isfinite(self._least_s):
            return False
        self.balanced = np.tensordot(parts, answers[: len(parts)], axes=1)
        order = np.argsort(-parts, kind="stable")[: self.schedule.num_stages + _MORE_ANSWERS]
        self._answers = answers[np.sort(order)]
        needed = np.arange(len(shares)) < self._num_known
        needed[shares > 0], needed[-_LATEST:] = True, True
        self._flows = self._flows.only(needed)
        return True

    def use_known(self) -> Floats:
        """Choose from the average of all ranks' paths and the best flows of the last candidates; return the answers."""
        average = len(self._stages)
        numbers = {average, *range(max(average, self._num_known - _LATEST), self._num_known)}
        return np.array([self._try(self._flows.mixed(np.eye(len(self._flows.runs))[number])) for number in numbers])

    def _try(self, flow: FlowTimes) -> Floats:
        """Return the layers with which a flow is shortest, and keep it if it is the longest then of all so far."""
        least_s, layers = self._answer(flow)
        if least_s > self._least_s or not np.isfinite(least_s):
            self._mixture, self._least_s = flow, least_s
        return layers

    def _are_left(self) -> NDArray[np.bool_]:
        """Say of which answers ranks may still have so many layers."""
        totals = self._answers.sum(axis=1)[:, self._stages].sum(axis=2).astype(np.int64)  # [answer, rank]
        left: NDArray[np.bool_] = self._fits[np.arange(totals.shape[1]), totals - self._ways.totals[0]]
        return np.all(left, axis=1)

    def _own_s(self, flow: FlowTimes) -> Floats:
        """Return the least length of a flow on each rank: [rank, total]."""
        costs_s = self._ways.by_total_s(self._ways.costs_s(flow.layer_s[0][:, self._stages]))
        return np.where(self._fits, costs_s, np.inf)

    def _answer(self, flow: FlowTimes) -> tuple[float, Floats]:
        """Return the least length of a flow, and the layers with which it is so long."""
        least_s, totals = cheapest_totals(self._own_s(flow), self._num_layers, int(self._ways.totals[0]))
        return float(flow.fixed_s[0]) + least_s, self._ways.layers(flow.layer_s[0], totals)

    def bound_s(self) -> float:
        """Return a lower bound of all micro-batches for any split, up to the limit; infinite if none fits in memory."""
        if not self._some_fit:
            return np.inf
        bound_s = 0.0
        for number in range(_ROUNDS):
            least_s = self._exclude(self._average if number == 1 else self._mixture)
            slowest_s = self._slowest_s(self._ways, self._by_rank_s)
            bound_s = max(bound_s, min(max(least_s, slowest_s), self.below_s))
            beyond = self._fits & (self._by_rank_s >= self.below_s)
            if bound_s >= self.below_s or (number > 1 and not beyond.any()):
                break
            self._fits &= ~beyond
            self._fits &= ~self._left_over()
        return bound_s

    def _slowest_s(self, ways: WayCosts, by_rank_s: Floats) -> float:
        """Return the least time of the slowest rank."""
        return least_for_all(np.where(ways.fits_by_total, by_rank_s, np.inf), ways.totals, self._num_layers)

    def _left_over(self) -> NDArray[np.bool_]:
        """Say for which layers of a rank the others cannot have all the rest."""
        totals, fits = self._ways.totals, self._fits
        most, fewest = (
            np.where(fits, totals, 0).max(axis=1),
            np.where(fits, totals, self._num_layers).min(axis=1),
        )
        rest = self._num_layers - totals
        return (rest > (most.sum() - most)[:, None]) | (rest < (fewest.sum() - fewest)[:, None])

    def _exclude(self, flow: FlowTimes) -> float:
        """Return the least length of a flow, and raise what a step takes in which a rank has so many layers.

        For each rank and number of layers, averages of the rank's own path with the flow say what that takes at least.
        The layers of other ranks cost each what makes the least of the whole as large as can be (Lagrange).
        """
        own_s, totals, num_layers = self._own_s(flow), self._ways.totals, self._num_layers
        least_s, _ = cheapest_totals(own_s, num_layers, int(totals[0]))
        if not np.isfinite(least_s):
            return np.inf
        price_s, beyond_s = _best_price(own_s, totals, num_layers)
        ranks, stages = np.arange(len(self._stages)), self._stages
        besides_s = flow.fixed_s[0] + price_s * (num_layers - totals) + (beyond_s.sum() - beyond_s)[:, None]
        paths_s = self._flows.layer_s[ranks]  # the path of each rank: [rank, kind, stage]
        at_s = paths_s[ranks[:, None], :, stages], np.moveaxis(flow.layer_s[0][:, stages], 0, 2)  # [rank, chunk, kind]
        shares = _SHARES[:, None, None, None]
        mixed_s = np.moveaxis(shares * at_s[0] + (1 - shares) * at_s[1], 3, 1)  # [share, kind, rank, chunk]
        rank_s = self._ways.by_total_s(self._ways.costs_s(mixed_s))  # [share, rank, total]
        elsewhere_s = paths_s[:, -1].copy()
        elsewhere_s[ranks[:, None], stages] = np.inf
        others = self.schedule.num_stages - stages.shape[1]
        base_s = self._flows.fixed_s[ranks] + np.where(np.isfinite(elsewhere_s), elsewhere_s, 0.0).sum(axis=1)
        free = num_layers - totals - others
        path_s = base_s[:, None] + np.where(free > 0, elsewhere_s.min(axis=1)[:, None] * np.maximum(free, 1e-30), 0.0)
        shares = _SHARES[:, None, None]
        each_s = (shares * path_s + (1 - shares) * besides_s + rank_s).max(axis=0)
        self._by_rank_s = np.maximum(self._by_rank_s, each_s)
        return float(flow.fixed_s[0]) + least_s


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


def _best_price(own_s: Floats, totals: Ints, num_layers: int) -> tuple[float, Floats]:
    """Return a price of a layer, and the least cost of each rank beyond the price of its layers.

    ``own_s`` is the time of each rank by its layers; the price is one that makes the cost of all layers largest.
    """

    def beyond(prices: Floats) -> Floats:
        return (own_s - prices[:, None, None] * totals).min(axis=2)  # [price, rank]

    both = np.isfinite(own_s[:, 1:]) & np.isfinite(own_s[:, :-1])
    steps = own_s[:, 1:][both] - own_s[:, :-1][both]
    low, high = float(steps.min(initial=0.0)), float(steps.max(initial=0.0))
    coarse = np.linspace(low, high, _PRICES)
    best = coarse[(coarse * num_layers + beyond(coarse).sum(axis=1)).argmax()]
    fine = best + np.linspace(-1.0, 1.0, _PRICES) * (high - low) / (_PRICES - 1)
    least = beyond(fine)
    number = int((fine * num_layers + least.sum(axis=1)).argmax())
    return float(fine[number]), least[number]


@lru_cache(maxsize=256)
def _unit_delays(schedule: Schedule, hidden: bool, receives_apart: bool) -> Delays:
    """Return the delays of a candidate whose passes take nothing, and each of its sends a second."""
    sends = Sends(time_s=np.ones(1), hidden=hidden, receives_apart=receives_apart)
    return pipeline_delays(schedule, sends, np.zeros((4, schedule.num_stages, 1)))
