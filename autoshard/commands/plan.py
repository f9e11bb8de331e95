"""``autoshard plan``: the best plan, or exactly one candidate."""

from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.commands.asked import Asked, How
from autoshard.commands.like import asked_again, resuming_json, resuming_text
from autoshard.commands.output import next_command, place_checks, print_json, write_plan
from autoshard.commands.watching import Watcher, watching
from autoshard.errors import InputError, NoPlan, require

if TYPE_CHECKING:
    from autoshard.plan.plan import Plan
    from autoshard.search.planner import Found, Request

MOST_SHOWN = 100  # every plan that is shown is predicted in full, a few milliseconds each


def plan(
    asked: Asked,
    how: How,
    like: Path | None = None,
    pareto: bool = False,
    at: str | None = None,
    top: int = 3,
    out: Path = Path("plan.json"),
    json: bool = False,
) -> int:
    """Find the fastest layout of a training run that fits in memory, and write it to a plan file.

    Args:
        asked: The question.
        how: What is minimised, and how far the search goes.
        like: Ask what this plan file has answered again, for the --nodes that are left, and say what resuming costs.
        pareto: Show what no plan betters in step time, memory and dollars at once, over all --nodes; write the fastest.
        at: Evaluate exactly this layout, even one that is refused, and say why.
        top: How many plans to show, the best one included.
        out: The plan file to write.
        json: Print one JSON object instead of tables.
    """
    _refuse_contradictions(asked, pareto, at, top, out)
    if like is not None:
        require((not pareto and at is None, "--like", "searches for one plan; leave out --pareto and --at"))
        old, request = asked_again(like, asked, how)
        return _best(request, how, top, out, json, old)
    requests = asked.requests(how)
    if at is not None:
        return _plan_at(requests[0], at, out, json)
    if pareto:
        return _frontier(requests, how, out, json)
    return _best(requests[0], how, top, out, json)


def _best(request: "Request", how: How, top: int, out: Path, json: bool, old: "Plan | None" = None) -> int:
    found = searched(request, top, how)
    best = found.plans[0]
    write_plan(best, out)
    if json:
        from autoshard.report.structured import found_json

        print_json({**found_json(found.plans, found.certificate), **(resuming_json(old, best) if old else {})})
    else:
        from autoshard.report.terminal import make_console, plan_report

        make_console().print(plan_report(best, found.plans[1:], found.certificate, next_command(out)))
        if old:
            print(resuming_text(old, best))
        print(f"wrote {out}")
    return 0


def _frontier(requests: "list[Request]", how: How, out: Path, json: bool) -> int:
    """Show what cannot be bettered; where nothing fits on any number of nodes, say why on the last."""
    from autoshard.report.frontier import frontier_report
    from autoshard.report.structured import frontier_json
    from autoshard.report.terminal import make_console
    from autoshard.search.frontier import frontier
    from autoshard.search.no_plan import unanswered
    from autoshard.search.planner import search
    from autoshard.units import format_seconds

    with watching(how.time_limit, format_seconds) as watch:
        found = frontier(requests, watch)
    if not found.plans:
        _refuse_unfinished(found.ended, watch)
        raise unanswered(requests[-1], search(requests[-1]), helpful=True)
    write_plan(found.plans[0], out)
    if json:
        print_json(frontier_json(found.plans, found.gap, found.ended))
    else:
        make_console().print(frontier_report(found.plans, found.gap, found.ended))
        print(f"wrote the fastest, {out}")
    return 0


def searched(request: "Request", num_plans: int, how: How) -> "Found":
    """Search; where nothing fits, say by how much the best misses and what would help."""
    from autoshard.search.no_plan import unanswered
    from autoshard.search.planner import search
    from autoshard.units import format_bytes, format_seconds

    show = format_bytes if how.objective == "memory" else format_seconds
    with watching(how.time_limit, show) as watch:
        found = search(request, num_plans, watch)
    if not found.plans:
        _refuse_unfinished(found.certificate.ended, watch)
        raise unanswered(request, found, helpful=True)
    return found


def _refuse_unfinished(ended: str, watch: Watcher) -> None:
    """Say that a search which was stopped has found nothing yet; whether there is anything is not known."""
    if watch.interrupted:
        raise KeyboardInterrupt
    if ended != "complete":
        raise NoPlan(f"no plan: {ended}, before any was found that fits. Give the search more time")


def _plan_at(request: "Request", text: str, out: Path, json: bool) -> int:
    """Evaluate one candidate: its rejections first, then an estimate where it has a shape."""
    from autoshard.plan.candidate import Candidate, parse_pins
    from autoshard.plan.verify import verify as reasons_against
    from autoshard.report.structured import made_json
    from autoshard.report.terminal import make_console, plan_report, rejections_report
    from autoshard.search.planner import rejections_of, resolved

    try:
        lnc = parse_pins(text).get("lnc")
        request = request.with_lnc_of(lnc if isinstance(lnc, int) else None)
        candidate, engine = resolved(request, Candidate.parse(text, request.cluster.num_ranks))
    except InputError as error:
        raise error.under("--at") from None
    refused = rejections_of(request, candidate, engine)
    made, shapeless = None, ""
    try:
        made = request.plan(candidate, engine)
    except InputError as error:
        if not refused:
            raise error.under("--at") from None
        shapeless = str(error)
    refused = reasons_against(made) if made else refused
    if json:
        print_json(made_json(made, refused))
    else:
        report = plan_report(made, (), None, "") if made else f"no estimate: {shapeless}"
        make_console().print(rejections_report(refused), report)
    if refused or made is None:
        return 1
    write_plan(made, out)
    if not json:
        print(f"wrote {out}\nnext: {next_command(out)}")
    return 0


def _refuse_contradictions(asked: Asked, pareto: bool, at: str | None, top: int, out: Path) -> None:
    """Find out before the search what nobody could want, and that the answer would have no place."""
    require(
        (at is None or asked.fix is None, "--at", "already names every key; leave out --fix"),
        (at is None or not pareto, "--pareto", "searches; leave out --at"),
        (pareto or len(asked.nodes) <= 1, "--nodes", "takes several numbers with --pareto only; name one"),
        (1 <= top <= MOST_SHOWN, "--top", f"must be 1 to {MOST_SHOWN}, not {top}"),
        *place_checks(out),
    )
