"""The sheets of a run that is watched: its state, its last steps beside the prediction, and what is not as it was."""

from collections.abc import Callable, Iterator

from autoshard.report.sheet import Cell, Fact, Node, Sheet, Table, Words
from autoshard.report.watch.progress import RunProgress
from autoshard.units import counted, format_bytes, format_count, format_seconds, format_wait

_FEW = 5  # starts that are named
_COLUMNS = ("", ">predicted", ">interval", ">measured", ">measured / predicted")


def headline_sheet(progress: RunProgress, figures: Node) -> Sheet:
    """Return what runs, how far it is, and what somebody should look at."""
    ranks = f" on {counted(progress.num_ranks, 'rank')}: {progress.candidate}" if progress.num_ranks else ""
    kind = "bad" if progress.is_bad else "warning" if progress.state == "stopped" else "good"
    last, drifts = figures["last"], [Words(text, "warning") for text in progress.drifts]
    facts = [Fact(Words(progress.state, kind), state_words(progress))]
    if last:
        loss, norm = _finite(last, "loss", "{:.4f}".format), _finite(last, "norm", "{:.3f}".format)
        facts.append(Fact("loss", loss, (" in the last step, gradient norm ", norm)))
        if last["router"].value:
            facts.append(Fact("experts", *_routed(last["router"])))
    if figures["left_s"].value is not None:
        facts.append(Fact("left", figures["left_s"].figure(format_wait)))
    facts += [_checkpoint(progress, figures["checkpoint"]), Fact("starts", _starts_words(progress))]
    lines = [*progress.reason.splitlines()[1:], *drifts, *progress.remarks]
    return Sheet(title=progress.folder, about=f"{progress.model or 'no plan yet'}{ranks}", facts=facts, notes=lines)


def _routed(router: Node) -> tuple[Cell, tuple[Cell, ...]]:
    """Say how busy the busiest expert was, and what was dropped."""
    dropped: tuple[Cell, ...] = ()
    if router["dropped"].value:
        dropped = (", dropped ", router["dropped"].figure("{:.1%} of choices".format))
    return router["busiest"].figure("{:.2f} x the mean".format), (" in the busiest", *dropped)


def _finite(step: Node, key: str, text: Callable[[float], str]) -> Cell:
    """Return a number of a step; one that is not finite by its name, a loss that no answer makes as none."""
    return step[key].figure(text) if step[key].value is not None else step.at("nonfinite", key).value or "none"


def ranks_sheet(progress: RunProgress) -> Sheet:
    """Return where the ranks of a run are that stands still."""
    about = "The one that most likely keeps the others waiting comes first."
    return Sheet(name="ranks", title="Where its ranks are", about=about, notes=progress.behind)


def failures_sheet(progress: RunProgress) -> Sheet:
    """Return how earlier starts failed."""
    failures = [text.strip().partition("\n")[0] for text in progress.failures if text != progress.reason]
    return Sheet(name="failures", title="Starts that failed", notes=failures[-_FEW:])


def steps_sheet(figures: Node) -> Sheet:
    """Return what was measured of the last steps beside what was predicted."""
    rows = list(_rows(figures))
    tables = [Table("", _COLUMNS, rows, drop=(">interval",))] if rows else []
    return Sheet(name="steps", title="The last steps", tables=tables)


def _rows(figures: Node) -> Iterator[tuple[Cell, ...]]:
    if pace := figures["pace"]:
        interval: Cell = ""
        ratio: Cell = "not predicted for this machine"
        if pace["ratio"].value is not None:
            interval = (pace["low_s"].figure(format_seconds), " to ", pace["high_s"].figure(format_seconds))
            side = Words(", inside", "good") if pace["inside"].value else Words(", outside", "warning")
            ratio = (pace["ratio"].figure("{:.2f}".format), side)
        step, predicted = (pace[key].figure(format_seconds) for key in ("step_time_s", "predicted_s"))
        yield "step (median)", predicted, interval, step, ratio
        speeds = pace["predicted_tokens_per_s"], pace["tokens_per_s"]
        before, now = (speed.figure(lambda count: format_count(count, "tokens/s")) for speed in speeds)
        yield "speed", before, "", now, f"{speeds[1].value / speeds[0].value:.2f}" if speeds[0].value else ""
    if memory := figures["memory"]:
        sizes = memory["predicted_bytes"], memory["measured_bytes"]
        share = f"{sizes[1].value / sizes[0].value:.2f}" if sizes[0].value else ""
        what = "whole process" if memory["of_process"].value else share
        yield "memory of rank 0", sizes[0].figure(format_bytes), "", sizes[1].figure(format_bytes), what


def state_words(progress: RunProgress) -> str:
    """Say how far a run is, and what else belongs to its state."""
    parts = progress.reason.splitlines()[:1]
    if progress.step or progress.num_steps:
        share = f" of {progress.num_steps} ({progress.step / progress.num_steps:.0%})" if progress.num_steps else ""
        parts.append(f"step {progress.step}{share}")
    if progress.idle_s is not None and progress.state == "running":
        parts.append(f"last step {format_seconds(progress.idle_s)} ago")
    return "; ".join(parts)


def _checkpoint(progress: RunProgress, newest: Node) -> Fact:
    """Return which checkpoint is the last one."""
    if progress.checkpoints_elsewhere:
        return Fact("checkpoint", f"in {progress.checkpoints_elsewhere}, which is not looked at from here")
    saving = f"; step {progress.saving} is being saved" if progress.saving else ""
    if not newest:
        return Fact("checkpoint", f"none yet{saving}")
    age, size = newest["age_s"].figure(format_wait), newest["num_bytes"].figure(format_bytes)
    return Fact("checkpoint", ("step ", newest["step"].figure(str)), (", ", age, " ago, ", size, saving))


def _starts_words(progress: RunProgress) -> str:
    """Say how often the run was started, and how often that failed."""
    if not progress.starts:
        return "none has come to its first step"
    after = ", ".join(f"after step {step}" if step else "from the beginning" for step in progress.starts[-_FEW:])
    failed = f"; {len(progress.failures)} failed" if progress.failures else ""
    return f"{len(progress.starts)}: {after}{failed}"
