"""``autoshard plan``: the best plan, exactly one candidate, or the question of a plan again for the nodes left."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from autoshard.command_line.options import Counts, is_recipe
from autoshard.commands.output import print_answer, print_notes
from autoshard.commands.progress import StatusLine, Watcher, watching
from autoshard.commands.writing.here import on_this_machine
from autoshard.commands.writing.machines import compare_machines, sized
from autoshard.commands.writing.modes import idle_options
from autoshard.commands.writing.places import place_checks
from autoshard.commands.writing.resizing import (
    LikeQuestion,
    names_before,
    request_like,
    resume_command,
    resuming_answer,
    same_answer,
)
from autoshard.commands.writing.target import Target, Written
from autoshard.cost.timeline import rank_times
from autoshard.errors import Check, InputError, NoPlan, inside, require
from autoshard.plan.candidate import Candidate, parse_pins
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan
from autoshard.plan.verify import verify as reasons_against
from autoshard.report.brief import brief_sheets
from autoshard.report.plan_sheets import frontier_sheets, plan_sheets, rejections_sheet
from autoshard.report.sheet import Sheet, Words
from autoshard.report.structured import answers_json, candidate_json, frontier_json, total_json
from autoshard.search.ask.answers import MOST_PLANS, NAMES, NUMBERS, PlanResult, answers_of, num_searched
from autoshard.search.ask.api import request_of
from autoshard.search.ask.arguments import Brought
from autoshard.search.ask.choice.doubt import DOUBT, Within
from autoshard.search.ask.no_plan import better_sizes, unanswered, why_none_yet
from autoshard.search.ask.planner import Known, SearchResult, frontier, search
from autoshard.search.bound.request import Request, rejections_of, resolved
from autoshard.search.fill.stage_filling import EVERYTHING, PROVEN, Effort
from autoshard.spec.model import ModelSpec
from autoshard.spec.recipe import Pins, QuestionOptions
from autoshard.units import counted, format_bytes, format_seconds

SHOWN = 3  # plans, where --top does not say how many
_LONGEST_S = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What the search minimises, and when it ends.

    Args:
        objective: What is minimised. On one cluster dollars are proportional to time.
        prove: Go on until the plan is proven to be within 0.5% of the best, as far as bounds can prove it; `--prove
            exact` until it is proven to be the best.
        exhaustive: Solve every layout, without bounds. Slow; it serves to check that the bounds are right.
        time_limit: Stop after so many seconds with the best plan found, or the plain one that is made first, and print
            how far it may be from the best.
    """

    objective: Literal["time", "dollars", "memory"] = "time"
    prove: bool | Literal["exact"] = False
    exhaustive: bool = False
    time_limit: int | None = None

    def __post_init__(self) -> None:
        """Refuse a time limit that is too long or not positive."""
        limit = self.time_limit
        require((limit is None or 1 <= limit <= _LONGEST_S, "time_limit", f"must be 1 to {_LONGEST_S}, not {limit}"))

    @property
    def stated(self) -> dict[str, object]:
        """What differs from a usual search, by option."""
        objective = self.objective if self.objective != "time" else None
        return {"--prove": self.prove, "--exhaustive": self.exhaustive, "--time-limit": self.time_limit,
                "--objective": objective}  # fmt: skip

    @property
    def simple_within(self) -> Within | None:
        """What share of time a simple plan may cost; None where another thing than time is minimised."""
        return None if self.objective == "memory" else DOUBT

    def requests(self, question: QuestionOptions, nodes: Counts, module: str | None = None) -> list[Request]:
        """Return one request per number of nodes, with model, cluster and calibration looked up."""
        message = (
            "missing. Type a name of autoshard list models, as in autoshard plan llama3-70b --nodes 16, the path of a "
            "config.json, or --module"
        )
        require(
            (question.model is not None or module is not None, "--model", message),
            (question.model is None or module is None, "--module", "is the model; leave out --model"),
        )
        brought = Brought(model=_read_off(module, question)) if module else None
        if len(nodes) > 1:  # one workload on all of them, so that their plans can be compared
            work = request_of(question, max(nodes), brought).workload
            question = replace(question, seq_len=work.seq_len, global_batch=work.global_batch)
        return [self.applied(request_of(question, number, brought)) for number in nodes or (1,)]

    def applied(self, request: Request) -> Request:
        """Return a request with these options."""
        cluster = request.cluster
        message = (
            f"no price of {cluster.name} is known. Type yours, --price with the dollars of a node hour, or minimise "
            "time: on one cluster the fastest plan is the cheapest"
        )
        require((self.objective != "dollars" or cluster.price_usd_per_node_hour is not None, "--objective", message))
        effort = EVERYTHING if self.prove == "exact" else PROVEN if self.prove else Effort()
        effort = replace(effort, exhaustive=self.exhaustive, at_once=self.time_limit is not None)
        return replace(request, effort=effort, objective=self.objective)


