"""What a page says first: a sentence that can be repeated, what was measured, and the plan beside what others run."""

from collections.abc import Iterator

from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.report.answers import plan_words
from autoshard.report.page.shown import ShownPlan
from autoshard.report.sheet import Bar, Cell, Fact, Node, Table, Words, plain
from autoshard.report.words import TIME_WORDS, layout_words, prediction_of, share_words, time_bar, tokens_a_day
from autoshard.spec.cluster import LOCAL
from autoshard.units import counted, format_at_most, format_bytes, format_count, format_dollars, format_seconds

_LIKE = ("vendor", "other", "fsdp")  # answers that are what people run
_LEAST_SHARE = 0.005  # of a step: smaller parts of it are not compared
_FACTOR = 1.5  # from which on a ratio is clearer than a percentage
_SAME = 0.0005  # of a step


def headline(shown: ShownPlan, figures: Node, run: Node) -> Words:
    """Return the plan, and its run, in one sentence."""
    plan, predicted = shown.plan, prediction_of(shown.plan)
    if (missing := predicted.peak_bytes - predicted.capacity_bytes) > 0:
        full = f"This plan does not fit: its fullest rank needs {format_bytes(missing)} more than it may fill."
        return Words(full, "bad")
    if run:
        return _run_sentence(run)
    cluster = plan.cluster
    place = "this machine" if cluster.name == LOCAL else f"{cluster.num_nodes} x {cluster.name}"
    tokens = f"{tokens_a_day(plan)} a day"
    usd = plan.dollars.price_usd_per_node_hour * 24 * cluster.num_nodes if plan.dollars else None
    costs = f" for {format_dollars(usd)}" if usd is not None else ""
    against = _against(plan, figures)
    return Words(f"{plan.model.name} trains on {tokens}{costs} on {place}, by prediction{against}.", "strong")


def _against(plan: Plan, figures: Node) -> str:
    """Say how much shorter or longer the steps are than those of what people run; otherwise how good the search was."""
    step_s = prediction_of(plan).step_time_s
    for answer in others_of(figures):
        if answer["name"].value in _LIKE and not answer["against"].value:
            share = step_s / answer["step_time_s"].value - 1
            if abs(share) < _SAME:
                return f"; its steps are as long as those of {_whose(answer)}"
            side = "shorter" if share < 0 else "longer"
            return f"; its steps are {share_words(share)} {side} than those of {_whose(answer)}"
    record, candidate = figures["search"], str(plan.candidate)
    gaps = (
        [answer["gap"].value for answer in record["answers"] if answer["candidate"].value == candidate]
        if record
        else []
    )
    if not gaps or gaps[0] >= 1:
        return ""
    limit = f"more than {format_at_most(gaps[0])} better" if gaps[0] else "better"
    return f"; no layout that was searched is {limit}"


def _whose(answer: Node) -> str:
    why = answer["why"].value
    if answer["name"].value == "other":
        return why.replace("the fastest", "the fastest layout", 1)
    return "FSDP" if answer["name"].value == "fsdp" else f"the layout that {why.partition(', for ')[0]} documents"


def _run_sentence(run: Node) -> Words:
    measured, steps = run["measured"], run["steps"].value
    words = f"The run took {plain(measured['step_time_s'].figure())} a step"
    if not run["same_machine"].value:
        return Words(f"{words}, on another machine than the prediction is about.", "strong")
    step_s, predicted = measured["step_time_s"].value, run["predicted"]
    ratio, low_s, high_s = step_s / predicted["step_time_s"].value, predicted["low_s"].value, predicted["high_s"].value
    is_inside = low_s <= step_s <= high_s
    if 1 / _FACTOR < ratio < _FACTOR:
        compared = f"{share_words(ratio - 1)} {'more' if ratio >= 1 else 'less'} than predicted"
    else:
        compared = f"{ratio:.3g} times what was predicted" if ratio > 1 else f"1/{1 / ratio:.3g} of what was predicted"
    within = "within" if is_inside else "outside"
    words = f"{words}, {compared} and {within} its interval, over {counted(len(steps), 'step')}."
    return Words(words, "strong" if is_inside else "bad")


