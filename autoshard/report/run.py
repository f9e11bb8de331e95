"""A run: the lines of its steps, and the sheet that compares what was predicted and measured at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from autoshard.cost.predict import sent_by_stage
from autoshard.plan.plan import Plan
from autoshard.report.sheet import Cell, Node, Sheet, Table, Words
from autoshard.report.words import compiled_words, prediction_of, ranks_text
from autoshard.run.other_programs import BusyProcessors
from autoshard.run.reports import DryRank, Measured, RunReport, TimedStep, losses_of, with_nulls
from autoshard.spec.kernels import load_kernels
from autoshard.units import counted, format_bytes, format_count, format_seconds, format_wait

_PORT = 6006  # TensorBoard's own
_GAP = "   "  # between the parts of a line
_WAITED = 0.02  # of a step's time: to wait so long for data is worth a word
_PHASES = {"compile": "compiled in it", "warm-up": "warm-up", "steady": ""}
_DISPENSABLE = (
    "memory",
    "rate",
    "norm",
    "ratio",
    "experts",
    "mfu",
    "speed",
    "waited",
    "left",
    "phase",
)  # where a line is short
_PARTS = {  # what an engine counts -> the predicted parts that it adds up
    **{name: (name,) for name in ("weights", "gradients", "masters", "optimizer")},
    "saved": ("activations", "logits"),
}
_STEP, _SIDES = ("predicted", "low", "high", "measured"), ("predicted", "measured")
_BYTES = ("memory_bytes", "sent_bytes")
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
        "loss": "no loss" if step.loss is None else f"loss {step.loss:.4f}",
        "norm": f"norm {step.norm:.3f}",
        "rate": "" if step.learning_rate is None else f"lr {step.learning_rate:.2e}",
        "time": format_seconds(step.time_s),
        "ratio": "" if ratio is None or step.phase != "steady" else f"{ratio:.2f} x predicted",
        "speed": format_count(step.tokens_per_s, "tokens/s"),
        "mfu": "" if mfu is None else f"MFU {mfu:.1%}",
        "memory": "" if step.memory_bytes is None else format_bytes(step.memory_bytes),
        "experts": "" if step.router is None else f"busiest expert {step.router.busiest:.2f} x mean",
        "waited": f"waited {format_seconds(step.waited_s)} for data" if step.waited_s > _WAITED * step.time_s else "",
        "left": "" if not left_s else f"{format_wait(left_s)} left",
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


def without_steps(num_steps: int, num_done: int, stopped_by: int) -> str:
    """Say why a start has taken no step: a signal came before one had ended, or all are done.

    >>> without_steps(300, 120, stopped_by=2)
    'stopped before a step of this start had ended: the same command goes on'
    >>> without_steps(300, 320, stopped_by=0)
    'nothing left to do: all 300 steps are done, and 320 were before. For more, type --steps 640'
    """
    stopped = "stopped before a step of this start had ended: the same command goes on"
    more = f"For more, type --steps {2 * max(num_steps, num_done)}"
    before = f", and {num_done} were before" if num_done > num_steps else ""
    are_done = "its step is done" if num_steps == 1 else f"all {num_steps} steps are done"
    return stopped if stopped_by else f"nothing left to do: {are_done}{before}. {more}"


def ending_lines(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what all starts of a run have reached, from the lines that it wrote of its steps and of its evaluations.

    >>> ending_lines([{"loss": 6.25, "time_s": 1.5, "tokens": 4096}, {"loss": 2.5, "time_s": 1.0, "tokens": 4096}], [])
    ['loss 6.2500 -> 2.5000 in 2 steps: 8,192 tokens in 2.50 s']
    """
    if not steps:
        return []
    time_s = sum(step["time_s"] + step.get("waited_s", 0.0) for step in steps)
    tokens, losses = sum(step["tokens"] for step in steps), losses_of(steps)
    ends = [losses[0], losses[-1]] if losses else []
    curve = " -> ".join("not finite" if loss is None else f"{loss:.4f}" for loss in ends)
    loss = f"loss {curve}" if ends else "no loss"
    lines = [f"{loss} in {counted(len(steps), 'step')}: {tokens:,} tokens in {format_wait(time_s)}"]
    if best := [line for line in evaluations if line["best"]]:
        figures = f"{best[-1]['loss']:.4f} (perplexity {best[-1]['perplexity']:.2f})"
        lines.append(f"lowest evaluation loss {figures} after step {best[-1]['step']}")
    return lines