def plan(
    question: QuestionOptions,
    options: SearchOptions,
    to: Target,
    module: str | None = None,
    nodes: Counts = (),
    like: Path | None = None,
    pareto: bool = False,
    at: Pins | None = None,
    choose: str | None = None,
    top: int | None = None,
) -> int:
    """Find the fastest layout of a training run that fits in memory, and a simple one; write a plan file.

    Args:
        question: The question.
        options: What is minimised, and how far the search goes.
        to: Where the plan goes, and what is printed.
        module: Instead of --model, a torch.nn.Module that makes logits or a loss of tokens: FILE.py:FUNCTION, which
            returns it.
        nodes: How many nodes the cluster has; several with --pareto, e.g. 4,8,16. Default: 1.
        like: Ask what this plan file has answered again, for at most --nodes, with what it fixed; say what resuming
            costs.
        pareto: Show what no plan betters in step time, memory and dollars at once, over all --nodes; write the fastest.
        at: Evaluate exactly this layout, even one that is refused, and say why.
        choose: Which plan to write: fastest, simple (the simplest within the doubt about the fastest), vendor (the
            layout that the vendor documents), fsdp (with FSDP, on GPUs), other (of a kind that these are not), smallest
            (where memory is minimised), or the number of a runner-up. Default: simple.
        top: How many plans to show, the best one included. Default: 3.
    """
    several = "," in (question.cluster or "")
    stated = {"--at": at, "--like": like, "--pareto": pareto, "--cluster of several": several, "--module": module}
    stated |= {"--nodes": nodes, "--choose": choose, "--top": top, "--fix": question.fix, **to.stated, **options.stated}
    checks = place_checks(to.out)
    require(*idle_options(stated), *selection_checks(nodes, choose, top, several_nodes=pareto), *checks)
    to.refuse_to_replace(like, searches=at is None)
    selection = num_searched(choose, top or SHOWN), choose
    if like is not None:
        again = request_like(like, question, nodes, options.applied)
        return _answer_again(like, again, replace(options, objective=again.request.objective), to, selection)
    if several or to.deadline or to.budget:
        return _of_machines(question, options, to, nodes, selection)
    request, *larger = options.requests(on_this_machine(question), nodes, module)
    if pareto:
        return _frontier([request, *larger], options, to)
    coded = partial(_with_code, module=module)
    if at is not None:
        return _one_candidate(request, at, to, coded)
    start_s = time.monotonic()
    result = searched(request, selection[0], options)
    better = partial(_print_better_sizes, request, result, options, start_s)
    return _show_answers(answers_of(request, result, choose), to, better, coded=coded)


def selection_checks(
    nodes: Counts, choose: str | None, top: int | None, *, several_nodes: bool = False
) -> tuple[Check, ...]:
    """Check the options that say which answers there are; ``several_nodes`` may be named where a frontier is shown."""
    names = f"type {', '.join(NAMES)}, or a number up to {MOST_PLANS}"
    return (
        (several_nodes or len(nodes) <= 1, "--nodes", "takes several numbers with --pareto only; name one"),
        (top is None or 1 <= top <= MOST_PLANS, "--top", f"must be 1 to {MOST_PLANS}, not {top}"),
        (choose is None or choose in (*NAMES, *NUMBERS), f"--choose {choose}", names),
    )


def _of_machines(
    question: QuestionOptions, options: SearchOptions, to: Target, nodes: Counts, selection: tuple[int, str | None]
) -> int:
    """Compare several clusters; or answer on as many nodes as a deadline or a budget asks for."""
    with _searching(options) as watch:

        def ask(request: Request) -> SearchResult:
            return search(request, num_searched(selection[1], 1), watch, simple_within=options.simple_within)

        if "," in (question.cluster or ""):
            return compare_machines(question, (*nodes, 1)[0], options.applied, ask, to)
        try:
            size = sized(question, options.applied, ask, to, selection[1])
        except NoPlan:
            if watch.interrupted:
                raise KeyboardInterrupt from None
            raise
    result = searched(size.request, selection[0], options)
    if not to.json:
        print_notes(Words(f"on {counted(size.request.cluster.num_nodes, 'node')}: {size.why}", "strong"))
    about = {"size": {"nodes": size.request.cluster.num_nodes, "why": size.why}}, ""
    return _show_answers(answers_of(size.request, result, selection[1]), to, about=lambda _: about)


