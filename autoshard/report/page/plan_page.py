"""The page of one plan, or of several: what is chosen, what it takes, why, and what it rests on."""

from collections.abc import Iterator, Sequence

from autoshard.report.page.answers import answer_of, answers_section, time_parts
from autoshard.report.page.charts import Axis, Dot, legend, scatter, stacked_bar
from autoshard.report.page.document import document
from autoshard.report.page.elements import Content, Markup, Node, details, facts, linked, section, table, tag
from autoshard.report.page.mesh_drawing import mesh_section
from autoshard.report.page.runs import run_section
from autoshard.report.page.shown import ShownPlan
from autoshard.report.page.timeline import memory_charts, timeline, timeline_legend
from autoshard.report.terminal import compiled_words, headroom_words, outside_lines, prediction_of, reserved_lines
from autoshard.report.words import TIME_WORDS, layers_of, layout_words, nodes_of, program_lines, program_of
from autoshard.units import GIB, format_at_most, format_bytes, format_count, format_dollars, format_seconds

_STATE = ("weights", "gradients", "masters", "optimizer")
_KEYS = {"activations": "activations, logits"}  # drawn as one area
_NO_SEARCH = "Not known, because the plan file holds no search."
_NOTHING = 1e-9  # of a step
_NEAR = 1.5  # times the fastest: slower layouts would squeeze the others into a corner


def plan_page(shown: Sequence[ShownPlan], data: Node) -> str:
    """Return the page: the first plan whole, the others beside it."""
    first, own = shown[0], data["plans"][0]
    found = list[tuple[str, str, Markup]]()
    if len(shown) > 1:
        found.append(("plans", "Plans", _plans(shown, data)))
    if data["difference"]:
        found.append(("difference", "Difference", _difference(data["difference"], shown[0].name, shown[1].name)))
    if data["run"]:
        found.append(("run", "Run", run_section("run", first.plan, data["run"])))
    found += [
        ("time", "Time", _time(own)),
        ("timeline", "Timeline", _timelines(shown)),
        ("memory", "Memory", _memory(first, own)),
        ("mesh", "Mesh", mesh_section("mesh", first.plan, own)),
        ("blocks", "Operations", _blocks(own)),
        ("pareto", "Trade-offs", _pareto(shown, data)),
        ("others", "Runners-up", answers_section(own)),
        ("refused", "Refused", _refused(own)),
        ("basis", "Basis", _basis(shown)),
    ]
    cluster = first.plan.cluster
    title = f"{first.plan.model.name} on {cluster.num_nodes} x {cluster.name}"
    return document(title, found, head=_headline(first, own))


def _headline(shown: ShownPlan, own: Node) -> list[Content]:
    """Return the plan in a sentence and in large figures, with what is unusual about it."""
    plan, prediction = shown.plan, own["prediction"]
    cluster, workload = plan.cluster, plan.workload
    question = (
        f"{workload.global_batch} sequences of {workload.seq_len} tokens a step on {cluster.num_nodes} x {cluster.name}"
        f" ({cluster.num_ranks} ranks), {workload.precision.weights}, {workload.optimizer}, ZeRO-{plan.zero}"
    )
    step = prediction["step_time_s"].figure(format_seconds)
    interval = (prediction["low_s"].figure(format_seconds), " to ", prediction["high_s"].figure(format_seconds))
    pairs: list[tuple[str, Content]] = [
        (f"a step of {program_of(plan)}", (step, tag("small", interval))),
        ("tokens a second", prediction["tokens_per_s"].figure(format_count)),
        ("MFU", (prediction["mfu"].figure(_percent), _causal(prediction))),
        ("fullest rank", (own["peak_bytes"].figure(format_bytes),
                          tag("small", "of ", prediction["capacity_bytes"].figure(format_bytes)))),
    ]  # fmt: skip
    if own["dollars"]:
        billion = own["dollars"]["usd_per_billion_tokens"].figure(format_dollars)
        date = own["dollars"]["price_date"].value or "an unknown date"
        pairs.append(("a billion tokens", (billion, tag("small", f"price of {date}"))))
    if (answer := answer_of(own)) is not None:
        pairs.append(("distance from the best", answer["gap"].figure(_distance)))
    missing = own["peak_bytes"].value - own["prediction"]["capacity_bytes"].value
    warnings = [f"does not fit: {format_bytes(missing)} too much on the fullest rank"] if missing > 0 else []
    warnings += [*outside_lines(prediction_of(plan)), *reserved_lines(plan), *program_lines(plan)]
    warnings += [shown.remark] if shown.remark else []
    return [
        tag("h1", plan.model.name, tag("small", question)),
        tag("p", layout_words(plan), class_="lead"),
        facts(pairs),
        tag("p", tag("code", str(plan.candidate))),
        tag("ul", (tag("li", line) for line in warnings), class_="warnings") if warnings else None,
    ]


