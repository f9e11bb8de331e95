"""A run that is watched, for a terminal."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from autoshard.report.sparkline import columns
from autoshard.report.tables import Cell, FittingTable, Labelled, unbroken
from autoshard.report.watch.progress import RunProgress, State
from autoshard.report.words import counted
from autoshard.units import format_bytes, format_count, format_seconds

_HEIGHT, _MOST_WIDTH, _INDENT = 6, 100, 12  # of the curve, in characters; where it begins
_LABEL = 12
_FEW = 3  # earlier failures that are shown
_BAD, _GOOD, _WARNING = "bold red", "green", "yellow"
_STYLES: dict[State, str] = {
    "running": _GOOD, "saving": _GOOD, "ended": _GOOD, "stopped": _WARNING,
    **dict.fromkeys(("hangs", "silent", "killed", "failed"), _BAD),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Curve:
    """The loss over steps, as wide as the terminal."""

    progress: RunProgress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        points = self.progress.losses
        known = [loss for _, loss in points if loss is not None]
        width = max(8, min(_MOST_WIDTH, options.max_width - _INDENT - 1))
        lines = columns([loss for _, loss in points], width, _HEIGHT, ascii_only=options.ascii_only)
        labels = {0: f"{max(known):.4g}", _HEIGHT - 1: f"{min(known):.4g}"} if known else {}
        for number, line in enumerate(lines):
            name = "loss" if number == 0 else ""
            yield unbroken(f"{name:<5}{labels.get(number, ''):>{_INDENT - 6}} {line}".rstrip())
        first, last = str(points[0][0]), str(points[-1][0])
        gap = max(1, len(lines[0]) - len(first) - len(last))
        yield unbroken(f"{'step':<{_INDENT}}{first}{' ' * gap}{last}")


def progress_report(one: RunProgress) -> Group:
    """Return a picture of a run at a moment."""
    ranks = f" on {counted(one.num_ranks, 'rank')}: {one.candidate}" if one.num_ranks else ""
    parts: list[RenderableType] = [Labelled(f"{one.folder}  ", Text(f"{one.model or 'no plan yet'}{ranks}"), "bold", 2)]
    parts.append(Labelled(f"{one.state}  ".ljust(_LABEL), Text(state_words(one)), _STYLES.get(one.state, ""), _LABEL))
    parts += [_line("", line.strip()) for line in (*one.reason.splitlines()[1:], *one.behind)]
    parts += [_line("drifts", text, _WARNING) for text in one.drifts]
    earlier = [text.strip().partition("\n")[0] for text in one.failures[-_FEW:] if text != one.reason]
    parts += [_line("failed", text, _WARNING) for text in earlier]
    if len(one.losses) > 1:
        parts += ["", _Curve(one)]
    if rows := list(_rows(one)):
        names = ("", ">predicted", ">interval", ">measured", ">measured / predicted")
        parts += ["", FittingTable("The last steps", names, rows, drop=(">interval",))]
    parts += ["", _line("checkpoint", checkpoint_words(one)), _line("starts", starts_words(one))]
    parts += [_line("note", text) for text in one.remarks]
    return Group(*parts)


def _line(label: str, text: str, style: str = "") -> Labelled:
    return Labelled(label.ljust(_LABEL), Text(text), style, _LABEL)


def state_words(one: RunProgress) -> str:
    """Say how far a run is, and what else belongs to its state."""
    parts = one.reason.splitlines()[:1]
    if one.step or one.num_steps:
        share = f" ({one.step / one.num_steps:.0%})" if one.num_steps else ""
        parts.append(f"step {one.step}" + (f" of {one.num_steps}" if one.num_steps else "") + share)
    if one.left_s:
        parts.append(f"{format_seconds(one.left_s)} left")
    if one.idle_s is not None and one.state == "running":
        parts.append(f"last step {format_seconds(one.idle_s)} ago")
    if one.last:
        step = one.last.step
        parts.append(f"loss {step.loss:.4f}, norm {step.norm:.3f}")
    return "; ".join(parts)


def _rows(one: RunProgress) -> Iterator[tuple[Cell, ...]]:
    """Yield what was measured beside what was predicted."""
    if one.pace:
        pace, interval, ratio = one.pace, "", Text("")
        if pace.low_s is not None and pace.high_s is not None and pace.ratio is not None:
            interval = f"{format_seconds(pace.low_s)} to {format_seconds(pace.high_s)}"
            words = f"{pace.ratio:.2f}, {'inside' if pace.inside else 'outside'}"
            ratio = Text(words, style=_GOOD if pace.inside else _WARNING)
        predicted = format_seconds(pace.predicted_s) if pace.predicted_s else "-"
        yield "step", predicted, interval, format_seconds(pace.step_time_s), ratio
        tokens = pace.predicted_tokens_per_s
        share = f"{pace.tokens_per_s / tokens:.2f}" if tokens else ""
        speed = format_count(pace.tokens_per_s, "tokens/s")
        yield "speed", format_count(tokens, "tokens/s") if tokens else "-", "", speed, share
    if one.memory:
        held = one.memory
        predicted = format_bytes(held.predicted_bytes) if held.predicted_bytes else "-"
        share = f"{held.measured_bytes / held.predicted_bytes:.2f}" if held.predicted_bytes else ""
        what = "whole process" if held.of_process else share
        yield "memory of rank 0", predicted, "", format_bytes(held.measured_bytes), what


def checkpoint_words(one: RunProgress) -> str:
    """Say which checkpoint is the last one."""
    if one.checkpoints_elsewhere:
        return f"in {one.checkpoints_elsewhere}, which is not looked at from here"
    saving = f"; step {one.saving} is being saved" if one.saving else ""
    if one.checkpoint is None:
        return f"none yet{saving}"
    kept = one.checkpoint
    return f"step {kept.step}, {format_seconds(kept.age_s)} ago, {format_bytes(kept.num_bytes)}{saving}"


def starts_words(one: RunProgress) -> str:
    """Say how often the run was started, and how often that failed."""
    if not one.starts:
        return "none has come to its first step"
    after = ", ".join(str(step) for step in one.starts[-5:])
    failed = f"; {len(one.failures)} failed" if one.failures else ""
    return f"{len(one.starts)}, after step {after}{failed}"
