"""Tables for a terminal, and a plan, a frontier of plans, rejections and proofs shown with them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan.explanation import Certificate
from autoshard.plan.plan import Compiling, Dollars, Plan, Prediction
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.rule import Rejection
from autoshard.schedule.simulate import ideal_bubble
from autoshard.spec.cluster import LOCAL
from autoshard.units import GIB, format_bytes, format_count, format_dollars, format_seconds

if TYPE_CHECKING:  # plans are shown without what proves them
    from autoshard.plan.proof import Proof

WIDTH = 120  # of what is no terminal, so that files do not depend on the machine
MOST_ROWS = 20  # of pipeline ranks; beyond, neighbours share a row
TIME_WORDS = {
    "compute": "compute",
    "waiting": "waiting for kernels to start",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "sends between stages",
    "bubble": "waiting in the pipeline",
    "dp": "gradients and weights over dp",
    "update": "optimizer update",
    "fixed": "fixed time of every step",
}
_MOST_CHUNKS = 3  # whose layers a row names
_SIZES = (("weights",), ("gradients",), ("masters", "optimizer"), ("activations", "logits"))  # columns of memory


def make_console() -> Console:
    """Return a console; names are never read as markup."""
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=WIDTH)


def make_table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Sequence[str | Text]] = (),
    *,
    whole: Collection[str] = (),
    widths: Mapping[str, int] | None = None,
) -> Table:
    """Return a table as all reports have them.

    A column ``>name`` has numbers, which stand to the right and are never broken, like those of ``whole`` columns.
    ``widths`` are the most characters of a column.
    """
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    for column in columns:
        name, right = column.lstrip(">"), column.startswith(">")
        table.add_column(
            name,
            justify="right" if right else "left",
            no_wrap=right or name in whole,
            overflow="fold",
            max_width=(widths or {}).get(name),
        )
    for row in rows:
        table.add_row(*row)
    return table


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


def rejections_report(rejections: Sequence[Rejection]) -> Group:
    """Return why something may not run, one reason per line with its source."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for rejection in rejections:
        table.add_row(Text("refused", style="bold red"), Text(rejection.message))
        table.add_row("", Text(rejection.source, style="dim"))
    return Group(*([table, ""] if rejections else []))


def proof_report(proof: "Proof") -> Group:
    """Return per block what was executed and how far it is from the unsharded program."""
    lines = [Text(f"proof on virtual ranks, shrunk to {proof.candidate}:")]
    for block in proof.blocks:
        counts = ", ".join(f"{count} {kind}" for kind, count in block.collectives.items()) or "no collectives"
        verdict = ("  equal  ", "green") if block.holds else ("  DIFFERS", "bold red")
        words = f" {block.name}: {block.num_results} results within {block.error:.0e}; {counts}"
        lines.append(Text.assemble(verdict, words))
    return Group(*lines, *(Text(f"  not kept: {feature}", style="yellow") for feature in proof.lost))


def plan_report(plan: Plan, runners_up: Sequence[Plan] = (), certificate: Certificate | None = None) -> Group:
    """Return what ``autoshard plan`` prints: the layout first, then time, memory, alternatives, what was refused."""
    prediction = prediction_of(plan)
    parts: list[RenderableType] = [_headline(plan, prediction), "", time_table(prediction), ""]
    parts += [memory_table(plan), "", *runners_up_parts(plan, runners_up), *([""] if runners_up else [])]
    if certificate:
        if certificate.refusals:
            title = f"Refused, of {certificate.num_points} outer points (one may be refused by several rules)"
            ordered = sorted(certificate.refusals, key=lambda refusal: -refusal.num_points)
            rows = [(refusal.rule_id, str(refusal.num_points), refusal.example) for refusal in ordered]
            parts += [make_table(title, ("rule", ">points", "for example"), rows), ""]
        parts += [Text(f"{certificate.statement}\n{certificate.accounting}", style="dim"), ""]
    parts.append(Text(f"prediction {prediction.basis}", style="yellow"))
    if prediction.compiling:
        parts.append(Text(compiled_words(prediction.compiling), style="yellow"))
    return Group(*parts)


def prediction_of(plan: Plan) -> Prediction:
    """Return the prediction of a plan that has one."""
    assert plan.prediction, "only predicted plans are shown"
    return plan.prediction


