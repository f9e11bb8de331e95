"""The sheets of an explanation: what limits a plan, where time and memory go, and its blocks operation by operation."""

from collections.abc import Iterator, Sequence

from autoshard.blocks.explain import ExplainedBlock, Explanation
from autoshard.cost.timeline import RankTime
from autoshard.plan.explanation import Alternatives
from autoshard.plan.plan import Plan
from autoshard.report.answers import answers_sheet, runners_up_of
from autoshard.report.plan_sheets import (
    MOST_ROWS,
    NOTHING,
    day_fact,
    headroom_words,
    memory_table,
    plan_figures,
    plan_warnings,
    refused_sheet,
    stage_table,
    time_sheet,
)
from autoshard.report.sheet import Cell, Fact, Node, Sheet, Table, Words
from autoshard.report.words import TIME_WORDS, prediction_of, software_of
from autoshard.spec.record import encode
from autoshard.units import format_bytes, format_change, format_seconds

_FEW_ROWS = 10  # of pipeline ranks, on the first screen
_PASSES = ("F", "I", "W")
_SECOND = "second best; what is sent"
_ABOUT = (
    "Times of one micro-batch on one rank: F forward pass, I gradients of inputs, W gradients of weights. What has no "
    "time runs in the kernel of an operation above it, or only sends. Second best: another way to cut this operation, "
    "with all others solved again, and how much longer the block then takes."
)


def explanation_sheets(
    plan: Plan,
    explanation: Explanation,
    alternatives: Alternatives,
    times: Sequence[RankTime] = (),
    *,
    whole: bool = True,
) -> Iterator[Sheet]:
    """Yield what limits the plan, where time and memory go, and the next best plans.

    The ``whole`` explanation has also what ranks hold part by part, every operation, and what was refused.
    """
    figures = Node({**plan_figures(plan, times), "blocks": encode(explanation.blocks), "rules": {**explanation.rules}})
    facts = [Fact("layout", Words(explanation.candidate, "code"))]
    facts += [*_limits(plan, alternatives), Fact("headroom", headroom_words(plan)), day_fact(plan, figures["dollars"])]
    yield Sheet(facts=facts)
    yield time_sheet(figures)
    stages = stage_table(plan, figures, MOST_ROWS if whole else _FEW_ROWS)
    yield Sheet(tables=[stages, memory_table(plan, figures)] if whole else [stages])
    if whole:
        yield blocks_sheet(figures, explanation.blocks)
    if alternatives.rivals:
        yield answers_sheet(plan, runners_up_of(plan, alternatives.rivals))
    if proof := alternatives.certificate:
        record = Node({**encode(proof), "accounting": proof.about(plan).accounting})
        refused = refused_sheet(record, proof.statement_of(plan))
        yield refused if whole else Sheet(notes=refused.notes[:1])
    yield Sheet(notes=[Words(f"seconds {explanation.basis}", "warning"), *plan_warnings(plan)])
    if not whole:
        yield Sheet(facts=[Fact("more", "-v shows memory in parts, every operation, and what was refused")])


def _limits(plan: Plan, alternatives: Alternatives) -> list[Fact]:
    """Return what limits the speed of the plan: the largest part of its time, and memory."""
    prediction = prediction_of(plan)
    step_s, unlimited_s = prediction.step_time_s, alternatives.unlimited_s
    part, time_s = max(prediction.time_parts.items(), key=lambda entry: entry[1])
    most = f" of {software_of(plan)}, most of it {TIME_WORDS.get(part, part)}: {time_s / step_s:.0%}"
    fullest = prediction.peak_bytes / prediction.capacity_bytes
    uses = f"the fullest rank uses {fullest:.0%} of what a plan may fill"
    less = 1 - unlimited_s / step_s
    if fullest > 1:
        memory = f"is too small: the fullest rank needs {fullest:.0%} of what a plan may fill"
    elif less <= NOTHING:
        memory = f"does not limit its speed: {uses}, and more memory would not make this layout faster"
    else:
        gain = f"with unlimited memory the same layout would take {format_seconds(unlimited_s)}, {less:.1%} less"
        memory = f"limits its speed: {uses}; {gain}"
    return [Fact("step", format_seconds(step_s), most), Fact("memory", memory)]


def blocks_sheet(figures: Node, blocks: Sequence[ExplainedBlock]) -> Sheet:
    """Return each block's operations with their layouts, Collectives and second-best cuts."""
    tables = [_block(block, node) for block, node in zip(blocks, figures["blocks"], strict=True)]
    rules = [(Words(name, "strong"), f": {remedy.value}") for name, remedy in figures["rules"].entries()]
    return Sheet(name="blocks", title="Operations and what they send", about=_ABOUT, tables=tables, notes=rules)


def _block(block: ExplainedBlock, node: Node) -> Table:
    """Return the table of a block; the title has its times, and those that are zero are left out."""
    times = "once" if block.count == 1 else f"{block.count} times"
    waiting = f", waiting {format_seconds(block.waiting_s)}" if block.waiting_s else ""
    hidden = f", {format_seconds(block.hidden_s)} of it hidden" if block.hidden_s else ""
    sums = f"compute {format_seconds(block.compute_s)}{waiting}, sending {format_seconds(block.sending_s)}{hidden}"
    title = f"{block.name}, {times}: {format_seconds(block.time_s)} ({sums})"
    columns = ("operation", "gives, or sends", *(f">{name}" for name in _PASSES), _SECOND)
    rows: list[list[Cell]] = []
    for step in node["steps"]:
        if step["seconds"].value or step["sent"].value or step["other"]:  # else a deliver that changes no layout
            seconds = step["seconds"]
            cells = [seconds[name].figure(format_seconds) if name in seconds.value else "" for name in _PASSES]
            second = _second_best(step["other"], block.time_s)
            rows.append([Words(step["name"].value, "strong"), step["gives"].value, *cells, second])
        for sent in step["sent"]:
            time = sent["time_s"].figure(format_seconds)
            cells = [time if sent["pass_"].value == name else "" for name in _PASSES]
            link = f", {sent['link'].value} x {sent['num_ranks'].value}"
            collective = Words(f"  {sent['collective'].value}", "sent")
            rows.append(["", collective, *cells, (sent["sent_bytes"].figure(format_bytes), Words(link, "sent"))])
    return Table(title, columns, rows, whole=("operation",), widths={_SECOND: 31}, drop=(_SECOND,))


def _second_best(cut: Node, block_s: float) -> Cell:
    """Return another way to cut an operation, and what the block then takes longer, as a share of its time."""
    if not cut:
        return ""
    refused = f", but {cut['refused'].value}" if cut["refused"].value else ""
    return f"{cut['cut'].value}: ", cut["more_s"].figure(lambda more_s: format_change(more_s / block_s)), refused
