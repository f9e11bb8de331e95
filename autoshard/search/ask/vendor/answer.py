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
from autoshard.spec.kernels import load_kernels
from autoshard.units import format_bytes

_LONGER = 2.0  # than documented, or shorter: at another length than that a layout is no answer


def vendor_answer(request: Request, fastest: Plan) -> Answer | str:
    """Return the documented layout nearest to a question, as an answer; or say why there is none."""
    suited = [documented for documented in vendor_layouts() if documented.suits(request.model, request.cluster)]
    suited.sort(key=lambda documented: documented.distance(request))
    reasons: list[str] = []
    for layout in suited:
        words = f"{layout.vendor} documents {layout.layout} for {layout.words(request.cluster.name)}"
        longer = request.workload.seq_len / layout.seq_len
        if not 1 / _LONGER <= longer <= _LONGER:
            far = f"more than {_LONGER:g} times as many" if longer > 1 else f"less than 1/{_LONGER:g} of these"
            tokens = f"{layout.seq_len} tokens a sequence; {request.workload.seq_len} are {far}"
            reasons.append(f"{layout.vendor} documents one for {layout.place(request.cluster.name)} with {tokens}")
            continue
        try:
            plan, cutting, against = _made(request, layout)
        except InputError as error:  # no shape on so many ranks, or a tensor is pinned
            reasons.append(f"{words}: {error}")
            continue
        values = {**{key: getattr(plan.candidate, key) for key in request.pins}, "kernels": plan.kernels}
        left_out = {key: value for key, value in request.pins.items() if values[key] != value}
        if left_out:
            reasons.append(f"{words}, which {pins_text(left_out)} leaves out")
            continue
        return Answer(
            name="vendor",
            plan=plan,
            why=f"{layout.vendor}, for {layout.words(request.cluster.name)}",
            slower=step_s(plan) / step_s(fastest) - 1,
            against=against,
            source=layout.source,
            nearest_run=_nearest_run(request, [run for run in suited if run.measured_s], layout, cutting),
            unsettled_run=_unsettled_run(request, layout, cutting),
        )
    nothing = f"no layout of {request.model.name} on {request.cluster.chip.name} is documented that autoshard knows"
    return next(iter(reasons), nothing)


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
    return plan, cutting, (*against, *([f"{format_bytes(round(over))} more than fit on a rank"] if over > 0 else []))


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
    workload = replace(request.workload, seq_len=run.seq_len, global_batch=run.global_batch)
    question = replace(
        request, cluster=replace(request.cluster, num_nodes=run.nodes or 1), workload=workload, pins={}, layouts=()
    )
    try:
        question, candidate, engine = _resolved(question, run)
        return step_s(question.plan(candidate, engine, cutting, tables=False))
    except InputError:
        return None
