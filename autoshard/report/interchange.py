"""The sheets of ``import`` and ``export``: others' configurations, their predictions, and what they cannot say."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from autoshard.exports.price import ExportAnswer
from autoshard.imports.answer import ImportAnswer
from autoshard.plan.plan import Plan
from autoshard.report.plan_sheets import plan_figures, plan_headline
from autoshard.report.sheet import Cell, Fact, Node, Sheet, Words
from autoshard.report.structured import rejection_json
from autoshard.report.words import counted, layout_words, prediction_of, ratio_words, software_of
from autoshard.spec.record import encode

_MOST_NAMED = 12  # keys that were not read; --json has them all


def import_json(answer: ImportAnswer) -> dict[str, Any]:
    """Return everything that is said of a configuration."""
    question = answer.question
    run, request = question.run, question.request
    return {
        "program": run.program.title,
        "file": run.file,
        "configuration": run.name,
        "model": request.model.name,
        "model_from": question.model_from,
        "cluster": request.cluster.name,
        "nodes": request.cluster.num_nodes,
        "ranks": request.cluster.num_ranks,
        "seq_len": request.workload.seq_len,
        "global_batch": request.workload.global_batch,
        "precision": request.workload.precision.name,
        "candidate": str(question.candidate),
        "keys_read": run.stated,
        "not_read": list(run.unread),
        "no_effect": list(run.harmless),
        "remarks": list(run.remarks),
        "assumed": [{"what": guess.what, "why": guess.why, "option": guess.option} for guess in question.assumed],
        "rejections": [rejection_json(reason) for reason in answer.refused],
        "only_there": [rejection_json(reason) for reason in answer.foreign],
        "no_estimate": answer.shapeless,
        "imported": answer.plan and plan_figures(answer.plan),
        "best": answer.best and plan_figures(answer.best),
        "ratio": answer.ratio and encode(answer.ratio),
        "no_best": answer.why_no_best,
    }


def import_sheets(answer: ImportAnswer, figures: Node, next_step: str) -> Iterator[Sheet]:
    """Yield one screen: the configuration and its prediction, what cannot run, the best plan, what was not read."""
    run, plan = answer.question.run, answer.plan
    name = f"{run.file}{f':{run.name}' if run.name else ''}"
    yield Sheet(title=(Words(name, "strong"), f": {run.program.title}, {counted(run.stated, 'key')} read"))
    request = answer.question.request
    if plan is not None:
        headline = plan_headline(plan, figures["imported"])
        yield Sheet(title=headline.title, about=headline.about, facts=[*headline.facts, *_verdict(answer)])
    else:
        question = f"{request.model.name} on {request.cluster.num_nodes} x {request.cluster.name}"
        layout = Fact("layout", Words(str(answer.question.candidate), "code"))
        yield Sheet(title=question, facts=[layout, *_verdict(answer)])
    best = [Fact("" if number else "best", cell) for number, cell in enumerate(_best_words(answer, figures))]
    model = Fact("model", request.model.name, f": {answer.question.model_from}")
    notes = [*_reading_notes(run.unread, len(run.harmless)), *(Words(remark, "warning") for remark in run.remarks)]
    notes = [*notes, *(Words(f"assumed {guess}", "soft") for guess in answer.question.assumed)]
    more = [Fact("next", Words(next_step, "code"))] if next_step else []
    yield Sheet(facts=[*best, model, *more], notes=notes)


def _verdict(answer: ImportAnswer) -> Iterator[Fact]:
    """Yield the layout in text, and every reason why it cannot run."""
    if answer.plan is not None:
        yield Fact("layout", Words(str(answer.plan.candidate), "code"))
    for name, reasons in groupby(answer.refused, lambda reason: reason.rule_id):
        first, *likewise = reasons
        if name == "memory":
            text = first.message.partition(": ")[2]
            more = f" Likewise on {len(likewise)} more." if likewise else ""
            yield Fact(Words("cannot run", "bad"), f"{text}.{more}")
            continue
        yield from (Fact(Words("cannot run", "bad"), str(reason)) for reason in (first, *likewise))
    if answer.runs:
        only = f", in {answer.question.run.program.title} only" if answer.foreign else ""
        yield Fact(Words("runs", "good"), f"no Rule speaks against it, and it fits in memory{only}")


def _best_words(answer: ImportAnswer, figures: Node) -> Iterator[Cell]:
    """Yield the best plan and how it compares, or why there is none."""
    best, program = answer.best, answer.question.run.program.title
    if best is None:
        if answer.why_no_best:
            yield f"nothing fits on these nodes: {answer.why_no_best}"
        return
    step = figures["best"]["prediction"]["step_time_s"].figure()
    if answer.plan is not None and best.candidate == answer.plan.candidate:
        yield f"no other layout that {program} can run is chosen before this one"
        return
    yield (Words(layout_words(best), "strong"), ", ", step, " a step")
    if answer.ratio:
        yield f"{ratio_words(answer.ratio)} (80% interval of the ratio)"
    yield Words(str(best.candidate), "code")


def _reading_notes(unread: Sequence[str], num_harmless: int) -> Iterator[Cell]:
    """Yield which keys were not read, and how many have no effect."""
    shown = list(unread[:_MOST_NAMED])
    more = [f"and {len(unread) - _MOST_NAMED} more, which --json names"] if len(unread) > _MOST_NAMED else []
    if shown:
        yield Words(f"not read: {'; '.join([*shown, *more])}", "warning")
    yield Words(f"{counted(num_harmless, 'key')} of the file without effect on the time or memory of a step", "soft")


def export_json(answer: ExportAnswer, out: str) -> dict[str, Any]:
    """Return everything that is said of an export, with the text of the file."""
    return {
        "program": answer.program.title,
        "file": out,
        "text": answer.text,
        "candidate": str(answer.expressed.candidate),
        "differences": [encode(difference) for difference in answer.expressed.differences],
        "not_in_the_file": dict(answer.program.limits.unsaid),
        "planned": answer.planned and _priced(answer.planned),
        "as_run": answer.as_run and _priced(answer.as_run),
        "no_price": answer.unpriced,
        "ratio": answer.ratio and encode(answer.ratio),
        "rejections": [rejection_json(reason) for reason in answer.refused],
    }


def _priced(plan: Plan) -> Mapping[str, Any]:
    return {"candidate": str(plan.candidate), "step_time_s": prediction_of(plan).step_time_s}


def export_sheets(answer: ExportAnswer, figures: Node) -> Iterator[Sheet]:
    """Yield what a program cannot express of a plan, what it will do instead, and the price of that."""
    program, differences = answer.program.title, answer.expressed.differences
    lost = [Fact(Words("cannot say", "warning"), loss.what, f"; instead: {loss.instead}") for loss in differences]
    lost = lost or [Fact(Words("says all", "good"), f"{program} can express every choice of this layout")]
    missing = answer.program.limits.unsaid.items()
    unsaid = [Fact("not in it", what.rpartition(".")[2], f": {where}") for what, where in missing]
    price: list[Fact] = []
    if answer.planned and answer.as_run:
        planned, run = (figures[key]["step_time_s"].figure() for key in ("planned", "as_run"))
        price = [Fact("step", run, (f" of {software_of(answer.as_run)} as {program} will run it"))]
        if differences:
            price = [Fact("as planned", planned, f" of {software_of(answer.planned)}"), Fact("as it runs", run)]
        price += [Fact("price", f"{ratio_words(answer.ratio)} (80% interval)")] if answer.ratio else []
    elif answer.unpriced:
        price = [Fact("price", f"not known: {answer.unpriced}")]
    refused = [Fact(Words("cannot run", "bad"), str(reason)) for reason in answer.refused]
    layout = Fact("layout", Words(str(answer.expressed.candidate), "code"))
    yield Sheet(title=f"for {program}", facts=[layout, *lost, *unsaid, *price, *refused])
