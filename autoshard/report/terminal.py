"""A plan, the answers to a question, a frontier, rejections and proofs for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.cost.timeline import RankTime
from autoshard.plan.explanation import Answer, Certificate
from autoshard.plan.plan import Compiling, Dollars, Plan, Prediction
from autoshard.plan.rules.rule import Rejection
from autoshard.report.answers import answers_parts
from autoshard.report.tables import Bar, Cell, FittingTable, Labelled, prose, unbroken
from autoshard.report.words import (
    TIME_WORDS,
    again_of,
    axes_words,
    counted,
    layers_of,
    layout_words,
    nodes_of,
    prediction_of,
    program_lines,
    program_of,
    ranks_text,
)
from autoshard.spec.cluster import LOCAL
from autoshard.spec.kernels import load_kernels
from autoshard.units import GIB, format_at_most, format_bytes, format_count, format_dollars, format_seconds

if TYPE_CHECKING:  # plans are printed without what proves them
    from autoshard.plan.proof import Proof

NOTHING = 1e-4  # share of a step that rounds to zero
MOST_ROWS = 20  # of pipeline ranks; beyond, neighbours share a row
_SIZES = (("weights",), ("gradients",), ("masters", "optimizer"), ("activations", "logits"))  # columns of memory
_DAY_S = 86_400
_NO_GAIN = 5e-4  # share of a step that is printed as 0.0%
_LEAST_SHARE = 0.005  # of the time that is worth a word
_LARGE = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand"))
_PLACE = ("rank", "layers", "nodes")  # columns of neighbouring pipeline ranks
_LINE = "write: "  # before a line of a plan file that can be pasted


def plan_report(
    plan: Plan,
    certificate: Certificate | None = None,
    *,
    times: Sequence[RankTime] = (),
    answers: Sequence[Answer] = (),
    total_tokens: float | None = None,
    next_step: str = "",
) -> Group:
    """Return what ``autoshard plan`` prints: the plan in ten lines, its stages, the other answers, and its basis."""
    prediction = prediction_of(plan)
    parts: list[RenderableType] = [*_headline(plan, certificate, total_tokens, next_step), ""]
    parts += [unbroken(Text.assemble(("layout   ", "dim"), (str(plan.candidate), "bold green")))]
    parts += [Labelled("time", Text(_time_words(prediction)), "dim"), "", stage_table(plan, times)]
    parts += [prose(f"headroom {headroom_words(plan, certificate)}"), ""]
    if answers:
        parts += [*answers_parts(plan, answers), ""]
    padded = "".join(f"; {dim} padded to {size}" for dim, size in plan.padding.items())
    parts.append(prose(f"for engine {plan.engine} with kernels {plan.kernels}{padded}", "dim"))
    parts += [prose(line, "yellow") for line in program_lines(plan)]
    parts.append(prose(f"prediction {prediction.basis}", "yellow"))
    parts += [prose(line, "yellow") for line in (*outside_lines(prediction), *reserved_lines(plan))]
    if prediction.compiling:
        parts.append(prose(compiled_words(prediction.compiling), "yellow"))
    return Group(*parts)


def _headline(
    plan: Plan, certificate: Certificate | None, total_tokens: float | None, next_step: str
) -> list[RenderableType]:
    """Return the question, then the plan in words with its speed, memory, cost, proof, and the next command."""
    prediction = prediction_of(plan)
    parts: list[RenderableType] = []
    if certificate and certificate.stopped:
        words = f"The search was not finished ({certificate.stopped}): this is the best plan so far, not a proven one"
        parts.append(prose(words, "bold red"))
    low, high = format_seconds(prediction.low_s), format_seconds(prediction.high_s)
    # By both conventions: with all pairs of attention, and with those that no mask hides.
    causal = "" if prediction.mfu_causal is None else f" ({prediction.mfu_causal:.1%} causal)"
    speed = Text.assemble(
        (format_seconds(prediction.step_time_s), "bold"), f" a step of {program_of(plan)} ({low} to {high}), ",
        (format_count(prediction.tokens_per_s, "tokens/s"), "bold"), f", MFU {prediction.mfu:.1%}{causal}",
    )  # fmt: skip
    texts = {"plan": Text(layout_words(plan), "bold"), "speed": speed, "memory": _memory_words(plan)}
    texts["day"] = Text(_day_words(plan))
    texts |= {"total": Text(_total_words(plan, total_tokens))} if total_tokens else {}
    texts |= {"search": Text(_search_words(certificate))} if certificate else {}
    parts += [*_question(plan), "", *(Labelled(label, text, "dim") for label, text in texts.items())]
    return [*parts, *([unbroken(Text.assemble(("next     ", "dim"), next_step))] if next_step else [])]


def _question(plan: Plan) -> list[Labelled]:
    cluster, workload, precision = plan.cluster, plan.workload, plan.workload.precision
    lnc = f" at lnc {cluster.lnc}" if cluster.lnc else ""
    place = f"{cluster.num_nodes} x {cluster.name}{lnc}" if cluster.name != LOCAL else "this machine"
    size = f" ({format_count(plan.model.num_parameters)} parameters)"
    masters = f" with {precision.masters} masters" if precision.masters else ""
    masters = " with stochastic rounding" if precision.rounds_stochastically else masters
    parts = [("products", precision.products, None), ("gradients", precision.gradients, "fp32")]
    parts += [("moments", precision.moments, "fp32")]
    formats = "".join(f" and {dtype} {part}" for part, dtype, usual in parts if dtype != usual)
    apart = " of separate documents" if workload.documents == "separate" else ""
    even = f", busiest expert {workload.expert_imbalance:.0%} above the mean" if plan.model.num_experts else ""
    work = (
        f"{counted(workload.global_batch, 'sequence')} of {counted(workload.seq_len, 'token')}{apart} a step, "
        f"{precision.weights}{masters}{formats}, {workload.optimizer}, ZeRO-{plan.zero}{even}"
    )
    title = Text.assemble((plan.model.name, "bold"), f"{size} on {place}: {counted(cluster.num_ranks, 'rank')}")
    return [prose(title), prose(work, "dim")]


def _time_words(prediction: Prediction) -> str:
    """Name the largest parts of the time."""
    parts = sorted(prediction.time_parts.items(), key=lambda part: -part[1])
    shares = [(TIME_WORDS.get(part, part), time_s / prediction.step_time_s) for part, time_s in parts]
    return ", ".join(f"{words} {share:.0%}" for words, share in shares if share >= _LEAST_SHARE)


def _memory_words(plan: Plan) -> Text:
    """Say how full the fullest rank is."""
    peak, capacity = prediction_of(plan).peak_bytes, prediction_of(plan).capacity_bytes
    if peak > capacity:
        left = (f"{format_bytes(peak - capacity)} too much", "bold red")
    else:
        kept = f", and a headroom of {plan.headroom:.0%}" if plan.headroom else ""
        left = (f"{format_bytes(capacity - peak)} free{kept}", "")
    return Text.assemble((format_bytes(peak), "bold"), f" of {format_bytes(capacity)} on the fullest rank, ", left)


def headroom_words(plan: Plan, certificate: Certificate | None = None) -> str:
    """Say what stays free, and what the outer layout of the plan takes if its stages are filled again with less."""
    words = f"leaves {_percent(plan.headroom)} of {format_bytes(plan.cluster.rank_memory_bytes)} free"
    words += " of tensors" if load_kernels(plan.kernels).reserved else ""
    step_s = prediction_of(plan).step_time_s
    times_s = certificate.by_headroom if certificate else dict[float, float]()
    gains = {headroom: 1 - time_s / step_s for headroom, time_s in times_s.items()}
    if gains and max(gains.values()) < _NO_GAIN:
        return f"{words}; this mesh gains nothing with less"
    if gains:
        listed = (f"{gain:.1%} faster with {_percent(headroom)}" for headroom, gain in gains.items())
        words += f"; this mesh would be {', '.join(listed)}"
    return words


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def reserved_lines(plan: Plan) -> list[str]:
    """Say how far the peak of memory is known where an allocator reserves more than is in use."""
    interval, usable = prediction_of(plan).peak_interval_bytes, plan.cluster.rank_memory_bytes
    if not interval:
        return []
    low, high = map(format_bytes, interval)
    words = f"peak memory is {low} to {high}, by what PyTorch's allocator reserved in published runs"
    return [f"{words}, and a rank can use {format_bytes(usable)}" if interval[1] > usable else words]


def outside_lines(prediction: Prediction) -> list[str]:
    """Say per feature how far outside the rows of its calibration a plan lies."""
    features = {feature: text for feature, text in prediction.outside.items() if feature != "mfu"}
    listed = "; ".join(f"{feature} {text}" for feature, text in features.items())
    lines = [f"outside these rows: {listed}"] if features else []
    if "mfu" in prediction.outside:
        lines.append(f"likely too fast: MFU {prediction.outside['mfu']}")
    return lines


def _large(count: float) -> str:
    """Write a large number as people say it.

    >>> _large(3.574e9), _large(15e12), _large(512)
    ('3.57 billion', '15 trillion', '512')
    """
    unit, word = next(((unit, f" {word}") for unit, word in _LARGE if count >= unit), (1.0, ""))
    return f"{count / unit:,.2f}".rstrip("0").rstrip(".") + word


def _day_words(plan: Plan) -> str:
    """Say how many tokens a day trains on, and what it costs at which price."""
    tokens, dollars = f"{_large(prediction_of(plan).tokens_per_s * _DAY_S)} tokens", plan.dollars
    if not dollars:
        return tokens
    usd = dollars.price_usd_per_node_hour * 24 * plan.cluster.num_nodes
    date, billion = dollars.price_date or "an unknown date", format_dollars(dollars.usd_per_billion_tokens)
    return f"{tokens} for {format_dollars(usd)}: {billion} a billion (price of {date})"


def _total_words(plan: Plan, total_tokens: float) -> str:
    """Say how long all of the tokens take, and what they cost."""
    time_s, dollars = total_tokens / prediction_of(plan).tokens_per_s, plan.dollars
    took = f"{time_s / _DAY_S:,.1f} days" if time_s >= 2 * _DAY_S else format_seconds(time_s)
    cost = f" and {format_dollars(dollars.usd_per_billion_tokens * total_tokens / 1e9)}" if dollars else ""
    return f"{_large(total_tokens)} tokens take {took}{cost}"


def price_words(dollars: Dollars) -> str:
    """Say what a billion tokens cost, and how old the price is."""
    date = f"as of {dollars.price_date}" if dollars.price_date else "undated"
    price = f"{format_dollars(dollars.price_usd_per_node_hour)} a node hour on demand, {date}; check yours"
    return f"{format_dollars(dollars.usd_per_billion_tokens)} per billion tokens ({price})"


def _search_words(certificate: Certificate) -> str:
    """Say how good the plan is among what was searched."""
    more = {"time": "faster", "memory": "smaller", "dollars": "cheaper"}[certificate.objective]
    best = {"time": "fastest", "memory": "smallest", "dollars": "cheapest"}[certificate.objective]
    of = f"{certificate.num_legal:,} legal layouts searched"
    gap = certificate.gap
    if not certificate.bound:
        return f"{of} in part: how much {more} another could be is not known"
    return f"the {best} of {of}" if gap < 1e-9 else f"{of}: none can be more than {format_at_most(gap)} {more}"


def compiled_words(compiling: Compiling) -> str:
    """Say what is compiled before the first step, and how long that takes."""
    graphs = counted(compiling.num_graphs, "distinct graph")
    return f"before the first step, {graphs} to compile: {format_seconds(compiling.compile_s)} by {compiling.basis}"


def stage_table(plan: Plan, times: Sequence[RankTime] = ()) -> FittingTable:
    """Return what each pipeline rank does: its layers, what it computes again, its seconds and its memory."""
    memories, capacity = prediction_of(plan).stage_memory, prediction_of(plan).capacity_bytes
    rows: list[list[Cell]] = []
    for ranks in _row_groups(len(memories)):
        share = max(memories[rank].total for rank in ranks) / capacity
        seconds: list[Cell] = []
        if times:
            busiest = max((times[rank] for rank in ranks), key=lambda own: own.work_s)
            seconds = [format_seconds(value) for value in (busiest.work_s, busiest.sending_s, busiest.idle_s)]
        used: list[Cell] = [f"{share * capacity / GIB:.2f}", f"{share:.0%}", Bar(share, 10)]
        rows.append([*_place(plan, ranks), again_of(plan, ranks), *seconds, *used])
    shared = "; of ranks that share a row, the most" if len(rows) < len(memories) else ""
    title = f"Pipeline ranks: seconds of a step, memory in GiB of {capacity / GIB:.2f}{shared}"
    names = (">work", ">sends", ">idle") if times else ()
    columns = (*_PLACE, "recomputed", *names, ">memory", ">used", "")
    return FittingTable(title, columns, rows, whole=_PLACE, drop=("nodes", *names[1:2], ">used", "recomputed"))


def time_table(prediction: Prediction) -> FittingTable:
    """Return where the seconds of a step go; the parts add up to it."""
    shares = {part: time_s / prediction.step_time_s for part, time_s in prediction.time_parts.items()}
    rows = [
        (TIME_WORDS.get(part, part), format_seconds(prediction.time_parts[part]), f"{share:.1%}", Bar(share))
        for part, share in sorted(shares.items(), key=lambda item: -item[1])
    ]
    return FittingTable("Where the time goes", ("part", ">time", ">share", ""), rows)


def memory_table(plan: Plan) -> FittingTable:
    """Return what each pipeline rank holds, in parts that add up to its peak."""
    memories, capacity = prediction_of(plan).stage_memory, prediction_of(plan).capacity_bytes
    rows: list[list[Cell]] = []
    for ranks in _row_groups(len(memories)):
        fullest = max((memories[rank] for rank in ranks), key=lambda memory: memory.total)
        share = fullest.total / capacity
        sizes = [sum(fullest.parts.get(part, 0) for part in parts) for parts in _SIZES]
        cells = [f"{size / GIB:.2f}" for size in (*sizes, fullest.total - sum(sizes), fullest.total)]
        rows.append([*_place(plan, ranks), *cells, f"{share:.0%}", Bar(share)])
    shared = "; of ranks that share a row, the fullest" if len(rows) < len(memories) else ""
    title = f"Memory per pipeline rank in GiB, of {capacity / GIB:.2f}{shared}"
    numbers = (">weights", ">grads", ">optim", ">activ", ">other", ">total")
    return FittingTable(title, (*_PLACE, *numbers, ">used", ""), rows, whole=_PLACE, drop=("nodes", ">used", "layers"))


def _place(plan: Plan, ranks: range) -> tuple[str, ...]:
    return ranks_text(ranks), layers_of(plan, ranks), nodes_of(plan, ranks)


def _row_groups(num_ranks: int) -> list[range]:
    """Return which pipeline ranks share a row: the first and the last never do, because they hold more than layers.

    >>> [len(ranks) for ranks in _row_groups(64)]
    [1, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2, 1]
    """
    size = 1 if num_ranks <= MOST_ROWS else -(-(num_ranks - 2) // (MOST_ROWS - 2))
    middle = [range(first, min(first + size, num_ranks - 1)) for first in range(1, num_ranks - 1, size)]
    return [range(1), *middle, *([range(num_ranks - 1, num_ranks)] if num_ranks > 1 else [])]


def certificate_parts(certificate: Certificate) -> list[RenderableType]:
    """Return what was searched and proven, and what was refused."""
    parts: list[RenderableType] = [prose(certificate.statement), prose(certificate.accounting, "dim")]
    if certificate.refusals:
        title = f"Refused, of {certificate.num_points} outer points (one may be refused by several rules)"
        ordered = sorted(certificate.refusals, key=lambda refusal: -refusal.num_points)
        rows = [(refusal.rule_id, str(refusal.num_points), refusal.example) for refusal in ordered]
        parts += ["", FittingTable(title, ("rule", ">points", "for example"), rows, whole=("rule",), drop=(">points",))]
    return parts


def rejections_report(rejections: Sequence[Rejection]) -> Group:
    """Return why something may not run, one reason after the other with its source; lines to paste stay whole."""
    parts: list[RenderableType] = []
    for rejection in rejections:
        reason, mark, line = rejection.message.partition(_LINE)
        parts.append(Labelled("refused", Text(reason + mark.rstrip()), "bold red", 8))
        parts += [unbroken(line)] if mark else []
        parts.append(Labelled("", Text(rejection.source, "dim"), "", 8))
    return Group(*parts, *([""] if parts else []))


def proof_report(proof: "Proof") -> Group:
    """Return per block what was executed and how far it is from the unsharded program."""
    lines: list[RenderableType] = [prose("proof on virtual ranks, shrunk to"), unbroken(f"  {proof.candidate}")]
    for block in proof.blocks:
        counts = ", ".join(f"{count} {kind}" for kind, count in block.collectives.items()) or "no collectives"
        label, style = ("  equal", "green") if block.holds else ("  DIFFERS", "bold red")
        words = f"{block.name}: {block.num_results} results within {block.error:.0e}; {counts}"
        lines.append(Labelled(label, Text(words), style, 10))
    return Group(*lines, *(Labelled("", Text(f"not kept: {feature}", "yellow"), indent=2) for feature in proof.lost))


def frontier_report(plans: Sequence[Plan], gap: float, ended: str) -> Group:
    """Return one line per plan, fastest first, with bars that are longer for more, and their candidates."""
    slowest_s, rows = max(prediction_of(plan).step_time_s for plan in plans), list[list[Cell]]()
    for number, plan in enumerate(plans, 1):
        prediction, dollars, nodes = prediction_of(plan), plan.dollars, plan.cluster.num_nodes
        step_s, peak = prediction.step_time_s, prediction.peak_bytes
        cost = format_dollars(dollars.usd_per_step) if dollars else f"{nodes * step_s:,.0f}"
        bars = [Bar(max(share, 1 / 8), 8) for share in (step_s / slowest_s, peak / prediction.capacity_bytes)]
        figures = [str(nodes), format_seconds(step_s), bars[0], format_bytes(peak), bars[1], cost]
        rows.append([str(number), *figures, axes_words(plan)])
    cost = "cost a step" if any(plan.dollars for plan in plans) else "node seconds"
    columns = (">plan", ">nodes", ">step", "", ">peak memory", "", f">{cost}", "layout")
    unfinished = f"The search was not finished ({ended}): there may be more"
    stopped = [prose(unfinished, "bold red")] if ended != "complete" else []
    words = f"each the fastest of its nodes and memory, within {format_at_most(gap)}; memory in steps of a tenth"
    table = FittingTable("What no other plan betters in time, memory and cost at once", columns, rows, drop=("layout",))
    named = (Text.assemble(f"{number:<3}", (str(plan.candidate), "green")) for number, plan in enumerate(plans, 1))
    lines = map(unbroken, named)
    notes = (prose(line, "yellow") for line in program_lines(plans[0]))
    return Group(*stopped, table, "", *lines, "", prose(words, "dim"), *notes)
