"""The answers of a plan's search on its page: steps, how much slower each is, and where its time goes."""

from autoshard.report.page.charts import Part, stacked_bar
from autoshard.report.page.elements import Content, Markup, Node, linked, section, table, tag
from autoshard.report.words import TIME_WORDS, signed_words
from autoshard.units import format_bytes, format_seconds


def answers_section(own: Node) -> Markup:
    """Return the other answers to the question, with what each loses by."""
    record = own["search"]
    if not record:
        words = "This plan file holds no search: it was made by --at, by hand, or by an older autoshard. Plan again."
        return section("others", "Runners-up", tag("p", words))
    answers = record["answers"]
    longest = max(one["step_time_s"].value for one in answers)
    best = answers[0]
    rows = [
        (
            one["name"].value,
            one["step_time_s"].figure(format_seconds),
            *_slower(one),
            one["peak_bytes"].figure(format_bytes),
            stacked_bar(time_parts(one["time_parts"], one["step_time_s"].value), longest),
            _loses(one, best),
            tag("code", one["candidate"].value),
        )
        for one in answers
    ]
    columns = (
        "name",
        ">step",
        ">slower",
        ">80% of that",
        ">sure",
        ">fullest rank",
        "where its time goes",
        "why",
        "layout",
    )
    sources = (
        tag("p", linked(f"{one['name'].value}: {one['source'].value}")) for one in answers if one["source"].value
    )
    edited = answer_of(own) is None
    warning = tag("p", "The plan was edited since: it is none of these.", class_="warnings") if edited else None
    return section(
        "others", "Answers and runners-up", warning, table(columns, rows), sources, about=record["statement"].value
    )


def _slower(one: Node) -> tuple[Content, ...]:
    """Return how much slower than the fastest an answer is, what holds 80% of that, and how sure it is slower."""
    slower, ratio = one["slower"].figure(lambda share: f"{share:+.1%}"), one["ratio"]
    if not ratio:
        return slower, "", ""
    low, high = (ratio[end].figure(lambda end: signed_words(end - 1)) for end in ("low", "high"))
    return slower, tag("span", low, " to ", high), ratio["faster"].figure(lambda chance: f"{1 - chance:.0%}")


def _loses(one: Node, best: Node) -> str:
    """Say by which part of the time an answer loses most, or what is promised of it."""
    against = "; ".join(one["against"].value)
    if against:
        return f"may not run: {against}"
    if not one["name"].value.isdecimal():
        return one["why"].value
    parts, others = one["time_parts"].value, best["time_parts"].value
    more = {part: parts.get(part, 0.0) - others.get(part, 0.0) for part in {**others, **parts}}
    part = max(more, key=lambda name: more[name])
    return f"{format_seconds(more[part])} more {TIME_WORDS.get(part, part)}"


def answer_of(own: Node) -> Node | None:
    """Return what the search says of the plan; None where there is no search, or the plan was edited since."""
    answers = own["search"]["answers"] if own["search"] and not own["remark"] else ()
    return next((one for one in answers if one["candidate"].value == own["candidate"].value), None)


def time_parts(parts: Node, step_s: float) -> list[Part]:
    """Return the parts of a step for a bar."""
    return [
        Part(
            size=time_s.value,
            kind=f"t-{name}",
            tip=f"{TIME_WORDS.get(name, name)}: {format_seconds(time_s.value)}, {time_s.value / step_s:.1%}",
        )
        for name, time_s in sorted(parts.entries(), key=lambda entry: [*TIME_WORDS, entry[0]].index(entry[0]))
    ]
