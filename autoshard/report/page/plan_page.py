"""The page of one plan, or of several: the sheets of its answer with drawings, and what they rest on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from autoshard.plan.diff import Diff
from autoshard.plan.plan import Plan
from autoshard.report.answers import answers_notes, answers_table
from autoshard.report.comparison import comparison_sheets
from autoshard.report.explanation import blocks_sheet
from autoshard.report.page.charts import Axis, Dot, legend, scatter
from autoshard.report.page.document import document
from autoshard.report.page.elements import (
    Content,
    Markup,
    details,
    facts,
    notes,
    section,
    sheet_section,
    stacked_bar,
    table,
    tag,
)
from autoshard.report.page.headline import beside_table, headline, measured_facts
from autoshard.report.page.mesh_drawing import mesh_section
from autoshard.report.page.runs import run_section
from autoshard.report.page.shown import ShownPlan
from autoshard.report.page.timeline import lengths_of, memory_charts, shows_limits, timeline_legend, timelines
from autoshard.report.plan_sheets import (
    headroom_words,
    memory_table,
    plan_headline,
    plan_warnings,
    refused_sheet,
    stage_table,
    time_sheet,
)
from autoshard.report.sheet import Column, Fact, Node, Sheet, Table, Words, plain, sheet_rows
from autoshard.report.words import layout_words, prediction_of, time_bar
from autoshard.spec.cluster import LOCAL, Cluster
from autoshard.units import GIB, format_at_most, format_dollars, format_seconds

SECTIONS = ("others", "pareto", "time", "timeline", "memory", "mesh", "blocks", "refused", "basis")  # of a whole page
_STATE = ("weights", "gradients", "masters", "optimizer")
_KEYS = {"activations": "activations, logits"}  # drawn as one area
_NO_SEARCH = "This plan keeps no search, so that no other answer is known: it is of a run, of --at or made by hand."
_NOTHING = 1e-9  # of a step
_NEAR = 1.5  # times the fastest: slower layouts would squeeze the others into a corner


def plan_page(shown: Sequence[ShownPlan], data: Node, differences: Sequence[Diff] = ()) -> str:
    """Return the page: the first plan whole, the others beside it; ``differences`` are those of the others to it."""
    first, sections = shown[0], list[tuple[str, str, Markup]]()
    if data["run"]:
        sections.append(("run", "Run", run_section(first.plan, data["run"])))
    if len(shown) > 1:
        sections.append(("plans", "Plans", sheet_section(_plans(shown, data))))
    compared = zip(shown[1:], differences, [data["difference"], *data["further_differences"]], strict=False)
    for number, (rival, difference, figures) in enumerate(compared):
        names = first.name, rival.name
        name = "difference" if not number else f"difference-{number + 1}"
        drawn = difference_section(difference, figures, names, name=name, folded=number > 0)
        sections.append((name, f"{rival.name} against {first.name}", drawn))
    sections += plan_sections(shown, data)
    cluster = first.plan.cluster
    title = f"{first.plan.model.name} on {cluster.num_nodes} x {cluster.name}"
    title = f"{', '.join(page.name for page in shown)}: {len(shown)} plans" if len(shown) > 1 else title
    return document(title, sections, head=plan_head(first, data["plans"][0], data["run"], named=len(shown) > 1))


def plan_sections(
    shown: Sequence[ShownPlan], data: Node, names: Sequence[str] = SECTIONS
) -> Iterator[tuple[str, str, Markup]]:
    """Yield sections of the first plan, each with its name and its entry in a navigation."""
    first, figures = shown[0], data["plans"][0]
    drawings: dict[str, tuple[str, Callable[[], Markup]]] = {
        "time": ("Time", lambda: _time(figures)),
        "timeline": ("Timeline", lambda: _timelines(shown)),
        "memory": ("Memory", lambda: _memory(first, figures)),
        "mesh": ("Mesh", lambda: mesh_section("mesh", first.plan, figures)),
        "blocks": ("Operations", lambda: _blocks(first, figures)),
        "pareto": ("Trade-offs", lambda: _pareto(shown, data)),
        "others": ("Answers", lambda: _answers(first, figures)),
        "refused": ("Refused", lambda: sheet_section(refused_sheet(figures["search"], _proven(figures)))),
        "basis": ("Basis", lambda: _basis(shown)),
    }
    of_search = () if figures["search"] else ("refused", "pareto") if len(shown) == 1 else ("refused",)
    for name in (name for name in names if name not in of_search):
        entry, draw = drawings[name]
        yield name, entry, draw()


def plan_head(shown: ShownPlan, figures: Node, run: Node | None = None, *, named: bool = False) -> list[Content]:
    """Return the plan in two sentences and in large figures, those that a run measured first, and what is unusual."""
    whole, answer = plan_headline(shown.plan, figures), _answer_of(figures)
    run = run if run else Node(None)
    gap = [Fact("distance from the best", answer["gap"].figure(_distance))] if answer else []
    remark = [Words(shown.remark, "warning")] if shown.remark else []
    warnings = [*plan_warnings(shown.plan), *remark]
    plan, *predicted = map(partial(_priced, shown.plan), whole.facts)
    if run:
        memory = next(fact for fact in predicted if fact.name == "memory")
        predicted = [*measured_facts(run), replace(memory, name="memory, predicted")]
    said, (rests_on, _, details_of) = headline(shown, figures, run), prediction_of(shown.plan).basis.partition(":")
    rests_on += f":{details_of}" if rests_on == "uncalibrated" else ""
    basis = Words(f"Predicted seconds: {rests_on}.", "soft")
    return [
        tag("h1", f"{shown.name}: " if named else None, whole.title, tag("small", whole.about)),
        tag("p", said.text, class_="lead bad" if said.kind == "bad" else "lead said"),
        tag("p", tag("strong", plain(plan.name)), ": ", plain(plan.value)),
        facts([*predicted, *gap]),
        tag("p", tag("code", str(shown.plan.candidate))),
        *notes([*warnings, basis]),
    ]


def _priced(plan: Plan, fact: Fact) -> Fact:
    """Return a fact; that of a day says why it has no dollars."""
    lacks = fact.name == "day" and not plan.dollars and plan.cluster.name != LOCAL
    return replace(fact, beside="no price is known; plan --price takes yours") if lacks else fact


def _distance(gap: float) -> str:
    if gap > 1 - _NOTHING:
        return "not known"
    return "none, proven" if gap < _NOTHING else f"at most {format_at_most(gap)}"


def _plans(shown: Sequence[ShownPlan], data: Node) -> Sheet:
    words = {figures.path: layout_words(plan.plan) for plan, figures in zip(shown, data["plans"], strict=True)}
    questions = {figures.path: plan.plan for plan, figures in zip(shown, data["plans"], strict=True)}
    columns: dict[str, Column] = {
        "plan": "name", "model": lambda figures: questions[figures.path].model.name,
        "cluster": lambda figures: _place_words(questions[figures.path].cluster),
        ">step": ("prediction", "step_time_s"), ">tokens/s": ("prediction", "tokens_per_s"),
        ">MFU": ("prediction", "mfu"), ">memory": "peak_bytes",
        ">$ / 1e9 tokens": ("dollars", "usd_per_billion_tokens"), "layout": lambda figures: words[figures.path],
    }  # fmt: skip
    about = f"What follows is {shown[0].name} unless it names another plan."
    tables = [Table("", [*columns], sheet_rows(data["plans"], columns))]
    return Sheet(name="plans", title="The plans", about=about, tables=tables)


def _place_words(cluster: Cluster) -> str:
    return f"{cluster.num_nodes} x {cluster.name}"


def difference_section(
    difference: Diff, figures: Node, names: tuple[str, str], *, name: str = "difference", folded: bool = False
) -> Markup:
    """Return how the second plan differs from the first, as ``compare`` says it; its tables may open at a click."""
    first, second = names
    _, verdict, *tables = comparison_sheets(difference, figures, names, names)
    whole = Sheet(
        name=name,
        title=f"{second} against {first}",
        tables=[table for sheet in tables for table in sheet.tables],
        notes=[note for sheet in tables for note in sheet.notes],
    )
    said = tag("p", verdict.title, class_="lead"), notes(verdict.notes)
    if not folded:
        return sheet_section(whole, *said)
    inside = details("Part by part", map(table, whole.tables), notes(whole.notes))
    return sheet_section(replace(whole, tables=(), notes=()), *said, inside)


def _blocks(shown: ShownPlan, figures: Node) -> Markup:
    """Return the operations of each block; the table of the largest block is open."""
    assert shown.explanation, "operations are shown of plans that are explained"
    sheet = blocks_sheet(figures, shown.explanation.blocks)
    largest = max(sheet.tables, key=lambda block: len(block.rows), default=None)
    drawn = [details(block.title, table(replace(block, title="")), open=block is largest) for block in sheet.tables]
    return sheet_section(replace(sheet, tables=()), drawn)


def _time(figures: Node) -> Markup:
    """Return where the seconds of a step go, as a bar and as a table."""
    parts, step_s = figures["prediction"]["time_parts"].value, figures["prediction"]["step_time_s"].value
    largest = sorted(time_bar(parts, step_s), key=lambda part: -part.size)
    return sheet_section(time_sheet(figures), stacked_bar(largest, 1.0))


def _timelines(shown: Sequence[ShownPlan]) -> Markup:
    """Return the steps of all plans on one axis."""
    lengths_s = lengths_of([page.timeline for page in shown])
    named = (page.name if len(shown) > 1 else "" for page in shown)
    drawn = [timelines(page.plan, page.timeline, lengths_s, name) for page, name in zip(shown, named, strict=True)]
    about = (
        "A row is a pipeline rank. "
        + "Ranks that differ only in tp, dp, cp or ep do the same at the same time, and share a row."
    )
    colours = timeline_legend([page.timeline for page in shown])
    return section("timeline", "The pipeline's timeline", drawn, colours, about=about)


def _memory(shown: ShownPlan, figures: Node) -> Markup:
    """Return what each pipeline rank holds, over the step and in parts, and what it does."""
    plan, memories = shown.plan, prediction_of(shown.plan).stage_memory
    names = sorted({name for memory in memories for name, size in memory.parts.items() if size})
    names.sort(key=lambda name: (name not in _STATE, name))
    keys = {_KEYS.get(name, name): f"m-{name}" for name in names if name != "logits"}
    if shows_limits(plan, shown.timeline):
        keys |= {"what a plan may fill": "capacity", "what a rank can use": "usable"}
    all_ranks = len(memories)
    sheet = Sheet(
        name="memory",
        title="Memory and work of the pipeline ranks",
        about=f"headroom {headroom_words(plan)}",
        tables=[
            stage_table(plan, figures, all_ranks),
            memory_table(plan, figures, {name: (name,) for name in names}, all_ranks),
        ],
    )
    return sheet_section(sheet, memory_charts(plan, shown.timeline, shown.timeline.end_s), legend(keys))


def _answers(shown: ShownPlan, figures: Node) -> Markup:
    """Return the plan beside what others run, then all answers to the question, with what each loses by."""
    name, record = "others", figures["search"]
    if not record:
        return sheet_section(Sheet(name=name, title="Answers", notes=[_NO_SEARCH]))
    answers, beside = list(record["answers"]), beside_table(shown, figures)
    edited = "The plan was edited since: it is none of these."
    warnings = [] if _answer_of(figures) else [Words(edited, "warning")]
    whole_table = answers_table(answers, answers[0], figures["candidate"].value)
    whole = Sheet(
        name=name,
        title="The answers, and what others run",
        about=_proven(figures),
        notes=[*warnings, *answers_notes(answers)],
    )
    return sheet_section(
        whole,
        table(beside) if beside else None,
        details("All answers and runners-up", table(whole_table), open=not beside),
    )


def _proven(figures: Node) -> str:
    """Say what the search proves of the best plan, and how far this one may be from the best where it is another."""
    record, answer = figures["search"], _answer_of(figures)
    best = record["answers"][0]
    of_best = f"{best['name'].value}: {record['statement'].value}"
    if not answer or answer["gap"].value == best["gap"].value or answer["gap"].value > 1 - _NOTHING:
        return of_best
    return f"{answer['name'].value}, this plan: {_distance(answer['gap'].value)} from the best; {of_best}"


def _answer_of(figures: Node) -> Node | None:
    """Return what the search says of the plan; None where there is no search, or the plan was edited since."""
    answers = figures["search"]["answers"] if figures["search"] and not figures["remark"] else ()
    return next((answer for answer in answers if answer["candidate"].value == figures["candidate"].value), None)


def _pareto(shown: Sequence[ShownPlan], data: Node) -> Markup:
    """Return step time against memory and dollars: the layouts that were solved, the answers, and the plans."""
    first = data["plans"][0]
    record = first["search"]
    layouts = [(layout, "other", "") for layout in record["layouts"]] if record else []
    named = [answer for answer in record["answers"] if not answer["name"].value.isdecimal()] if record else []
    layouts += [(answer, "answer", answer["name"].value) for answer in named if not answer["against"].value]
    least_s = min((layout["step_time_s"].value for layout, _, _ in layouts), default=0.0)
    near = [point for point in layouts if point[0]["step_time_s"].value <= _NEAR * least_s or point[2]]
    time_s, usd = first["prediction"]["step_time_s"].value, first["dollars"]
    memory, dollars = list[Dot](), list[Dot]()
    for layout, kind, name in near:
        at_s, words = layout["step_time_s"].value, layout["candidate"].value
        memory.append(_point(at_s, layout["peak_bytes"].value / GIB, words, kind, name))
        if usd:  # of the same nodes
            share = at_s / time_s
            dollars.append(_point(at_s, share * usd["usd_per_billion_tokens"].value, words, kind, name))
    for plan in data["plans"]:
        at_s, words, name = plan["prediction"]["step_time_s"].value, plan["candidate"].value, plan["name"].value
        memory.append(_point(at_s, plan["peak_bytes"].value / GIB, words, "plan", name))
        if plan["dollars"]:
            dollars.append(_point(at_s, plan["dollars"]["usd_per_billion_tokens"].value, words, "plan", name))
    step = Axis(name="a step", text=format_seconds)
    charts = [scatter("Time and memory", memory, step, Axis(name="fullest rank, GiB", text="{:g}".format))]
    if dollars:
        charts.append(scatter("Time and dollars", dollars, step, Axis(name="$ a billion tokens", text=format_dollars)))
    sizes = {page.plan.cluster.num_nodes for page in shown}
    about = "Grey dots: the best plan of each layout that the search solved. " if record else ""
    about += "The line joins those that nothing betters."
    about += f" {len(layouts) - len(near)} slower layouts are left out." if len(layouts) > len(near) else ""
    if dollars and len(sizes) == 1:
        about += " On one cluster dollars are proportional to time; report plans of several sizes to compare them."
    title = "Time, memory and dollars" if dollars else "Time and memory"
    return section("pareto", title, tag("div", charts, class_="charts"), about=about)


def _point(time_s: float, size: float, words: str, kind: str, label: str) -> Dot:
    tip = f"{label + ': ' if label else ''}{format_seconds(time_s)}; {words}"
    return Dot(x=time_s, y=size, tip=tip, kind=kind, label=label)


def _basis(shown: Sequence[ShownPlan]) -> Markup:
    """Return what the figures rest on, of all plans; then the constants and sources of the first."""
    plan = shown[0].plan
    bases = dict[str, list[str]]()
    for page in shown:
        bases.setdefault(prediction_of(page.plan).basis, []).append(page.name)
    names = (f" of {', '.join(plans)}" if len(bases) > 1 else "" for plans in bases.values())
    chip, cluster = plan.cluster.chip, plan.cluster
    sources = [(f"{chip.name}: {name}", text) for name, text in chip.sources.items()]
    sources += [(f"{link.name}: {name}", text) for link in cluster.links for name, text in link.sources.items()]
    sources += [("model", plan.model.source)] if plan.model.source else []
    pairs = [pair.partition("=") for pair in plan.provenance.get("calibration.constants", "").split(",")]
    constants = [(name.replace("_", " "), number) for name, equals, number in pairs if equals and float(number)]
    return section(
        "basis",
        "What the figures rest on",
        [tag("p", f"Seconds{whose}: {basis}.") for whose, basis in zip(names, bases, strict=True)],
        details("Constants of the seconds", table(Table("", ("constant", ">value"), constants))) if constants else None,
        details("Sources of the numbers of the cluster and the model", table(Table("", ("number", "source"), sources))),
    )
