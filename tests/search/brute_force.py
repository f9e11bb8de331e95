"""Every candidate of a small question, with none of the search's own enumeration, bounds, columns or pruning.

An outer point is a candidate with nothing said about its stages. Of a point each stage, with each recompute, is priced
by itself by the cost model, as part of a plan; then all ways to put such stages together are timed.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from autoshard.cost.block import BlockCost, Setting
from autoshard.cost.memory import rank_memory
from autoshard.cost.pipeline import Pipeline, Price, RankCost, StageLayers, StageSeconds, rank_cost
from autoshard.cost.predict import plan_cost, priced
from autoshard.cost.setting import Question, price_block, setting_of
from autoshard.cost.sharded import CutBlocks
from autoshard.cost.step import rank_update
from autoshard.cost.update import Turns
from autoshard.layout.cutting import Cutting
from autoshard.plan.build import build_plan, cut_atoms
from autoshard.plan.candidate import Candidate, even_stages, parse_pins
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.check import rejections
from autoshard.schedule.builders import BUILDERS
from autoshard.schedule.makespan import makespan_columns
from autoshard.schedule.simulate import delays_of
from autoshard.schedule.timeline import KINDS
from autoshard.search.api import default_workload
from autoshard.search.exact_ranges import Effort
from autoshard.search.planner import Request
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model_catalogue import load_model

Stages = tuple[int, ...]
EXACT = Effort(gap=0.0, most_labels=10**8, most_timed=10**8)
ALL_RANGES = ("gpipe", "1f1b")
TIE = 1e-11  # sums of the same seconds in another order
PLAIN, FULL = Recompute(), Recompute(kind="full")


def ask(
    model: str, cluster: str = "local", nodes: int = 1, *, ranks: int | None = None, pins: str = "", **work: int
) -> Request:
    """Make a request as the command line does."""
    the_model, the_cluster = load_model(model), load_cluster(cluster, nodes, ranks=ranks)
    return Request(
        model=the_model,
        cluster=the_cluster,
        workload=replace(default_workload(the_model, the_cluster), **work),
        engines=(the_cluster.engine,),
        pins=parse_pins(pins),
    )


def time_s(plan: Plan) -> float:
    assert plan.prediction
    return plan.prediction.step_time_s


def peak(plan: Plan) -> int:
    assert plan.prediction
    return plan.prediction.peak_bytes


def kinds_of_recompute(kernels: str) -> list[Recompute]:
    """None, every set of the framework's names that have operations, where these do not overlap, small ones first."""
    sets = {name: ops for name, ops in load_kernels(kernels).selective.items() if ops}
    found = [PLAIN]
    for size in range(1, len(sets) + 1):
        for names in itertools.combinations(sets, size):
            ops = [op for name in names for op in sets[name]]
            if len(ops) == len(set(ops)):
                found.append(Recompute(kind="selective", ops=names))
    return [*found, FULL]


def layouts(request: Request) -> Iterator[Candidate]:
    """Try all whole numbers; a pinned key has one choice. What no Rule could allow anyway is left out."""
    ranks, batch, model = request.cluster.num_ranks, request.workload.global_batch, request.model
    pins = dict(request.pins)
    most = {"tp": model.num_heads, "pp": model.num_layers, "cp": request.workload.seq_len, "ep": model.num_experts or 1}
    axes = [[pins[key]] if key in pins else range(1, min(ranks, size) + 1) for key, size in most.items()]
    for tp, pp, cp, ep in itertools.product(*axes):
        for dp in [pins["dp"]] if "dp" in pins else range(1, ranks + 1):
            if "dp" not in pins and tp * pp * cp * dp != ranks:
                continue
            for mbs in [pins["mbs"]] if "mbs" in pins else range(1, batch // dp + 1):
                if "mbs" in pins or batch % (dp * mbs) == 0:
                    sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp, "mbs": mbs}
                    if any(axis not in pins and ranks % sizes[axis] for axis in ("tp", "pp", "cp", "ep")):
                        continue
                    yield replace(Candidate(), **{**pins, **sizes})


def every_point(request: Request) -> Iterator[Candidate]:
    """Every layout run in every way that there are words for, whether or not they say anything."""
    pins = request.pins
    free: Mapping[str, Sequence[Any]] = {
        "sp": (True, False), "zero": (0, 1, 3), "cp_kind": ("ring", "all_to_all"),
        "cp_order": ("contiguous", "zigzag"), "schedule": tuple(BUILDERS), "vp": range(1, request.model.num_layers + 1),
    }  # fmt: skip
    choices = [[pins[key]] if key in pins else values for key, values in free.items()]
    for layout in layouts(request):
        for values in itertools.product(*choices):
            yield replace(layout, **dict(zip(free, values, strict=True)))


