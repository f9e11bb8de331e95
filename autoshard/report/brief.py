"""The first answer to a question, on one screen: what, how fast, how full, how dear, how sure, and what comes next."""

from collections.abc import Iterator, Sequence

from autoshard.cost.doubt import ratio_of
from autoshard.plan.explanation import Answer, Certificate
from autoshard.plan.plan import Plan
from autoshard.report.plan_sheets import (
    day_fact,
    doubts,
    largest_parts,
    plan_figures,
    question_words,
    total_words,
    work_words,
)
from autoshard.report.sheet import Cell, Fact, Node, Sheet, Table, Words
from autoshard.report.words import (
    axes_words,
    kept_free_words,
    layout_words,
    prediction_of,
    program_lines,
    search_words,
    signed_words,
    software_of,
    spill_words,
)
from autoshard.search.ask.answers import PlanResult
from autoshard.units import format_bytes, format_count, format_seconds

_MOST_DOUBTS = 3  # that the first answer names


def brief_sheets(
    result: PlanResult, answer: Answer, *, total_tokens: float | None = None, next_step: str = ""
) -> Iterator[Sheet]:
    """Yield the answers to a question in about twenty lines; ``answer`` is the one that the plan file gets."""
    plan, written, answers, defaults = answer.plan, answer.name, result.answers, result.defaults
    certificate = result.certificate.about(plan)
    figures = Node(plan_figures(plan))
    if certificate.stopped:
        words = f"The search was not finished ({certificate.stopped}): this is the best plan so far, not a proven one"
        yield Sheet(notes=[Words(words, "bad")])
    assumed = f"assumed {defaults}" if defaults else ""
    yield Sheet(title=question_words(plan), about=work_words(plan), notes=[Words(assumed, "soft")] if assumed else [])
    yield Sheet(facts=[*_facts(plan, figures), *_sureness(plan, certificate, total_tokens)])
    shown = shown_answers(answers, written)
    if len(shown) > 1:
        yield Sheet(tables=[answers_beside(plan, shown, written)])
    lines = [Words(line, "warning") for line in (*result.remarks, *program_lines(plan))]
    lines += doubts(prediction_of(plan).outside, _MOST_DOUBTS)
    basis = Words(f"prediction {prediction_of(plan).basis.partition(':')[0]}", "soft")
    yield Sheet(notes=[*_misfit(plan), *lines, basis])
    choices = "|".join(answer.name for answer in answers if answer.name != written)
    more = Fact("more", f"-v shows stages, runners-up and sources; --choose {choices} writes another answer")
    yield Sheet(facts=[*([Fact("next", Words(next_step, "code"))] if next_step else []), more])


def shown_answers(answers: Sequence[Answer], written: str) -> list[Answer]:
    """Return the answers of the first screen: what is written, what people run, and the fastest."""
    named = {answer.name: answer for answer in answers}
    usual = "vendor" if "vendor" in named else "other"
    shown = [named[name] for name in dict.fromkeys((written, usual, "fsdp", "fastest", "smallest")) if name in named]
    return [answer for place, answer in enumerate(shown) if answer.plan not in [rival.plan for rival in shown[:place]]]


def _facts(plan: Plan, figures: Node) -> Iterator[Fact]:
    """Yield the plan in words, its speed, memory, price and the largest parts of its time."""
    prediction, predicted = figures["prediction"], prediction_of(plan)
    causal = prediction["mfu_causal"]  # beside that of all pairs, which other commands and runs count
    masked: Cell = (" (", causal.figure(), " causal)") if causal else ""
    low, high = (format_seconds(time_s) for time_s in (predicted.low_s, predicted.high_s))
    per_second = prediction["tokens_per_s"].figure(lambda count: format_count(count, "tokens/s"))
    yield Fact("plan", Words(layout_words(plan), "strong"))
    yield Fact("layout", Words(str(plan.candidate), "code"))
    yield Fact("step", prediction["step_time_s"].figure(), (f" ({low} to {high}), ", per_second,
               ", MFU ", prediction["mfu"].figure(), masked, f" of {software_of(plan)}"))  # fmt: skip
    yield Fact("time", largest_parts(predicted))
    usable = format_bytes(plan.cluster.rank_memory_bytes)
    room = spill_words(plan) or kept_free_words(plan)
    kept_free = "; ".join(filter(None, (f" of {usable} on the fullest rank", room)))
    yield Fact("memory", figures["peak_bytes"].figure(), kept_free)
    yield day_fact(plan, figures["dollars"])


def _sureness(plan: Plan, certificate: Certificate, total_tokens: float | None) -> Iterator[Fact]:
    """Yield what all tokens take, and how good the plan is by the cost model."""
    if total_tokens:
        yield Fact("total", total_words(plan, total_tokens))
    looked = f"; {certificate.changes_in_short}" if certificate.num_changes else ""
    yield Fact("search", f"{search_words(certificate)}, by this cost model{looked}")


def answers_beside(plan: Plan, answers: Sequence[Answer], written: str) -> Table:
    """Return the answers beside what is written: time, memory, layout, and why each stands here."""
    rows: list[list[Cell]] = []
    for answer in answers:
        prediction, layout = prediction_of(answer.plan), answer.plan.candidate
        more: Cell = ""
        if answer.plan is not plan and not answer.against:
            ratio = ratio_of(answer.plan, plan)
            more = f"{signed_words(ratio.value - 1)} ({signed_words(ratio.low - 1)} to {signed_words(ratio.high - 1)})"
        why = "written" if answer.name == written else "" if answer.name in ("fastest", "smallest") else answer.why
        why = why.partition(", for ")[0]
        why = f"may not run: {answer.against[0].partition('. ')[0]}" if answer.against else why
        rows.append([answer.name, format_seconds(prediction.step_time_s), more, format_bytes(prediction.peak_bytes),
                     f"{axes_words(layout)}; {layout.schedule}", why])  # fmt: skip
    title = "Answers; what each takes more than the written one, with the 80% interval of that"
    return Table(title, ("name", ">step", ">more time", ">memory", "layout", "why"), rows, whole=("name",),
                 drop=("why",))  # fmt: skip


def _misfit(plan: Plan) -> list[Cell]:
    missing = prediction_of(plan).peak_bytes - prediction_of(plan).capacity_bytes
    return [Words(f"does not fit: {format_bytes(missing)} too much on the fullest rank", "bad")] if missing > 0 else []
