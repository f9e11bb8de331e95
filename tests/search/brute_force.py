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
from hypothesis import note, strategies as st

from autoshard.cost.built_in import built_in
from autoshard.cost.predict import plan_cost, priced
from autoshard.cost.setting import BlockCost, Question, Setting, price_block, setting_of
from autoshard.cost.sharded import CutBlocks
from autoshard.cost.stages import PipelineBlocks, StageOptions, StagePrices, price_stages
from autoshard.cost.step import Price, priced_blocks, step_seconds
from autoshard.layout.layout import Cutting
from autoshard.plan.build import build_plan, cut_atoms
from autoshard.plan.candidate import Candidate, parse_pins
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute, parse_stages
from autoshard.plan.rules.check import rejections
from autoshard.plan.rules.columns import Columns
from autoshard.plan.rules.rule import Rule, Verdict, rule
from autoshard.schedule.builders import BUILDERS
from autoshard.search.ask.vendor.defaults import default_workload
from autoshard.search.bound.request import Request
from autoshard.search.fill.stage_filling import Effort
from autoshard.search.fill.stage_options import near_even_splits
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import LayerKind
from autoshard.spec.model_catalogue import load_model

Stages = tuple[int, ...]
EXACT = Effort(gap=0.0, most_splits=10**8, split_s=np.inf, most_idle=np.inf)
PLAIN, FULL = Recompute(), Recompute(kind="full")


def ask(
    model: str, cluster: str = "local", nodes: int = 1, *, ranks: int | None = None, pins: str = "", **work: int
) -> Request:
    """Make a request as the command line does."""
    the_model, the_cluster = load_model(model), load_cluster(cluster, nodes, ranks=ranks)
    return Request(
        model=the_model,
        cluster=the_cluster,
        workload=replace(default_workload(the_model, the_cluster)[0], **work),
        engines=(the_cluster.engine,),
        pins=parse_pins(pins),
    )


def with_host_memory(cluster: Cluster, memory_bytes: int, bytes_per_s: float) -> Cluster:
    """The cluster with memory beside that of its ranks, whatever this machine has."""
    sources = {**cluster.sources, "default": "this test"}
    return replace(cluster, host_memory_bytes=memory_bytes, host_bandwidth_bytes_per_s=bytes_per_s, sources=sources)


def time_s(plan: Plan) -> float:
    assert plan.prediction
    return plan.prediction.step_time_s


def peak(plan: Plan) -> int:
    assert plan.prediction
    return plan.prediction.peak_bytes


def kinds_of_recompute(kernels: str, cluster: Cluster) -> list[Recompute]:
    """None, every set of the framework's names that have operations, where these do not overlap, small ones first.

    Behind them stand those that its table names with host memory, where nodes have any that is not the ranks' own.
    """
    table, found = load_kernels(kernels), [PLAIN]
    sets = {name: ops for name, ops in table.selective.items() if ops}
    for size in range(1, len(sets) + 1):
        for names in itertools.combinations(sets, size):
            ops = [op for name in names for op in sets[name]]
            if len(ops) == len(set(ops)):
                found.append(Recompute(kind="selective", ops=names))
    beside = cluster.host_memory_bytes is not None and not table.host_computes
    return [*found, FULL, *(Recompute.parse(f"{text}+offload") for text in table.offloads if beside)]


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
        "cp_order": ("contiguous", "zigzag"), "schedule": tuple(BUILDERS),
        "vp": range(1, (request.model.num_layers if "stages" in pins else 8) + 1),
    }  # fmt: skip
    choices = [[pins[key]] if key in pins else values for key, values in free.items()]
    for layout in layouts(request):
        of_node, rest = divmod(request.cluster.ranks_per_node, layout.tp)
        groups = [layout.zero_group] if "zero_group" in pins else [None] if rest or of_node == 1 else [None, of_node]
        for group, *values in itertools.product(groups, *choices):
            yield replace(layout, zero_group=group, **dict(zip(free, values, strict=True)))


def says_something(point: Candidate, request: Request) -> bool:
    """Whether each choice that is not pinned and not the usual one changes what some rank does."""
    chunks = BUILDERS[point.schedule].num_chunks
    free_chunks = point.vp == chunks if chunks else point.vp > 1
    meaning = {
        "sp": point.tp > 1 or not point.sequence_parallel,
        "zero": point.zero == 1 or point.dp * point.cp > 1,
        "zero_group": point.zero_group is None
        or (request.cluster.num_nodes > 1 and of_nodes(point, request.engines[0])),  # a node alone has the only copy
        "cp_kind": point.cp_kind == "ring" or (point.cp > 1 and point.tp == 1),
        "cp_order": point.cp_order == "contiguous" or (point.cp > 1 and point.cp_kind == "ring"),
        "schedule": (point.schedule == "1f1b" or point.pp > 1) and ("vp" not in request.pins or free_chunks),
        "vp": free_chunks and point.pp * point.vp <= request.model.num_layers,
    }
    return all(says for key, says in meaning.items() if key not in request.pins)


