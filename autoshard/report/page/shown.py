"""What a page says of plans, as the JSON of ``autoshard report --json``, from which the page takes its figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.blocks.explain import Explanation
from autoshard.cost.timeline import RankTime, StepTimeline
from autoshard.plan.diff import Diff
from autoshard.plan.found import SearchRecord
from autoshard.plan.plan import Plan
from autoshard.report.plan_sheets import plan_figures
from autoshard.report.structured import comparison_json
from autoshard.report.words import prediction_of
from autoshard.spec.record import encode

AXES = ("tp", "cp", "ep", "pp", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPlan:
    """A plan with everything that a page draws of it."""

    name: str  # of its file
    plan: Plan
    timeline: StepTimeline
    times: Sequence[RankTime]
    explanation: Explanation | None  # of its operations, if they are shown
    record: SearchRecord | None  # of the search that found it
    remark: str = ""  # what was noticed when it was read: that it was edited, or is out of date


def page_json(shown: Sequence[ShownPlan], differences: Sequence[Diff], run: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return every figure of the page: of each plan, of the other plans against the first, of a run."""
    remarks = [f"{plan.name}: {plan.remark}" for plan in shown if plan.remark]
    first, further = differences[:1], [comparison_json(difference, remarks) for difference in differences[1:]]
    return {
        "plans": list(map(_plan_json, shown)),
        "difference": comparison_json(first[0], remarks) if first else None,
        "further_differences": further,
        "run": run,
    }


def _plan_json(shown: ShownPlan) -> dict[str, Any]:
    plan = shown.plan
    record, why = encode(shown.record) if shown.record else None, shown.explanation
    return {
        "name": shown.name,
        "remark": shown.remark,
        "num_ranks": plan.cluster.num_ranks,
        **plan_figures(plan, shown.times),
        "axes": [_axis_json(plan, axis) for axis in AXES if plan.mesh.size(axis) > 1],
        "blocks": encode(why.blocks) if why else [],
        "rules": dict(why.rules) if why else {},
        "search": record,
    }


def _axis_json(plan: Plan, axis: str) -> dict[str, Any]:
    """Return the groups of an axis: their size, the nodes and the link that they cross, what a rank sends in a step."""
    group = plan.mesh.group_of(0, axis)
    link = plan.cluster.link_of(group)
    sent = prediction_of(plan).communication_bytes
    return {
        "axis": axis,
        "size": len(group),
        "num_nodes": len({rank // plan.cluster.ranks_per_node for rank in group}),
        "link": link.name,
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "sent_bytes": sent.get(axis),
        "neighbours": list(group[:8]),
    }
