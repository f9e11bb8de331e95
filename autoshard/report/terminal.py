"""Plans as tables for a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan.certificate import Certificate
from autoshard.plan.plan import Plan
from autoshard.plan.prediction import Prediction, StageMemory
from autoshard.plan.rules.rule import Rejection
from autoshard.units import GIB, format_bytes, format_count, format_seconds

_BAR = 16
_STATES = ("weights", "gradients", "optimizer", "activations")
_TIME_WORDS = {
    "compute": "compute",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "sends between stages",
    "bubble": "waiting in the pipeline",
    "dp": "gradients and weights over dp",
    "update": "optimizer update",
}


def plan_report(plan: Plan, runners_up: Sequence[Plan], certificate: Certificate | None, next_command: str) -> Group:
    """Return what ``autoshard plan`` prints: the layout first, then time, memory, alternatives, what was refused."""
    assert plan.prediction, "only predicted plans are shown"
    parts: list[RenderableType] = [_headline(plan, plan.prediction), "", _time_table(plan.prediction), ""]
    parts += [_memory_table(plan, plan.prediction), ""]
    if runners_up:
        parts += [_runners_up(plan, runners_up), ""]
    if certificate:
        parts += [_looked_at(certificate), ""]
    parts.append(Text(f"prediction {plan.prediction.basis}", style="yellow"))
    if next_command:
        parts.append(Text.assemble("next: ", (next_command, "bold")))
    return Group(*parts)


def rejections_report(rejections: Sequence[Rejection]) -> Group:
    """Return why something may not run, one reason per line with its source."""
    lines = [
        Text.assemble(("refused ", "bold red"), (rejection.message, ""), (f"\n        {rejection.source}", "dim"))
        for rejection in rejections
    ]
    return Group(*lines)


def make_console() -> Console:
    """Return a console; what is no terminal gets 120 columns, so that files do not depend on the machine."""
    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, width=120)


def _headline(plan: Plan, prediction: Prediction) -> Group:
    cluster, workload, model = plan.cluster, plan.workload, plan.model
    lnc = f" at lnc {cluster.lnc}" if cluster.lnc else ""
    place = f"{cluster.num_nodes} x {cluster.name}{lnc}" if cluster.name != "local" else "this machine"
    asked = Text.assemble(
        (model.name, "bold"),
        f" ({format_count(model.num_parameters)} parameters) on {place}: {cluster.num_ranks} ranks",
    )
    work = (
        f"{workload.global_batch} sequences of {workload.seq_len} tokens a step, {_precision(plan)}, ZeRO-{plan.zero}, "
        f"engine {plan.engine}, kernels {plan.kernels}"
    )
    low, high = format_seconds(prediction.low_s), format_seconds(prediction.high_s)
    result = Text.assemble(
        ("step ", ""), (format_seconds(prediction.step_time_s), "bold"), f" ({low} to {high}), ",
        (f"{format_count(prediction.tokens_per_s)}tokens/s", "bold"), f", MFU {prediction.mfu:.1%}, peak ",
        (format_bytes(prediction.peak_bytes), "bold"), f" of {format_bytes(prediction.capacity_bytes)} a rank",
    )  # fmt: skip
    layout = Text.assemble(("plan ", ""), (str(plan.candidate), "bold green"))
    return Group(asked, Text(work, style="dim"), "", layout, result, Text(_batches(plan), style="dim"))


def _precision(plan: Plan) -> str:
    precision = plan.workload.precision
    masters = f" with {precision.masters} masters" if precision.masters else ""
    return f"{precision.weights}{masters}"


def _batches(plan: Plan) -> str:
    count, bubble = plan.schedule.num_micro_batches, plan.schedule.bubble_fraction()
    batches = "micro-batch" if count == 1 else "micro-batches"
    shape = f"{plan.schedule.builder}: {count} {batches} of {plan.micro_batch} per data-parallel rank"
    padded = "".join(f"; {dim} padded to {size}" for dim, size in plan.padding.items())
    stages = "stage" if len(plan.stages) == 1 else "stages"
    return f"{shape}, {len(plan.stages)} {stages}, ideal bubble {bubble:.1%}{padded}"


def _bar(share: float) -> str:
    return "█" * min(_BAR, round(share * _BAR))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def _time_table(prediction: Prediction) -> Table:
    table = _table("Where the time goes")
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for part, time_s in sorted(prediction.time_parts.items(), key=lambda item: -item[1]):
        share = time_s / prediction.step_time_s
        table.add_row(_TIME_WORDS.get(part, part), format_seconds(time_s), f"{share:.1%}", _bar(share))
    return table


def _memory_table(plan: Plan, prediction: Prediction) -> Table:
    table = _table(f"Memory per pipeline rank in GiB, of {_gib(prediction.capacity_bytes)}, and where it lies")
    table.add_column("rank")
    table.add_column("layers", no_wrap=True)
    table.add_column("nodes", no_wrap=True)
    for part in ("weights", "grads", "optim", "activ", "other", "total"):
        table.add_column(part, justify="right", no_wrap=True)
    table.add_column("used", no_wrap=True)
    for rank, memory in enumerate(prediction.stage_memory):
        table.add_row(*_memory_row(plan, prediction, rank, memory))
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _memory_row(plan: Plan, prediction: Prediction, rank: int, memory: StageMemory) -> list[str]:
    share = memory.total / prediction.capacity_bytes
    sizes = [memory.parts.get(part, 0) for part in _STATES]
    cells = [_gib(size) for size in (*sizes, memory.total - sum(sizes), memory.total)]
    return [str(rank), _layers(plan, rank), _nodes(plan, rank), *cells, f"{share:4.0%} {_bar(share)}"]


def _layers(plan: Plan, rank: int) -> str:
    """Say which layers a pipeline rank holds, and whether it has the embedding or the head."""
    held = [
        f"{stage.first_layer}-{stage.first_layer + stage.num_layers - 1}" for stage in plan.stages if stage.rank == rank
    ]
    numbers = [number for number, stage in enumerate(plan.stages) if stage.rank == rank]
    before = "embed " if 0 in numbers else ""
    after = " head" if len(plan.stages) - 1 in numbers else ""
    return f"{before}{','.join(held)}{after}"


def _nodes(plan: Plan, rank: int) -> str:
    """Say on which nodes a pipeline rank's layers lie."""
    nodes = sorted({plan.cluster.node_of(member) for member in plan.mesh.ranks_of({"pp": rank})})
    if len(nodes) == 1:
        return str(nodes[0])
    return f"{nodes[0]}-{nodes[-1]}" if nodes[-1] - nodes[0] + 1 == len(nodes) else f"{len(nodes)} nodes"