def of_nodes(point: Candidate, engine: str) -> bool:
    """Whether nodes hold copies of the states that they divide, each of them those of all experts."""
    group, rest = divmod(point.zero_group or 1, point.ep * point.cp)
    return engine == "torch" and point.zero > 0 and point.dp > group * point.ep and not rest


def points(request: Request) -> list[Candidate]:
    """The outer points of a question, each once."""
    return list(dict.fromkeys(point for point in every_point(request) if says_something(point, request)))


def refused(request: Request, candidate: Candidate) -> tuple[str, ...]:
    """Which Rules refuse a candidate."""
    facts = (request.model, request.cluster, request.workload, request.engines[0])
    return tuple(one.rule_id for one in rejections(candidate, *facts, extra_rules=request.extra_rules))


def allowed_kinds(request: Request, point: Candidate) -> list[tuple[Recompute, ...]]:
    """The kinds of recompute that no Rule refuses for a point; what is pinned is the only choice."""
    kinds = [(kind,) for kind in kinds_of_recompute(point.kernels or request.cluster.kernels, request.cluster)]
    tried = [request.pins["recompute"]] if "recompute" in request.pins else kinds
    return [kind for kind in tried if not refused(request, replace(point, recompute=kind))]


def compositions(number: int, parts: int) -> Iterator[Stages]:
    """All ways to write a number as a sum of so many numbers of at least one.

    >>> list(compositions(4, 2))
    [(1, 3), (2, 2), (3, 1)]
    """
    for cuts in itertools.combinations(range(1, number), parts - 1):
        yield tuple(np.diff((0, *cuts, number)).tolist())