def run_sheet(plan: Plan, run: Node, *, comparable: bool) -> Sheet:
    """Return a run's predicted and measured time, memory and traffic, from its JSON.

    No ratio of times stands there where the prediction is for other hardware than that which ran.
    """
    tables = [_step_table(plan, run["step_time_s"], comparable=comparable)] if run["step_time_s"] else []
    notes = [] if tables else ["The run has not ended: its comparison by part is written at the end."]
    for table, key in zip(bytes_tables(run["ranks"], "measured"), _BYTES, strict=True):
        if any(pair["measured"].value is not None for group in run["ranks"] for _, pair in group[key].entries()):
            tables.append(table)
            notes += _saved_notes(plan) if key == "memory_bytes" else []
    if (programs := run.at("other_programs")).value:
        words = str(BusyProcessors(**programs.value))
        notes += [f"Meanwhile {words}; the prediction has all of them for the run."] if words else []
    return Sheet(name="run", title="Predicted and measured", tables=tables, notes=notes)


def _step_table(plan: Plan, step: Node, *, comparable: bool) -> Table:
    predicted, low, high, measured = (step[key].figure(format_seconds) for key in _STEP)
    predicted_s, low_s, high_s, measured_s = (step[key].value for key in _STEP)
    inside, speed = low_s <= measured_s <= high_s, predicted_s / measured_s
    ratio = f"{measured_s / predicted_s:.2f}" if comparable else "another machine"
    kind = "good" if inside and comparable else "warning"
    tokens = [format_count(prediction_of(plan).tokens_per_s * share, "tokens/s") for share in (1, speed)]
    rows: list[tuple[Cell, ...]] = [
        ("step", predicted, (low, " to ", high), measured, Words(ratio, kind)),
        ("speed", tokens[0], "", tokens[1], f"{speed:.2f}" if comparable else ""),
    ]
    return Table("", ("", ">predicted", ">interval", ">measured", ">measured / predicted"), rows, drop=(">interval",))


def run_json(plan: Plan, report: RunReport) -> dict[str, Any]:
    """Return what a run took beside its prediction; a loss or norm that is not finite is null, and ``nonfinite`` it."""
    prediction = prediction_of(plan)
    times = {"predicted": prediction.step_time_s, "low": prediction.low_s, "high": prediction.high_s}
    return {
        "candidate": str(plan.candidate),
        "step_time_s": {**times, "measured": report.step_time_s},
        "steps": [
            with_nulls({"number": step.number, "loss": step.loss, "norm": step.norm, "time_s": step.time_s})
            for step in report.steps
        ],
        "ranks": [
            {"ranks": ranks, "memory_bytes": memory, "sent_bytes": sent}
            for ranks, memory, sent in alike_ranks(plan, report.ranks)
        ],
        "other_programs": asdict(report.other_programs) if report.other_programs else None,
    }


def run_summary(plan: Plan, report: RunReport, platform: str) -> dict[str, Any]:
    """Return predictions and measurements under flat names, to compare many runs; bytes are those of the fullest rank.

    No ratio of times is given where the prediction is for other hardware than ``platform``.
    """
    step = run_json(plan, report)["step_time_s"]
    summary: dict[str, Any] = {f"step_time_s/{name}": value for name, value in step.items()}
    if plan.cluster.name == platform:
        summary["step_time_s/ratio"] = step["measured"] / step["predicted"]
    summary["mfu/predicted"] = prediction_of(plan).mfu
    for name, kind in (("memory", "memory_bytes"), ("sent", "sent_bytes")):
        groups: list[Pairs] = [getattr(group, name) for group in alike_ranks(plan, report.ranks)]
        for part in dict.fromkeys(part for pairs in groups for part in pairs):
            fullest = max((pairs[part] for pairs in groups if part in pairs), key=lambda pair: pair["measured"] or 0)
            summary |= {f"{kind}/{part}/{key}": value for key, value in fullest.items() if value is not None}
    return summary


