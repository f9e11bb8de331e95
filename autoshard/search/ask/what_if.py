"""A plan's own question asked again with one thing changed: for its runners-up, and why another plan is not chosen."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from string import ascii_lowercase
from typing import Any

from autoshard.cost.calibration import Calibration
from autoshard.errors import InputError, inside, require
from autoshard.plan.candidate import Candidate, even_stages, parse_pins, pins_text
from autoshard.plan.explanation import Alternatives, Flip, WhyNot
from autoshard.plan.found import search_record
from autoshard.plan.plan import Plan
from autoshard.plan.rules.nxd_kernels import FLASH_TILE
from autoshard.search.ask.answers import FASTEST
from autoshard.search.ask.no_plan import best_plan, question_faults, why_none
from autoshard.search.ask.planner import SearchResult, search
from autoshard.search.bound.request import Request
from autoshard.search.bound.space import default_kernels
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster, other_lnc

_OUTER = ("tp", "pp", "cp", "ep", "dp", "mbs", "vp", "zero", "zero_group", "weight_group", "schedule", "cp_kind",
          "cp_order")  # fmt: skip
_MOST_RUNNERS_UP = 3
_DOUBLINGS = 4  # or halvings: up to 16 times as much or as little
_FINE = 100  # units of a circumstance that may take any value


def request_of_plan(plan: Plan, calibration: Calibration) -> Request:
    """Return the question that a plan answers, for its own engine and kernels, with nothing else fixed."""
    usual = default_kernels(plan.cluster, plan.engine)
    return Request(
        model=plan.model,
        cluster=plan.cluster,
        workload=plan.workload,
        headroom=plan.headroom,
        engines=(plan.engine,),
        pins={} if plan.kernels == usual else {"kernels": plan.kernels},
        calibration=calibration,
    )


def outer_pins(candidate: Candidate) -> dict[str, Any]:
    """Return pins of all keys of a candidate but its stages and their recompute."""
    return {**{key: getattr(candidate, key) for key in _OUTER}, "sp": candidate.sequence_parallel}


def _siblings(cluster: Cluster) -> tuple[Cluster, ...]:
    """Return the same nodes under their other logical cores, if a cluster is one of the catalogue."""
    if cluster.lnc is None or cluster.name not in cluster_names():
        return ()
    shipped = load_cluster(cluster.name, cluster.num_nodes, lnc=cluster.lnc)
    prices = {key: getattr(cluster, key) for key in ("price_usd_per_node_hour", "price_date", "sources")}
    return other_lnc(cluster.name, cluster) if replace(shipped, **prices) == cluster else ()


def best_time_s(request: Request, pins: Mapping[str, Any]) -> float:
    """Return the time of the best plan with these pins; infinite where there is none."""
    plan = best_plan(lambda: replace(request, pins={**request.pins, **pins}))
    return plan.prediction.step_time_s if plan and plan.prediction else math.inf


def alternatives(plan: Plan, calibration: Calibration) -> Alternatives:
    """Search a plan's own question again, and its own outer point without a limit of memory."""
    request = request_of_plan(plan, calibration)
    result = search(replace(request, other_lnc=_siblings(plan.cluster)), _MOST_RUNNERS_UP + 1)
    named = zip(_names(plan, result), result.plans, strict=True)
    rivals = [(name, rival) for name, rival in named if rival.candidate != plan.candidate]
    unlimited_s = best_time_s(replace(request, memory_bytes=math.inf), outer_pins(plan.candidate))
    return Alternatives(rivals=dict(rivals[:_MOST_RUNNERS_UP]), unlimited_s=unlimited_s, certificate=result.certificate)


def _names(plan: Plan, result: SearchResult) -> list[str]:
    """Return for each plan of a search the name by which `plan --choose` writes it where the plan was searched.

    It is a letter where that search had other layouts to choose from, as with `--fix`: no name selects that plan there.
    """
    record, certificate = search_record(plan), result.certificate
    names = {answer.candidate: answer.name for answer in reversed(record.answers if record else ())}
    is_same = not record or (record.num_points, record.num_legal) == (certificate.num_points, certificate.num_legal)
    places = [FASTEST, *map(str, range(2, len(result.plans) + 1))]
    letters = iter(ascii_lowercase)
    return [
        names.get(str(rival.candidate)) or (place if is_same and place not in names.values() else next(letters))
        for rival, place in zip(result.plans, places, strict=False)
    ]


def _pins_named(plan: Plan, text: str) -> tuple[Mapping[str, Any], str]:
    """Read keys and values, or the name of an answer that stands in the plan beside it, which means all of its keys.

    Also return how they are shown.
    """
    record = search_record(plan)
    named = {answer.name: answer.candidate for answer in record.answers} if record else {}
    if text and "=" not in text and text not in named:
        beside = f"those are {', '.join(named)}" if named else "it holds none"
        raise InputError.of("", f"{text!r} is no answer beside this plan: {beside}. Write keys, for example tp=8,pp=16")
    if text not in named:
        return (pins := parse_pins(text)), pins_text(pins)
    answer = Candidate.parse(named[text])
    even = even_stages(plan.model.num_layers, answer.num_stages)
    whole = {"recompute": answer.recompute, "stages": answer.stages or even}  # also where they are the usual ones
    return {**outer_pins(answer), **whole, **parse_pins(named[text])}, named[text]


