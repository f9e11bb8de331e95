"""What would make a question answerable: which pin is in the way, how many nodes or how short a sequence it takes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.errors import Fault, InputError
from autoshard.plan.candidate import Candidate, pins_text
from autoshard.plan.certificate import Refusal
from autoshard.plan.rules.check import all_rules
from autoshard.plan.rules.columns import Engine
from autoshard.plan.rules.nxd_engine import FLASH_TILE
from autoshard.plan.rules.rule import Rule
from autoshard.search.judging import judge_space
from autoshard.search.planner import Found, Request, rejections_of, search
from autoshard.search.space import Pins, default_kernels
from autoshard.spec.cluster import LOCAL, Cluster
from autoshard.spec.workload import MOST
from autoshard.units import format_bytes

_MOST_NODES = 64  # times as many nodes as asked for, at most
_MOST_LOCAL_RANKS = 64
_LEAST_TOKENS = 512
_MOST_REFUSALS = 6  # that are shown
_OPTIONS = {"seq_len": "--seq-len", "engine": "--engine", "precision": "--precision", "documents": "--documents"}


def remedies(request: Request) -> Iterator[str]:
    """Yield changes of one thing at a time after which a plan exists, each as options to type."""
    yield from _fewer_pins(request)
    yield from _other_batch(request)
    yield from _whole_tiles(request)
    yield from _more_ranks(request)
    yield from _shorter(request)
    yield from _other_engine(request)


def fixed_faults(request: Request) -> tuple[Fault, ...]:
    """Return what is wrong with the question itself: what the Rules say against every layout that it leaves."""
    found = [_against_all(request, engine) for engine in request.engines]
    if not all(found):
        return ()
    return tuple(dict.fromkeys(_fault(message, request.pins) for messages in found for message in messages))


def why_none(request: Request, found: Found) -> str:
    """Say why a search found nothing: which Rules left nothing, or by how much the smallest plan misses memory."""
    pins = f" with {pins_text(request.pins)}" if request.pins else ""
    where = f"{request.model.name} on {_place(request.cluster)}{pins}"
    miss, certificate = found.nearest_miss, found.certificate
    if miss is None or miss.prediction is None:
        head = f"no plan: each of the {certificate.num_points} outer points of {where} is refused by a rule"
        return "\n".join([head, *_refusal_lines(certificate.refusals)])
    peak, capacity = miss.prediction.peak_bytes, miss.prediction.capacity_bytes
    parts = max(miss.prediction.stage_memory, key=lambda memory: memory.total).parts
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return (
        f"no plan: none of the {certificate.num_legal} legal outer points for {where} fits in memory\n"
        f"  the smallest is {miss.candidate}: {format_bytes(peak)} a rank "
        f"({', '.join(f'{part} {format_bytes(size)}' for part, size in largest)}), "
        f"{format_bytes(peak - capacity)} more than the {format_bytes(capacity)} there are"
    )


def no_remedy(found: Found) -> str:
    """Say what was in the way, when nothing that was tried helps."""
    lines = ["  neither more nodes nor a shorter sequence helps; the rules refuse what would be smaller:"]
    return "\n".join([*lines, *_refusal_lines(found.certificate.refusals)])


def _refusal_lines(refusals: Sequence[Refusal]) -> list[str]:
    most = sorted(refusals, key=lambda refusal: -refusal.num_points)
    return [f"  {refusal.num_points} by {refusal.rule_id}, like {refusal.example}" for refusal in most[:_MOST_REFUSALS]]


def _place(cluster: Cluster) -> str:
    if cluster.name == LOCAL:
        return f"this machine with {cluster.num_ranks} ranks"
    return f"{cluster.num_nodes} x {cluster.name}"


def _against_all(request: Request, engine: Engine) -> list[str]:
    judged = judge_space(request, engine)
    if not judged.num_points:
        return _against_pins(request, engine)
    asked = {*_OPTIONS, *request.pins}
    about = {rule.id: _keys(rule) for rule in (*all_rules(), *request.extra_rules)}
    return [
        refusal.example
        for refusal in judged.refusals
        if refusal.rule_id in judged.hopeless and asked & about[refusal.rule_id]
    ]


def _against_pins(request: Request, engine: Engine) -> list[str]:
    """Say why sizes leave no layout at all: what the Rules say about the pins, or else about any layout with them."""
    sizes = [int(request.pins.get(key, 1)) for key in ("tp", "pp", "cp")]
    dp = max(1, request.cluster.num_ranks // (sizes[0] * sizes[1] * sizes[2]))
    kernels = default_kernels(request.cluster, engine)
    candidate = replace(Candidate(), **{"dp": dp, "kernels": kernels, **request.pins})
    found = rejections_of(request, candidate, engine)
    fixed = {*_OPTIONS, *request.pins}
    about = {rule.id: _keys(rule) for rule in (*all_rules(), *request.extra_rules)}
    about_pins = [rejection for rejection in found if about[rejection.rule_id] <= fixed]
    return [rejection.message for rejection in about_pins or found]


def _keys(rule: Rule) -> set[str]:
    return set(rule.subject.replace(" ", "").split(","))


def _fault(message: str, pins: Pins) -> Fault:
    """Turn ``tp=3: ...`` into a fault of the option that says so: ``--fix tp=3: ...``."""
    head, colon, rest = message.partition(": ")
    key, _, value = head.partition("=")
    if colon and key in _OPTIONS:
        return Fault(where=f"{_OPTIONS[key]} {value}", message=rest)
    pinned = colon and pins.keys() & {pair.partition("=")[0] for pair in head.split(",")}
    return Fault(where=f"--fix {head}" if pinned else "", message=rest if pinned else message)


def _answered(request: Request, **work: int) -> bool:
    """Say whether a plan exists when some numbers of the workload are others."""
    if any(number > MOST for number in work.values()):
        return False
    return bool(search(replace(request, workload=replace(request.workload, **work))).plans)


def _fewer_pins(request: Request) -> Iterator[str]:
    """Without one of the pins; if that is not enough, without any."""
    pins = dict(request.pins)
    for key in pins if len(pins) > 1 else ():
        fewer = {name: value for name, value in pins.items() if name != key}
        if _answered(replace(request, pins=fewer)):
            yield f"--fix {pins_text(fewer)}, so without {pins_text({key: pins[key]})}"
            return
    if pins and _answered(replace(request, pins={})):
        yield "it without --fix"


def _other_batch(request: Request) -> Iterator[str]:
    """The next global batch that divides by the odd part of the ranks, which tp, cp and pp rarely take up."""
    ranks, batch = request.cluster.num_ranks, request.workload.global_batch
    odd = ranks // (ranks & -ranks)
    more = -(-batch // odd) * odd
    if more != batch and _answered(request, global_batch=more):
        yield f"--global-batch {more}"


def _whole_tiles(request: Request) -> Iterator[str]:
    """The next length that NxD's attention can cut into tiles."""
    seq_len = request.workload.seq_len
    more = -(-seq_len // FLASH_TILE) * FLASH_TILE
    if more != seq_len and "nxd" in request.engines and _answered(request, seq_len=more):
        yield f"--seq-len {more}"


def _more_ranks(request: Request) -> Iterator[str]:
    cluster = request.cluster
    local = cluster.name == LOCAL
    size = cluster.num_ranks if local else cluster.num_nodes
    most = _MOST_LOCAL_RANKS if local else size * _MOST_NODES
    while size < most:
        size = min(most, size * 2)
        try:
            larger = _resized(request, "chips_per_node" if local else "num_nodes", size)
        except InputError:  # no such cluster can be built or searched, so no larger one either
            return
        if _answered(larger):
            yield f"--ranks {size}" if local else f"--nodes {size}"
            return


def _resized(request: Request, number: str, size: int) -> Request:
    """Ask about a larger cluster."""
    others = tuple(replace(cluster, **{number: size}) for cluster in request.other_lnc)
    return replace(request, cluster=replace(request.cluster, **{number: size}), other_lnc=others)


def _shorter(request: Request) -> Iterator[str]:
    seq_len = request.workload.seq_len // 2
    while seq_len >= _LEAST_TOKENS:
        if _answered(request, seq_len=seq_len):
            yield f"--seq-len {seq_len}"
            return
        seq_len //= 2


def _other_engine(request: Request) -> Iterator[str]:
    others: tuple[Engine, ...] = ("nxd", "torch")
    for engine in others:
        if engine not in request.engines and _answered(replace(request, engines=(engine,))):
            yield f"--engine {engine}"