Option = tuple[Stages, Stages, tuple[Recompute, ...]]  # of the chunks of a pipeline rank: layers, first, recompute


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to fill all stages of a point."""

    candidate: Candidate
    time_s: float
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
    columns: PipelineBlocks  # of this candidate alone
    known_kinds: tuple[Recompute, ...]  # the rows of its layers

    @cached_property
    def splits(self) -> list[Stages]:
        """The layers that stages may have: all ways to give each at least one."""
        if self.candidate.stages is not None:
            return [self.candidate.stages]
        layers, stages, builder = self.question.model.num_layers, self.candidate.num_stages, self.candidate.schedule
        if self.question.model.order and builder not in ("1f1b", "gpipe"):
            return list(near_even_splits(layers, stages))  # as docs/understand/proven.md says
        return list(compositions(layers, stages))

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

    @cached_property
    def options(self) -> list[Option]:
        """Everything that some rank may do in some split."""
        found: dict[Option, None] = {}
        for split, rank in itertools.product(self.splits, range(self.candidate.pp)):
            layers = self.layers(rank, split)
            found |= dict.fromkeys((layers, self.first(rank, split), own) for own in self.recomputes(rank, layers))
        return list(found)

    def layers(self, rank: int, split: Stages) -> Stages:
        """The layers of a rank's chunks."""
        return tuple(split[stage] for _, stage in sorted(self.plan.schedule.stages_of(rank).items()))

    def first(self, rank: int, split: Stages) -> Stages:
        """The first layers of a rank's chunks; the same for all where layers do not differ."""
        differ = len(self.question.model.layer_counts) > 1
        stages = sorted(self.plan.schedule.stages_of(rank).items())
        return tuple(sum(split[:stage]) if differ else 0 for _, stage in stages)

    @cached_property
    def prices(self) -> StagePrices:
        """What every rank takes and holds with every option."""
        kinds, layers = self.known_kinds, np.array([layers for layers, _, _ in self.options])
        kind = np.array([[kinds.index(one.kinds[0]) for one in own] for _, _, own in self.options])
        some = np.array([[one.num_layers or 10**6 for one in own] for _, _, own in self.options])
        first = np.array([first for _, first, _ in self.options])
        recomputed = np.minimum(some, layers)
        options = StageOptions(
            kind=kind[None],
            recomputed=recomputed[None],
            plain=(layers - recomputed)[None],
            plain_kind=0,
            first=first[None],
        )
        return price_stages(self.columns, options)

    @cached_property
    def peak_bytes(self) -> Any:
        """The memory of every rank with every option."""
        shape = (self.candidate.pp, len(self.options), 1)
        return np.broadcast_to(self.prices.peak_bytes, shape)[..., 0]

    def numbers(self, rank: int, split: Stages, capacity: float) -> list[int]:
        """Which options a rank may choose from in a split."""
        if not self.options:
            return []
        layers = self.layers(rank, split)
        own = {(layers, self.first(rank, split), one) for one in self.recomputes(rank, layers)}
        cluster, shape = self.question.cluster, self.peak_bytes.shape
        host = np.broadcast_to(self.prices.host_bytes, (*shape, 1))[rank, :, 0] * cluster.ranks_per_node
        fits = (self.peak_bytes[rank] <= capacity) & (host <= 0.75 * (cluster.host_memory_bytes or np.inf))
        return [number for number, option in enumerate(self.options) if option in own and fits[number]]

    def choices(self, split: Stages, capacity: float = np.inf) -> list[list[int]]:
        """What each rank may do with its part of a split."""
        return [self.numbers(rank, split, capacity) for rank in range(self.candidate.pp)]

    def timed(self, choices: Sequence[Sequence[int]]) -> Any:
        """Time all ways to choose one option for every rank: an axis per rank."""
        ways = np.stack(np.meshgrid(*choices, indexing="ij")).reshape(len(choices), -1)
        nobody = np.zeros(ways.shape[1], dtype=np.int64)
        found = step_seconds(self.columns.only(nobody), self.prices.of_options(ways, nobody))
        return found.total_s.reshape(tuple(map(len, choices)))

    def fastest(self, capacity: float = np.inf) -> Way | None:
        """The fastest way that fits."""
        found: Way | None = None
        for split in self.splits:
            choices = self.choices(split, capacity)
            if not all(choices):
                continue
            seconds = self.timed(choices)
            if found is None or seconds.min() < found.time_s:
                place = np.unravel_index(int(seconds.argmin()), seconds.shape)
                way = [options[number] for options, number in zip(choices, place, strict=True)]
                found = self.way(split, way, float(seconds.min()))
        return found

    def smallest(self) -> Way | None:
        """The way whose fullest rank holds least."""
        found: tuple[float, Stages, list[int]] | None = None
        for split in self.splits:
            choices = [self.numbers(rank, split, np.inf) for rank in range(self.candidate.pp)]
            if all(choices):
                way = [min(own, key=lambda one: self.peak_bytes[rank, one]) for rank, own in enumerate(choices)]
                peak = max(self.peak_bytes[rank, one] for rank, one in enumerate(way))
                found = (peak, split, way) if found is None or peak < found[0] else found
        return found and self.way(*found[1:], float(self.timed([[one] for one in found[2]]).item()))

    def way(self, split: Stages, way: Sequence[int], seconds: float) -> Way:
        """Say what was chosen for every rank as a candidate."""
        places = [self.plan.schedule.place_of(stage) for stage in range(len(split))]
        recompute = tuple(self.options[way[rank]][1][chunk] for rank, chunk in places)
        candidate = replace(self.candidate, stages=split, recompute=recompute)
        peak = max(float(self.peak_bytes[rank, one]) for rank, one in enumerate(way))
        return Way(candidate=candidate, time_s=seconds, peak_bytes=peak)

    def cost_of(self, candidate: Candidate) -> tuple[float, float]:
        """Price a way as a plan: seconds and bytes."""
        question = self.question
        plan = build_plan(candidate, question.model, question.cluster, question.workload, self.plan.engine)
        cost = plan_cost(plan, question, self.blocks)
        return float(cost.time_s), float(cost.peak_bytes)


class Truth:
    """All legal outer points of a question for one engine, priced one by one."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._cuttings: dict[Candidate, Cutting] = {}
        self._priced: dict[Candidate, tuple[CutBlocks, Setting, Price]] = {}

    @cached_property
    def points(self) -> list[Candidate]:
        """All outer points, legal or not."""
        return points(self.request)

    @cached_property
    def legal(self) -> list[Point]:
        """The points that no Rule refuses."""
        kinds = [(point, allowed_kinds(self.request, point)) for point in self.points]
        return [self._point(point, own) for point, own in kinds if own]

    def fastest(self, capacity: float) -> Way | None:
        """The fastest of everything that fits."""
        found = [way for way in (point.fastest(capacity) for point in self.legal) if way]
        return min(found, key=lambda way: way.time_s, default=None)

    def smallest(self) -> Way | None:
        """What takes least memory."""
        found = [way for way in (point.smallest() for point in self.legal) if way]
        return min(found, key=lambda way: way.peak_bytes, default=None)

    def point_of(self, candidate: Candidate) -> Point:
        """The point that a legal candidate belongs to."""
        alone = replace(candidate, recompute=self.request.pins.get("recompute", (PLAIN,)))
        return self._point(alone, allowed_kinds(self.request, alone))

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
        pipeline = priced(plan, question, blocks)[1]
        known = tuple(dict.fromkeys((PLAIN, *(one for own in kinds for entry in own for one in entry.kinds), FULL)))
        return Point(
            candidate=candidate,
            kinds=kinds,
            is_pinned="recompute" in request.pins,
            question=question,
            plan=plan,
            blocks=blocks,
            columns=priced_blocks(question, setting, pipeline, price, known),
            known_kinds=known,
        )


def bare(candidate: Candidate) -> Candidate:
    """A candidate with nothing said about its stages."""
    return replace(candidate, stages=None, recompute=(PLAIN,))


def _pricing(question: Question, setting: Setting) -> Price:
    @cache
    def price(kind: str, drop: Recompute) -> BlockCost:
        return price_block(question, setting, kind, drop)

    return price


MODELS = ("tiny-llama", "tiny-llama", "tiny-mixtral")
KERNELS = (None, "torch_cuda", "te", "mcore", "torch_engine_gpu")  # None: those of the cluster
PINNED_RECOMPUTE = ((PLAIN,), (FULL,), (Recompute(kind="full", num_layers=1),))


def only_kinds(kinds: tuple[Recompute, ...]) -> Rule:
    """A user's Rule: layers do nothing else than this."""

    @rule("recompute", source="this test")
    def mine(c: Columns) -> Verdict:
        yield all(kind in kinds for stage in parse_stages(str(c.recompute)) for kind in stage.kinds)
        yield f"not {c.recompute}"

    return mine


