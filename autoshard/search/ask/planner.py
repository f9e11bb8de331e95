"""From a request to the best plan, with the points that were searched, and the refused ones with their reasons.

A frontier repeats the search with less memory and other sizes of the cluster; ``at_most`` with fewer nodes, because
some numbers divide badly: seven nodes may leave pipelines of 7 and 28 stages only, where six leave many layouts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

import numpy as np

from autoshard.errors import InputError
from autoshard.plan.explanation import Answer, Certificate
from autoshard.plan.found import SolvedLayout
from autoshard.plan.plan import Plan, rounded
from autoshard.plan.rules.columns import Engine
from autoshard.search.ask.choice.choosing import (
    Choice,
    choose,
    choose_known,
    fastest_of,
    fastest_with_fsdp,
    of_another_kind,
)
from autoshard.search.ask.choice.doubt import DOUBT, Within
from autoshard.search.ask.choice.hinge import experts_hinge
from autoshard.search.ask.choice.hunt import hunted
from autoshard.search.ask.choice.searched import EngineResult, order_of
from autoshard.search.ask.plain import Plain, plain_plan
from autoshard.search.ask.vendor.answer import vendor_answer
from autoshard.search.bound.legal_space import LegalSpace, legal_space
from autoshard.search.bound.points import Solution
from autoshard.search.bound.pool import Pool
from autoshard.search.bound.priced_layouts import LayoutPricer
from autoshard.search.bound.request import Request
from autoshard.search.bound.watch import Look, SearchStopped, Watch, never_stop
from autoshard.search.fill.split_bounds import SplitSearch
from autoshard.spec.cluster import LOCAL, Cluster

_MOST = 16  # plans of one cluster on a frontier
_REFILL_S = 0.1  # that it may take to look for splits with less headroom
_AT_ONCE = "a plain plan, by rules of thumb: the search was stopped before it had priced any"
_NOT_SIMPLE = "no simpler one was looked for"
Known = dict[tuple[Cluster, Engine], tuple[LegalSpace, LayoutPricer]]
_TIE = 1e-9  # relative: times that differ by less count as equal
# How many more tokens a second a node may do than on any number of nodes that is known. Chosen: fewer nodes save
# communication and bubbles, which together take less of a step than this in all plans of docs/developers/accuracy.md.
_MORE = 1.15
_MOST_SIZES = 8  # that are searched; each takes about a second
_HOPELESS = "nothing faster is possible"  # ends the search of a number of nodes
_STEP = 0.1  # of memory: of plans that differ by less only the faster is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The answer: plans that fit, fastest first; if there is none, a legal plan that needs little more memory."""

    plans: tuple[Plan, ...]
    nearest_miss: Plan | None
    certificate: Certificate
    simple: Plan | None = None  # the simplest plan that is nearly as fast, if there is one
    simple_why: str = "the simplest"
    simple_within: float = 0.0  # by which share of the fastest it may be slower
    simple_ended: str = _NOT_SIMPLE  # why the search for it stopped; "" if it did not
    fsdp: tuple[Plan, str] | None = None  # on GPUs a plan with FSDP, and why
    other: tuple[Plan, str] | None = None  # a plan of another kind than all of these, and of which
    vendor: Answer | str | None = None  # the layout that a vendor documents, or why there is none, if it was looked at
    hinge: str = ""  # on which number that is assumed the choice depends
    layouts: tuple[SolvedLayout, ...] = ()  # the best plan of every layout that was solved

    @property
    def preferred(self) -> Plan:
        """The plan that is run where nobody says which: the simple one, or the fastest if there is none."""
        return self.simple or self.plans[0]