def why_not(plan: Plan, text: str, calibration: Calibration) -> WhyNot:
    """Return the best plan with these keys, or why there is none, and the changes after which it is the faster plan."""
    with inside("--why-not"):
        pins, shown = _pins_named(plan, text)
        require((bool(pins), "", "names nothing; write key=value, for example tp=8,pp=16"))
    request = request_of_plan(plan, calibration)
    pinned = replace(request, pins={**request.pins, **pins}, other_lnc=_siblings(plan.cluster))
    pinned = pinned.with_lnc_of(pins["lnc"]) if "lnc" in pins else pinned
    result = search(pinned)
    rival = next(iter(result.plans), result.nearest_miss)
    against: list[str] = []
    if not result.plans:
        faults = question_faults(pinned, "--why-not") if rival is None else ()
        against = [str(fault) for fault in faults] or [why_none(pinned, result)]
    flips: dict[str, Flip | None] = {}
    times = [timed_plan.prediction.step_time_s for timed_plan in (*result.plans[:1], plan) if timed_plan.prediction]
    already = bool(result.plans) and times[0] < times[1]
    if rival is not None and rival.candidate != plan.candidate and rival.cluster == plan.cluster and not already:
        stages = {key: pins[key] for key in ("stages", "recompute") if key in pins}
        plan_pins, rival_pins = outer_pins(plan.candidate), {**outer_pins(rival.candidate), **stages}
        for circumstance in circumstances(request, plan.candidate, rival.candidate):
            flips[circumstance.name] = _flip(circumstance, plan_pins, rival_pins)
    return WhyNot(
        pins=shown,
        rival=rival,
        fits=bool(result.plans),
        against=tuple(against),
        flips=tuple(flip for flip in flips.values() if flip),
        unmoved=tuple(name for name, flip in flips.items() if flip is None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstance:
    """One number of a question, counted in units: its value, and the question for another value."""

    name: str
    unit: float  # of what is printed
    now: int  # units
    changed: Callable[[int], Request]


def circumstances(request: Request, plan_candidate: Candidate, other_candidate: Candidate) -> Iterator[Circumstance]:
    """Yield the batch, sequence, memory and bandwidth of a question, in units that both candidates can take."""
    workload, cluster = request.workload, request.cluster

    def with_work(key: str, unit: int, count: int) -> Request:
        return replace(request, workload=replace(workload, **{key: count * unit}))

    batch = math.lcm(*(candidate.dp * candidate.mbs * candidate.pp for candidate in (plan_candidate, other_candidate)))
    if workload.global_batch % batch:
        batch = math.lcm(*(candidate.dp * candidate.mbs for candidate in (plan_candidate, other_candidate)))
    tokens = math.lcm(*(2 * candidate.cp * candidate.tp for candidate in (plan_candidate, other_candidate)))
    tokens = math.lcm(tokens, FLASH_TILE) if "nxd" in request.engines else tokens
    for name, key, unit in (("global batch", "global_batch", batch), ("sequence length", "seq_len", tokens)):
        now, rest = divmod(getattr(workload, key), unit)
        if not rest:
            yield Circumstance(name=name, unit=unit, now=now, changed=partial(with_work, key, unit))
    capacity = request.capacity_bytes(request.question(plan_candidate).kernels)
    yield Circumstance(
        name="memory of a rank",
        unit=capacity / _FINE,
        now=_FINE,
        changed=lambda count: replace(request, memory_bytes=capacity * count / _FINE),
    )

    def with_bandwidth(count: int) -> Request:
        speeds = [link.bandwidth_bytes_per_s * count / _FINE for link in cluster.links]
        pairs = zip(cluster.links, speeds, strict=True)
        links = tuple(replace(link, bandwidth_bytes_per_s=speed) for link, speed in pairs)
        return replace(request, cluster=replace(cluster, links=links))

    yield Circumstance(name="bandwidth of all links", unit=1 / _FINE, now=_FINE, changed=with_bandwidth)


def _flip(circumstance: Circumstance, plan_pins: Mapping[str, Any], other_pins: Mapping[str, Any]) -> Flip | None:
    """Return the smallest change of a circumstance after which the other outer point is faster, or alone fits."""

    def turns(count: int) -> bool:
        try:
            request = circumstance.changed(count)
        except InputError:  # no such workload
            return False
        return best_time_s(request, other_pins) < best_time_s(request, plan_pins)

    flips: list[Flip] = []
    powers = range(1, _DOUBLINGS + 1)
    for counts in (
        [circumstance.now << power for power in powers],
        [circumstance.now >> power for power in powers if circumstance.now >> power],
    ):
        before = circumstance.now
        for after in counts:
            if turns(after):
                while abs(after - before) > 1:
                    middle = (before + after) // 2
                    before, after = (before, middle) if turns(middle) else (middle, after)
                flips.append(
                    Flip(
                        name=circumstance.name, now=circumstance.now * circumstance.unit, then=after * circumstance.unit
                    )
                )
                break
            before = after
    return min(flips, key=lambda flip: abs(math.log(flip.factor)), default=None)
