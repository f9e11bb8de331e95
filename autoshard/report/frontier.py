"""Plans that trade time, memory and cost against each other, as a table."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.plan.plan import Plan
from autoshard.report.terminal import at_commas, make_table
from autoshard.units import format_bytes, format_dollars, format_seconds

_CANDIDATE, _BAR = 52, 8


def frontier_report(plans: Sequence[Plan], gap: float, ended: str) -> Group:
    """Return one line per plan, fastest first, with bars that are longer for more."""
    table = make_table("What no other plan betters in time, memory and cost at once")
    priced = any(plan.dollars for plan in plans)
    cost = "cost a step" if priced else "node seconds"
    for name in ("nodes", "step", "", "peak memory", "", cost, "plan"):
        left, whole = name in ("", "plan"), name in ("step", "peak memory")
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=whole)
    slowest = max(_step_s(plan) for plan in plans)
    for plan in plans:
        assert plan.prediction
        step_s, peak, dollars = _step_s(plan), plan.prediction.peak_bytes, plan.dollars
        cost = format_dollars(dollars.usd_per_step) if dollars else f"{plan.cluster.num_nodes * step_s:,.0f}"
        table.add_row(
            str(plan.cluster.num_nodes), format_seconds(step_s), _bar(step_s / slowest), format_bytes(peak),
            _bar(peak / plan.prediction.capacity_bytes), cost, at_commas(str(plan.candidate), _CANDIDATE),
        )  # fmt: skip
    stopped = "" if ended == "complete" else f" ({ended}: there may be more)"
    words = f"each the fastest of its nodes and memory, within {gap:.2%}; memory in steps of a tenth{stopped}"
    parts: list[RenderableType] = [table, "", Text(words, style="dim")]
    return Group(*parts)


def _step_s(plan: Plan) -> float:
    assert plan.prediction, "only predicted plans are shown"
    return plan.prediction.step_time_s


def _bar(share: float) -> str:
    return "█" * max(1, min(_BAR, round(share * _BAR)))