def alike_ranks(plan: Plan, measured: Sequence[Measured]) -> list[AlikeRanks]:
    """Return the predicted and measured bytes of every rank; ranks with equal numbers form one group."""
    groups: list[AlikeRanks] = []
    sent = sent_by_stage(plan)
    for rank, figures in enumerate(measured):
        compared = _compared(plan, rank, figures, sent)
        group = next((group for group in groups if group[1:] == compared[1:]), None)
        if group:
            group.ranks.append(rank)
        else:
            groups.append(compared)
    return groups


def _compared(plan: Plan, rank: int, figures: Measured, by_stage: Sequence[Mapping[str, int]]) -> AlikeRanks:
    """Return a rank's memory and traffic with the predictions for its pipeline rank."""
    place = plan.mesh.coordinates(rank).get("pp", 0)
    parts = prediction_of(plan).stage_memory[place].parts
    memory: Pairs = {
        name: {"predicted": sum(parts.get(part, 0) for part in names), "measured": figures.memory_bytes.get(name)}
        for name, names in _PARTS.items()
    }
    if host_bytes := prediction_of(plan).stage_memory[place].host_bytes:
        memory["host"] = {"predicted": host_bytes, "measured": figures.memory_bytes.get("host")}
    predicted, sent = by_stage[place], figures.sent_bytes
    axes = sorted(axis for axis in {*predicted, *sent} if predicted.get(axis) or sent.get(axis))
    pairs: Pairs = {axis: {"predicted": predicted.get(axis, 0), "measured": sent.get(axis)} for axis in axes}
    return AlikeRanks([rank], memory, pairs)


def bytes_tables(groups: Node, kind: str) -> tuple[Table, Table]:
    """Return tables of bytes by rank, predicted and of a ``kind`` (measured or counted): of memory, and sent."""

    def table(title: str, key: str) -> Table:
        rows: list[tuple[Cell, ...]] = []
        for group in groups:
            for number, (name, pair) in enumerate(group[key].entries()):
                predicted, measured = pair["predicted"].value or 0, pair["measured"].value
                ratio = "-" if measured is None or not predicted else f"{measured / predicted:.2f}"
                ranks = "" if number else ranks_text(group["ranks"].value)
                rows.append((ranks, name, *(pair[side].figure(format_bytes) for side in _SIDES), ratio))
        return Table(title, ("ranks", "", ">predicted", f">{kind}", f">{kind} / predicted"), rows)

    memory, sent = _BYTES
    return table(_MEMORY, memory), table(_SENT, sent)


def dry_sheet(run: Node) -> Sheet:
    """Return the counted bytes of a dry run's ranks and their predictions, from its JSON."""
    groups = [{**group, "ranks": [group["rank"]]} for group in run["ranks"].value]
    return Sheet(tables=bytes_tables(Node(groups), "counted"))


def dry_notes(plan: Plan, ranks: Sequence[DryRank]) -> list[str]:
    """Return which ranks each counted rank represents, how much of the step was executed, and what predictions mean."""
    notes = [f"rank {dry.rank} represents {counted(len(dry.alike), 'rank')}: {ranks_text(dry.alike)}" for dry in ranks]
    represented = {rank for dry in ranks for rank in dry.alike}
    if missing := [rank for rank in range(plan.mesh.num_ranks) if rank not in represented]:
        notes.append(f"not executed: ranks {ranks_text(missing)}. Without --dry-ranks one rank of every kind is")
    whole = plan.schedule.num_micro_batches
    if fewest := sorted({dry.num_run for dry in ranks if dry.num_run < whole}):
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
    """Return the counted bytes of a dry run's ranks, and their predictions."""
    rows, by_stage = list[dict[str, Any]](), sent_by_stage(plan)
    for rank in ranks:
        _, memory, sent = _compared(plan, rank.rank, rank.measured, by_stage)
        about = {"rank": rank.rank, "stands_for": list(rank.alike), "micro_batches_run": rank.num_run}
        rows.append({**about, "memory_bytes": memory, "sent_bytes": sent})
    return {"candidate": str(plan.candidate), "ranks": rows}
