"""Short runs on few nodes that stand for large plans: the same layout, with fewer replicas, stages and layers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.search.bound.request import Request, rejections_of

_MICRO_BATCHES = 8  # for each pipeline rank, at most: enough that the pipeline is mostly full, and a step is short
_SHARES = (1, 2, 4)  # a stage keeps its layers, or a half or a quarter of them, where they do not fit


def proposed_runs(request: Request, plans: Sequence[Plan], most_nodes: int) -> list[Plan]:
    """Shrink plans to 1, 2, 4, ... up to ``most_nodes`` nodes; return those that fit and are legal, once each."""
    proposals: dict[object, Plan] = {}
    sizes = sorted({2**power for power in range(most_nodes.bit_length())} | {most_nodes})
    for plan in plans:
        for num_nodes in (size for size in sizes if size <= plan.cluster.num_nodes):
            proposal = next(_fitting(request, plan, num_nodes), None)
            if proposal:
                proposals.setdefault(
                    (proposal.model, proposal.cluster, proposal.workload, proposal.candidate), proposal
                )
    return list(proposals.values())


def _fitting(request: Request, plan: Plan, num_nodes: int) -> Iterator[Plan]:
    """Yield what may run and fits of a plan on some nodes, that with the most layers first."""
    cluster = replace(plan.cluster, num_nodes=num_nodes)
    for share in _SHARES:
        layout = smaller(plan, cluster.num_ranks, share)
        if layout is None:
            return
        candidate, num_layers = layout
        model, large = plan.model, plan.candidate
        if num_layers != model.num_layers:
            model = replace(model.with_layers(num_layers), name=f"{model.name}-{num_layers}-layers")
        count = min(plan.workload.global_batch // (large.dp * large.mbs), _MICRO_BATCHES * candidate.pp)
        workload = replace(plan.workload, global_batch=candidate.dp * candidate.mbs * count)
        smaller_request = replace(request, model=model, cluster=cluster, workload=workload, pins={}, other_lnc=())
        try:
            if rejections_of(smaller_request, candidate, plan.engine):
                continue
            smaller_plan = smaller_request.plan(candidate, plan.engine)
        except InputError:  # it has no shape: layers or heads that do not divide
            continue
        assert smaller_plan.prediction, "a plan of a request is predicted"
        if smaller_plan.prediction.peak_bytes <= smaller_request.capacity_bytes(smaller_plan.kernels):
            yield smaller_plan


def smaller(plan: Plan, num_ranks: int, share: int = 1) -> tuple[Candidate, int] | None:
    """Return the layout of a plan on fewer ranks, and its layers; None where its tp, cp and ep do not fit there.

    Replicas go first, then pipeline ranks with the layers of their stages; of the kinds of recompute, those of stages
    at equal distances stay.
    """
    large = plan.candidate
    inner, replicas = large.tp * large.cp, dict[int, int]()
    for pp in (size for size in range(1, large.pp + 1) if large.pp % size == 0):
        dp = num_ranks // (inner * pp)
        if inner * pp * dp == num_ranks and 1 <= dp <= large.dp and dp % large.ep == 0:
            replicas[pp] = dp
    if not replicas:
        return None
    pp = max(replicas)
    if pp == large.pp and share == 1:
        return replace(large, dp=replicas[pp]), plan.model.num_layers
    vp = large.vp if pp > 1 else 1
    per_stage = max(1, plan.model.num_layers // (large.pp * vp * share))
    recomputes = [large.recompute_of(stage * large.num_stages // (pp * vp)) for stage in range(pp * vp)]
    layout = replace(
        large,
        pp=pp,
        dp=replicas[pp],
        vp=vp,
        schedule=large.schedule if pp > 1 else "1f1b",
        recompute=tuple(_of_layers(kind, per_stage) for kind in recomputes),
        stages=None,
        place=large.place if pp == large.pp else None,
    )
    return layout, pp * vp * per_stage


def _of_layers(kind: Recompute, num_layers: int) -> Recompute:
    """Return the recompute of a stage with so many layers."""
    return replace(kind, num_layers=None) if kind.num_layers and kind.num_layers >= num_layers else kind
