"""Which machine, and how many nodes of it: several clusters in one table, and nodes for a deadline or a budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.commands.output import print_answer, print_notes
from autoshard.commands.writing.target import DAY_S, Target
from autoshard.errors import InputError, NoPlan
from autoshard.plan.plan import Plan
from autoshard.report.machines import MachineAnswer, machines_json, machines_sheets
from autoshard.search.ask.api import request_of
from autoshard.search.ask.no_plan import why_none
from autoshard.search.ask.planner import SearchResult
from autoshard.search.bound.request import Request
from autoshard.spec.price import price_of_each
from autoshard.spec.recipe import QuestionOptions
from autoshard.units import counted, format_dollars

_SIZES = tuple(2**exponent for exponent in range(11))  # nodes that are tried for a deadline or a budget
# Costs go up and down by a tenth with the number of nodes: batches divide better or worse.
_FAR, _LEAST_TRIED = 1.5, 4  # times the budget, above which no larger number is tried; so many numbers are, at least

Search = Callable[[Request], SearchResult]


def compare_machines(question: QuestionOptions, nodes: int, applied: Callable[[Request], Request], search: Search,
                     to: Target) -> int:  # fmt: skip
    """Plan one question on each of several clusters: print a row for each, and write the fastest; 1 if nothing fits."""
    names = [name.strip() for name in (question.cluster or "").split(",")]
    if len(set(names)) < len(names) or not all(names):
        raise InputError.of("--cluster", f"{question.cluster}: name each cluster once, with commas between them")
    prices = price_of_each(question.price, names, "cluster")
    first = request_of(replace(question, cluster=names[0], price=None), nodes)
    sizes = replace(question, seq_len=first.workload.seq_len, global_batch=first.workload.global_batch)
    if first.defaults and not to.json:
        print_notes(f"assumed {first.defaults}")
    requests = [
        applied(request_of(replace(sizes, cluster=name, price=price), nodes))
        for name, price in zip(names, prices, strict=True)
    ]
    answers = [_machine_answer(request, search(request)) for request in requests]
    answers.sort(key=lambda answer: answer.step_s)
    fastest = answers[0].plan
    written = to.write(fastest) if fastest else None
    print_answer((machines_json if to.json else machines_sheets)(answers, to.total_tokens))
    return to.end(fastest, written, "the fastest, ") if fastest and written else 1


def _machine_answer(request: Request, result: SearchResult) -> MachineAnswer:
    stopped = result.certificate.stopped
    if result.plans:
        unfinished = f"the search was not finished ({stopped}): the best plan so far" if stopped else ""
        return MachineAnswer(cluster=request.cluster, plan=result.preferred, remark=unfinished)
    why = f"the search was not finished ({stopped}), and had no plan yet" if stopped else why_none(request, result)
    return MachineAnswer(cluster=request.cluster, plan=None, remark=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRequest:
    """The question on the number of nodes that meets what was asked."""

    request: Request
    why: str


def sized(question: QuestionOptions, applied: Callable[[Request], Request], search: Search, to: Target) -> SizedRequest:
    """Return the question on the fewest nodes that meet the deadline; without one, on the most that the budget pays."""
    tokens, met, too_dear = to.total_tokens, list[tuple[Request, Plan]](), list[tuple[float, int]]()
    assert tokens, "checked by Target"
    first, unfinished = request_of(question, _SIZES[0]), ""
    sizes = replace(question, seq_len=first.workload.seq_len, global_batch=first.workload.global_batch)
    for nodes in _SIZES:
        request = replace(applied(request_of(sizes, nodes)), defaults=first.defaults)
        result = search(request)
        if result.certificate.stopped:
            unfinished = f"the search on {counted(nodes, 'node')} was not finished ({result.certificate.stopped})"
            break
        if not result.plans:
            continue
        plan = result.preferred
        days, usd = _cost(plan, tokens)
        if to.budget_usd is not None and usd is None:
            why = f"no price of {plan.cluster.name} is known. Type yours: --price, dollars of a node hour"
            raise InputError.of("--budget", why)
        if to.budget_usd is not None and usd is not None and usd > to.budget_usd:
            too_dear.append((usd, nodes))
            if usd > _FAR * to.budget_usd and len(too_dear) >= _LEAST_TRIED:
                break
            continue
        met.append((request, plan))
        if to.deadline_s is not None and days * DAY_S <= to.deadline_s:
            return SizedRequest(request=request, why=_in_time(plan, days, to))
    if met and to.deadline_s is None:
        request, plan = met[-1]
        days, usd = _cost(plan, tokens)
        why = f"the most nodes that the budget pays: {format_dollars(usd or 0.0)}"
        return SizedRequest(request=request, why=f"{why}; {unfinished}" if unfinished else why)
    words = [_missed(met, tokens, min(too_dear, default=None))] if met or too_dear or not unfinished else []
    words += [f"{unfinished}. Give it more time"] if unfinished else []
    raise NoPlan(f"no plan: {'; '.join(words)}")


def _cost(plan: Plan, tokens: float) -> tuple[float, float | None]:
    """Return how many days all tokens take, and what they cost."""
    assert plan.prediction, "every plan of a search is predicted"
    days = tokens / plan.prediction.tokens_per_s / DAY_S
    return days, plan.dollars and plan.dollars.usd_per_billion_tokens * tokens / 1e9


def _in_time(plan: Plan, days: float, to: Target) -> str:
    """Say that so many nodes meet the deadline, and whether they still do at the slow end of the prediction."""
    assert plan.prediction and to.deadline_s, "asked only of a plan that is fast enough"
    slow_days = days * plan.prediction.high_s / plan.prediction.step_time_s
    missed = ", too late" if slow_days * DAY_S > to.deadline_s else ""
    fewest = f"the fewest nodes, of 1, 2, 4 and so on, that meet {to.deadline}: {days:.1f} days"
    return f"{fewest}; {slow_days:.1f} days at the slow end of the interval{missed}"


def _missed(met: Sequence[tuple[Request, Plan]], tokens: float, cheapest: tuple[float, int] | None) -> str:
    """Say how near the largest size comes to what was asked, or the cheapest to the budget."""
    if not met and cheapest:
        usd, nodes = cheapest
        cheapest_words = f"{format_dollars(usd)} on {counted(nodes, 'node')}, the cheapest number that was tried"
        return f"all tokens cost {cheapest_words}. Type a larger --budget"
    if not met:
        return f"on no number of nodes up to {_SIZES[-1]} does a plan fit in memory"
    days, usd = _cost(met[-1][1], tokens)
    nodes = met[-1][0].cluster.num_nodes
    cost = f" for {format_dollars(usd)}" if usd is not None else ""
    return f"{counted(nodes, 'node')}, the most that were tried or paid, need {days:.1f} days{cost}"
