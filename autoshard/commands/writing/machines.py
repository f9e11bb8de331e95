"""Which machine, and how many nodes of it: several clusters in one table, and nodes for a deadline or a budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.commands.output import print_answer, print_notes
from autoshard.commands.writing.target import Target
from autoshard.errors import InputError, NoPlan, inside
from autoshard.plan.plan import Plan
from autoshard.report.machines import MachineAnswer, machines_json, machines_sheets
from autoshard.search.ask.answers import answers_of
from autoshard.search.ask.api import request_of
from autoshard.search.ask.no_plan import why_none
from autoshard.search.ask.planner import SearchResult
from autoshard.search.ask.vendor.answer import step_s
from autoshard.search.bound.request import Request
from autoshard.spec.price import price_of_each
from autoshard.spec.recipe import QuestionOptions
from autoshard.units import counted, format_dollars, format_training

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


def sized(question: QuestionOptions, applied: Callable[[Request], Request], search: Search, to: Target,
          choose: str | None) -> SizedRequest:  # fmt: skip
    """Return the question on the fewest nodes on which the answer that is written meets the deadline.

    Without one, on those on which it is fastest, of the numbers that the budget pays.
    """
    tokens, met, too_dear = to.total_tokens, list[tuple[Request, Plan]](), list[tuple[float, int]]()
    assert tokens, "checked by Target"
    first, unfinished = request_of(question, _SIZES[0]), ""
    refused: InputError | NoPlan | None = None
    sizes = replace(question, seq_len=first.workload.seq_len, global_batch=first.workload.global_batch)
    for nodes in _SIZES:
        request = replace(applied(request_of(sizes, nodes)), defaults=first.defaults)
        result = search(request)
        if result.certificate.stopped:
            unfinished = f"the search on {counted(nodes, 'node')} was not finished ({result.certificate.stopped})"
            break
        plan = _chosen(request, result, choose)
        if not isinstance(plan, Plan):
            refused = refused or plan
            continue
        time_s, usd = _cost(plan, tokens)
        if to.budget_usd is not None and usd is None:
            why = f"no price of {plan.cluster.name} is known. Type yours: --price, dollars of a node hour"
            raise InputError.of("--budget", why)
        if to.budget_usd is not None and usd is not None and usd > to.budget_usd:
            too_dear.append((usd, nodes))
            if usd > _FAR * to.budget_usd and len(too_dear) >= _LEAST_TRIED:
                break
            continue
        met.append((request, plan))
        if to.deadline_s is not None and time_s <= to.deadline_s:
            return SizedRequest(request=request, why=_in_time(plan, time_s, to))
    if met and to.deadline_s is None:
        why = "; ".join(filter(None, (_paid(met, tokens, to), unfinished)))
        return SizedRequest(request=_fastest(met)[0], why=why)
    if refused and not met and not too_dear:
        raise refused
    words = [_missed(met, tokens, min(too_dear, default=None))] if met or too_dear or not unfinished else []
    words += [f"{unfinished}. Give it more time"] if unfinished else []
    raise NoPlan(f"no plan: {'; '.join(words)}")


def _chosen(request: Request, result: SearchResult, choose: str | None) -> Plan | InputError | NoPlan | None:
    """Return the plan that is written on so many nodes, why none has that name, or None where none fits."""
    if not result.plans:
        return None
    answers = answers_of(request, result, choose)
    try:
        with inside("--choose"):
            return answers.runnable(answers.name).plan
    except (InputError, NoPlan) as refusal:
        return refusal


def _fastest(met: Sequence[tuple[Request, Plan]]) -> tuple[Request, Plan]:
    return min(met, key=lambda entry: step_s(entry[1]))


def _paid(met: Sequence[tuple[Request, Plan]], tokens: float, to: Target) -> str:
    """Say why so many nodes are taken for a budget, and whether it pays them at the slow end of the prediction too."""
    request, plan = _fastest(met)
    usd = _cost(plan, tokens)[1]
    assert usd is not None and to.budget_usd is not None, "asked only where the budget pays"
    slow_usd = usd * _slow_end(plan)
    over = ", above the budget" if slow_usd > to.budget_usd else ""
    why = "the most nodes that the budget pays" if request is met[-1][0] else "the fastest that the budget pays"
    longer = "" if request is met[-1][0] else "; more nodes take longer"
    return f"{why}: {format_dollars(usd)}; {format_dollars(slow_usd)} at the slow end of the interval{over}{longer}"


def _slow_end(plan: Plan) -> float:
    """Return how many times the predicted time of a step the slow end of its interval is."""
    assert plan.prediction, "every plan of a search is predicted"
    return plan.prediction.high_s / plan.prediction.step_time_s


def _cost(plan: Plan, tokens: float) -> tuple[float, float | None]:
    """Return how many seconds all tokens take, and what they cost."""
    assert plan.prediction, "every plan of a search is predicted"
    return tokens / plan.prediction.tokens_per_s, plan.dollars and plan.dollars.usd_per_billion_tokens * tokens / 1e9


def _in_time(plan: Plan, time_s: float, to: Target) -> str:
    """Say that so many nodes meet the deadline, and whether they still do at the slow end of the prediction."""
    assert to.deadline_s, "asked only of a plan that is fast enough"
    slow_s = time_s * _slow_end(plan)
    missed = ", too late" if slow_s > to.deadline_s else ""
    fewest = f"the fewest nodes, of 1, 2, 4 and so on, that meet {to.deadline}: {format_training(time_s)}"
    return f"{fewest}; {format_training(slow_s)} at the slow end of the interval{missed}"


def _missed(met: Sequence[tuple[Request, Plan]], tokens: float, cheapest: tuple[float, int] | None) -> str:
    """Say how near the fastest size comes to what was asked, or the cheapest to the budget."""
    if not met and cheapest:
        usd, nodes = cheapest
        cheapest_words = f"{format_dollars(usd)} on {counted(nodes, 'node')}, the cheapest number that was tried"
        return f"all tokens cost {cheapest_words}. Type a larger --budget"
    if not met:
        return f"on no number of nodes up to {_SIZES[-1]} does a plan fit in memory"
    request, plan = _fastest(met)
    time_s, usd = _cost(plan, tokens)
    cost = f" for {format_dollars(usd)}" if usd is not None else ""
    place, need = counted(request.cluster.num_nodes, "node"), "needs" if request.cluster.num_nodes == 1 else "need"
    return f"{place}, the fastest of those that were tried or paid, {need} {format_training(time_s)}{cost}"