def search(
    request: Request,
    num_plans: int = 1,
    watch: Watch = never_stop,
    *,
    nearest: bool = True,
    simple_within: Within | None = None,
    known: Known | None = None,
) -> SearchResult:
    """Price every legal candidate of every engine and return the fastest that fit, and a simple one if that is wanted.

    The simple one takes at most this share more than the fastest, or as much as the doubt about it allows (DOUBT). An
    engine that cannot run what is pinned leaves the answer to the others. ``nearest`` asks for the nearest miss;
    ``known`` keeps prices, which do not depend on memory.
    """
    plain = plain_plan(request) if request.effort.at_once else Plain()
    early = request.effort.at_once and num_plans > 1  # with one plan, other answers are not shown
    vendor = vendor_answer(request, watch) if early else None
    results = _search_engines(request, num_plans, watch, {} if known is None else known, nearest=nearest)
    results = _hunted(results) if simple_within == DOUBT or request.effort.hunts else results
    choice, simple_ended = _chosen(results, simple_within)
    ranked = sorted(((result, solution) for result in results for solution in result.solutions), key=order_of)
    ranked[:num_plans] = sorted(
        ((result, result.evened(solution)) for result, solution in ranked[:num_plans]), key=order_of
    )
    plans = tuple(result.plan(solution) for result, solution in ranked[:num_plans])
    if plain.plan and not plans and not choice.plan:
        plans, choice = (plain.plan,), replace(choice, plan=plain.plan, why=_AT_ONCE)
    fsdp, other, hinge = None, None, ""
    if simple_within == DOUBT and not simple_ended and plans:
        with suppress(SearchStopped):
            fsdp = fastest_with_fsdp(results) if _on_gpus(request.cluster) else None
            shown = [plan.candidate for plan in (*plans, choice.plan) if plan]
            other = of_another_kind(results, shown, fsdp and fsdp[0].candidate)
            hinge = experts_hinge(results)
    misses = [result.plan(result.nearest_miss) for result in results if result.nearest_miss]
    certificate = reduce(Certificate.plus, (result.certificate for result in results), Certificate())
    if nearest and not ranked and not (plain.miss or certificate.stopped):
        plain = plain_plan(request)
    misses += [plain.miss] if plain.miss else []
    if ranked and not certificate.stopped:
        certificate = replace(certificate, by_headroom=_with_less_headroom(*ranked[0]))
    return SearchResult(
        plans=plans,
        nearest_miss=None if ranked else min(misses, key=lambda plan: coordinates(plan)[1], default=None),
        certificate=certificate.about(plans[0]) if plans else certificate,
        simple=choice.plan,
        simple_why=choice.why,
        simple_within=choice.within,
        simple_ended=simple_ended,
        fsdp=fsdp,
        other=other,
        vendor=vendor,
        hinge=hinge,
        layouts=tuple(_solved(solution) for _, solution in ranked),
    )


def _search_engines(
    request: Request, num_plans: int, watch: Watch, known: Known, *, nearest: bool
) -> list[EngineResult]:
    """Search the space of every engine that can keep the pins."""
    results, faults = list[EngineResult](), list[InputError]()
    for cluster, engine in product((request.cluster, *request.other_lnc), request.engines):
        # After a stop, engines only bound how good their plans can be.
        stopped = results[-1].certificate.stopped if results else ""
        own_watch: Watch = (lambda _, why=stopped: why) if stopped else watch
        rival_values = [solution.value for result in results for solution in result.solutions]
        question = replace(request, cluster=cluster, other_lnc=())
        try:
            results.append(
                _search_engine(question, engine, (num_plans, rival_values), own_watch, known, nearest=nearest)
            )
        except InputError as fault:
            faults.append(fault)
    if not results:
        raise faults[0]
    return results


def _hunted(results: list[EngineResult]) -> list[EngineResult]:
    """Look around the fastest solution for a better one, and note in the certificate of its engine what came of it."""
    best = fastest_of(results)
    if not best or any(result.legal.stopped for result in results):
        return results
    with suppress(SearchStopped):
        hunt = hunted(*best)
        certificate = replace(best[0].legal, num_changes=hunt.num_changes, gained=hunt.gained)
        return [replace(result, legal=certificate) if result is best[0] else result for result in results]
    return results


def _chosen(results: Sequence[EngineResult], within: Within | None) -> tuple[Choice, str]:
    """Return the simple plan, and why the search for it stopped; a stopped search chooses among its solutions."""
    if within is None:
        return Choice(), _NOT_SIMPLE
    ended = next((result.legal.stopped for result in results if result.legal.stopped), "")
    if not ended:
        try:
            return choose(results, within), ""
        except SearchStopped as stop:
            ended = str(stop)
    return (choose_known(results, ended) if within == DOUBT else Choice()), ended


def _on_gpus(cluster: Cluster) -> bool:
    return not cluster.platform and cluster.name != LOCAL and cluster.num_ranks > 1


def _solved(solution: Solution) -> SolvedLayout:
    filling = solution.filling
    step_s, peak_bytes = rounded(float(filling.time_s[0])), round(float(filling.peak_bytes[0]))
    return SolvedLayout(candidate=str(solution.candidate), step_time_s=step_s, peak_bytes=peak_bytes)