@st.composite
def requests(draw: Any) -> Request:
    """A small model on up to eight ranks with something pinned; it has few points and few ways for each."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 4, 6, 8, 8]))
    layers = draw(st.integers(2, 5))
    pp = draw(st.sampled_from([size for size in (1, 2, 2, 3, 4, 4, 5) if ranks % size == 0 and size <= layers]))
    pins: dict[str, Any] = {"pp": pp}
    for key, values in {
        "mbs": (1, 1, 2), "tp": (1, 2), "zero": (0, 1, 3), "sp": (False,), "cp": (1, 1, 2), "vp": (1, 2),
        "schedule": tuple(BUILDERS),
    }.items():  # fmt: skip
        if draw(st.sampled_from([True, key != "vp" and key != "sp", False])):
            pins[key] = draw(st.sampled_from(values))
    if pins.get("zero") == 3 and draw(st.booleans()):
        pins["weight_group"] = draw(st.sampled_from((1, 2)))
    if draw(st.booleans()) and pp > 1:
        pins["schedule"] = draw(st.sampled_from([*BUILDERS]))
    machine = load_cluster("local", 1, ranks=ranks)
    chip = replace(machine.chip, memory_bytes=2**34)  # not what this machine has: runtimes of GPUs fit too
    cluster, kernels = replace(machine, chip=chip), draw(st.sampled_from(KERNELS))
    if kernels == "torch_engine_gpu":  # of all programs that one alone uses host memory, if there is any
        memory, link = draw(st.sampled_from([2**18, 2**22, 2**40])), draw(st.sampled_from([1e7, 1e9, 1e12]))
        cluster = with_host_memory(cluster, memory, link)
    if kernels:
        pins["kernels"] = kernels
    kinds: tuple[Recompute, ...] = ()
    if draw(st.integers(0, 4)) == 0:
        pins["recompute"] = draw(st.sampled_from(PINNED_RECOMPUTE))
    else:
        known = kinds_of_recompute(kernels or "torch_cuda", cluster)
        most = 2 if pp > 3 else 4 if pp > 2 else 13
        kinds = tuple(draw(st.lists(st.sampled_from(known), min_size=1, max_size=most, unique=True)))
    batch = draw(st.sampled_from([1, 2, 4, 4, 6, 8, 12]))
    request = ask(
        draw(st.sampled_from(MODELS)), ranks=ranks, global_batch=batch, seq_len=draw(st.sampled_from([8, 64, 256]))
    )
    constants = replace(
        built_in("local"),
        step_s=draw(st.sampled_from([0.0, 0.01])),
        collective_s=draw(st.sampled_from([0.0, 1e-6, 1e-4])),
    )
    model = replace(request.model, num_layers=layers)
    if draw(st.integers(0, 2)) == 0:
        names = [draw(st.sampled_from(["layer", "other"])) for _ in range(layers - 1)]
        other = LayerKind(name="other", dense_ffn=80) if model.num_experts else LayerKind(name="other", window=3)
        order = "/".join(draw(st.permutations(["other", *names])))
        model = replace(model, order=order, kinds=(other,))
    rules = (only_kinds(kinds),) if kinds else ()
    note(f"{model.name}, {layers} layers, {model.order}, {ranks} ranks, batch {batch}, {pins}")
    note(f"kinds {kinds or 'all'}, {constants}")
    return replace(request, model=model, cluster=cluster, pins=pins, extra_rules=rules, calibration=constants)
