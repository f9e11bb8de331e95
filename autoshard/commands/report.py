"""``autoshard report``: plans, and a run of one of them, as a page to look at."""

import sys
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard.blocks.explain import explain
from autoshard.command_line.options import DEFAULT_PLAN, Paths
from autoshard.commands.output import print_answer, print_refused, write_text
from autoshard.commands.writing.places import page_checks
from autoshard.cost.doubt import compared
from autoshard.cost.predict import CheckedPlan, check_plan
from autoshard.cost.timeline import rank_times, timeline_of
from autoshard.errors import Faults, inside, require
from autoshard.plan.codec import load
from autoshard.plan.diff import Diff
from autoshard.plan.found import search_record
from autoshard.plan.module_plan import is_module_plan, load_module_plan
from autoshard.plan.plan import Plan
from autoshard.report.page.module_page import module_page
from autoshard.report.page.plan_page import plan_page
from autoshard.report.page.runs import run_data
from autoshard.report.page.shown import ShownPlan, page_json
from autoshard.report.sheet import Node
from autoshard.spec.record import encode

_MOST = 8  # plans of a page


def report(
    plans: Paths = (DEFAULT_PLAN,),
    run: Path | None = None,
    out: Path = Path("report.html"),
    open: bool = False,
    json: bool = False,
) -> int:
    """Draw a plan as a page to look at: its step, memory, mesh, operations, runners-up, and what was refused.

    Args:
        plans: The plan file. Further ones are set beside it; how each differs from the first is explained.
        run: The folder of a run of the plan, to set what was measured beside the prediction.
        out: The page to write: one HTML file that needs no network.
        open: Also open the page in the browser.
        json: Print the figures of the page as one JSON object instead.
    """
    many = f"a page shows at most {_MOST} plans, not {len(plans)}"
    require((len(plans) <= _MOST, "PLANS", many), *(() if json else page_checks(out)))
    if any(map(is_module_plan, plans)):
        alone = len(plans) == 1 and run is None
        require((alone, "PLANS", "the page of a module's plan shows that plan alone, and no run"))
        return _module_report(plans[0], out, open=open, json=json)
    read, faults = list[CheckedPlan](), Faults()
    for path in plans:
        with faults.of():
            read.append(check_plan(load(path), place=path))
    faults.refuse()
    for one in read:
        if misfits := [reason for reason in one.rejections if reason.rule_id != "memory"]:
            return print_refused(misfits, json=json)
    alone = len({path.stem for path in plans}) == len(plans)
    names = [path.stem if alone else str(path) for path in plans]
    shown, against, data = _page_content(plans, names, read, run)
    if json:
        print_answer(data)
        return 0
    write_text(plan_page(shown, Node(data), against), out)
    print(f"wrote {out}")
    if open:
        open_page(out)
    return 0


def _page_content(
    places: Sequence[Path], names: Sequence[str], read: Sequence[CheckedPlan], run: Path | None
) -> tuple[list[ShownPlan], list[Diff], dict[str, Any]]:
    """Return what a page draws: plans, the differences of the others to the first, and all figures."""
    shown = [_shown(*entry) for entry in zip(places, names, read, strict=True)]
    against = [compared(shown[0].plan, rival.plan) for rival in shown[1:]]
    return shown, against, page_json(shown, against, run_data(run, shown[0].plan) if run else None)


def draw_page(plans: Mapping[str, CheckedPlan], run: Path | None, out: Path) -> Path:
    """Draw plans by name, and a run of the first, as one page; return its path."""
    names = [*plans]
    shown, against, data = _page_content([*map(Path, names)], names, [*plans.values()], run)
    write_text(plan_page(shown, Node(data), against), out)
    return out


def _module_report(plan: Path, out: Path, *, open: bool, json: bool) -> int:
    data = encode(load_module_plan(plan))
    if json:
        print_answer(data)
        return 0
    write_text(module_page(Node(data)), out)
    print(f"wrote {out}")
    if open:
        open_page(out)
    return 0


def draw_plan(plan: Plan, out: Path) -> None:
    """Draw a plan that was just made, and open the page in the browser."""
    open_page(draw_page({out.stem: CheckedPlan(plan=plan, rejections=())}, None, out))


def _shown(path: Path, name: str, read: CheckedPlan) -> ShownPlan:
    """Return everything that a page draws of a plan."""
    plan = read.plan
    with inside(path):
        drawn, record = timeline_of(plan), search_record(plan)
    return ShownPlan(
        name=name,
        plan=plan,
        timeline=drawn,
        times=rank_times(plan),
        explanation=explain(plan),
        record=record,
        remark=read.remark,
    )


def open_page(page: Path) -> None:
    """Open a page in the browser; say where it is if there is none."""
    if not webbrowser.open(page.resolve().as_uri()):
        print(f"no browser was found: open {page} yourself", file=sys.stderr)
