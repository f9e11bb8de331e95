"""Every candidate of a question, one by one, with none of the search's own enumeration or columns."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoshard.layout.cutting import Cutting
from autoshard.plan.candidate import Candidate, parse_pins
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.check import rejections
from autoshard.search.api import default_workload
from autoshard.search.planner import Request
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model_catalogue import load_model


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


def kinds_of_recompute(kernels: str) -> set[tuple[Recompute, ...]]:
    """None, full, and every set of the framework's names that have operations, where these do not overlap."""
    sets = {name: ops for name, ops in load_kernels(kernels).selective.items() if ops}
    kinds = {(Recompute(),), (Recompute(kind="full"),)}
    for chosen in itertools.product((False, True), repeat=len(sets)):
        names = tuple(itertools.compress(sets, chosen))
        ops = [op for name in names for op in sets[name]]
        if names and len(ops) == len(set(ops)):
            kinds.add((Recompute(kind="selective", ops=names),))
    return kinds


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


def candidates(request: Request) -> Iterator[Candidate]:
    """Every layout with every kind of recompute."""
    kernels = request.cluster.kernels
    kinds = [request.pins["recompute"]] if "recompute" in request.pins else sorted(kinds_of_recompute(kernels), key=str)
    for layout in layouts(request):
        yield from (replace(layout, recompute=kind) for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What judging and pricing one by one finds."""

    num_layouts: int
    refused: Counter[str]
    plans: list[Plan]

    @property
    def fitting(self) -> list[Plan]:
        return [plan for plan in self.plans if peak(plan) <= plan.cluster.rank_memory_bytes]


def peak(plan: Plan) -> int:
    assert plan.prediction
    return plan.prediction.peak_bytes


def time_s(plan: Plan) -> float:
    assert plan.prediction
    return plan.prediction.step_time_s


def answer(request: Request) -> Answer:
    """Judge and price everything."""
    (engine,) = request.engines
    facts = (request.model, request.cluster, request.workload, engine)
    refused, plans, by_layout = Counter[str](), list[Plan](), dict[Candidate, set[str]]()
    cuttings: dict[Candidate, Cutting] = {}
    for candidate in candidates(request):
        reasons = rejections(candidate, *facts, extra_rules=request.extra_rules)
        by_layout.setdefault(replace(candidate, recompute=(Recompute(),)), set()).update(r.rule_id for r in reasons)
        if not reasons:
            layout = replace(candidate, recompute=(Recompute(),))
            cuttings[layout] = cuttings.get(layout) or request.cutting(layout, engine)
            plans.append(request.plan(candidate, engine, cuttings[layout]))
    for rule_ids in by_layout.values():
        refused.update(rule_ids)
    return Answer(num_layouts=len(by_layout), refused=refused, plans=plans)