def _with_less_headroom(result: EngineResult, solution: Solution) -> dict[float, float]:
    """Return the time of a solution's outer point with half of the headroom and with none."""
    request, pool, by_headroom = result.request, result.pool, dict[float, float]()
    if request.memory_bytes is not None or request.objective == "memory" or pool is None:
        return by_headroom
    for headroom in (request.headroom / 2, 0.0) if request.headroom else ():
        goal = replace(request, headroom=headroom).goal(pool.pricer.question.kernels)
        splits = SplitSearch(flows=pool.splits.flows, seconds_left=_REFILL_S)
        point = replace(solution.point, bound=0.0 * solution.point.bound)  # which was that of less memory
        filled_s = float(point.solved(goal, solution.value, splits).time_s[0])
        by_headroom[headroom] = min(filled_s, *by_headroom.values(), solution.value)
    return by_headroom


def _search_engine(
    request: Request, engine: Engine, ranking: tuple[int, Sequence[float]], watch: Watch, known: Known, *, nearest: bool
) -> EngineResult:
    """Find the best layouts of one engine; ``ranking`` has their number, and the values of other engines' layouts."""
    certificate, pool, miss = Certificate(objective=request.objective), None, None
    try:
        if (request.cluster, engine) not in known:
            legal = _keeping_pins(request, legal_space(request, engine, watch))
            known[request.cluster, engine] = legal, LayoutPricer(request.question(legal.space.base), legal.space)
        legal, pricer = known[request.cluster, engine]
        certificate = replace(
            certificate,
            num_points=legal.num_points,
            refusals=legal.refusals,
            num_legal=legal.num_legal,
            num_near_even=legal.num_near_even(request.model),
        )
        if legal.variants:
            num_plans, rival_values = ranking
            pool = Pool(pricer, legal, request.goal(pricer.question.kernels), request.layouts, watch, rival_values)
            pool.settle(num_plans)
            with suppress(SearchStopped):  # that nothing fits is known
                miss = pool.smallest() if nearest and not (pool.solutions or rival_values) else None
    except SearchStopped as stop:
        certificate = replace(certificate, bound=0.0, ended=str(stop))
    return EngineResult(request=request, engine=engine, legal=certificate, pool=pool, nearest_miss=miss)