def _causal(prediction: Node) -> Content:
    causal = prediction["mfu_causal"]
    return tag("small", causal.figure(_percent), " without masked pairs") if causal else None


def _distance(gap: float) -> str:
    return "none, proven" if gap < _NOTHING else f"at most {format_at_most(gap)}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _plans(shown: Sequence[ShownPlan], data: Node) -> Markup:
    rows = [
        (
            own["name"].value,
            own["prediction"]["step_time_s"].figure(format_seconds),
            own["prediction"]["tokens_per_s"].figure(format_count),
            own["prediction"]["mfu"].figure(_percent),
            own["peak_bytes"].figure(format_bytes),
            own["dollars"]["usd_per_billion_tokens"].figure(format_dollars) if own["dollars"] else "-",
            layout_words(one.plan),
        )
        for one, own in zip(shown, data["plans"], strict=True)
    ]
    columns = ("plan", ">step", ">tokens/s", ">MFU", ">fullest rank", ">$ / 1e9 tokens", "layout")
    return section("plans", "The plans", table(columns, rows), about="The first is drawn below; the others beside it.")


def _difference(found: Node, first: str, second: str) -> Markup:
    """Return how plan b differs from plan a: in words, in choices, and part by part."""
    verdict, *more = found["summary"].value
    named = ((one["name"].value, one["a"].value, one["b"].value) for one in found["choices"])
    choices = [(name, _choice(name, a), _choice(name, b)) for name, a, b in named]
    parts = [*found["time"]["parts"], found["time"]["total"]]
    rows = [
        (
            TIME_WORDS.get(part["name"].value, part["name"].value),
            *(part[key].figure(format_seconds) for key in ("a", "b", "difference")),
        )
        for part in parts
    ]
    return section(
        "difference",
        f"b, {second}, against a, {first}",
        tag("p", verdict, class_="lead"),
        [tag("p", line) for line in more],
        table(("choice", "a", "b"), choices, "Choices that differ") if choices else None,
        table(("part", ">a", ">b", ">b - a"), rows, f"Seconds of {found['seconds_of'].value}", total=True),
    )


def _choice(name: str, value: str | float | None) -> str:
    if isinstance(value, float):
        return format_bytes(value) if name.endswith("_bytes") else f"{value:.12g}"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _time(own: Node) -> Markup:
    """Return where the seconds of a step go, as a bar and as a table."""
    parts, step_s = own["prediction"]["time_parts"], own["prediction"]["step_time_s"].value
    ordered = sorted(parts.entries(), key=lambda entry: -entry[1].value)
    bar = stacked_bar(time_parts(parts, step_s), step_s)
    rows = [
        (tag("span", tag("i", class_=f"key t-{name}"), TIME_WORDS.get(name, name)), time_s.figure(format_seconds),
         f"{time_s.value / step_s:.1%}")
        for name, time_s in ordered
    ]  # fmt: skip
    return section("time", "Where the time goes", bar, table(("part", ">time", ">share"), rows))


def _timelines(shown: Sequence[ShownPlan]) -> Markup:
    """Return the steps of all plans on one axis."""
    end_s = max(one.timeline.end_s for one in shown)
    named = (one.name if len(shown) > 1 else "" for one in shown)
    drawn = [timeline(one.plan, one.timeline, end_s, name) for one, name in zip(shown, named, strict=True)]
    about = "Ranks that differ only in tp, dp, cp or ep do the same at the same time, and share a row."
    colours = timeline_legend([one.timeline for one in shown])
    return section("timeline", "The pipeline's timeline", drawn, colours, about=about)