def _runners_up(plan: Plan, runners_up: Sequence[Plan]) -> Table:
    assert plan.prediction
    table = _table("Runners-up")
    for name in ("plan", "step", "slower", "peak memory"):
        table.add_column(name, justify="left" if name == "plan" else "right", overflow="fold")
    for other in runners_up:
        assert other.prediction
        slower = other.prediction.step_time_s / plan.prediction.step_time_s - 1
        row = [
            format_seconds(other.prediction.step_time_s),
            f"+{slower:.1%}",
            format_bytes(other.prediction.peak_bytes),
        ]
        table.add_row(str(other.candidate), *row)
    return table


def _looked_at(certificate: Certificate) -> Group:
    table = _table(f"Refused, of {certificate.num_layouts} layouts (one may be refused by several rules)")
    table.add_column("rule")
    table.add_column("layouts", justify="right")
    table.add_column("for example", overflow="fold")
    for refusal in sorted(certificate.refusals, key=lambda entry: -entry.num_layouts):
        table.add_row(refusal.rule_id, str(refusal.num_layouts), refusal.example)
    misfits = certificate.num_candidates - certificate.num_fitting
    table.add_row(
        "memory", f"{misfits} *", "peak memory above the capacity of a rank (* counted per kind of recompute)"
    )
    return Group(table, Text(certificate.claim, style="dim"))
