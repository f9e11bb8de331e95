"""The explanation of a plan for a terminal: limits, time, memory, and its blocks operation by operation."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.blocks.explain import ExplainedBlock, Explanation
from autoshard.cost.timeline import RankTime
from autoshard.plan.explanation import Alternatives
from autoshard.plan.plan import Plan
from autoshard.report.answers import answers_parts, runners_up_of
from autoshard.report.tables import Cell, FittingTable, prose, unbroken
from autoshard.report.terminal import (
    NOTHING,
    certificate_parts,
    headroom_words,
    memory_table,
    outside_lines,
    prediction_of,
    price_words,
    stage_table,
    time_table,
)
from autoshard.report.words import TIME_WORDS, program_lines, program_of
from autoshard.units import format_bytes, format_seconds

_PASSES = ("F", "I", "W")
_LEGEND = (
    "Times of one micro-batch on one rank: F forward pass, I gradients of inputs, W gradients of weights. Second best: "
    "another way to cut this operation, with all others solved again, and how much longer the block then takes."
)


def explanation_report(
    plan: Plan, explanation: Explanation, alternatives: Alternatives, times: Sequence[RankTime] = ()
) -> Group:
    """Return what limits the plan, where time and memory go, every operation of its blocks, and the next best plans."""
    prediction = prediction_of(plan)
    parts: list[RenderableType] = [unbroken(Text.assemble("layout ", (explanation.candidate, "bold green")))]
    parts += [prose(f"cost {price_words(plan.dollars)}")] if plan.dollars else []
    parts += map(prose, _limits(plan, alternatives))
    parts.append(prose(f"headroom {headroom_words(plan)}"))
    tables = time_table(prediction), stage_table(plan, times), memory_table(plan)
    parts += [part for table in tables for part in ("", table)]
    parts += ["", prose(_LEGEND, "dim")]
    for block in explanation.blocks:
        parts += ["", _block(block)]
    if explanation.rules:
        parts.append("")
        parts += [prose(Text.assemble((rule, "bold"), f": {remedy}")) for rule, remedy in explanation.rules.items()]
    parts += ["", *answers_parts(plan, runners_up_of(plan, alternatives.others))] if alternatives.others else []
    parts += ["", *certificate_parts(alternatives.certificate)] if alternatives.certificate else []
    outside = (prose(line, "yellow") for line in (*program_lines(plan), *outside_lines(prediction)))
    return Group(*parts, "", prose(f"seconds {explanation.basis}", "yellow"), *outside)


def _limits(plan: Plan, alternatives: Alternatives) -> list[str]:
    """Return what limits the speed of the plan: the largest part of its time, and memory."""
    prediction = prediction_of(plan)
    step_s, unlimited_s = prediction.step_time_s, alternatives.unlimited_s
    part, time_s = max(prediction.time_parts.items(), key=lambda entry: entry[1])
    step = f"{format_seconds(step_s)} a step of {program_of(plan)}"
    most = f"{step}, most of it {TIME_WORDS.get(part, part)}: {time_s / step_s:.0%}"
    fullest = max(memory.total for memory in prediction.stage_memory) / prediction.capacity_bytes
    less = 1 - unlimited_s / step_s
    if fullest > 1:
        memory = f"is too small: the fullest rank needs {fullest:.0%} of what a plan may fill"
    elif less <= NOTHING:
        memory = f"does not limit it: the fullest rank uses {fullest:.0%}, and more memory would not make it faster"
    else:
        gain = f"with unlimited memory the same layout would take {format_seconds(unlimited_s)}, {less:.1%} less"
        memory = f"limits it ({fullest:.0%} of a rank is full): {gain}"
    return [most, f"memory {memory}"]


def _block(block: ExplainedBlock) -> FittingTable:
    """Return the table of a block; the title has its times, and those that are zero are left out."""
    times = "once" if block.count == 1 else f"{block.count} times"
    waiting = f", waiting {format_seconds(block.waiting_s)}" if block.waiting_s else ""
    hidden = f", {format_seconds(block.hidden_s)} of it hidden" if block.hidden_s else ""
    sums = f"compute {format_seconds(block.compute_s)}{waiting}, sending {format_seconds(block.sending_s)}{hidden}"
    title = f"{block.name}, {times}: {format_seconds(block.time_s)} ({sums})"
    second = "second best; what is sent"
    columns = ("operation", "gives, or sends", *(f">{name}" for name in _PASSES), second)
    rows: list[list[Cell]] = []
    for step in block.steps:
        otherwise = ""
        if step.other:
            refused = f", but {step.other.refused}" if step.other.refused else ""
            otherwise = f"{step.other.cut}: {step.other.more_s / block.time_s:+.1%}{refused}"
        if step.seconds or step.sent or step.other:  # a deliver that changes no layout is left out
            cells = [Text(format_seconds(step.seconds[name]) if name in step.seconds else "") for name in _PASSES]
            rows.append([Text(step.name, "bold"), step.gives, *cells, Text(otherwise, "dim")])
        for one in step.sent:
            cells = [Text(format_seconds(one.time_s) if name == one.pass_ else "", "cyan") for name in _PASSES]
            where = f"{format_bytes(one.sent_bytes)}, {one.link} x {one.num_ranks}"
            rows.append(["", Text(f"  {one.collective}", "cyan"), *cells, Text(where, "cyan")])
    return FittingTable(title, columns, rows, whole=("operation",), widths={second: 31}, drop=(second,))
