"""A run for a terminal: its steps, and the comparison of prediction and measurement at its end or after a dry run."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.cost.predict import sent_by_stage
from autoshard.plan.plan import Plan
from autoshard.report.tables import Cell, FittingTable, prose
from autoshard.report.terminal import compiled_words, prediction_of
from autoshard.report.words import ranks_text
from autoshard.run.reports import DryRank, Measured, RunReport, TimedStep, with_nulls
from autoshard.spec.kernels import load_kernels
from autoshard.units import format_bytes, format_count, format_seconds

_PORT = 6006  # TensorBoard's own
_GAP = "   "  # between the parts of a line
_WAITED = 0.02  # of a step's time: to wait so long for data is worth a word
_PHASES = {"compile": "compiled in it", "warm-up": "warm-up", "steady": ""}
_DISPENSABLE = ("memory", "rate", "norm", "ratio", "mfu", "speed", "waited", "left", "phase")  # where a line is short
_PARTS = {  # what an engine counts -> the predicted parts that it adds up
    **{name: (name,) for name in ("weights", "gradients", "masters", "optimizer")},
    "saved": ("activations", "logits"),
}
_MEMORY, _SENT = "Memory of a rank", "Sent by a rank in a step (predicted for the largest share of its stage)"

Pairs = dict[str, dict[str, int | None]]  # name -> predicted and measured bytes; None where not measured


class AlikeRanks(NamedTuple):
    """Ranks with the same memory and traffic, both predicted and measured."""

    ranks: list[int]
    memory: Pairs
    sent: Pairs


def step_line(
    step: TimedStep,
    num_steps: int,
    *,
    mfu: float | None = None,
    ratio: float | None = None,
    left_s: float | None = None,
    width: int | None = None,
) -> str:
    """Write a step as a line; where it does not fit the width, the least important parts are left out first.

    ``ratio`` is the step's time over the predicted time.

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
        "speed": format_count(step.tokens_per_s, "tokens/s"),
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
    """Return what happens before the first step, and how to watch the run from another machine."""
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


def run_report(plan: Plan, report: RunReport, platform: str) -> Group:
    """Return a run's predicted and measured time, memory and traffic; ``platform`` names the hardware that ran it.

    No ratio of times is given where the prediction is for other hardware.
    """
    prediction, measured_s, comparable = prediction_of(plan), report.step_time_s, plan.cluster.name == platform
    inside = prediction.low_s <= measured_s <= prediction.high_s
    ratio = f"{measured_s / prediction.step_time_s:.2f}" if comparable else "another machine"
    predicted_s, low, high = map(format_seconds, (prediction.step_time_s, prediction.low_s, prediction.high_s))
    speed = prediction.step_time_s / measured_s
    tokens = [format_count(prediction.tokens_per_s * share, "tokens/s") for share in (1, speed)]
    rows: list[tuple[Cell, ...]] = [
        ("step", predicted_s, f"{low} to {high}", format_seconds(measured_s),
         Text(ratio, style="green" if inside and comparable else "yellow")),
        ("speed", tokens[0], "", tokens[1], f"{speed:.2f}" if comparable else ""),
    ]  # fmt: skip
    columns = ("", ">predicted", ">interval", ">measured", ">measured / predicted")
    parts: list[RenderableType] = ["", FittingTable("Predicted and measured", columns, rows, drop=(">interval",))]
    memory, sent = _bytes_tables(alike_ranks(plan, report.ranks), "measured")
    if any(counted.memory_bytes for counted in report.ranks):
        parts += ["", memory, *map(prose, _saved_notes(plan))]
    parts += ["", sent] if any(counted.sent_bytes for counted in report.ranks) else []
    return Group(*parts)


def run_json(plan: Plan, report: RunReport) -> dict[str, Any]:
    """Return the same as JSON; a loss or norm that is not finite is null, and ``nonfinite`` says what it was."""
    prediction = prediction_of(plan)
    step = {"predicted": prediction.step_time_s, "low": prediction.low_s, "high": prediction.high_s}
    return {
        "candidate": str(plan.candidate),
        "step_time_s": {**step, "measured": report.step_time_s},
        "steps": [
            with_nulls({"number": one.number, "loss": one.loss, "norm": one.norm, "time_s": one.time_s})
            for one in report.steps
        ],
        "ranks": [
            {"ranks": ranks, "memory_bytes": memory, "sent_bytes": sent}
            for ranks, memory, sent in alike_ranks(plan, report.ranks)
        ],
    }


def run_summary(plan: Plan, report: RunReport, platform: str) -> dict[str, Any]:
    """Return predictions and measurements under flat names, to compare many runs; bytes are those of the fullest rank.

    No ratio of times is given where the prediction is for other hardware than ``platform``.
    """
    step = run_json(plan, report)["step_time_s"]
    found: dict[str, Any] = {f"step_time_s/{name}": value for name, value in step.items()}
    if plan.cluster.name == platform:
        found["step_time_s/ratio"] = step["measured"] / step["predicted"]
    found["mfu/predicted"] = prediction_of(plan).mfu
    for name, kind in (("memory", "memory_bytes"), ("sent", "sent_bytes")):
        groups: list[Pairs] = [getattr(group, name) for group in alike_ranks(plan, report.ranks)]
        for part in dict.fromkeys(part for pairs in groups for part in pairs):
            fullest = max((pairs[part] for pairs in groups if part in pairs), key=lambda pair: pair["measured"] or 0)
            found |= {f"{kind}/{part}/{key}": value for key, value in fullest.items() if value is not None}
    return found


