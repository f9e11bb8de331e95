"""Bounds of all splits of the layers of one candidate over its stages, by flows through its schedule.

Given the order of actions, the time of a step is the length of the longest path through them. The length of a path
adds up passes of each stage and sends. A flow is a weighted average of paths. The length of each path, and so of each
flow, is a lower bound for every split, linear in the layers of stages. Good flows are found where fractions of layers
balance the stages. A flow belongs to a schedule: it bounds the step for any times of the passes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.stages import PASSES, PipelineBlocks, Sends, price_stages
from autoshard.cost.step import pipeline_delays
from autoshard.schedule.counts import counts_of, in_flight_of
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import long_paths
from autoshard.schedule.waves import Delays, Floats, Ints
from autoshard.search.fill.game import game
from autoshard.search.fill.stage_options import ChunkLayers, StageChoices, stage_options
from autoshard.spec.kernels import load_kernels

_SHARES = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 1.0])[:, None]  # of one rank's path in its flow with all paths
_NEAR = 4  # layers by which a rank may be off an even share for it to be found what it must recompute
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
    runs: Floats  # [flow, stage]: how often it runs the pass that computes again, or any if all may take longer
    best: Floats  # [flow]


class SplitBounds:
    """Bounds of all splits of one candidate, better with every flow that is found."""

    def __init__(self, blocks: PipelineBlocks, choices: StageChoices, splits: SplitSearch) -> None:
        blocks = blocks.with_least_layers
        assert choices.again_s is not None, "how much ranks compute again is known"
        self._blocks, self.schedule, self._known = blocks, blocks.schedule, splits
        self._extra_s = choices.again_s[..., 0]
        self._num_layers, self._stages = choices.num_layers, counts_of(self.schedule).stages
        self._started, self._totals = _started_s(blocks), rank_totals(self.schedule, self._num_layers)
        self._embed, self._layer, self._head = (passes[:, 0] for passes in fastest_passes(blocks, choices))
        kinds = _possible(blocks, choices)[:, 0]
        durations = (blocks.layer.forward_s[kinds], blocks.layer.weight_s[kinds])
        self._again_in_input = all(np.ptp(kind_s, axis=0).max() <= 0 for kind_s in durations)
        if self.schedule not in splits.flows:  # at first, the flows of all actions of one rank
            ranks = self.schedule.num_ranks
            passes = np.zeros((ranks, len(PASSES), self.schedule.num_stages))
            passes[np.arange(ranks)[:, None], :, self._stages] = self.schedule.num_micro_batches
            unit = replace(blocks, sends=replace(blocks.sends, time_s=np.ones(1)))
            sends = max(0, self.schedule.num_micro_batches - 1) * unit.hop_s
            rows = np.concatenate([passes.reshape(ranks, -1), sends], axis=1)
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
        delays = pipeline_delays(
            self.schedule, self._blocks.sends, np.array([inputs + weight, forward, inputs, weight])
        )
        sends = self._blocks.sends
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
        fits, totals = np.isfinite(self._extra_s), layers[self._stages].sum(axis=1)
        again_s = np.zeros(len(totals))
        for rank, extra_s in enumerate(np.where(fits, self._extra_s, self._extra_s[fits].max(initial=0))):
            again_s[rank] = np.interp(totals[rank], self._totals, extra_s)
        return (again_s / totals)[counts_of(self.schedule).ranks]

    def paths(self) -> PathBounds:
        """Return the known flows and the best flow, which other candidates get if this candidate found any flow."""
        passes = self._rows[:, :-1].reshape(len(self._rows), len(PASSES), -1)
        fixed_s = passes[:, :, 0] @ self._embed + passes[:, :, -1] @ self._head
        fixed_s += self._rows[:, -1] * self._blocks.sends.time_s + passes.sum(axis=2) @ self._started
        layer_s, num_free = np.einsum("jps,p->js", passes, self._layer), self._num_layers - self.schedule.num_stages
        runs = passes[:, 1] if self._again_in_input else passes.min(axis=1)
        near_s = layer_s + runs * self._again_s(self.layers)  # as if each layer computed as much again
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
            least_s = max(least_s, _least(by_rank_s, self._totals, self._num_layers))
            bound_s = max(bound_s, min(least_s, below_s) if bound_s else least_s)
            beyond = np.isfinite(again_s) & (by_rank_s >= below_s)
            if bound_s >= below_s or (number > 1 and not beyond.any()):
                break
            again_s[beyond] = np.inf
            again_s[self._left_over(np.isfinite(again_s))] = np.inf
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
        stages, more, fits = self._stages, self._totals - self._stages.shape[1], np.isfinite(again_s)
        if not fits.any(axis=1).all():
            return np.inf, np.full(again_s.shape, np.inf)
        again_s = np.where(fits, again_s, 0.0)
        num_free, ranks = self._num_layers - self.schedule.num_stages, np.arange(len(stages))[:, None]
        whole_s = paths.fixed_s + paths.layer_s.sum(axis=1)
        best_s, best_runs, best_whole_s = (flow @ columns for columns in (paths.layer_s, paths.runs, whole_s))
        own_s = best_s[stages].min(axis=1)[:, None] * more + best_runs[stages].min(axis=1)[:, None] * again_s
        price_s, least_s = _best_price(np.where(fits, own_s, np.inf), more, num_free)
        number = paths.layer_s[:, stages].sum(axis=2).argmax(axis=0)  # the path of each rank
        alone_s, best_shares = paths.layer_s[number], 1 - _SHARES
        each_s = _SHARES * alone_s[:, None] + best_shares * best_s  # [rank, share, stage]
        runs = _SHARES * paths.runs[number][:, None] + best_shares * best_runs
        rank_s, rank_runs = (columns[ranks, :, stages].min(axis=1)[..., None] for columns in (each_s, runs))
        alone_s[ranks, stages] = np.inf
        elsewhere_s = alone_s.min(axis=1)[:, None, None] * np.maximum(num_free - more, 1e-30)
        cost = _SHARES * (whole_s[number][:, None, None] + np.where(num_free > more, elsewhere_s, 0.0))
        besides_s = price_s * (num_free - more) + least_s.sum() - least_s[:, None]
        cost = cost + best_shares * (best_whole_s + besides_s)[:, None] + rank_s * more + rank_runs * again_s[:, None]
        by_rank_s = np.where(fits, cost.max(axis=1), np.inf)
        return float(best_whole_s) + num_free * price_s + float(least_s.sum()), by_rank_s


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


def least_again_s(blocks: PipelineBlocks, choices: StageChoices, capacity: Floats) -> Floats:
    """Return the least seconds of recompute of ranks in a micro-batch, by their layers: [rank, total, candidate].

    They are infinite where so many layers do not fit. More layers hold more, so they recompute no less; far fewer than
    an even share may recompute nothing.
    """
    totals = rank_totals(blocks.schedule, choices.num_layers)
    if choices.recompute is not None:  # pinned: there is nothing to find
        return np.zeros((blocks.schedule.num_ranks, len(totals), blocks.num_candidates))
    near_even = np.flatnonzero(np.abs(totals - choices.num_layers / blocks.schedule.num_ranks) < _NEAR)
    held, extra_s, starts = _least_held(blocks, choices, totals[near_even])
    again_s = np.minimum.reduceat(np.where(held <= capacity, extra_s, np.inf), starts, axis=1)
    least_s = np.zeros((len(again_s), len(totals), blocks.num_candidates))
    least_s[:, near_even], least_s[:, near_even[-1] + 1 :] = again_s, again_s[:, -1:]
    return least_s


def least_fullest_bytes(blocks: PipelineBlocks, choices: StageChoices) -> Floats:
    """Return the least bytes of the fullest rank of each candidate, for any split."""
    if choices.recompute is not None:
        return np.zeros(blocks.num_candidates)  # what is pinned may differ from chunk to chunk
    totals = rank_totals(blocks.schedule, choices.num_layers)
    held, _, starts = _least_held(blocks, choices, totals)
    by_total = np.minimum.reduceat(held, starts, axis=1)
    return np.array(
        [_least(by_total[..., number], totals, choices.num_layers) for number in range(blocks.num_candidates)]
    )


@lru_cache(maxsize=256)
def _unit_delays(schedule: Schedule, hidden: bool, receives_apart: bool) -> Delays:
    """Return the delays of a candidate whose passes take nothing, and each of its sends a second."""
    sends = Sends(time_s=np.ones(1), hidden=hidden, receives_apart=receives_apart)
    return pipeline_delays(schedule, sends, np.zeros((4, schedule.num_stages, 1)))


def rank_totals(schedule: Schedule, num_layers: int) -> Ints:
    """Return how many layers a rank may have."""
    return np.arange(schedule.num_chunks, num_layers - schedule.num_chunks * (schedule.num_ranks - 1) + 1)


def _started_s(blocks: PipelineBlocks) -> Floats:
    return np.array([1.0, 1.0, 0.0]) * blocks.question.calibration.task_s / 2  # as ``price_stages`` has it


def _possible(blocks: PipelineBlocks, choices: StageChoices) -> NDArray[np.bool_]:
    """Say which recompute layers may use, [kind, candidate]: any kind where it is pinned, or none is allowed."""
    if choices.recompute is not None:
        return np.ones_like(blocks.layer.forward_s, dtype=bool)
    return choices.allowed | ~choices.allowed.any(axis=0)


def fastest_passes(blocks: PipelineBlocks, choices: StageChoices) -> tuple[Floats, Floats, Floats]:
    """Return the least time of embedding, layer and head in every pass, for any recompute: [pass, candidate]."""
    allowed = _possible(blocks, choices)
    embed, head = (np.stack([getattr(block, name)[0] for name in PASSES]) for block in (blocks.embed, blocks.head))
    columns = (np.where(allowed, getattr(blocks.layer, name), np.inf) for name in PASSES)
    return embed, np.stack([column.min(axis=0) for column in columns]), head


def _least_held(blocks: PipelineBlocks, choices: StageChoices, totals: Ints) -> tuple[Floats, Floats, Ints]:
    """Return the least bytes of every option, and its recompute in a micro-batch: [rank, option, candidate].

    All layers hold as little as any. Options are those of a number of layers, in order of it; the last value says where
    those of each number begin.
    Every chunk has a layer, all others lie where they are kept least.
    """
    blocks, schedule, chunks = blocks.with_least_layers, blocks.schedule, blocks.schedule.num_chunks
    count = np.ones((schedule.num_ranks, len(totals), chunks), dtype=np.int64)
    count[:, :, 0] = totals - chunks + 1
    options, divisions, allowed = stage_options(schedule, choices, ChunkLayers(count=count, first=0 * count))
    prices = price_stages(blocks, options)
    shape = (*prices.num_blocks.shape, blocks.num_candidates)
    kind = np.broadcast_to(options.kind[..., 0], shape[:2])
    again = np.broadcast_to(options.recomputed.sum(axis=2), shape[:2])
    plain = options.num_layers - again
    embed, layer, head = fastest_passes(blocks, choices)
    counts, ends_s = counts_of(schedule), np.full((schedule.num_ranks, 1, shape[2]), chunks * _started_s(blocks).sum())
    for stage, passes in ((0, embed), (-1, head)):
        ends_s[counts.ranks[stage]] += passes.sum(axis=0)
    extra_s = prices.pass_s - (again + plain)[..., None] * layer.sum(axis=0) - ends_s
    memory = {part: np.broadcast_to(size, shape) for part, size in prices.memory.items()}
    if chunks > 1:
        memory |= _least_memory(blocks, kind, again, plain, options.plain_kind)
        memory.pop("host", None)  # it depends on the chunk as well
        memory["working"] = np.minimum(prices.memory["working"], memory["working"])
        reserved = load_kernels(blocks.question.kernels).reserved
        if reserved:
            excluded = memory.pop("reserved") * 0.0 + memory["runtime"]
            memory["reserved"] = reserved.share * (sum(memory.values()) - excluded)
    starts = np.flatnonzero(np.diff(divisions, prepend=-1))
    return np.where(allowed, sum(memory.values()), np.inf), np.maximum(extra_s, 0.0), starts


def _least_memory(
    blocks: PipelineBlocks, kind: Ints, num_recomputed: Ints, num_plain: Ints, plain_kind: int
) -> dict[str, Floats]:
    """Return lower bounds of the activations and the working memory of ranks: [rank, option, candidate].

    An option recomputes ``num_recomputed`` layers by ``kind``; ``num_plain`` layers are of ``plain_kind``. Every chunk
    has at least one layer; all further layers lie in the chunk with the fewest micro-batches in flight.
    """
    schedule, chunks, stages = blocks.schedule, blocks.schedule.num_chunks, counts_of(blocks.schedule).stages
    num_recomputed, num_plain = num_recomputed[..., None], num_plain[..., None]

    def least(name: str) -> tuple[Floats, Floats]:
        """Return a column summed over all layers, and its value for the smaller of the two sorts of layers."""
        column: Floats = getattr(blocks.layer, name)
        of_kind, of_plain = column[kind], column[plain_kind]
        smaller = np.where(
            num_plain == 0, of_kind, np.where(num_recomputed == 0, of_plain, np.minimum(of_kind, of_plain))
        )
        return num_recomputed * of_kind + num_plain * of_plain, smaller

    def kept_bytes(in_flight: Floats, name: str) -> Iterator[Floats]:
        """Yield a lower bound of the bytes that ranks keep for backward at each time."""
        all_bytes, smaller = least(name)
        for now in np.moveaxis(in_flight, 1, 0)[..., None, None]:
            fewest = now.min(axis=1)
            held = fewest * all_bytes + (now.sum(axis=1) - chunks * fewest) * smaller
            for stage, block in ((0, blocks.embed), (schedule.num_stages - 1, blocks.head)):
                runs_here = (stages == stage)[:, :, None, None]
                held = held + (now * runs_here).sum(axis=1) * getattr(block, name)[0]
            yield held

    saved = in_flight_of(schedule)[..., :chunks]  # two times: when most is in flight, and when every chunk has much
    times = np.stack([saved.sum(axis=2).argmax(axis=1), saved.min(axis=2).argmax(axis=1)], axis=1)
    in_flight = np.take_along_axis(in_flight_of(schedule), times[..., None], axis=1)
    activations = [*kept_bytes(in_flight[..., :chunks], "saved_bytes")]
    if schedule.splits_backward:
        pairs = zip(activations, kept_bytes(in_flight[..., chunks:], "waiting_bytes"), strict=True)
        activations = [saved_bytes + waiting_bytes for saved_bytes, waiting_bytes in pairs]
    return {"activations": np.maximum(*activations), "working": least("moment_bytes")[1]}


def _least(cost: Floats, totals: Ints, num_layers: int) -> float:
    """Return the least value with which the ranks can have all layers, given the cost of each total on a rank."""
    values = np.unique(cost[np.isfinite(cost)])
    values = values[values >= cost.min(axis=1).max()]
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        most = np.where(cost <= values[middle], totals, 0).max(axis=1)
        low, high = (low, middle) if most.sum() >= num_layers else (middle + 1, high)
    return float(values[low]) if low < len(values) else np.inf