def says_something(point: Candidate, request: Request) -> bool:
    """Whether each choice that is not pinned and not the usual one changes what some rank does."""
    chunks = BUILDERS[point.schedule].num_chunks
    free_chunks = point.vp == chunks if chunks else point.vp > 1
    meaning = {
        "sp": point.tp > 1 or not point.sequence_parallel,
        "zero": point.zero == 1 or point.dp * point.cp > 1,
        "cp_kind": point.cp_kind == "ring" or (point.cp > 1 and point.tp == 1),
        "cp_order": point.cp_order == "contiguous" or (point.cp > 1 and point.cp_kind == "ring"),
        "schedule": (point.schedule == "1f1b" or point.pp > 1) and ("vp" not in request.pins or free_chunks),
        "vp": free_chunks and point.pp * point.vp <= request.model.num_layers,
    }
    return all(says for key, says in meaning.items() if key not in request.pins)


def points(request: Request) -> list[Candidate]:
    """The outer points of a question, each once."""
    return list(dict.fromkeys(point for point in every_point(request) if says_something(point, request)))


def refused(request: Request, candidate: Candidate) -> tuple[str, ...]:
    """Which Rules refuse a candidate."""
    facts = (request.model, request.cluster, request.workload, request.engines[0])
    return tuple(one.rule_id for one in rejections(candidate, *facts, extra_rules=request.extra_rules))


def allowed_kinds(request: Request, point: Candidate) -> list[tuple[Recompute, ...]]:
    """The kinds of recompute that no Rule refuses for a point; what is pinned is the only choice."""
    kinds = [(kind,) for kind in kinds_of_recompute(point.kernels or request.cluster.kernels)]
    tried = [request.pins["recompute"]] if "recompute" in request.pins else kinds
    return [kind for kind in tried if not refused(request, replace(point, recompute=kind))]


def compositions(number: int, parts: int) -> Iterator[Stages]:
    """All ways to write a number as a sum of so many numbers of at least one.

    >>> list(compositions(4, 2))
    [(1, 3), (2, 2), (3, 1)]
    """
    for cuts in itertools.combinations(range(1, number), parts - 1):
        yield tuple(np.diff((0, *cuts, number)).tolist())


def near_even(num_layers: int, num_stages: int) -> Iterator[Stages]:
    """The even split, then those whose first stage gives none or one layer away, and the last none, one or two.

    What ends give away, the stages between share evenly; of two stages, each gets what the other gives.
    """
    even = even_stages(num_layers, num_stages)
    yield even
    for last, first in sorted({(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)}, key=lambda ends: (ends[0] == 2, ends[::-1])):
        if num_stages == 2:
            found: Stages = (even[0] - first + last, even[1] - last + first)
        elif num_stages > 2:
            between = num_layers - (even[0] - first) - (even[-1] - last)
            found = (even[0] - first, *even_stages(between, num_stages - 2), even[-1] - last)
        else:
            continue
        if min(found) >= 1:
            yield found