def alike_ranks(plan: Plan, measured: Sequence[Measured]) -> list[AlikeRanks]:
    """Return the predicted and measured bytes of every rank; ranks with equal numbers form one group."""
    found: list[AlikeRanks] = []
    sent = sent_by_stage(plan)
    for rank, counted in enumerate(measured):
        one = _compared(plan, rank, counted, sent)
        alike = next((group for group in found if group[1:] == one[1:]), None)
        if alike:
            alike.ranks.append(rank)
        else:
            found.append(one)
    return found


def _compared(plan: Plan, rank: int, counted: Measured, by_stage: Sequence[Mapping[str, int]]) -> AlikeRanks:
    """Return a rank's memory and traffic with the predictions for its pipeline rank."""
    place = plan.mesh.coordinates(rank).get("pp", 0)
    parts = prediction_of(plan).stage_memory[place].parts
    memory: Pairs = {
        name: {"predicted": sum(parts.get(part, 0) for part in its), "measured": counted.memory_bytes.get(name)}
        for name, its in _PARTS.items()
    }
    predicted, sent = by_stage[place], counted.sent_bytes
    axes = sorted(axis for axis in {*predicted, *sent} if predicted.get(axis) or sent.get(axis))
    pairs: Pairs = {axis: {"predicted": predicted.get(axis, 0), "measured": sent.get(axis)} for axis in axes}
    return AlikeRanks([rank], memory, pairs)


def _bytes_tables(groups: Sequence[AlikeRanks], counted: str) -> tuple[FittingTable, FittingTable]:
    """Return tables of predicted and ``counted`` ("measured" or "counted") bytes by rank: of memory, and sent."""

    def table(title: str, found: Sequence[Pairs]) -> FittingTable:
        rows: list[tuple[str, ...]] = []
        for group, pairs in zip(groups, found, strict=True):
            for number, (name, pair) in enumerate(pairs.items()):
                predicted, measured = pair["predicted"] or 0, pair["measured"]
                text = "-" if measured is None else format_bytes(measured)
                ratio = "-" if measured is None or not predicted else f"{measured / predicted:.2f}"
                rows.append(("" if number else ranks_text(group.ranks), name, format_bytes(predicted), text, ratio))
        return FittingTable(title, ("ranks", "", ">predicted", f">{counted}", f">{counted} / predicted"), rows)

    return table(_MEMORY, [group.memory for group in groups]), table(_SENT, [group.sent for group in groups])


def dry_report(plan: Plan, ranks: Sequence[DryRank]) -> Group:
    """Return the counted bytes of a dry run's ranks and their predictions."""
    by_stage = sent_by_stage(plan)
    memory, sent = _bytes_tables([_compared(plan, one.rank, one.measured, by_stage) for one in ranks], "counted")
    return Group("", memory, "", sent)


def dry_notes(plan: Plan, ranks: Sequence[DryRank]) -> list[str]:
    """Return which ranks each counted rank represents, how much of the step was executed, and what predictions mean."""
    notes = [f"rank {one.rank} represents {len(one.alike)} ranks: {ranks_text(one.alike)}" for one in ranks]
    known = {rank for one in ranks for rank in one.alike}
    if missing := [rank for rank in range(plan.mesh.num_ranks) if rank not in known]:
        notes.append(f"not executed: ranks {ranks_text(missing)}. Without --dry-ranks one rank of every kind is")
    whole = plan.schedule.num_micro_batches
    if fewest := sorted({one.num_run for one in ranks if one.num_run < whole}):
        notes.append(
            f"executed: {' or '.join(map(str, fewest))} of {whole} micro-batches, enough to reach the peak of memory; "
            "the traffic of the others is added"
        )
    return [*notes, *_saved_notes(plan)]


def _saved_notes(plan: Plan) -> list[str]:
    """Say why saved activations differ from their prediction, where a plan is for the kernels of another framework."""
    words = (
        f"saved: predicted are the activations that the kernels {plan.kernels} keep for the backward pass, measured "
        "are those that the torch engine keeps, which are others: no ratio of 1 is expected here"
    )
    return [] if load_kernels(plan.kernels).engine == "torch" else [words]


def dry_json(plan: Plan, ranks: Sequence[DryRank]) -> dict[str, Any]:
    """Return the same as JSON."""
    rows, by_stage = list[dict[str, Any]](), sent_by_stage(plan)
    for one in ranks:
        _, memory, sent = _compared(plan, one.rank, one.measured, by_stage)
        about = {"rank": one.rank, "stands_for": list(one.alike), "micro_batches_run": one.num_run}
        rows.append({**about, "memory_bytes": memory, "sent_bytes": sent})
    return {"candidate": str(plan.candidate), "ranks": rows}