def _read_off(module: str, question: QuestionOptions) -> ModelSpec:
    """Read a decoder off its code; torch starts only for this."""
    line = StatusLine()
    line.show(f"reading the code of {module}", at_once=True)
    from autoshard.modules.decoder.reading import decoder_of

    try:
        return decoder_of(module, question.seq_len, lambda text: line.show(f"{module}: {text}"))
    finally:
        line.clear()


def _with_code(plan: Plan, module: str | None) -> Plan:
    """Add to the plan of a decoder what a run needs of its code; say why no run can train it, if that is so."""
    if module is None or plan.model.traced is None:
        return plan
    from autoshard.modules.training.planning import with_code

    line = StatusLine()
    line.show(f"laying the code of {module} out for a run", at_once=True)
    try:
        full = with_code(plan, module)
    finally:
        line.clear()
    return full


def _answer_again(
    path: Path, question: LikeQuestion, options: SearchOptions, to: Target, selection: tuple[int, str | None]
) -> int:
    """Answer the question of a plan for at most so many nodes: show so many plans, and write the one that is chosen."""
    old, (num_plans, choose) = question.old, selection
    num_plans = max(num_plans, *(num_searched(name, 1) for name in names_before(old)), 1)
    with _searching(options) as watch:

        def ask(request: Request, points: Known) -> SearchResult:
            return search(request, num_plans, watch, simple_within=options.simple_within, known=points)

        answer, not_kept = question.answered(watch, ask)
        _refuse_none(answer.request, answer.found, watch)
    result = answers_of(answer.request, answer.found, choose)
    result = result if choose else same_answer(old, result)

    def about(new: Plan) -> tuple[dict[str, Any], str]:
        data, sentences = resuming_answer(old, new, answer.sizes, not_kept)
        again = resume_command(path, to.out)
        return data, f"{sentences}\nto go on: {again}" if again else sentences

    return _show_answers(result, to, about=about, coded=partial(_with_code, module=old.code and old.code.source))


def _show_answers(
    result: PlanResult,
    to: Target,
    better: Callable[[], None] = lambda: None,
    about: Callable[[Plan], tuple[dict[str, Any], str]] = lambda _: ({}, ""),
    coded: Callable[[Plan], Plan] = lambda plan: plan,
) -> int:
    """Write the answer that was chosen and show all, ``better`` sizes, and ``about`` it what else there is to say."""
    with inside("--choose"):
        answer = result.runnable(result.name)
    chosen = coded(answer.plan)
    written = to.write(chosen)
    data, sentences = about(answer.plan)
    if to.json:
        figures = answers_json(answer, result.answers, result.certificate, result.no_vendor, result.remarks)
        total = total_json(answer.plan, to.total_tokens)
        print_answer({**figures, "total": total, "defaults": result.defaults, **data})
        return to.end(chosen, written)
    next_step = "" if written.refused else to.next_step
    if not to.verbose:
        print_answer(brief_sheets(result, answer, total_tokens=to.total_tokens, next_step=next_step))
        better()
        if sentences:
            print(sentences)
        return to.end(chosen, written)
    print_answer(
        plan_sheets(
            answer.plan,
            result.certificate.about(answer.plan),
            times=rank_times(answer.plan),
            answers=result.answers,
            total_tokens=to.total_tokens,
            next_step=next_step,
        )
    )
    if result.defaults:
        print_notes(result.defaults)
    if result.no_vendor:
        print_notes(f"no vendor's layout: {result.no_vendor}")
    for remark in result.remarks:
        print_notes(Words(remark, "warning"))
    names = "|".join(entry.name for entry in result.answers)
    print_notes(f"this is {answer.name}; --choose {names} writes another")
    better()
    if sentences:
        print(sentences)
    return to.end(chosen, written)


