"""A run for a terminal: its steps while it goes on, and at the end what was predicted beside what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoshard.engine.base import Measured
from autoshard.engine.ran import RunReport, TimedStep
from autoshard.plan.plan import Plan
from autoshard.plan.prediction import Prediction
from autoshard.report.terminal import compiled_words, make_table
from autoshard.units import format_bytes, format_count, format_seconds

_PORT = 6006  # TensorBoard's own
_GAP = "   "  # between the parts of a line
_WAITED = 0.02  # of a step's time: to wait so long for data is worth a word
_PHASES = {"compile": "compiled in it", "warm-up": "warm-up", "steady": ""}
_DISPENSABLE = ("memory", "rate", "norm", "ratio", "mfu", "speed", "waited", "left", "phase")  # where a line is short
_PARTS = {  # what an engine counts -> the predicted parts that it adds up
    "weights": ("weights",),
    "gradients": ("gradients",),
    "masters": ("masters",),
    "optimizer": ("optimizer",),
    "saved": ("activations", "logits"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Two numbers of bytes about the same thing; None where nobody measured."""

    predicted: int
    measured: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeRanks:
    """Ranks that held and sent the same, as predicted and as measured."""

    ranks: tuple[int, ...]
    memory: Mapping[str, Beside] = field(hash=False)
    sent: Mapping[str, Beside] = field(hash=False)


def step_line(
    step: TimedStep,
    num_steps: int,
    *,
    mfu: float | None = None,
    ratio: float | None = None,
    left_s: float | None = None,
    width: int | None = None,
) -> str:
    """Write a step as a line: what is known of it, or as much as fits a width, the least important left out first.

    ``ratio`` is that of the step's time to the predicted.

    >>> step_line(TimedStep(number=3, loss=6.25, norm=1.5, time_s=0.125, num_tokens=512), 20)
    'step  3/20   loss 6.2500   norm 1.500   125.0 ms   4.10 ktokens/s'
    >>> step = TimedStep(number=1, loss=6.25, norm=1.5, time_s=0.125, num_tokens=512, phase="warm-up")
    >>> step_line(step, 20, mfu=0.381, left_s=2.4, width=60)
    'step  1/20   loss 6.2500   125.0 ms   2.40 s left   warm-up'
    """
    parts = {
        "step": f"step {step.number:{len(str(num_steps))}}/{num_steps}",
        "loss": f"loss {step.loss:.4f}",
        "norm": f"norm {step.norm:.3f}",
        "rate": "" if step.learning_rate is None else f"lr {step.learning_rate:.2e}",
        "time": format_seconds(step.time_s),
        "ratio": "" if ratio is None or step.phase != "steady" else f"{ratio:.2f} x predicted",
        "speed": _tokens(step.tokens_per_s),
        "mfu": "" if mfu is None else f"MFU {mfu:.1%}",
        "memory": "" if step.memory_bytes is None else format_bytes(step.memory_bytes),
        "waited": f"waited {format_seconds(step.waited_s)} for data" if step.waited_s > _WAITED * step.time_s else "",
        "left": "" if not left_s else f"{format_seconds(left_s)} left",
        "phase": _PHASES[step.phase],
        "skipped": "" if step.updated else "no update",
    }
    parts = {name: text for name, text in parts.items() if text}
    for name in _DISPENSABLE:
        if width is None or len(_GAP.join(parts.values())) <= width:
            break
        parts.pop(name, None)
    return _GAP.join(parts.values())


def start_lines(plan: Plan, folder: str, host: str, *, tensorboard: bool) -> list[str]:
    """Say before the first step what it does besides, and how the run is watched from elsewhere."""
    lines: list[str] = []
    if plan.prediction and plan.prediction.compiling:
        lines.append(compiled_words(plan.prediction.compiling))
    if plan.engine == "nxd":
        lines.append("NeuronCores: type neuron-top on a node to watch them")
    if tensorboard or plan.engine == "nxd":
        place = f"tensorboard --logdir {folder}/tensorboard --port {_PORT}"
        tunnel = f"ssh -N -L {_PORT}:localhost:{_PORT} {host}"
        lines.append(f"TensorBoard: on {host} type {place}, on your machine {tunnel}; open http://localhost:{_PORT}")
    return lines


def ran_report(plan: Plan, report: RunReport, platform: str) -> Group:
    """Return what was predicted of a run beside what it took, held and sent; ``platform`` names what ran it."""
    assert plan.prediction, "only predicted plans are run"
    groups = alike_ranks(plan, report.ranks)
    tables = [_time_table(plan.prediction, report, comparable=plan.cluster.name == platform)]
    if any(counted.memory_bytes for counted in report.ranks):
        tables.append(bytes_table("Memory of a rank", [(ranks_text(group.ranks), group.memory) for group in groups]))
    if any(counted.sent_bytes for counted in report.ranks):
        tables.append(
            bytes_table("Sent by a rank in a step", [(ranks_text(group.ranks), group.sent) for group in groups])
        )
    return Group(*(part for table in tables for part in ("", table)))


def ran_json(plan: Plan, report: RunReport) -> dict[str, Any]:
    """Return the same as JSON."""
    prediction = plan.prediction
    assert prediction, "only predicted plans are run"
    return {
        "candidate": str(plan.candidate),
        "step_time_s": {
            "predicted": prediction.step_time_s,
            "low": prediction.low_s,
            "high": prediction.high_s,
            "measured": report.step_time_s,
        },
        "steps": [_step_json(step) for step in report.steps],
        "ranks": [
            {"ranks": list(group.ranks), "memory_bytes": plain(group.memory), "sent_bytes": plain(group.sent)}
            for group in alike_ranks(plan, report.ranks)
        ],
    }


