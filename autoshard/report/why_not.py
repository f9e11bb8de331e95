"""Why a plan is not another, for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan.diff import diff
from autoshard.plan.explanation import Flip, WhyNot
from autoshard.plan.plan import Plan
from autoshard.report.compared import comparison_report
from autoshard.report.terminal import make_table
from autoshard.units import format_bytes, format_count


def why_not_report(plan: Plan, found: WhyNot) -> Group:
    """Return what forbids the other, or how it compares; then what would turn the order."""
    parts: list[RenderableType] = []
    for reason in found.against:
        parts.append(Text.assemble(("refused ", "bold red"), reason))
    if found.other is None:
        return Group(*parts)
    if found.other.candidate == plan.candidate:
        return Group(Text(f"{found.asked}: this is the plan", "bold"))
    names = ("the plan", f"the {'best' if found.fits else 'smallest'} with {found.asked}")
    parts += [*([""] if parts else []), comparison_report(diff(plan, found.other), names, ()), ""]
    if found.flips:
        parts.append(_flips(found.flips))
    if found.unmoved:
        parts.append(Text(f"no change up to 16 times turns the order: {', '.join(found.unmoved)}", "dim"))
    return Group(*parts)


def _flips(flips: tuple[Flip, ...]) -> Table:
    table = make_table("The smallest change of one thing after which b is faster, or fits where a does not")
    for name in ("what", "now", "then", "times"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for flip in flips:
        table.add_row(flip.name, _shown(flip, flip.now), _shown(flip, flip.then), f"{flip.factor:.3g}")
    return table


def _shown(flip: Flip, value: float) -> str:
    if flip.name.startswith("memory"):
        return format_bytes(round(value))
    if flip.name.startswith("bandwidth"):
        return f"{value:.0%}"
    return format_count(value) if value >= 1e6 else f"{value:g}"