def _memory(shown: ShownPlan, own: Node) -> Markup:
    """Return what each pipeline rank holds, over the step and in parts."""
    plan, memories = shown.plan, own["prediction"]["stage_memory"]
    names = sorted({name for one in memories for name, size in one["parts"].entries() if size.value})
    names.sort(key=lambda name: (name not in _STATE, name))
    rows: list[list[Content]] = []
    for number, (one, times) in enumerate(zip(memories, own["pipeline_ranks"], strict=True)):
        sizes = (one["parts"][name].figure(_gib) if name in one["parts"].value else "-" for name in names)
        seconds = (times[key].figure(format_seconds) for key in ("work_s", "sending_s", "idle_s"))
        place = (tag("span", text, class_="keep") for text in (layers_of(plan, (number,)), nodes_of(plan, (number,))))
        total = prediction_of(plan).stage_memory[number].total
        share = f"{total / own['prediction']['capacity_bytes'].value:.0%}"
        rows.append([str(number), *place, *seconds, f"{total / GIB:.2f}", share, *sizes])
    columns = ("rank", "layers", "nodes", ">work", ">sends", ">idle", ">GiB", ">used", *(f">{name}" for name in names))
    keys = {_KEYS.get(name, name): f"m-{name}" for name in names if name != "logits"}
    keys |= {"what a plan may fill": "capacity", "what a rank can use": "usable"}
    end_s = shown.timeline.end_s
    return section(
        "memory",
        "Memory and work of the pipeline ranks",
        memory_charts(plan, shown.timeline, end_s),
        legend(keys),
        table(columns, rows, "Pipeline ranks: seconds of a step, and GiB by part", class_="many"),
        about=f"Headroom: {headroom_words(plan)}.",
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _blocks(own: Node) -> Markup:
    """Return each block's operations with their layouts, Collectives and second-best cuts."""
    found = [
        details(f"{block['name'].value}, {_times(block['count'].value)} a micro-batch", _block(block))
        for block in own["blocks"]
    ]
    largest = max(range(len(found)), key=lambda number: len(own["blocks"][number]["steps"].value), default=0)
    if found:
        found[largest] = Markup(found[largest].text.replace("<details>", "<details open>", 1))
    rules = [tag("p", tag("b", name), ": ", remedy.value) for name, remedy in own["rules"].entries()]
    about = (
        "Seconds of one micro-batch on one rank: F forward, I gradients of inputs, W gradients of weights. What has no "
        "seconds runs in the kernel of an operation above it, or only sends. Second best: another way to cut the "
        "operation, all others solved again, and how much longer the block then takes."
    )
    return section("blocks", "Operations and what they send", found, rules, about=about)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _block(block: Node) -> Markup:
    rows: list[Sequence[Content]] = []
    for step in block["steps"]:
        if step["seconds"].value or step["sent"].value or step["other"]:
            rows.append(
                (step["name"].value, step["gives"].value, *_passes(step["seconds"]), _second_best(step["other"]))
            )
        for sent in step["sent"]:
            cells = [sent["time_s"].figure(format_seconds) if sent["pass_"].value == name else "" for name in "FIW"]
            size = (
                sent["sent_bytes"].figure(format_bytes),
                f" over {sent['link'].value}, {sent['num_ranks'].value} ranks",
            )
            rows.append(("", tag("em", sent["collective"].value), *cells, size))
    return table(("operation", "gives, or sends", ">F", ">I", ">W", "what is sent; second best"), rows)


def _passes(seconds: Node) -> Iterator[Content]:
    return (seconds[name].figure(format_seconds) if name in seconds.value else "" for name in "FIW")


def _second_best(other: Node) -> Content:
    if not other:
        return ""
    refused = other["refused"].value
    more = other["more_s"].figure(lambda more_s: f"{'+' if more_s >= 0 else ''}{format_seconds(more_s)}")
    return (f"{other['cut'].value}: ", more, f", refused by {refused}" if refused else "")


def _pareto(shown: Sequence[ShownPlan], data: Node) -> Markup:
    """Return step time against memory and dollars: the layouts that were solved, the answers, and the plans."""
    first = data["plans"][0]
    record = first["search"]
    if not record and len(shown) == 1:
        return section("pareto", "Time, memory and dollars", tag("p", _NO_SEARCH))
    found = [(one, "other", "") for one in record["layouts"]] if record else []
    answers = record["answers"] if record else ()
    found += [
        (one, "answer", one["name"].value)
        for one in answers
        if not (one["name"].value.isdecimal() or one["against"].value)
    ]
    least_s = min((one["step_time_s"].value for one, _, _ in found), default=0.0)
    near = [one for one in found if one[0]["step_time_s"].value <= _NEAR * least_s or one[2]]
    time_s, usd = first["prediction"]["step_time_s"].value, first["dollars"]
    memory, dollars = list[Dot](), list[Dot]()
    for one, kind, name in near:
        at_s, words = one["step_time_s"].value, one["candidate"].value
        memory.append(_point(at_s, one["peak_bytes"].value / GIB, words, kind, name))
        if usd:  # of the same nodes
            share = at_s / time_s
            dollars.append(_point(at_s, share * usd["usd_per_billion_tokens"].value, words, kind, name))
    for own in data["plans"]:
        at_s, words = own["prediction"]["step_time_s"].value, own["candidate"].value
        memory.append(_point(at_s, own["peak_bytes"].value / GIB, words, "plan", own["name"].value))
        if own["dollars"]:
            own_usd = own["dollars"]["usd_per_billion_tokens"].value
            dollars.append(_point(at_s, own_usd, words, "plan", own["name"].value))
    step = Axis(name="a step", text=format_seconds)
    charts = [scatter("Time and memory", memory, step, Axis(name="fullest rank, GiB", text="{:g}".format))]
    if dollars:
        charts.append(scatter("Time and dollars", dollars, step, Axis(name="$ a billion tokens", text=format_dollars)))
    sizes = {one.plan.cluster.num_nodes for one in shown}
    about = "Grey dots: the best plan of each layout that the search solved. " if record else ""
    about += "The line joins those that nothing betters."
    about += f" {len(found) - len(near)} slower layouts are left out." if len(found) > len(near) else ""
    if dollars and len(sizes) == 1:
        about += " On one cluster dollars are proportional to time; report plans of several sizes to compare them."
    return section("pareto", "Time, memory and dollars", tag("div", charts, class_="charts"), about=about)


def _point(time_s: float, size: float, words: str, kind: str, label: str) -> Dot:
    tip = f"{label + ': ' if label else ''}{format_seconds(time_s)}; {words}"
    return Dot(x=time_s, y=size, tip=tip, kind=kind, label=label)


def _refused(own: Node) -> Markup:
    """Return the Rules that refused layouts, with an example of each."""
    record = own["search"]
    if not record:
        return section("refused", "What was refused", tag("p", _NO_SEARCH))
    count = f"{record['num_legal'].value:,} of {record['num_points'].value:,} layouts are legal"
    refusals = sorted(record["refusals"], key=lambda one: -one["num_points"].value)
    rows = [
        (one["rule_id"].value, one["num_points"].figure(lambda n: f"{n:,}"), one["example"].value) for one in refusals
    ]
    about = f"{count}. A layout counts for every Rule that refuses it. {record['accounting'].value}."
    return section(
        "refused", "What was refused, and why", table(("Rule", ">layouts", "for example"), rows), about=about
    )


def _basis(shown: Sequence[ShownPlan]) -> Markup:
    """Return what the figures rest on, of all plans; then the constants and sources of the first."""
    plan = shown[0].plan
    prediction = prediction_of(plan)
    bases = dict[str, list[str]]()
    for one in shown:
        bases.setdefault(prediction_of(one.plan).basis, []).append(one.name)
    names = (f" of {', '.join(own)}" if len(bases) > 1 else "" for own in bases.values())
    chip, cluster = plan.cluster.chip, plan.cluster
    sources = [(f"{chip.name}: {name}", text) for name, text in chip.sources.items()]
    sources += [(f"{link.name}: {name}", text) for link in cluster.links for name, text in link.sources.items()]
    sources += [("model", plan.model.source)] if plan.model.source else []
    rows = [(name, linked(text)) for name, text in sources]
    compiling = tag("p", compiled_words(prediction.compiling)) if prediction.compiling else None
    constants = plan.provenance.get("calibration.constants", "").replace(",", ", ")
    return section(
        "basis",
        "What the figures rest on",
        [tag("p", f"Seconds{whose}: {basis}.") for whose, basis in zip(names, bases, strict=True)],
        tag("p", "Constants: ", tag("code", constants)) if constants else None,
        compiling,
        details("Sources of the numbers of the cluster and the model", table(("number", "source"), rows)),
    )
