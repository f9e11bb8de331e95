"""What would make a question answerable: which pin is in the way, how many nodes or how short a sequence it takes."""

from collections.abc import Iterator
from dataclasses import replace

from autoshard.plan.candidate import Candidate
from autoshard.plan.rules.check import all_rules, rejections
from autoshard.plan.rules.rule import Rejection
from autoshard.search.planner import Found, Request, search
from autoshard.units import format_bytes

_MOST_NODES = 64  # times as many nodes as asked for, at most
_LEAST_TOKENS = 512
_QUESTION = ("seq_len", "engine", "precision")  # what Rules judge that is not a key of a candidate


def remedies(request: Request) -> Iterator[str]:
    """Yield changes of one thing at a time after which a plan exists, each as something to type."""
    if request.pins and search(replace(request, pins={})).plans:
        yield "leave out --fix: without it there are plans that fit"
    nodes = _enough_nodes(request)
    if nodes:
        yield f"--nodes {nodes}"
    seq_len = _short_enough(request)
    if seq_len:
        yield f"--seq-len {seq_len}"


def fixed_rejections(request: Request) -> tuple[Rejection, ...]:
    """Return what the Rules say about the pins and the question itself, whatever the other keys would be."""
    sizes = [int(request.pins.get(key, 1)) for key in ("tp", "pp", "cp")]
    dp = max(1, request.cluster.num_ranks // (sizes[0] * sizes[1] * sizes[2]))
    candidate = replace(Candidate(), **{"dp": dp, **request.pins})
    rules = (*all_rules(), *request.extra_rules)
    found = rejections(
        candidate, request.model, request.cluster, request.workload, request.engines[0],
        extra_rules=request.extra_rules,
    )  # fmt: skip
    fixed = {*_QUESTION, *request.pins}
    named = {rule.id for rule in rules if set(rule.subject.replace(" ", "").split(",")) <= fixed}
    return tuple(rejection for rejection in found if rejection.rule_id in named)


def why_none(request: Request, found: Found) -> str:
    """Say why a search found nothing: which Rules left nothing, or by how much the smallest plan misses memory."""
    where = f"{request.model.name} on {request.cluster.num_nodes} x {request.cluster.name}"
    miss, certificate = found.nearest_miss, found.certificate
    if miss is None or miss.prediction is None:
        refused = "; ".join(refusal.example for refusal in certificate.refusals[:5]) or "the pins leave no layout"
        return f"no plan: none of {certificate.num_layouts} layouts of {where} is legal: {refused}"
    peak, capacity = miss.prediction.peak_bytes, miss.prediction.capacity_bytes
    parts = max(miss.prediction.stage_memory, key=lambda memory: memory.total).parts
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return (
        f"no plan: none of {certificate.num_candidates} legal candidates for {where} fits. The smallest, "
        f"{miss.candidate}, needs {format_bytes(peak)} a rank "
        f"({', '.join(f'{part} {format_bytes(size)}' for part, size in largest)}), "
        f"{format_bytes(peak - capacity)} more than the {format_bytes(capacity)} there are"
    )


def _enough_nodes(request: Request) -> int | None:
    if request.cluster.name == "local":
        return None
    factor = 2
    while factor <= _MOST_NODES:
        nodes = request.cluster.num_nodes * factor
        if search(replace(request, cluster=replace(request.cluster, num_nodes=nodes))).plans:
            return nodes
        factor *= 2
    return None


def _short_enough(request: Request) -> int | None:
    seq_len = request.workload.seq_len // 2
    while seq_len >= _LEAST_TOKENS:
        if search(replace(request, workload=replace(request.workload, seq_len=seq_len))).plans:
            return seq_len
        seq_len //= 2
    return None
