"""The layout that a vendor documents for a model on a cluster, as an answer beside those of the search."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from autoshard.errors import InputError
from autoshard.layout.layout import Cutting
from autoshard.plan.candidate import Candidate, parse_pins, pins_text
from autoshard.plan.explanation import Answer, NearestRun
from autoshard.plan.plan import Plan
from autoshard.plan.rules.columns import Engine
from autoshard.search.ask.vendor.documented import VendorLayout, vendor_layouts
from autoshard.search.bound.request import Request, rejections_of, resolved
from autoshard.search.bound.watch import SearchProgress, Watch, never_stop
from autoshard.spec.kernels import load_kernels
from autoshard.spec.workload import Precision
from autoshard.units import format_bytes

_LONGER = 2.0  # than documented, or shorter: at another length than that a layout is no answer


def vendor_answer(request: Request, watch: Watch = never_stop) -> Answer | str:
    """Return the documented layout nearest to a question, as an answer; or say why there is none.

    Of layouts for this length and number of nodes, or for others that are as near, the first that may run comes first.
    How much slower than another plan it is, is not said yet. Where ``watch`` stops this, that is why there is none.
    """
    suited = [documented for documented in vendor_layouts() if documented.suits(request.model, request.cluster)]
    suited.sort(key=lambda documented: documented.distance(request))
    refused: list[tuple[Answer, tuple[float, ...]]] = []
    reasons: list[str] = []
    for layout in suited:
        near = layout.distance(request)[:2]
        if refused and near != refused[0][1]:
            break
        if why := watch(SearchProgress):
            return refused[0][0] if refused else f"none was looked at: {why}"
        answer = _answer(request, layout, [run for run in suited if run.measured_s])
        if isinstance(answer, str):
            reasons.append(answer)
        elif answer.against:
            refused.append((answer, near))
        else:
            return answer
    nothing = f"no layout of {request.model.name} on {request.cluster.chip.name} is documented that autoshard knows"
    return refused[0][0] if refused else next(iter(reasons), nothing)


def _answer(request: Request, layout: VendorLayout, measured: Sequence[VendorLayout]) -> Answer | str:
    """Return a layout as an answer to a question, whatever is against it; or say why it is none."""
    words = f"{layout.vendor} documents {layout.layout} for {layout.words(request.cluster.name)}"
    longer = request.workload.seq_len / layout.seq_len
    if not 1 / _LONGER <= longer <= _LONGER:
        far = f"more than {_LONGER:g} times as many" if longer > 1 else f"less than 1/{_LONGER:g} of these"
        tokens = f"{layout.seq_len} tokens a sequence; {request.workload.seq_len} are {far}"
        return f"{layout.vendor} documents one for {layout.place(request.cluster.name)} with {tokens}"
    try:
        plan, cutting, against = _made(request, layout)
    except InputError as error:  # no shape on so many ranks, or a tensor is pinned
        return f"{words}: {error}"
    values = {**{key: getattr(plan.candidate, key) for key in request.pins}, "kernels": plan.kernels}
    left_out = {key: value for key, value in request.pins.items() if values[key] != value}
    if left_out:
        return f"{words}, which {pins_text(left_out)} leaves out"
    return Answer(
        name="vendor",
        plan=plan,
        why=f"{layout.vendor}, for {layout.words(request.cluster.name)}"
        + (f"; here without {layout.lacks}" if layout.lacks else ""),
        slower=0.0,
        against=against,
        source=layout.source,
        nearest_run=_nearest_run(request, measured, layout, cutting),
        unsettled_run=_unsettled_run(request, layout, cutting),
    )


def step_s(plan: Plan) -> float:
    """Return the predicted seconds of a plan's step."""
    assert plan.prediction, "a plan of the search has its prediction"
    return plan.prediction.step_time_s


def _resolved(request: Request, layout: VendorLayout, *, of_request: bool = False) -> tuple[Request, Candidate, Engine]:
    """Return a layout on all ranks of a question, with the question about its logical cores, and an engine for it.

    Its seconds are those of the measured program, or with ``of_request`` those of the program in question; then kernels
    are part of the layout only if they are those of autoshard's own engines.
    """
    lnc = parse_pins(layout.layout).get("lnc")
    request = request.with_lnc_of(lnc if isinstance(lnc, int) else None)
    candidate = Candidate.parse(layout.layout, request.cluster.num_ranks)
    if of_request and not (candidate.kernels and load_kernels(candidate.kernels).engine):
        candidate = replace(candidate, kernels=cast(str | None, request.pins.get("kernels")))
    return request, *resolved(request, candidate)