def measured_facts(run: Node) -> Iterator[Fact]:
    """Yield what a run measured as large figures, each beside its prediction."""
    measured, predicted, losses = run["measured"], run["predicted"], run["measured"]["losses"]
    comparable = run["same_machine"].value
    between: Cell = (
        "; predicted ",
        predicted["step_time_s"].figure(),
        " (",
        predicted["low_s"].figure(),
        " to ",
        predicted["high_s"].figure(),
        ")",
    )
    yield Fact(
        "step, measured", measured["step_time_s"].figure(), ("median", between if comparable else " on another machine")
    )
    speed = measured["tokens_per_s"].figure(lambda count: format_count(count, "tokens/s"))
    expected = predicted["tokens_per_s"].figure(lambda count: format_count(count, "tokens/s"))
    mfu: Cell = (
        ("MFU ", measured["mfu"].figure(), "; predicted ", expected, ", MFU ", predicted["mfu"].figure())
        if comparable
        else ""
    )
    yield Fact("speed, measured", speed, mfu)
    if losses["first"].value is not None and losses["last"].value is not None:
        yield Fact(
            "loss, measured", losses["last"].figure("{:.4f}".format), ("from ", losses["first"].figure("{:.4f}".format))
        )


def others_of(figures: Node) -> list[Node]:
    """Return the named answers that are other layouts than the plan: what vendors document, FSDP, the fastest."""
    record, candidates = figures["search"], [figures["candidate"].value]
    named = {answer["name"].value: answer for answer in record["answers"]} if record else {}
    rivals: list[Node] = []
    for name in (*_LIKE, "fastest", "smallest", "simple"):
        if name in named and named[name]["candidate"].value not in candidates:
            rivals.append(named[name])
            candidates.append(named[name]["candidate"].value)
    return rivals


def beside_table(shown: ShownPlan, figures: Node) -> Table | None:
    """Return the plan beside the layouts that others run, and beside the fastest: step, memory, parts of the time."""
    rivals, prediction = others_of(figures), figures["prediction"]
    if not rivals:
        return None
    step_s = prediction["step_time_s"].value
    sides = [prediction, *rivals]
    longest_s = max(side["step_time_s"].value for side in sides)
    parts = [side["time_parts"] for side in sides]
    speeds = (side["tokens_per_s"].figure(lambda count: format_count(count, "tokens/s")) for side in sides)
    sizes = (side["peak_bytes"].figure() for side in (figures, *rivals))
    rows: list[list[Cell]] = [
        ["layout", layout_words(shown.plan), *map(_layout, rivals)],
        ["step", *(side["step_time_s"].figure() for side in sides)],
        ["against this plan", "", *(_more(answer, step_s) for answer in rivals)],
        ["speed", *speeds],
        ["memory of the fullest rank", *sizes],
    ]
    if figures["dollars"]:
        rows.append(["dollars per step", *(side["usd_per_step"].figure() for side in (figures["dollars"], *rivals))])
    rows.append(["where its time goes", *(Bar(1, 0, time_bar(part.value, longest_s)) for part in parts)])
    for name in [*TIME_WORDS, *(name for name in prediction["time_parts"].value if name not in TIME_WORDS)]:
        if max(part.value.get(name, 0.0) for part in parts) >= _LEAST_SHARE * longest_s:
            seconds = (part[name].figure(format_seconds) if name in part.value else "" for part in parts)
            rows.append([TIME_WORDS.get(name, name), *seconds])
    heads = ["this plan", *(answer["name"].value for answer in rivals)]
    return Table("This plan beside what others run", ("", *heads), rows)


def _layout(answer: Node) -> Cell:
    words = plan_words(Candidate.parse(answer["candidate"].value))
    refused = [Words(f"; may not run: {reason.partition('; ')[0]}", "bad") for reason in answer["against"].value]
    return (words, *refused)


def _more(answer: Node, step_s: float) -> str:
    share = answer["step_time_s"].value / step_s - 1
    return "as long" if abs(share) < _SAME else f"{share_words(share)} {'longer' if share > 0 else 'shorter'}"
