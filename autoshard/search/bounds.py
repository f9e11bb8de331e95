"""What a step takes or holds at least, for many points at once, before anything is known of their stages.

The layers of a pipeline are given to its ranks as their memory allows: those that recompute least first, each rank as
many as could fit if it held no others. The work that results is then spread in perfect balance, over a pipeline that
waits no longer than its schedule must. As layers are whole, some rank has most work, which is another bound. Every
step of this errs to the fast side.

All splits of the layers of one point over its stages are bounded by paths. With its order of actions given, a step
takes as long as the longest path through them, and a path adds up so many passes of each stage and so many sends. Each
path is therefore a bound for every split, linear in the layers of stages.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from autoshard.blocks.game import game
from autoshard.cost.stages import PASSES, BlockTotals, PipelineBlocks, counts_of, in_flight_of
from autoshard.cost.step import pipeline_delays
from autoshard.cost.update import state_bytes, update_cost
from autoshard.plan.candidate import Candidate, Zero
from autoshard.schedule.builders import builders
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import longest_paths
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.priced_layouts import PricedLayouts
from autoshard.search.space import Space
from autoshard.search.stage_options import ALL_RANGES, NEVER, SURE, RankOptions, StageChoices, split_layers
from autoshard.spec.kernels import load_kernels

_FOREVER = 1e30  # seconds of passes behind which as much as possible hides
_ROUNDED = 64.0  # bytes that rounding up of shards may add to the states of a block, by group of weights
_SHARES = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 1.0])  # of one rank's path in its mixture with all paths
_BETWEEN = (0.0, 0.4, 0.7, 0.9, 1.0)  # shares of the way from one split to another
_MORE = 3  # layers of a rank beyond an even share for which it is found what it must recompute
_ALONE = Schedule(builder="1f1b", num_ranks=1, num_micro_batches=1)


def least_seconds(priced: PricedLayouts, rows: Ints, space: Space, capacity: float) -> tuple[Floats, Floats]:
    """Return what a step of every point takes at least, and of that what is no micro-batch's, without fixed seconds.

    The points are layouts that are priced, by their rows there, as a variant runs them. Infinite where nothing fits.
    """
    question, base, pp = priced.question, space.base, space.rows["pp"]
    counts = question.workload.global_batch // (space.rows["dp"] * space.rows["mbs"])
    least_work = _least_work(
        priced, base.zero, _holds_as_1f1b(base.schedule), builders()[base.schedule].turns, capacity
    )
    work_s, rest_s = (column[rows] for column in least_work)
    work_s = work_s + pp * space.rows["vp"] * question.calibration.task_s
    blocks = priced.pipeline_blocks(slice(None), _ALONE, base)
    kernels = load_kernels(question.kernels)
    hidden = kernels.hides_sends(base.schedule)
    held_s = np.zeros(len(rows)) if hidden else (blocks.sends.time_s * (1 + kernels.receives_apart))[rows]
    passes_s = _passes(base.schedule, counts, pp) * (work_s + 2 * (pp - 1) * held_s)
    passes_s = np.maximum(passes_s, _fullest_rank_s(blocks, rows, space, counts, held_s))
    fixed_s = priced.fixed_s(rows, base, space.rows["vp"])
    return (passes_s + rest_s + fixed_s) * (1 - SURE), rest_s


def least_of_any(priced: PricedLayouts, zeros: Sequence[Zero], capacity: float) -> Floats:
    """Return what a step of every layout takes at least, with any schedule and, if it has but this, any recompute."""
    rows = priced.space.rows
    counts = priced.question.workload.global_batch // (rows["dp"] * rows["mbs"])
    found = np.full(len(counts), np.inf)
    for zero, turns in itertools.product(zeros, (False, True)):
        work_s, rest_s = _least_work(priced, zero, False, turns, capacity)
        found = np.minimum(found, counts / rows["pp"] * work_s + rest_s)
    return found * (1 - SURE)


def least_bytes(priced: PricedLayouts, zero: Zero) -> Floats:
    """Return what the rank with the most layers holds at least: states, and what one micro-batch keeps."""
    question = priced.question
    layers, kernels = -(-question.model.num_layers // priced.space.rows["pp"]), load_kernels(question.kernels)
    blocks = priced.pipeline_blocks(slice(None), _ALONE, Candidate(zero=zero))
    held = layers * (_states_bytes(blocks, priced.layer) + priced.layer.saved_bytes.min(axis=0))
    share = kernels.reserved.share if kernels.reserved else 0.0
    return ((held + kernels.workspace_bytes) * (1 + share) + kernels.runtime_bytes) * (1 - SURE)


@cache
def _holds_as_1f1b(builder: str) -> bool:
    """Say whether every rank of a schedule keeps all its layers as often as under 1F1B, counted with four ranks."""
    chunks = builders()[builder].num_chunks or 2
    schedule = Schedule(builder=builder, num_ranks=4, num_chunks=chunks, num_micro_batches=16)
    return all(max(min(held[:chunks]) for held in schedule.in_flight_by_chunk(rank)) >= 4 - rank for rank in range(4))


@lru_cache(maxsize=8)  # variants of the same layouts differ in little else
def _least_work(
    priced: PricedLayouts, zero: Zero, as_1f1b: bool, turns: bool, capacity: float
) -> tuple[Floats, Floats]:
    """Return what one micro-batch of every layout costs on all ranks together at least, and what the step phase does.

    Ranks keep as many micro-batches as under 1F1B, or one. A schedule that turns has the head on its first rank.
    """
    question, rows = priced.question, priced.space.rows
    num_layers, counts = question.model.num_layers, question.workload.global_batch // (rows["dp"] * rows["mbs"])
    blocks, kernels = priced.pipeline_blocks(slice(None), _ALONE, Candidate(zero=zero)), load_kernels(question.kernels)
    embed, layer, head = blocks.embed, blocks.layer, blocks.head
    gathered = layer.num_weights * (2.0 if zero == 3 else 0.0)
    share = kernels.reserved.share if kernels.reserved else 0.0
    free = (capacity * (1 + 1e-9) - kernels.runtime_bytes) / (1 + share) - (kernels.workspace_bytes + gathered)
    of_embed, of_layer, of_head = (_states_bytes(blocks, block) for block in (embed, layer, head))
    order = layer.pass_s.argsort(axis=0)
    pass_s = np.take_along_axis(layer.pass_s, order, axis=0)
    work_s = np.full(len(counts), np.inf)
    each_pp: list[int] = sorted(set(rows["pp"].tolist()))
    for num_ranks in each_pp:
        mine = np.flatnonzero(rows["pp"] == num_ranks)
        rank = np.arange(num_ranks)[:, None]
        flight = np.maximum(1, np.minimum(num_ranks - rank, counts[mine]) if as_1f1b else 0 * rank)
        first, last = rank == 0, rank == (0 if turns else num_ranks - 1)
        head_saved = head.saved_bytes[0, mine]
        ends = first * of_embed[mine] + last * (of_head[mine] + flight * head_saved)
        moment = np.maximum(0.0, layer.moment_bytes[:, mine] - (last * head_saved)[:, None])
        each = of_layer[mine] + flight[:, None] * layer.saved_bytes[:, mine]  # [rank, kind, layout]
        fits = np.maximum(0.0, np.floor(((free[mine] - ends)[:, None] - moment) / np.maximum(each, 1.0)))
        fits = np.maximum.accumulate(np.take_along_axis(fits, order[None][..., mine], axis=1), axis=1).sum(axis=0)
        share = np.diff(np.minimum(fits, num_layers), axis=0, prepend=0.0)
        work_s[mine] = np.where(fits[-1] >= num_layers, (share * pass_s[:, mine]).sum(axis=0), np.inf)
    return work_s + embed.pass_s[0] + head.pass_s[0], _update_s(blocks, counts, -(-num_layers // rows["pp"]))


def _states_bytes(blocks: PipelineBlocks, block: BlockTotals) -> Floats:
    """Return the states of a block at least: rounding, and weights that meet their copies, left out."""
    parts = state_bytes(block.weights, blocks.setting, blocks.question.workload)
    return np.maximum(0.0, sum(parts.values()) - _ROUNDED * len(block.weights))


def _passes(builder: str, counts: Ints, ranks: Ints) -> Floats:
    """Return how often a step takes the work of one micro-batch at least, however that lies on the ranks.

    Of GPipe and 1F1B these are paths that are no longer than those of ``path_weights``, in the mixture in which all
    layers weigh the same; other schedules may have no bubble.
    """
    if builder not in ALL_RANGES:
        return counts / ranks
    few = (counts <= ranks) & (builder != "gpipe")
    return np.where(few, 1 + (counts - 1) / (2 * ranks - counts + 1).clip(1), (counts + ranks - 1) / ranks)


def _fullest_rank_s(blocks: PipelineBlocks, rows: Ints, space: Space, counts: Ints, held_s: Floats) -> Floats:
    """Return what the micro-batches take at least on the rank that takes longest, with the fastest recompute.

    Layers are whole, and every stage has one. A rank begins when the stages before its first one have passed a
    micro-batch, and ends before these have passed the last one back, unless its weight gradients come later.
    """
    forward_s = blocks.layer.forward_s if builders()[space.base.schedule].splits else blocks.layer.pass_s
    embed, layer, head, ahead = (
        one.min(axis=0)[rows] for one in (blocks.embed.pass_s, blocks.layer.pass_s, blocks.head.pass_s, forward_s)
    )
    found, num_layers = np.zeros(len(rows)), blocks.question.model.num_layers
    shapes, shape = np.unique(np.stack([space.rows["pp"], space.rows["vp"]]), axis=1, return_inverse=True)
    for number, (pp, vp) in enumerate(shapes.T.tolist()):
        schedule = Schedule(builder=space.base.schedule, num_ranks=pp, num_chunks=vp, num_micro_batches=pp)
        mine = np.flatnonzero(shape.reshape(-1) == number)
        stages, sends = counts_of(schedule).stages, counts_of(schedule).sends[:, None]
        split = space.base.stages or (1,) * schedule.num_stages
        before = np.cumsum([0, *split])[stages.min(axis=1)][:, None] * ahead[mine]
        first, last = ((stages == stage).any(axis=1)[:, None] for stage in (0, schedule.num_stages - 1))
        ends = first * embed[mine] + last * head[mine] + sends * held_s[mine]
        ends = ends + vp * blocks.question.calibration.task_s
        each_s = counts[mine] * layer[mine]
        least_s = before + counts[mine] * ends + split_layers(schedule, [split]).sum(axis=2) * each_s
        left = num_layers - sum(split)  # these go where a rank is soonest done
        share_s = (least_s.sum(axis=0) + left * each_s) / pp
        more = np.maximum(0.0, np.floor((share_s - least_s) / each_s))
        next_s = np.sort(least_s + (more + 1) * each_s, axis=0)
        wanted = (left - more.sum(axis=0)).astype(np.int64)
        after_s = np.take_along_axis(next_s, np.clip(wanted - 1, 0, pp - 1)[None], axis=0)[0]
        found[mine] = np.maximum(least_s.max(axis=0), np.where(wanted > 0, after_s, 0.0))
    return found


def _update_s(blocks: PipelineBlocks, counts: Ints, layers: Ints) -> Floats:
    """Return what the step phase of a rank with so many layers takes at least.

    Embedding and head may be there too: under ZeRO-3 they are more messages, but if they are small, messages of another
    size, which may go another way.
    """
    weights = {pending: layers * number for pending, number in blocks.layer.weights.items()}
    found: list[Floats] = []
    for ends in range(3) if blocks.setting.zero == 3 else (0,):
        forever = np.full(len(counts), _FOREVER)
        update = update_cost(weights, blocks.setting, blocks.question, forever, counts, layers + ends)
        found.append(sum(update.seconds.values()) + np.zeros(len(counts)))
    return np.min(found, axis=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PathBounds:
    """Paths as linear functions of the layers of stages, each with its fastest recompute.

    ``mixed`` is the mixture of paths whose least value over all splits is largest, ``balanced`` the layers against it:
    fractions of layers with which all paths that matter take the same.
    """

    fixed_s: Floats  # [path]: with no layer anywhere
    layer_s: Floats  # [path, stage]: for each layer
    runs: Floats  # [path, stage]: how often it runs a stage at least, whatever pass takes longer
    mixed: Floats  # [path]
    balanced: Floats  # [stage]

    def with_mixture(self) -> tuple[Floats, Floats]:
        """Return fixed seconds and those of each layer, the mixture as one more path."""
        fixed_s, layer_s = (np.concatenate([own, self.mixed[None] @ own]) for own in (self.fixed_s, self.layer_s))
        return fixed_s, layer_s


class SplitBounds:
    """Bounds of all splits of one candidate, better with every path that is found."""

    def __init__(self, blocks: PipelineBlocks, choices: StageChoices) -> None:
        self._blocks, self._choices, self._schedule = blocks, choices, blocks.schedule
        self._num_layers, self._stages = choices.num_layers, counts_of(self._schedule).stages
        chunks, ranks = self._schedule.num_chunks, self._schedule.num_ranks
        self._started = np.array([1.0, 1.0, 0.0]) * blocks.question.calibration.task_s / 2  # as ``price_stages`` has it
        self._totals = np.arange(chunks, self._num_layers - chunks * (ranks - 1) + 1)  # that a rank may have
        self._extra_s = np.zeros((ranks, len(self._totals)))
        every = choices.recompute is not None or not choices.allowed.any()
        kinds = slice(None) if every else np.flatnonzero(choices.allowed[:, 0])
        self._embed, self._layer, self._head = (
            np.array([getattr(block, name)[rows].min() for name in PASSES])
            for block, rows in ((blocks.embed, 0), (blocks.layer, kinds), (blocks.head, 0))
        )
        unit = replace(blocks, sends=replace(blocks.sends, time_s=np.ones(1)))
        self._sent = pipeline_delays(self._schedule, unit.sends, np.zeros((4, self._schedule.num_stages, 1)))
        # Paths: passes by stage, and sends. Those known from the start are all that one rank does.
        passes = np.zeros((ranks, 3, self._schedule.num_stages))
        passes[np.arange(ranks)[:, None], :, self._stages] = self._schedule.num_micro_batches
        sends = np.maximum(0, self._schedule.num_micro_batches - 1) * unit.hop_s
        self._known = np.concatenate([passes.reshape(ranks, -1), sends], axis=1)

    def learn(self, layers: Floats, slower: Floats | float = 1.0) -> None:
        """Find the longest path for each column of layers, which may be fractions: [stage, column]."""
        work_s = self._layer[:, None, None] * layers
        work_s[:, 0] += self._embed[:, None]
        work_s[:, -1] += self._head[:, None]
        work_s += self._started[:, None, None]
        forward, inputs, weight = work_s * slower
        sends = self._blocks.sends
        delays = pipeline_delays(self._schedule, sends, np.array([inputs + weight, forward, inputs, weight]))
        passes, waits = longest_paths(self._schedule, delays, self._sent)
        rows = np.concatenate([passes.reshape(len(waits), -1), waits[:, None]], axis=1)
        self._known = np.unique(np.concatenate([self._known, rows]), axis=0)

    @property
    def even(self) -> Floats:
        """Fractions of layers with which all stages take the same."""
        ends = np.zeros(self._schedule.num_stages)
        ends[0] += self._embed.sum() / self._layer.sum()
        ends[-1] += self._head.sum() / self._layer.sum()
        even = np.maximum((self._num_layers + ends.sum()) / len(ends) - ends, 0.2)  # the head may exceed its share
        return even * (self._num_layers / even.sum())

    def learn_ranks(self, slower: float) -> None:
        """Find the longest path where all stages take the same, and where the stages of one rank are slower."""
        each = np.ones((self._schedule.num_stages, self._schedule.num_ranks + 1))
        each[self._stages, np.arange(self._schedule.num_ranks)[:, None]] = slower
        self.learn(np.repeat(self.even[:, None], each.shape[1], axis=1), each)

    def learn_between(self, layers: Floats | None) -> None:
        """Find the longest paths where those that are known balance, and from there to some layers."""
        balanced = self.paths().balanced
        toward = self.even if layers is None else layers
        self.learn(np.stack([balanced + share * (toward - balanced) for share in _BETWEEN], axis=1))

    def limit_memory(self, capacity: float) -> None:
        """Find what ranks must recompute in memory; more layers hold more, so that they recompute no less."""
        if self._choices.recompute is not None:  # pinned: there is nothing to find
            return
        even = -(-self._num_layers // self._schedule.num_ranks)
        some = self._totals[: max(1, even + _MORE - self._schedule.num_chunks + 1)]
        held, extra_s, starts = self._least_held(some)
        extra_s = np.minimum.reduceat(np.where(held <= capacity, extra_s, np.inf), starts, axis=1)
        self._extra_s = np.concatenate(
            [extra_s, np.repeat(extra_s[:, -1:], len(self._totals) - len(some), axis=1)], axis=1
        )

    def paths(self) -> PathBounds:
        """Return the paths that are known."""
        passes = self._known[:, :-1].reshape(len(self._known), len(PASSES), -1)
        fixed_s = passes[:, :, 0] @ self._embed + passes[:, :, -1] @ self._head
        fixed_s += self._known[:, -1] * self._blocks.sends.time_s + passes.sum(axis=2) @ self._started
        layer_s, left = np.einsum("jps,p->js", passes, self._layer), self._num_layers - self._schedule.num_stages
        mixed, places = game((fixed_s + layer_s.sum(axis=1))[:, None] + left * layer_s)
        return PathBounds(
            fixed_s=fixed_s, layer_s=layer_s, runs=passes.min(axis=1), mixed=mixed, balanced=1.0 + left * places
        )

    def bound_s(self, paths: PathBounds) -> float:
        """Return what the micro-batches take at least, whatever the split; infinite if none fits in memory.

        Some rank has as many layers as the others leave it. For each rank and number of layers, mixtures of the rank's
        own path with all paths say what that takes at least, with all other layers where they take least.
        """
        left, whole_s = self._num_layers - self._schedule.num_stages, paths.fixed_s + paths.layer_s.sum(axis=1)
        mixed_s, mixed_fixed_s = paths.mixed @ paths.layer_s, float(paths.mixed @ whole_s)
        mixed_runs, mine, others = paths.mixed @ paths.runs, _SHARES[:, None], 1 - _SHARES[:, None]
        cost = np.empty((len(self._stages), len(self._totals)))
        for rank, own in enumerate(self._stages):
            number = int(paths.layer_s[:, own].sum(axis=1).argmax())
            each = mine * paths.layer_s[number] + others * mixed_s
            fixed = mine * whole_s[number] + others * mixed_fixed_s
            times = (mine * paths.runs[number] + others * mixed_runs)[:, own].min(axis=1)[:, None]
            elsewhere = np.delete(each, own, axis=1).min(axis=1, initial=NEVER)[:, None]
            more = self._totals - len(own)
            more_s = times * np.minimum(self._extra_s[rank], NEVER) + each[:, own].min(axis=1)[:, None] * more
            cost[rank] = (fixed + more_s + np.where(left > more, elsewhere * (left - more), 0.0)).max(axis=0)
        cost[np.isinf(self._extra_s)] = np.inf
        return max(mixed_fixed_s + left * float(mixed_s.min()), self._least(cost))

    def least_bytes(self) -> float:
        """Return what the fullest rank holds at least, whatever the split."""
        if self._choices.recompute is not None:
            return 0.0  # what is pinned may differ from chunk to chunk
        held, _, starts = self._least_held(self._totals)
        return self._least(np.minimum.reduceat(held, starts, axis=1))

    def _least(self, cost: Floats) -> float:
        """Return the least value within which the ranks can have all layers, given what each total costs a rank."""
        values = np.unique(cost[np.isfinite(cost)])
        values = values[values >= cost.min(axis=1).max()]
        low, high = 0, len(values)
        while low < high:
            middle = (low + high) // 2
            most = np.where(cost <= values[middle], self._totals, 0).max(axis=1)
            low, high = (low, middle) if most.sum() >= self._num_layers else (middle + 1, high)
        return float(values[low]) if low < len(values) else np.inf

    def _least_held(self, totals: Ints) -> tuple[Floats, Floats, Ints]:
        """Return what each option of each rank holds at least, and recomputes in a micro-batch, [rank, option].

        Options are those of a number of layers, in order of it; the last value says where those of each number begin.
        Every chunk has a layer, all others lie where they are kept least.
        """
        blocks, schedule, chunks = self._blocks, self._schedule, self._schedule.num_chunks
        layers = np.ones((schedule.num_ranks, len(totals), chunks), dtype=np.int64)
        layers[:, :, 0] = totals - chunks + 1
        options = RankOptions.of(blocks, self._choices, layers, np.inf)
        shape = options.prices.num_blocks.shape
        kind, plain_kind = np.broadcast_to(options.options.kind[..., 0], shape), options.options.plain_kind
        again = np.broadcast_to(options.options.recomputed.sum(axis=2), shape)
        plain = options.options.num_layers - again
        counts, ends_s = counts_of(schedule), np.full((schedule.num_ranks, 1), chunks * self._started.sum())
        for stage, block in ((0, self._embed), (-1, self._head)):
            ends_s[counts.ranks[stage]] += block.sum()
        extra_s = options.prices.pass_s[..., 0] - (again + plain) * self._layer.sum() - ends_s
        memory = {part: np.broadcast_to(size, (*shape, 1))[..., 0] for part, size in options.prices.memory.items()}
        if chunks > 1:

            def least(name: str) -> tuple[Floats, Floats]:
                """Return a column of a layer that is computed again and of a plain one, and the least that there is."""
                column: Floats = getattr(blocks.layer, name)[:, 0]
                own, kept = column[kind], column[plain_kind]
                smaller = np.where(plain == 0, own, np.where(again == 0, kept, np.minimum(own, kept)))
                return again * own + plain * kept, smaller

            def kept(rank: int, in_flight: Floats, name: str) -> Floats:
                """Return what the layers of a rank keep at least at each time: [time, option]."""
                fewest, (all_bytes, smaller) = in_flight.min(axis=1)[:, None], least(name)
                beside = in_flight.sum(axis=1)[:, None] - chunks * fewest
                found = fewest * all_bytes[rank] + beside * smaller[rank]
                for stage, block in ((0, blocks.embed), (schedule.num_stages - 1, blocks.head)):
                    found = found + in_flight @ (counts.stages[rank] == stage)[:, None] * getattr(block, name)[0, 0]
                return found

            activations = [
                kept(rank, own[:, :chunks], "saved_bytes")
                + (kept(rank, own[:, chunks:], "waiting_bytes") if schedule.splits_backward else 0.0)
                for rank, own in enumerate(in_flight_of(schedule))
            ]
            memory["activations"] = np.stack([own.max(axis=0) for own in activations])
            memory["working"] = np.minimum(memory["working"], least("moment_bytes")[1])
            reserved = load_kernels(blocks.question.kernels).reserved
            if reserved:
                apart = memory.pop("reserved") * 0.0 + memory["runtime"]
                memory["reserved"] = reserved.share * (sum(memory.values()) - apart)
        starts = np.flatnonzero(np.diff(options.divisions, prepend=-1))
        held = np.where(options.fits[..., 0], sum(memory.values()), np.inf)
        return held, np.maximum(extra_s, 0.0), starts
