"""Plans as tables for a terminal."""

from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan.certificate import Certificate
from autoshard.plan.plan import Plan
from autoshard.plan.prediction import Compiling, Dollars, Prediction, StageMemory
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.rule import Rejection
from autoshard.report.words import TIME_WORDS
from autoshard.spec.cluster import LOCAL
from autoshard.units import GIB, format_bytes, format_count, format_dollars, format_seconds

WIDTH = 120  # of what is no terminal, so that files do not depend on the machine
MOST_ROWS = 20  # of pipeline ranks; beyond, neighbours share a row
_BAR = 16
_CANDIDATE = 56  # columns for the text of a candidate in a table
_MOST_CHUNKS = 4  # whose layers a row names
_SIZES = {  # columns of the table of memory -> the parts that they add up
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("masters", "optimizer"),
    "activations": ("activations", "logits"),
}


def plan_report(plan: Plan, runners_up: Sequence[Plan], certificate: Certificate | None, next_command: str) -> Group:
    """Return what ``autoshard plan`` prints: the layout first, then time, memory, alternatives, what was refused."""
    assert plan.prediction, "only predicted plans are shown"
    parts: list[RenderableType] = [_headline(plan, plan.prediction), "", time_table(plan.prediction), ""]
    parts += [memory_table(plan, plan.prediction), ""]
    if runners_up:
        near = worth_measuring(plan, runners_up)
        parts += [runners_up_table(plan, runners_up), *([near] if near else []), ""]
    if certificate:
        parts += [_looked_at(certificate), ""]
    parts.append(Text(f"prediction {plan.prediction.basis}", style="yellow"))
    if plan.prediction.compiling:
        parts.append(Text(compiled_words(plan.prediction.compiling), style="yellow"))
    if next_command:
        parts.append(Text.assemble("next: ", (next_command, "bold")))
    return Group(*parts)


def rejections_report(rejections: Sequence[Rejection]) -> Group:
    """Return why something may not run, one reason per line with its source."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for rejection in rejections:
        table.add_row(Text("refused", style="bold red"), Text(rejection.message))
        table.add_row("", Text(rejection.source, style="dim"))
    return Group(*([table, ""] if rejections else []))


def make_console() -> Console:
    """Return a console; names are never read as markup."""
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=WIDTH)


def _headline(plan: Plan, prediction: Prediction) -> Group:
    cluster, workload, model = plan.cluster, plan.workload, plan.model
    lnc = f" at lnc {cluster.lnc}" if cluster.lnc else ""
    place = f"{cluster.num_nodes} x {cluster.name}{lnc}" if cluster.name != LOCAL else "this machine"
    asked = Text.assemble(
        (model.name, "bold"),
        f" ({format_count(model.num_parameters)} parameters) on {place}: {_many(cluster.num_ranks, 'rank')}",
    )
    apart = " of separate documents" if workload.documents == "separate" else ""
    work = (
        f"{_many(workload.global_batch, 'sequence')} of {_many(workload.seq_len, 'token')}{apart} a step, "
        f"{_precision(plan)}, {workload.optimizer}, ZeRO-{plan.zero}, engine {plan.engine}, kernels {plan.kernels}"
    )
    low, high = format_seconds(prediction.low_s), format_seconds(prediction.high_s)
    result = Text.assemble(
        ("step ", ""), (format_seconds(prediction.step_time_s), "bold"), f" ({low} to {high}), ",
        (f"{format_count(prediction.tokens_per_s, 'tokens/s')}", "bold"), f", MFU {prediction.mfu:.1%}, peak ",
        (format_bytes(prediction.peak_bytes), "bold"), f" of {format_bytes(prediction.capacity_bytes)} a rank",
    )  # fmt: skip
    layout = Text.assemble("plan ", (at_commas(str(plan.candidate), WIDTH - 5).replace("\n", "\n     "), "bold green"))
    dollars = plan.dollars
    costs = [dollars_text(dollars)] if dollars else []
    return Group(asked, Text(work, style="dim"), "", layout, result, *costs, Text(_batches(plan), style="dim"))


def dollars_text(dollars: Dollars) -> Text:
    """Say what a step costs, and how old the price is."""
    date = f"as of {dollars.price_date}" if dollars.price_date else "undated"
    price = f"{format_dollars(dollars.price_usd_per_node_hour)} a node hour on demand, {date}; check yours"
    return Text.assemble(
        ("cost ", ""), (format_dollars(dollars.usd_per_step), "bold"), " a step, ",
        (format_dollars(dollars.usd_per_billion_tokens), "bold"), f" per billion tokens ({price})",
    )  # fmt: skip


def compiled_words(compiling: Compiling) -> str:
    """Say what is compiled before the first step, and how long that takes."""
    graphs = _many(compiling.num_graphs, "distinct graph")
    return f"before the first step, {graphs} to compile: {format_seconds(compiling.compile_s)} by {compiling.basis}"


def _precision(plan: Plan) -> str:
    precision = plan.workload.precision
    masters = f" with {precision.masters} masters" if precision.masters else ""
    masters = " with stochastic rounding" if precision.rounds_stochastically else masters
    products = f" and {precision.products} products" if precision.products else ""
    return f"{precision.weights}{masters}{products}"


def _batches(plan: Plan) -> str:
    count, bubble = plan.schedule.num_micro_batches, plan.schedule.bubble_fraction()
    batches = "micro-batch" if count == 1 else "micro-batches"
    shape = f"{plan.schedule.builder}: {count} {batches} of {plan.micro_batch} per data-parallel rank"
    padded = "".join(f"; {dim} padded to {size}" for dim, size in plan.padding.items())
    return f"{shape}, {_many(len(plan.stages), 'stage')}, ideal bubble {bubble:.1%}{padded}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def at_commas(text: str, width: int) -> str:
    """Break a candidate into lines after its commas; pasted as it stands it is still the same candidate.

    >>> print(at_commas("tp=8,pp=16,recompute=selective[attend,act]", 32))
    tp=8,pp=16,
    recompute=selective[attend,act]
    """
    lines = [""]
    for piece in text.replace(",", ",\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _bar(share: float) -> str:
    return "█" * min(_BAR, round(share * _BAR))


def make_table(title: str) -> Table:
    """Return an empty table as all reports have them."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )


def time_table(prediction: Prediction) -> Table:
    """Return where the seconds of a step go; the parts add up to it."""
    table = make_table("Where the time goes")
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for part, time_s in sorted(prediction.time_parts.items(), key=lambda item: -item[1]):
        share = time_s / prediction.step_time_s
        table.add_row(TIME_WORDS.get(part, part), format_seconds(time_s), f"{share:.1%}", _bar(share))
    return table


def memory_table(plan: Plan, prediction: Prediction) -> Table:
    """Return what each pipeline rank holds, in parts that add up to its peak."""
    groups = _row_groups(len(prediction.stage_memory))
    shared = "; of ranks that share a row, the fullest" if len(groups) < len(prediction.stage_memory) else ""
    table = make_table(f"Memory per pipeline rank in GiB, of {_gib(prediction.capacity_bytes)}{shared}")
    table.add_column("rank")
    table.add_column("layers", no_wrap=True)
    table.add_column("nodes", no_wrap=True)
    for part in ("weights", "grads", "optim", "activ", "other", "total"):
        table.add_column(part, justify="right", no_wrap=True)
    table.add_column("used", no_wrap=True)
    for ranks in groups:
        table.add_row(*_memory_row(plan, prediction, ranks))
    return table


def _row_groups(num_ranks: int) -> list[range]:
    """Say which pipeline ranks share a row: the first and the last never do, because they hold more than layers.

    >>> [len(ranks) for ranks in _row_groups(64)]
    [1, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2, 1]
    """
    size = 1 if num_ranks <= MOST_ROWS else -(-(num_ranks - 2) // (MOST_ROWS - 2))
    middle = [range(first, min(first + size, num_ranks - 1)) for first in range(1, num_ranks - 1, size)]
    return [range(1), *middle, *([range(num_ranks - 1, num_ranks)] if num_ranks > 1 else [])]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _memory_row(plan: Plan, prediction: Prediction, ranks: range) -> list[str]:
    memory = max((prediction.stage_memory[rank] for rank in ranks), key=_total)
    share = memory.total / prediction.capacity_bytes
    sizes = [sum(memory.parts.get(part, 0) for part in parts) for parts in _SIZES.values()]
    cells = [_gib(size) for size in (*sizes, memory.total - sum(sizes), memory.total)]
    place = [_span(ranks[0], ranks[-1]), _layers(plan, ranks), nodes_of(plan, ranks)]
    return [*place, *cells, f"{share:4.0%} {_bar(share)}"]


def _total(memory: StageMemory) -> int:
    return memory.total


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _layers(plan: Plan, ranks: range) -> str:
    """Say which layers neighbouring pipeline ranks hold, chunk by chunk, and whether the embedding or the head."""
    numbers = [number for number, stage in enumerate(plan.stages) if stage.rank in ranks]
    spans: dict[int, tuple[int, int]] = {}
    for stage in (plan.stages[number] for number in numbers):
        first, _ = spans.get(stage.chunk, (stage.first_layer, 0))
        spans[stage.chunk] = (first, stage.first_layer + stage.num_layers - 1)
    held = [_span(*span) for span in spans.values()]
    before = "embed " if 0 in numbers else ""
    after = " head" if len(plan.stages) - 1 in numbers else ""
    return f"{before}{','.join(held[:_MOST_CHUNKS])}{',...' if len(held) > _MOST_CHUNKS else ''}{after}"


def nodes_of(plan: Plan, ranks: range) -> str:
    """Say on which nodes the layers of neighbouring pipeline ranks lie."""
    members = (member for rank in ranks for member in plan.mesh.ranks_of({"pp": rank}))
    nodes = sorted({plan.cluster.node_of(member) for member in members})
    return _span(nodes[0], nodes[-1]) if nodes[-1] - nodes[0] + 1 == len(nodes) else f"{len(nodes)} nodes"


def runners_up_table(plan: Plan, runners_up: Sequence[Plan]) -> Table:
    """Return the next best plans, by how much they lose, and to which part of the time."""
    assert plan.prediction
    table = make_table("Runners-up")
    for name in ("plan", "step", "slower", "mostly for", "peak memory"):
        table.add_column(name, justify="left" if name in ("plan", "mostly for") else "right", overflow="fold")
    for other in runners_up:
        assert other.prediction
        slower = other.prediction.step_time_s / plan.prediction.step_time_s - 1
        row = [
            format_seconds(other.prediction.step_time_s),
            f"{slower:+.1%}",
            _mostly_for(plan.prediction, other.prediction),
            format_bytes(other.prediction.peak_bytes),
        ]
        table.add_row(at_commas(str(other.candidate), _CANDIDATE), *row)
    return table


def _mostly_for(one: Prediction, other: Prediction) -> str:
    """Name the part of the time that a plan loses most by, or gains."""
    worse = other.step_time_s >= one.step_time_s
    more = {part: seconds - one.time_parts.get(part, 0.0) for part, seconds in other.time_parts.items()}
    more |= {part: -seconds for part, seconds in one.time_parts.items() if part not in other.time_parts}
    part = max(more, key=lambda name: more[name] if worse else -more[name])
    return TIME_WORDS.get(part, part)


def worth_measuring(plan: Plan, others: Sequence[Plan]) -> Text | None:
    """Say which other layouts are so near that only a measurement can tell; at most three, the plan's own included."""
    assert plan.prediction
    near = [one for one in others if one.prediction and one.prediction.step_time_s <= plan.prediction.high_s][:2]
    if not near:
        return None
    words = f"{len(near)} of these lie within the interval of this prediction, so measure before you rent for long: "
    layouts = "; ".join(_layout(one) for one in (plan, *near))
    return Text(f"{words}{layouts}", style="yellow")


def _layout(plan: Plan) -> str:
    """Name a plan by its outer point; recompute and stages are long."""
    return str(replace(plan.candidate, recompute=(Recompute(),), stages=None))


def _looked_at(certificate: Certificate) -> Group:
    words = Text(f"{certificate.claim}\n{certificate.accounting}", style="dim")
    if not certificate.refusals:
        return Group(words)
    table = make_table(f"Refused, of {certificate.num_points} outer points (one may be refused by several rules)")
    table.add_column("rule")
    table.add_column("points", justify="right")
    table.add_column("for example", overflow="fold")
    for refusal in sorted(certificate.refusals, key=lambda entry: -entry.num_points):
        table.add_row(refusal.rule_id, str(refusal.num_points), refusal.example)
    return Group(table, "", words)
