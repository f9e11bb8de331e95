"""The annotated blocks of a plan, for a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan.explanation import Alternatives, ExplainedBlock, ExplainedOp, Explanation
from autoshard.plan.plan import Plan
from autoshard.plan.prediction import Prediction
from autoshard.report.terminal import (
    at_commas,
    dollars_text,
    make_table,
    memory_table,
    runners_up_table,
    time_table,
    worth_measuring,
)
from autoshard.report.words import TIME_WORDS
from autoshard.units import format_bytes, format_seconds

_PASSES = ("F", "I", "W")
_LEGEND = (
    "Times of one micro-batch on one rank: F forward, I and W gradients of inputs and of weights. Second best: another "
    "cut of this operation, all others chosen anew, and how much longer the block takes."
)
_CANDIDATE, _SECOND = 110, 31  # columns
_NOTHING = 1e-4  # of a step: what is rounded away


def explanation_report(plan: Plan, explanation: Explanation, alternatives: Alternatives) -> Group:
    """Return where seconds and bytes go, what limits the plan, its blocks line by line, and what comes next to it."""
    assert plan.prediction, "only predicted plans are explained"
    parts: list[RenderableType] = [Text.assemble("plan ", (at_commas(explanation.candidate, _CANDIDATE), "bold green"))]
    dollars = plan.dollars
    if dollars:
        parts.append(dollars_text(dollars))
    parts += [Text(line) for line in limits(plan.prediction, alternatives)]
    parts += ["", time_table(plan.prediction), "", memory_table(plan, plan.prediction), ""]
    parts.append(Text(_LEGEND, "dim"))
    for block in explanation.blocks:
        parts += ["", _block(block)]
    if explanation.rules:
        parts.append("")
        parts += [Text.assemble((rule, "bold"), f": {says}") for rule, says in explanation.rules.items()]
    if alternatives.others:
        near = worth_measuring(plan, alternatives.others)
        parts += ["", runners_up_table(plan, alternatives.others), *([near] if near else [])]
    parts += ["", Text(f"seconds {explanation.basis}", "yellow")]
    return Group(*parts)


def limits(prediction: Prediction, alternatives: Alternatives) -> list[str]:
    """Say what keeps the plan from being faster: its largest part, and memory."""
    step_s = prediction.step_time_s
    part, time_s = max(prediction.time_parts.items(), key=lambda entry: entry[1])
    said = [f"most of a step is {TIME_WORDS.get(part, part)}: {time_s / step_s:.0%} of {format_seconds(step_s)}"]
    saved = 1 - alternatives.unlimited_s / step_s
    fullest = max(memory.total for memory in prediction.stage_memory) / prediction.capacity_bytes
    if saved > _NOTHING:
        said.append(
            f"memory limits it ({fullest:.0%} of a rank is full): with room for everything the same layout would take "
            f"{format_seconds(alternatives.unlimited_s)}, {saved:.1%} less"
        )
    else:
        said.append(f"memory does not limit it: {fullest:.0%} of the fullest rank is used, and more would gain nothing")
    return said


def _block(block: ExplainedBlock) -> Table:
    table = make_table(_title(block))
    table.add_column("operation", no_wrap=True)
    table.add_column("gives, or sends", overflow="fold", ratio=1)
    for pass_ in _PASSES:
        table.add_column(pass_, justify="right", no_wrap=True)
    table.add_column("second best; what is sent", overflow="fold", max_width=_SECOND)
    for step in block.steps:
        if step.seconds or step.sent or step.other:  # a deliver that changes nothing gives what its maker gives
            for row in _rows(step, block):
                table.add_row(*row)
    return table


def _title(block: ExplainedBlock) -> str:
    """Say what a block takes, and of what that is the sum; what most platforms have not, only where it is."""
    times = "once" if block.count == 1 else f"{block.count} times"
    parts = [f"compute {format_seconds(block.compute_s)}"]
    if block.waiting_s:
        parts.append(f"waiting {format_seconds(block.waiting_s)}")
    parts.append(f"sending {format_seconds(block.sending_s)}")
    hidden = f", {format_seconds(block.hidden_s)} of it hidden" if block.hidden_s else ""
    return f"{block.name}, {times}: {format_seconds(block.time_s)} ({', '.join(parts)}{hidden})"


def _rows(step: ExplainedOp, block: ExplainedBlock) -> Iterator[tuple[Text, ...]]:
    cells = [Text(format_seconds(step.seconds[name]) if name in step.seconds else "") for name in _PASSES]
    yield (Text(step.name, "bold"), Text(step.gives), *cells, Text(_otherwise(step, block), "dim"))
    for one in step.sent:
        cells = [Text(format_seconds(one.time_s) if name == one.pass_ else "", "cyan") for name in _PASSES]
        where = f"{format_bytes(one.sent_bytes)}, {one.link} x {one.num_ranks}"
        yield (Text(), Text(f"  {one.collective}", "cyan"), *cells, Text(where, "cyan"))


def _otherwise(step: ExplainedOp, block: ExplainedBlock) -> str:
    """Say what the next best cut would cost, and what forbids it."""
    if step.other is None:
        return ""
    share = step.other.more_s / block.time_s
    refused = f", but {step.other.refused}" if step.other.refused else ""
    return f"{step.other.cut}: {share:+.1%}{refused}"