@dataclass(frozen=True, kw_only=True)
class Option:
    """A pipeline rank with so many layers on each of its chunks, under some recompute: what a plan would say of it."""

    recompute: tuple[Recompute, ...]  # by chunk
    cost: RankCost
    times: tuple[StageSeconds, ...]  # by chunk
    peak_bytes: float
    update_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to fill all stages of a point."""

    candidate: Candidate
    time_s: float
    latest_s: float  # what may be found instead, where recompute that takes as long ties
    peak_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """A legal outer point and the ways to fill its stages."""

    candidate: Candidate
    kinds: list[tuple[Recompute, ...]]  # allowed, or the one that is pinned
    is_pinned: bool
    question: Question
    plan: Plan
    blocks: CutBlocks
    setting: Setting
    pipeline: Pipeline
    price: Price
    options: dict[tuple[int, Stages], list[Option]]

    @property
    def all_ranges(self) -> bool:
        """Whether every range of layers is a way to fill its stages, and every recompute of each stage."""
        return self.candidate.schedule in ALL_RANGES and self.candidate.stages is None

    @cached_property
    def splits(self) -> list[Stages]:
        """The layers that stages may have."""
        if self.candidate.stages is not None:
            return [self.candidate.stages]
        listed = compositions if self.all_ranges and self.candidate.pp > 1 else near_even
        return list(listed(self.question.model.num_layers, self.candidate.num_stages))

    def recomputes(self, rank: int, layers: Stages) -> list[tuple[Recompute, ...]]:
        """What the chunks of a rank may compute again, together."""
        numbers = [stage for _, stage in sorted(self.plan.schedule.stages_of(rank).items())]
        if self.is_pinned:
            (pinned,) = self.kinds
            own = tuple(pinned[0] if len(pinned) == 1 else pinned[number] for number in numbers)
            short = any((one.num_layers or 1) > count for one, count in zip(own, layers, strict=True))
            return [] if short else [own]
        found = [kind * len(layers) for kind in self.kinds]
        if {(PLAIN,), (FULL,)} <= set(self.kinds):
            for count in range(1, max(layers)):
                some = (FULL if count >= have else Recompute(kind="full", num_layers=count) for have in layers)
                found.append(tuple(some))
        return found

    def rank_options(self, rank: int, split: Stages) -> list[Option]:
        """Price what a rank may do with its part of a split."""
        stages = [stage for _, stage in sorted(self.plan.schedule.stages_of(rank).items())]
        layers = tuple(split[stage] for stage in stages)
        if (rank, layers) not in self.options:
            self.options[rank, layers] = [
                self._option(rank, stages, layers, own) for own in self.recomputes(rank, layers)
            ]
        return self.options[rank, layers]

    def _option(self, rank: int, stages: Sequence[int], layers: Stages, own: tuple[Recompute, ...]) -> Option:
        last, schedule = self.candidate.num_stages - 1, self.plan.schedule
        held = tuple(
            StageLayers.of(count, drop, is_first=stage == 0, is_last=stage == last)
            for stage, count, drop in zip(stages, layers, own, strict=True)
        )
        cost = rank_cost(held, self.price, splits=schedule.splits_backward)
        memory = rank_memory(self.question, self.setting, self.pipeline, rank, cost)
        turns = Turns(num_micro_batches=schedule.num_micro_batches, num_blocks=cost.num_blocks)
        update = rank_update(self.question, self.setting, cost.weights, cost.time_s, turns)
        times = StageSeconds.of_all(held, self.price)
        return Option(
            recompute=own,
            cost=cost,
            times=tuple(times[stage] for stage in held),
            peak_bytes=float(sum(memory.values())),
            update_s={part: float(seconds) for part, seconds in update.seconds.items()},
        )

    def timed(self, choices: Sequence[Sequence[Option]]) -> Any:
        """Time all ways to choose one option for every rank: an axis per rank."""
        schedule, ranks, shape = self.plan.schedule, range(self.candidate.pp), tuple(map(len, choices))
        index = np.indices(shape).reshape(len(shape), -1)
        passes, update = ([np.array([part(one) for one in own]) for own in choices] for part in (_by_kind, _update))
        places = [schedule.place_of(stage) for stage in range(schedule.num_stages)]
        work = np.stack([passes[rank][index[rank], :, chunk].T for rank, chunk in places], axis=1)
        rest = np.max([update[rank][index[rank]] for rank in ranks], axis=0).sum(axis=1)
        hops, sends = (schedule.num_stages - 1, index.shape[1]), self.pipeline.sends
        if schedule.num_ranks == 1:
            spent = schedule.num_micro_batches * (work[KINDS.index("F")] + work[KINDS.index("B")]).sum(axis=0)
        else:
            send, receive = np.broadcast_to(sends.time_s, hops), np.broadcast_to(sends.receive_s, hops)
            spent = makespan_columns(schedule, delays_of(schedule, work, send, receive, overlap=sends.hidden))
        return (spent + rest + self.question.calibration.step_s).reshape(shape)

    def choices(self, split: Stages, capacity: float = np.inf) -> list[list[Option]]:
        """What each rank may do with its part of a split."""
        ranks = range(self.candidate.pp)
        found = [[one for one in self.rank_options(rank, split) if one.peak_bytes <= capacity] for rank in ranks]
        return found if self.all_ranges else [_quickest(options) for options in found]

    def fastest(self, capacity: float = np.inf) -> Way | None:
        """The fastest way that fits."""
        found: Way | None = None
        latest = np.inf
        for split in self.splits:
            choices = self.choices(split, capacity)
            if not all(choices):
                continue
            seconds = self.timed(choices)
            latest = min(latest, float(seconds.min() if self.all_ranges else seconds.max()))
            if found is None or seconds.min() < found.time_s:
                place = np.unravel_index(int(seconds.argmin()), seconds.shape)
                way = [options[number] for options, number in zip(choices, place, strict=True)]
                found = self.way(split, way, float(seconds.min()))
        return found and replace(found, latest_s=latest)

    def smallest(self) -> Way | None:
        """The way whose fullest rank holds least."""
        found: tuple[Stages, list[Option]] | None = None
        for split in self.splits:
            choices = [self.rank_options(rank, split) for rank in range(self.candidate.pp)]
            if all(choices):
                way = [min(options, key=_peak) for options in choices]
                found = min([found, (split, way)], key=lambda one: max(map(_peak, one[1]))) if found else (split, way)
        if found is None:
            return None
        return self.way(*found, float(self.timed([[one] for one in found[1]]).item()))

    def way(self, split: Stages, way: Sequence[Option], seconds: float) -> Way:
        """Say what was chosen for every rank as a candidate."""
        places = [self.plan.schedule.place_of(stage) for stage in range(len(split))]
        recompute = tuple(way[rank].recompute[chunk] for rank, chunk in places)
        candidate = replace(self.candidate, stages=split, recompute=recompute)
        return Way(candidate=candidate, time_s=seconds, latest_s=seconds, peak_bytes=max(map(_peak, way)))

    def cost_of(self, candidate: Candidate) -> tuple[float, float]:
        """Price a way as a plan: seconds and bytes."""
        question = self.question
        plan = build_plan(candidate, question.model, question.cluster, question.workload, self.plan.engine)
        cost = plan_cost(plan, question, self.blocks)
        return float(cost.time_s), float(cost.peak_bytes)


def _by_kind(option: Option) -> Any:
    return [[float(one.of_kind(kind)) for one in option.times] for kind in KINDS]


def _update(option: Option) -> Any:
    return [option.update_s[part] for part in sorted(option.update_s)]


def _peak(option: Option) -> float:
    return option.peak_bytes


def _quickest(options: Sequence[Option]) -> list[Option]:
    """The options that take least forward and backward: the first of them, and those that tie with it."""
    least = min((float(one.cost.time_s) for one in options), default=0.0)
    return [one for one in options if one.cost.time_s <= least * (1 + TIE)]


class Truth:
    """All legal outer points of a question for one engine, priced one by one."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.points = points(request)
        self._cuttings: dict[Candidate, Cutting] = {}
        self._priced: dict[Candidate, tuple[CutBlocks, Setting, Price]] = {}
        kinds = [(point, allowed_kinds(request, point)) for point in self.points]
        self.legal = [self._point(point, own) for point, own in kinds if own]

    def fastest(self, capacity: float) -> Way | None:
        """The fastest of everything that fits."""
        found = [way for way in (point.fastest(capacity) for point in self.legal) if way]
        if not found:
            return None
        return replace(min(found, key=lambda way: way.time_s), latest_s=min(way.latest_s for way in found))

    def smallest(self) -> Way | None:
        """What takes least memory."""
        found = [way for way in (point.smallest() for point in self.legal) if way]
        return min(found, key=lambda way: way.peak_bytes, default=None)

    def point_of(self, candidate: Candidate) -> Point:
        """The point that a candidate belongs to."""
        (found,) = (one for one in self.legal if bare(one.candidate) == bare(candidate))
        return found

    def _point(self, candidate: Candidate, kinds: list[tuple[Recompute, ...]]) -> Point:
        request, (engine,) = self.request, self.request.engines
        question = request.question(candidate)
        layout = replace(bare(candidate), zero=1, cp_order="contiguous", schedule="1f1b", vp=1)
        if layout not in self._cuttings:
            self._cuttings[layout] = request.cutting(layout, engine)
        plan = build_plan(
            replace(candidate, recompute=(PLAIN,)), request.model, request.cluster, request.workload, engine
        )
        alike = replace(bare(candidate), schedule="1f1b", vp=1)
        if alike not in self._priced:
            blocks = CutBlocks(
                step=question.step, cutting=self._cuttings[layout], atoms=cut_atoms(candidate, request.model)
            )
            setting = setting_of(question, candidate, blocks)
            self._priced[alike] = (blocks, setting, _pricing(question, setting))
        blocks, setting, price = self._priced[alike]
        return Point(
            candidate=candidate,
            kinds=kinds,
            is_pinned="recompute" in request.pins,
            question=question,
            plan=plan,
            blocks=blocks,
            setting=setting,
            pipeline=priced(plan, question, blocks)[1],
            price=price,
            options={},
        )


def bare(candidate: Candidate) -> Candidate:
    """A candidate with nothing said about its stages."""
    return replace(candidate, stages=None, recompute=(PLAIN,))


def _pricing(question: Question, setting: Setting) -> Price:
    @cache
    def price(kind: str, drop: Recompute) -> BlockCost:
        return price_block(question, setting, kind, drop)

    return price