def _print_better_sizes(request: Request, result: SearchResult, options: SearchOptions, start_s: float) -> None:
    """Say which number of nodes, or batch, the ranks share better, if there is time for that since the start."""
    limit_s = None if options.time_limit is None else options.time_limit - (time.monotonic() - start_s)
    with watching(limit_s, format_seconds) as watch:
        for words in () if result.certificate.stopped else better_sizes(request, result.plans[0], watch):
            print_notes(f"odd number of nodes: {words}")


def _frontier(requests: Sequence[Request], options: SearchOptions, to: Target) -> int:
    """Show what cannot be bettered; where nothing fits on any number of nodes, say why on the last."""
    with watching(options.time_limit, format_seconds) as watch:
        edge = frontier(requests, watch)
        if not edge.plans:
            _refuse_unfinished(edge.ended, watch)
            raise unanswered(requests[-1], search(requests[-1], watch=watch), helpful=True, watch=watch)
    written = to.write(edge.plans[0])
    print_answer((frontier_json if to.json else frontier_sheets)(edge.plans, edge.gap, edge.ended))
    return to.end(edge.plans[0], written, "the fastest, ")


def plan_of(path: Path, question: QuestionOptions, nodes: int | None) -> Plan:
    """Read a plan file, or answer the question of a recipe."""
    if not is_recipe(path):
        stated = [*question.given, *(["nodes"] if nodes else [])]
        _refuse(stated, f"is part of the question that {path} has answered. Plan again with it, or run a recipe")
        return load(path)
    options = SearchOptions()
    return searched(options.requests(question, (nodes or 1,))[0], 1, options).preferred


def _refuse(names: Iterable[str], why: str) -> None:
    require(*((False, f"--{name.replace('_', '-')}", why) for name in names))


def searched(request: Request, num_plans: int, options: SearchOptions) -> SearchResult:
    """Search; where nothing fits, say by how much the best misses and what would help."""
    with _searching(options) as watch:
        result = search(request, num_plans, watch, simple_within=options.simple_within)
        _refuse_none(request, result, watch)
    return result


def _searching(options: SearchOptions) -> AbstractContextManager[Watcher]:
    return watching(options.time_limit, format_bytes if options.objective == "memory" else format_seconds)


def _refuse_none(request: Request, result: SearchResult, watch: Watcher) -> None:
    """Refuse an answer without a plan."""
    if not result.plans:
        _refuse_unfinished(result.certificate.ended, watch, result.nearest_miss)
        raise unanswered(request, result, helpful=True, watch=watch)


def _refuse_unfinished(ended: str, watch: Watcher, miss: Plan | None = None) -> None:
    """Say that a search which was stopped has found nothing yet; whether there is anything is not known."""
    if watch.interrupted:
        raise KeyboardInterrupt
    if ended != "complete":
        raise NoPlan(why_none_yet(ended, miss))


def _one_candidate(request: Request, text: str, to: Target, coded: Callable[[Plan], Plan]) -> int:
    """Evaluate one candidate: its rejections first, then an estimate where it has a shape."""
    estimate, shapeless = None, ""
    with inside("--at"):
        lnc = parse_pins(text).get("lnc")
        request = request.with_lnc_of(lnc if isinstance(lnc, int) else None)
        candidate, engine = resolved(request, Candidate.parse(text, request.cluster.num_ranks))
        refused = rejections_of(request, candidate, engine)
        try:
            estimate = request.plan(candidate, engine)
        except InputError as error:
            if not refused:
                raise
            shapeless = str(error)
    if estimate:  # a plan states no logical cores but those of its cluster
        reasons = reasons_against(estimate)
        refused = (*(reason for reason in refused if reason.rule_id == "lnc"), *reasons)
    estimate = coded(estimate) if estimate and not refused else estimate
    written = to.write(estimate) if estimate and not refused else Written()
    if to.json:
        print_answer({**candidate_json(estimate, refused, to.total_tokens), "defaults": request.defaults})
    else:
        print_answer([rejections_sheet(refused)])
        next_step = "" if refused or written.refused else to.next_step
        shown: Iterable[Sheet] | str = f"no estimate: {shapeless}"
        if estimate:
            times, tokens = rank_times(estimate), to.total_tokens
            shown = plan_sheets(estimate, times=times, total_tokens=tokens, next_step=next_step)
        print_answer(shown)
        if request.defaults:
            print_notes(request.defaults)
    return 1 if refused or estimate is None else to.end(estimate, written)
