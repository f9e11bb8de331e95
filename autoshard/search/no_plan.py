"""Why a question has no plan, and what would change that: other pins, a larger cluster, a shorter sequence."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from autoshard.errors import AutoshardError, Fault, InputError, NoPlan
from autoshard.plan.candidate import Candidate, pins_text
from autoshard.plan.explanation import Refusal
from autoshard.plan.plan import Plan
from autoshard.plan.rules.check import all_rules
from autoshard.plan.rules.columns import Engine
from autoshard.plan.rules.nxd_kernels import FLASH_TILE
from autoshard.search.legal_space import legal_space
from autoshard.search.planner import SearchResult, search
from autoshard.search.request import Request, rejections_of
from autoshard.search.space import default_kernels
from autoshard.spec.cluster import LOCAL
from autoshard.units import format_bytes

_MOST_DOUBLINGS = 6  # of the nodes
_MOST_LOCAL_RANKS = 64
_LEAST_TOKENS = 512
_MOST_REFUSALS = 6  # that are printed
_OPTIONS = {"seq_len": "--seq-len", "engine": "--engine", "precision": "--precision", "documents": "--documents"}

Change = tuple[str, Callable[[], Request]]  # options to type, and the question with them


def unanswered(request: Request, found: SearchResult, *, helpful: bool = False) -> AutoshardError:
    """Return the error of a search that found nothing; to be helpful, search for changes after which a plan exists."""
    faults = question_faults(request)
    if faults:
        return InputError(faults)
    lines = [why_none(request, found)]
    if helpful:
        nothing = [
            "  neither more nodes nor a shorter sequence helps; the rules refuse what would be smaller:",
            *_refusal_lines(found.certificate.refusals),
        ]
        lines += [f"  try {remedy}" for remedy in remedies(request)] or nothing
    return NoPlan("\n".join(lines))


def best_plan(ask: Callable[[], Request]) -> Plan | None:
    """Return the best plan of a changed question; None where the change is impossible, or where no plan fits."""
    try:
        return next(iter(search(ask()).plans), None)
    except InputError:
        return None


def remedies(request: Request) -> Iterator[str]:
    """Yield changes of one thing at a time after which a plan exists, the least of each, as options to type."""
    for changes in _changes(request):
        first = next((words for words, ask in changes if best_plan(ask)), None)
        if first:
            yield first


def _changes(request: Request) -> Iterator[Iterable[Change]]:
    """Yield the changes of each thing, the least change first."""
    pins, workload, cluster = request.pins, request.workload, request.cluster

    def with_work(**numbers: int) -> Request:
        return replace(request, workload=replace(workload, **numbers))

    without_one: list[Change] = []
    for key in pins if len(pins) > 1 else ():
        rest = {name: value for name, value in pins.items() if name != key}
        words = f"--fix {pins_text(rest)}, so without {pins_text({key: pins[key]})}"
        without_one.append((words, partial(replace, request, pins=rest)))
    yield [*without_one, *([("it without --fix", partial(replace, request, pins={}))] if pins else [])]
    # tp, cp and pp rarely take up the odd part of the ranks, so that dp has to
    odd = cluster.num_ranks // (cluster.num_ranks & -cluster.num_ranks)
    batch = math.ceil(workload.global_batch / odd) * odd
    if batch != workload.global_batch:
        yield [(f"--global-batch {batch}", partial(with_work, global_batch=batch))]
    tokens = math.ceil(workload.seq_len / FLASH_TILE) * FLASH_TILE
    if tokens != workload.seq_len and "nxd" in request.engines:
        yield [(f"--seq-len {tokens}", partial(with_work, seq_len=tokens))]

    local = cluster.name == LOCAL
    option = "--ranks" if local else "--nodes"
    now = cluster.num_ranks if local else cluster.num_nodes
    most = _MOST_LOCAL_RANKS if local else now << _MOST_DOUBLINGS

    def resized(size: int) -> Request:
        if local:
            return replace(request, cluster=cluster.with_local_ranks(size))
        others = tuple(replace(other, num_nodes=size) for other in request.other_lnc)
        return replace(request, cluster=replace(cluster, num_nodes=size), other_lnc=others)

    larger = sorted({min(most, now << power) for power in range(1, _MOST_DOUBLINGS + 1)} - {now})
    yield [(f"{option} {size}", partial(resized, size)) for size in larger]
    halves = [workload.seq_len >> power for power in range(1, workload.seq_len.bit_length())]
    yield [(f"--seq-len {half}", partial(with_work, seq_len=half)) for half in halves if half >= _LEAST_TOKENS]
    engines: tuple[Engine, ...] = ("nxd", "torch")
    others = [engine for engine in engines if engine not in request.engines]
    yield [(f"--engine {engine}", partial(replace, request, engines=(engine,))) for engine in others]


def question_faults(request: Request, option: str = "--fix") -> tuple[Fault, ...]:
    """Return what is wrong with the question itself: what the Rules say against every layout that it leaves.

    ``option`` is the option with which the pins were given: ``tp=3: ...`` becomes a fault of the option that says so,
    ``--fix tp=3: ...``. Reasons with the same remedy are one fault.
    """
    found = [_against_all(request, engine) for engine in request.engines]
    distinct: dict[tuple[str, str], Fault] = {}
    for message in (message for messages in found if all(found) for message in messages):
        head, colon, rest = message.partition(": ")
        key, _, value = head.partition("=")
        if colon and key in _OPTIONS:
            fault = Fault(where=f"{_OPTIONS[key]} {value}", message=rest)
        elif colon and request.pins.keys() & {pair.partition("=")[0] for pair in head.split(",")}:
            fault = Fault(where=f"{option} {head}", message=rest)
        else:
            fault = Fault(where="", message=message)
        distinct.setdefault((fault.where, fault.message.rpartition(". ")[2]), fault)
    return tuple(distinct.values())


def why_none(request: Request, found: SearchResult) -> str:
    """Say why a search found nothing: which Rules left nothing, or by how much the smallest plan misses memory."""
    pins, cluster = f" with {pins_text(request.pins)}" if request.pins else "", request.cluster
    local = f"this machine with {cluster.num_ranks} ranks"
    where = local if cluster.name == LOCAL else f"{cluster.num_nodes} x {cluster.name}"
    question = f"{request.model.name} on {where}{pins}"
    miss, certificate = found.nearest_miss, found.certificate
    if miss is None or miss.prediction is None:
        head = f"no plan: each of the {certificate.num_points} outer points of {question} is refused by a rule"
        return "\n".join([head, *_refusal_lines(certificate.refusals)])
    peak, capacity = miss.prediction.peak_bytes, miss.prediction.capacity_bytes
    usable, headroom = format_bytes(miss.cluster.rank_memory_bytes), miss.headroom
    left = f"a headroom of {headroom:.3g} leaves of {usable}" if headroom else "there are"
    fullest = max(miss.prediction.stage_memory, key=lambda memory: memory.total)
    largest = sorted(fullest.parts.items(), key=lambda part: -part[1])[:3]
    return (
        f"no plan: none of the {certificate.num_legal} legal outer points for {question} fits in memory\n"
        f"  the smallest is {miss.candidate}: {format_bytes(peak)} a rank "
        f"({', '.join(f'{part} {format_bytes(size)}' for part, size in largest)}), "
        f"{format_bytes(peak - capacity)} more than the {format_bytes(capacity)} that {left}"
    )


def _refusal_lines(refusals: Sequence[Refusal]) -> list[str]:
    most = sorted(refusals, key=lambda refusal: -refusal.num_points)[:_MOST_REFUSALS]
    return [f"  {refusal.num_points} by {refusal.rule_id}, like {refusal.example}" for refusal in most]


def _against_all(request: Request, engine: Engine) -> list[str]:
    """Return the messages of the Rules about the question that refuse every layout of an engine.

    Where the pinned sizes leave no layout at all, return what the Rules say about a candidate with these sizes.
    """
    keys = {rule.id: rule.keys for rule in (*all_rules(), *request.extra_rules)}
    given = {*_OPTIONS, *request.pins}
    ruled = legal_space(request, engine)
    if ruled.num_points:
        hopeless = [refusal for refusal in ruled.refusals if refusal.rule_id in ruled.hopeless]
        return [refusal.example for refusal in hopeless if given & keys[refusal.rule_id]]
    size = math.prod(int(request.pins.get(key, 1)) for key in ("tp", "pp", "cp"))
    usual = {"dp": max(1, request.cluster.num_ranks // size), "kernels": default_kernels(request.cluster, engine)}
    reasons = rejections_of(request, replace(Candidate(), **{**usual, **request.pins}), engine)
    about_pins = [reason for reason in reasons if keys[reason.rule_id] <= given]
    return [reason.message for reason in about_pins or reasons]