def _headline(plan: Plan, prediction: Prediction) -> Group:
    """Return the model and the cluster, the work, the layout, and what it promises."""
    cluster, workload, precision = plan.cluster, plan.workload, plan.workload.precision
    lnc = f" at lnc {cluster.lnc}" if cluster.lnc else ""
    place = f"{cluster.num_nodes} x {cluster.name}{lnc}" if cluster.name != LOCAL else "this machine"
    size = f" ({format_count(plan.model.num_parameters)} parameters)"
    masters = f" with {precision.masters} masters" if precision.masters else ""
    masters = " with stochastic rounding" if precision.rounds_stochastically else masters
    products = f" and {precision.products} products" if precision.products else ""
    apart = " of separate documents" if workload.documents == "separate" else ""
    work = (
        f"{_counted(workload.global_batch, 'sequence')} of {_counted(workload.seq_len, 'token')}{apart} a step, "
        f"{precision.weights}{masters}{products}, {workload.optimizer}, ZeRO-{plan.zero}, engine {plan.engine}, "
        f"kernels {plan.kernels}"
    )
    low, high = format_seconds(prediction.low_s), format_seconds(prediction.high_s)
    result = Text.assemble(
        ("step ", ""), (format_seconds(prediction.step_time_s), "bold"), f" ({low} to {high}), ",
        (f"{format_count(prediction.tokens_per_s, 'tokens/s')}", "bold"), f", MFU {prediction.mfu:.1%}, peak ",
        (format_bytes(prediction.peak_bytes), "bold"), f" of {format_bytes(prediction.capacity_bytes)} a rank",
    )  # fmt: skip
    batches = (
        f"{plan.schedule.builder}: {_counted(plan.schedule.num_micro_batches, 'micro-batch', 'es')} of "
        f"{plan.micro_batch} per data-parallel rank, {_counted(len(plan.stages), 'stage')}, "
        f"ideal bubble {ideal_bubble(plan.schedule):.1%}"
        + "".join(f"; {dim} padded to {size}" for dim, size in plan.padding.items())
    )
    return Group(
        Text.assemble((plan.model.name, "bold"), f"{size} on {place}: {_counted(cluster.num_ranks, 'rank')}"),
        Text(work, style="dim"),
        "",
        Text.assemble("plan ", (at_commas(str(plan.candidate), WIDTH - 5).replace("\n", "\n     "), "bold green")),
        result,
        *([dollars_text(plan.dollars)] if plan.dollars else []),
        Text(batches, style="dim"),
    )


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


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
    graphs = _counted(compiling.num_graphs, "distinct graph")
    return f"before the first step, {graphs} to compile: {format_seconds(compiling.compile_s)} by {compiling.basis}"


def _bar(share: float, width: int = 16) -> str:
    return "█" * min(width, round(share * width))


def time_table(prediction: Prediction) -> Table:
    """Return where the seconds of a step go; the parts add up to it."""
    shares = {part: time_s / prediction.step_time_s for part, time_s in prediction.time_parts.items()}
    rows = [
        (TIME_WORDS.get(part, part), format_seconds(prediction.time_parts[part]), f"{share:.1%}", _bar(share))
        for part, share in sorted(shares.items(), key=lambda item: -item[1])
    ]
    return make_table("Where the time goes", ("part", ">time", ">share", ""), rows)


def memory_table(plan: Plan) -> Table:
    """Return what each pipeline rank holds, in parts that add up to its peak."""
    memories, capacity = prediction_of(plan).stage_memory, prediction_of(plan).capacity_bytes
    groups, rows = _row_groups(len(memories)), list[list[str]]()
    for ranks in groups:
        fullest = max((memories[rank] for rank in ranks), key=lambda memory: memory.total)
        share = fullest.total / capacity
        sizes = [sum(fullest.parts.get(part, 0) for part in parts) for parts in _SIZES]
        cells = [f"{size / GIB:.2f}" for size in (*sizes, fullest.total - sum(sizes), fullest.total)]
        place = [ranks_text(ranks), _layers(plan, ranks), nodes_of(plan, ranks)]
        rows.append([*place, *cells, f"{share:4.0%} {_bar(share)}"])
    shared = "; of ranks that share a row, the fullest" if len(groups) < len(memories) else ""
    title = f"Memory per pipeline rank in GiB, of {capacity / GIB:.2f}{shared}"
    numbers = (">weights", ">grads", ">optim", ">activ", ">other", ">total")
    return make_table(title, ("rank", "layers", "nodes", *numbers, "used"), rows, whole=("layers", "nodes", "used"))