def _made(request: Request, layout: VendorLayout) -> tuple[Plan, Cutting, tuple[str, ...]]:
    """Return the plan of a layout on all ranks of a question, its cutting, and the reasons against it."""
    request, candidate, engine = _resolved(request, layout, of_request=True)
    against = [str(reason) for reason in rejections_of(request, candidate, engine)]
    cutting = request.cutting(candidate, engine)
    plan = request.plan(candidate, engine, cutting)
    assert plan.prediction, "a plan of a request has its prediction"
    over = plan.prediction.peak_bytes - request.capacity_bytes(plan.kernels)
    against += [f"{format_bytes(round(over))} more than fit on a rank{_at_the_source(request, layout)}"] * (over > 0)
    return plan, cutting, tuple(against)


def _at_the_source(request: Request, layout: VendorLayout) -> str:
    """Return what a layout needs as its source has it, in another program or format than the question's."""
    plan = as_documented(request, layout) if layout.options else None
    if plan is None or plan.prediction is None:
        return ""
    needed, usable = plan.prediction.peak_bytes, plan.cluster.rank_memory_bytes
    place = layout.place(request.cluster.name)
    return f"; as documented for {place} ({layout.options}) it needs {format_bytes(needed)} of {format_bytes(usable)}"


def _nearest_run(
    request: Request, measured: Sequence[VendorLayout], layout: VendorLayout, cutting: Cutting
) -> NearestRun | None:
    """Return the measured runs of such a model on these chips that are nearest to a layout with this cutting."""
    mesh = {key: value for key, value in parse_pins(layout.layout).items() if key in ("tp", "pp", "cp", "ep")}
    runs = [run for run in measured if run.nodes]
    if not runs:
        return None

    def distance(candidate_run: VendorLayout) -> tuple[object, ...]:
        other_mesh = not mesh.items() <= parse_pins(candidate_run.layout).items()
        return candidate_run.seq_len != request.workload.seq_len, other_mesh, candidate_run.distance(request)

    run = min(runs, key=distance)
    # The same layout on other nodes is cut alike.
    predicted_s = _documented_s(request, run, cutting if run.layout == layout.layout else None)
    return None if predicted_s is None else _published(request, run, run.measured_s, predicted_s, run.source)


def _unsettled_run(request: Request, layout: VendorLayout, cutting: Cutting) -> NearestRun | None:
    """Return the runs of a layout whose times had not settled, if there are any."""
    seen, predicted_s = layout.unsettled, _documented_s(request, layout, cutting) if layout.unsettled else None
    if not seen or not predicted_s:
        return None
    return replace(_published(request, layout, seen.step_s, predicted_s, seen.source), unsettled=seen.doubt)


def _published(
    request: Request, run: VendorLayout, seconds: Sequence[float], predicted_s: float, source: str
) -> NearestRun:
    return NearestRun(
        run=f"{run.words(request.cluster.name)}: {run.layout}",
        num_runs=len(seconds),
        low_s=min(seconds),
        high_s=max(seconds),
        predicted_s=predicted_s,
        source=source,
    )


def _documented_s(request: Request, run: VendorLayout, cutting: Cutting | None) -> float | None:
    """Return the predicted seconds of what a layout was documented for; None where a Rule of the user's forbids it."""
    plan = as_documented(request, run, cutting)
    return None if plan is None else step_s(plan)


def as_documented(request: Request, run: VendorLayout, cutting: Cutting | None = None) -> Plan | None:
    """Return the plan of what a layout was documented for; None where a Rule of the user's forbids it."""
    workload = replace(
        request.workload,
        seq_len=run.seq_len,
        global_batch=run.global_batch,
        precision=Precision.named(run.precision) if run.precision else request.workload.precision,
        expert_imbalance=0.0 if run.even else request.workload.expert_imbalance,
    )
    question = replace(
        request, cluster=replace(request.cluster, num_nodes=run.nodes or 1), workload=workload, pins={}, layouts=()
    )
    try:
        question, candidate, engine = _resolved(question, run)
        return question.plan(candidate, engine, cutting, tables=False)
    except InputError:
        return None