def ran_summary(plan: Plan, report: RunReport, platform: str) -> dict[str, Any]:
    """Return predicted beside measured as flat names, for those who compare many runs; bytes are of the fullest rank.

    Seconds about another machine than ``platform`` are not divided by those that were measured.
    """
    prediction = plan.prediction
    assert prediction, "only predicted plans are run"
    found: dict[str, Any] = {
        "step_time_s/predicted": prediction.step_time_s,
        "step_time_s/low": prediction.low_s,
        "step_time_s/high": prediction.high_s,
        "step_time_s/measured": report.step_time_s,
        "step_time_s/ratio": report.step_time_s / prediction.step_time_s if plan.cluster.name == platform else None,
        "mfu/predicted": prediction.mfu,
    }
    groups = alike_ranks(plan, report.ranks)
    for kind, sizes in (("memory_bytes", [one.memory for one in groups]), ("sent_bytes", [one.sent for one in groups])):
        for name in dict.fromkeys(name for one in sizes for name in one):
            fullest = max((one[name] for one in sizes if name in one), key=lambda both: both.measured or 0)
            found |= {f"{kind}/{name}/{key}": value for key, value in plain({name: fullest})[name].items()}
    return {name: value for name, value in found.items() if value is not None}


def alike_ranks(plan: Plan, measured: Sequence[Measured]) -> tuple[AlikeRanks, ...]:
    """Put the prediction of every rank beside what it counted, and fold ranks of which all is the same."""
    found: list[tuple[list[int], dict[str, Beside], dict[str, Beside]]] = []
    for rank, counted in enumerate(measured):
        memory, sent = memory_beside(plan, rank, counted), sent_beside(plan, counted)
        alike = next((entry for entry in found if entry[1:] == (memory, sent)), None)
        if alike:
            alike[0].append(rank)
        else:
            found.append(([rank], memory, sent))
    return tuple(AlikeRanks(ranks=tuple(ranks), memory=memory, sent=sent) for ranks, memory, sent in found)


def memory_beside(plan: Plan, rank: int, counted: Measured) -> dict[str, Beside]:
    """Return what a rank held beside what its pipeline rank was predicted to hold."""
    assert plan.prediction
    parts = plan.prediction.stage_memory[plan.mesh.coordinates(rank).get("pp", 0)].parts
    return {
        name: Beside(predicted=sum(parts.get(part, 0) for part in its), measured=counted.memory_bytes.get(name))
        for name, its in _PARTS.items()
    }


def sent_beside(plan: Plan, counted: Measured) -> dict[str, Beside]:
    """Return what a rank sent beside the most that any was predicted to send."""
    assert plan.prediction
    predicted = {axis: size for axis, size in plan.prediction.communication_bytes.items() if size}
    axes = sorted({*predicted, *(axis for axis, size in counted.sent_bytes.items() if size)})
    return {axis: Beside(predicted=predicted.get(axis, 0), measured=counted.sent_bytes.get(axis)) for axis in axes}


def _time_table(prediction: Prediction, report: RunReport, *, comparable: bool) -> Table:
    """Return the table of seconds; those about another machine are not divided by those that were measured."""
    table = make_table("Predicted and measured")
    for name in ("", "predicted", "interval", "measured", "measured / predicted"):
        table.add_column(name, justify="right" if name else "left")
    measured_s, predicted_s = report.step_time_s, prediction.step_time_s
    interval = f"{format_seconds(prediction.low_s)} to {format_seconds(prediction.high_s)}"
    inside = prediction.low_s <= measured_s <= prediction.high_s
    shown = f"{measured_s / predicted_s:.2f}" if comparable else "another machine"
    ratio = Text(shown, style="green" if inside and comparable else "yellow")
    table.add_row("step", format_seconds(predicted_s), interval, format_seconds(measured_s), ratio)
    speed = prediction.tokens_per_s * predicted_s / measured_s
    ratio = f"{predicted_s / measured_s:.2f}" if comparable else ""
    table.add_row("speed", _tokens(prediction.tokens_per_s), "", _tokens(speed), ratio)
    return table


def bytes_table(title: str, rows: Sequence[tuple[str, Mapping[str, Beside]]], counted: str = "measured") -> Table:
    """Return a table of bytes by ranks, predicted and as they were ``counted``."""
    table = make_table(title)
    for name in ("ranks", "", "predicted", counted, f"{counted} / predicted"):
        table.add_column(name, justify="left" if name in ("ranks", "") else "right")
    for ranks, sizes in rows:
        for number, (name, both) in enumerate(sizes.items()):
            table.add_row("" if number else ranks, name, *_cells(both))
    return table


def _cells(both: Beside) -> tuple[str, str, str]:
    if both.measured is None:
        return format_bytes(both.predicted), "-", "-"
    ratio = f"{both.measured / both.predicted:.2f}" if both.predicted else "-"
    return format_bytes(both.predicted), format_bytes(both.measured), ratio


def ranks_text(ranks: Sequence[int]) -> str:
    """Write numbers with runs of neighbours folded.

    >>> ranks_text([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _step_json(step: TimedStep) -> dict[str, Any]:
    """Return a step; a loss or norm that is no number is null, and ``nonfinite`` says what it was."""
    found: dict[str, Any] = {"number": step.number, "loss": step.loss, "norm": step.norm, "time_s": step.time_s}
    strange = step.nonfinite
    return {**found, **dict.fromkeys(strange), "nonfinite": strange} if strange else found


def _tokens(per_s: float) -> str:
    return format_count(per_s, "tokens/s")


def plain(sizes: Mapping[str, Beside]) -> dict[str, dict[str, int | None]]:
    """Return pairs of bytes as JSON has them."""
    return {name: {"predicted": both.predicted, "measured": both.measured} for name, both in sizes.items()}