def _row_groups(num_ranks: int) -> list[range]:
    """Return which pipeline ranks share a row: the first and the last never do, because they hold more than layers.

    >>> [len(ranks) for ranks in _row_groups(64)]
    [1, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2, 1]
    """
    size = 1 if num_ranks <= MOST_ROWS else -(-(num_ranks - 2) // (MOST_ROWS - 2))
    middle = [range(first, min(first + size, num_ranks - 1)) for first in range(1, num_ranks - 1, size)]
    return [range(1), *middle, *([range(num_ranks - 1, num_ranks)] if num_ranks > 1 else [])]


def ranks_text(ranks: Sequence[int]) -> str:
    """Write numbers with runs of neighbours folded.

    >>> ranks_text([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _layers(plan: Plan, ranks: range) -> str:
    """Return which layers neighbouring pipeline ranks hold, chunk by chunk, and whether the embedding or the head."""
    chunks: dict[int, list[int]] = {}
    for stage in plan.stages:
        if stage.rank in ranks:
            chunks.setdefault(stage.chunk, []).extend(range(stage.first_layer, stage.first_layer + stage.num_layers))
    texts = [ranks_text(layers) for layers in chunks.values()]
    before = "embed " if plan.stages[0].rank in ranks else ""
    after = " head" if plan.stages[-1].rank in ranks else ""
    return f"{before}{','.join(texts[:_MOST_CHUNKS])}{',...' if len(texts) > _MOST_CHUNKS else ''}{after}"


def nodes_of(plan: Plan, ranks: range) -> str:
    """Return on which nodes the layers of neighbouring pipeline ranks lie."""
    members = (member for rank in ranks for member in plan.mesh.ranks_of({"pp": rank}))
    nodes = sorted({member // plan.cluster.ranks_per_node for member in members})
    text = ranks_text(nodes)
    return f"{len(nodes)} nodes" if "," in text else text


def runners_up_parts(plan: Plan, others: Sequence[Plan]) -> list[RenderableType]:
    """Return the table of the next best plans, by how much each loses and to which part of the time.

    Under it stands which of them, at most two, are so near that only a measurement can tell.
    """
    best, rows = prediction_of(plan), list[tuple[str, ...]]()
    for other in others:
        its = prediction_of(other)
        sign = 1 if its.step_time_s >= best.step_time_s else -1
        more = {
            part: sign * (its.time_parts.get(part, 0.0) - best.time_parts.get(part, 0.0))
            for part in sorted(best.time_parts.keys() | its.time_parts.keys())
        }
        part = max(more, key=more.__getitem__)  # by which it loses most, or gains
        slower = f"{its.step_time_s / best.step_time_s - 1:+.1%}"
        figures = format_seconds(its.step_time_s), slower, TIME_WORDS.get(part, part), format_bytes(its.peak_bytes)
        rows.append((at_commas(str(other.candidate), 56), *figures))
    table = make_table("Runners-up", ("plan", ">step", ">slower", "mostly for", ">peak memory"), rows)
    near = [other for other in others if prediction_of(other).step_time_s <= best.high_s][:2]
    # recompute and stages are long, so that a plan is named by its outer point
    names = [str(replace(one.candidate, recompute=(Recompute(),), stages=None)) for one in (plan, *near)]
    words = f"{len(near)} of these lie within the interval of this prediction, so measure before you rent for long: "
    return [*([table] if others else []), *([Text(words + "; ".join(names), style="yellow")] if near else [])]


def frontier_report(plans: Sequence[Plan], gap: float, ended: str) -> Group:
    """Return one line per plan, fastest first, with bars that are longer for more."""
    slowest_s, rows = max(prediction_of(plan).step_time_s for plan in plans), list[list[str]]()
    for plan in plans:
        prediction, dollars, nodes = prediction_of(plan), plan.dollars, plan.cluster.num_nodes
        step_s, peak = prediction.step_time_s, prediction.peak_bytes
        cost = format_dollars(dollars.usd_per_step) if dollars else f"{nodes * step_s:,.0f}"
        bars = [_bar(max(share, 1 / 8), 8) for share in (step_s / slowest_s, peak / prediction.capacity_bytes)]
        candidate = at_commas(str(plan.candidate), 52)
        rows.append([str(nodes), format_seconds(step_s), bars[0], format_bytes(peak), bars[1], cost, candidate])
    cost = "cost a step" if any(plan.dollars for plan in plans) else "node seconds"
    columns = (">nodes", ">step", "", ">peak memory", "", f">{cost}", "plan")
    stopped = "" if ended == "complete" else f" ({ended}: there may be more)"
    words = f"each the fastest of its nodes and memory, within {gap:.2%}; memory in steps of a tenth{stopped}"
    table = make_table("What no other plan betters in time, memory and cost at once", columns, rows)
    return Group(table, "", Text(words, style="dim"))