def _keeping_pins(request: Request, legal: LegalSpace) -> LegalSpace:
    """Leave out layouts that cannot keep pinned tensors; if no legal layout can, say why the first cannot."""
    if not request.layouts or not legal.variants:
        return legal
    layouts = np.unique(np.concatenate([variant.layouts for variant in legal.variants])).tolist()
    reasons = {row: request.pin_faults(legal.space.candidate(row, 0)) for row in layouts}
    if all(reasons.values()):
        raise InputError(next(iter(reasons.values())))
    return legal.with_layouts(np.array([not reasons.get(row, True) for row in range(legal.space.num_layouts)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Plans that no other plan betters, fastest first, each with its gap to the fastest plan of its memory."""

    plans: tuple[Plan, ...]
    gap: float
    ended: str


def frontier(requests: Sequence[Request], watch: Watch = never_stop) -> Frontier:
    """Return the frontier over several sizes of a cluster.

    For each size, search for the fastest plan, then for the fastest with a tenth less memory, until nothing fits.
    """
    plans: list[Plan] = []
    gap, stopped = 0.0, ""
    for request in requests:
        limit, prices = request.memory_bytes, Known()
        for _ in range(0 if stopped else _MOST):
            effort = replace(request.effort, at_once=request.effort.at_once and not plans, hunts=True)
            limited = replace(request, objective="time", memory_bytes=limit, effort=effort)
            answer = search(limited, 1, watch, nearest=False, known=prices)
            plans += answer.plans
            stopped = answer.certificate.stopped
            gap = max(gap, answer.certificate.gap) if answer.plans else gap
            if stopped or not answer.plans:
                break
            limit = coordinates(plans[-1])[1] * (1 - _STEP)
    return Frontier(plans=undominated(plans), gap=gap, ended=stopped or "complete")


def undominated(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return the plans that no other plan equals or betters in everything, fastest first."""
    best: list[Plan] = []
    for plan in sorted(plans, key=coordinates):
        costs = coordinates(plan)
        if not any(
            all(best_cost <= cost for best_cost, cost in zip(coordinates(best_plan), costs, strict=True))
            for best_plan in best
        ):
            best.append(plan)
    return tuple(best)


def coordinates(plan: Plan) -> tuple[float, float, float]:
    """Return step time, peak memory, and dollars of a plan; node seconds where no price is known."""
    assert plan.prediction, "a found plan has its prediction"
    dollars, step_s = plan.dollars, plan.prediction.step_time_s
    return step_s, plan.prediction.peak_bytes, dollars.usd_per_step if dollars else plan.cluster.num_nodes * step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A number of nodes that was asked about: how long a step takes there, or how long it takes at least."""

    num_nodes: int
    step_s: float  # infinite where there is no plan
    is_bound: bool = False

    def per_node(self, num_nodes: int) -> float:
        """Return how long a step would take on other nodes, each as fast as one of these."""
        return self.step_s * self.num_nodes / num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class AtMost:
    """The answer: the question that was answered, its plans, and every number of nodes that was tried."""

    request: Request
    found: SearchResult
    sizes: tuple[Size, ...]

    @property
    def num_spare(self) -> int:
        """How many nodes the plan leaves alone."""
        return self.sizes[0].num_nodes - self.request.cluster.num_nodes


def at_most(request: Request, before: Size, watch: Watch, ask: Callable[[Request, Known], SearchResult]) -> AtMost:
    """Answer a question on its nodes or fewer, whichever takes least time.

    ``before`` says what is known of a node's speed, e.g. by the plan of a run that has lost nodes. ``ask`` searches for
    the answer as it is shown. Numbers are left out where each node would have to do much more than any is known to do.
    """
    prices = Known()
    sizes, best, answer = list[Size](), request, ask(request, prices)
    sizes.append(Size(num_nodes=request.cluster.num_nodes, step_s=_fastest_s(answer)))
    if request.objective != "time" or answer.certificate.stopped or _lacks_memory(answer):
        return AtMost(request=request, found=answer, sizes=tuple(sizes))
    for num_nodes in _promising(before, sizes):
        least_s = min(size.step_s for size in sizes if not size.is_bound)
        effort = replace(request.effort, at_once=False)  # there is a plan for more nodes
        smaller = replace(request, cluster=replace(request.cluster, num_nodes=num_nodes), effort=effort)
        try:
            result = search(smaller, 1, _until_hopeless(watch, least_s), nearest=False, known=prices)
        except InputError:  # what is pinned does not divide these nodes
            continue
        fastest_s, bound_s = _fastest_s(result), result.certificate.bound
        hopeless = fastest_s >= least_s * (1 - _TIE)
        sizes.append(Size(num_nodes=num_nodes, step_s=bound_s if hopeless else fastest_s, is_bound=hopeless))
        if result.certificate.stopped not in ("", _HOPELESS):
            break
        if not hopeless:
            best = smaller
    if best is not request:
        answer = ask(best, prices)
    return AtMost(request=best, found=answer, sizes=tuple(sizes))


def _until_hopeless(watch: Watch, least_s: float) -> Watch:
    """Stop a search as soon as its bound shows that it cannot find a faster plan."""

    def look_at(look: Look) -> str:
        return watch(look) or (_HOPELESS if look().bound >= least_s else "")

    return look_at


def _promising(before: Size, sizes: list[Size]) -> Iterator[int]:
    """Yield ever smaller numbers of nodes, as long as a number may be the best; ``sizes`` grows meanwhile.

    A power of two comes first where no size is one: nothing divides better, so it tells what a node can do.
    """
    num_left, first = sizes[0].num_nodes, 0
    if before.num_nodes.bit_count() != 1 != num_left.bit_count():
        first = 1 << (num_left.bit_length() - 1)
        yield first
    for num_nodes in range(num_left - 1, 0, -1):
        if num_nodes == first:
            continue
        searched = [size for size in (before, *sizes) if not size.is_bound]
        best_s = min(size.step_s for size in sizes if not size.is_bound)
        if len(sizes) > _MOST_SIZES or min(size.per_node(num_nodes) for size in searched) / _MORE >= best_s:
            return
        yield num_nodes


def _fastest_s(result: SearchResult) -> float:
    best = result.plans[0].prediction if result.plans else None
    return best.step_time_s if best else math.inf


def _lacks_memory(result: SearchResult) -> bool:
    """Say whether layouts are legal and none fits: fewer nodes have less memory."""
    return not result.plans and result.certificate.num_legal > 0
