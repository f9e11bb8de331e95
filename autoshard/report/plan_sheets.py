"""The sheets of a plan: its headline, time, pipeline ranks and memory; of a frontier, of refusals and of proofs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoshard.cost.timeline import RankTime
from autoshard.plan.explanation import Answer, Certificate
from autoshard.plan.plan import Plan, Prediction
from autoshard.plan.rules.rule import Rejection
from autoshard.report.answers import answers_sheet
from autoshard.report.sheet import Bar, Cell, Column, Fact, Node, Sheet, Table, Words, sheet_rows
from autoshard.report.structured import total_json
from autoshard.report.words import (
    TIME_WORDS,
    again_of,
    axes_words,
    compiled_words,
    kept_free_words,
    layers_of,
    layout_words,
    nodes_of,
    percent,
    prediction_of,
    program_lines,
    ranks_text,
    search_words,
    software_of,
    time_bar,
    tokens_a_day,
    tokens_words,
    training_words,
    zero_words,
)
from autoshard.spec.cluster import LOCAL, Cluster
from autoshard.spec.kernels import load_kernels
from autoshard.spec.price import at_user_price
from autoshard.spec.record import encode
from autoshard.units import GIB, counted, format_at_most, format_bytes, format_count, format_dollars, format_seconds

if TYPE_CHECKING:  # plans are printed without what proves them
    from autoshard.plan.proof import Proof

NOTHING = 1e-4  # share of a step that rounds to zero
MOST_ROWS = 20  # of pipeline ranks; beyond, neighbours share a row
_SIZES = {  # columns of memory where a line is short -> the parts that each adds up
    "weights": ("weights",), "grads": ("gradients",), "optim": ("masters", "optimizer"),
    "activ": ("activations", "logits"),
}  # fmt: skip
_NO_GAIN = 5e-4  # share of a step that is printed as 0.0%
_LEAST_SHARE = 0.005  # of the time that is worth a word
_PLACE = ("rank", "layers", "nodes")  # columns of neighbouring pipeline ranks
_LINE = "write: "  # before a line of a plan file that can be pasted
_FEATURES = {  # what rows may lack -> how a plan has it
    "tp": "tensor parallelism over {}", "pp": "a pipeline over {}", "dp": "data parallelism over {}",
    "cp": "context parallelism over {}", "ep": "expert parallelism over {}", "vp": "{} chunks a rank",
    "recompute": "recompute {}", "schedule": "the schedule {}", "kernels": "the kernels {}",
    "products": "products in {}", "experts": "{} experts", "attention": "{} attention",
    "sequence": "sequences of {} tokens", "nodes": "{} nodes", "cluster": "the cluster {}",
}  # fmt: skip
_ROWS = ", and rows have "  # between what a plan has and what measured runs have


def plan_figures(plan: Plan, times: Sequence[RankTime] = ()) -> dict[str, Any]:
    """Return the figures from which the sheets of a plan are made, as they stand in JSON answers."""
    return {
        "candidate": str(plan.candidate),
        "prediction": encode(plan.prediction),
        "peak_bytes": prediction_of(plan).peak_bytes,
        "usable_bytes": plan.cluster.rank_memory_bytes,
        "dollars": encode(plan.dollars),
        "pipeline_ranks": encode(tuple(times)),
    }


def plan_sheets(
    plan: Plan,
    certificate: Certificate | None = None,
    *,
    times: Sequence[RankTime] = (),
    answers: Sequence[Answer] = (),
    total_tokens: float | None = None,
    next_step: str = "",
) -> Iterator[Sheet]:
    """Yield what ``autoshard plan`` prints: the plan in ten lines, its stages, the other answers, and its basis."""
    prediction, figures = prediction_of(plan), Node(plan_figures(plan, times))
    if certificate and certificate.stopped:
        words = f"The search was not finished ({certificate.stopped}): this is the best plan so far, not a proven one"
        yield Sheet(notes=[Words(words, "bad")])
    more = [Fact("total", total_words(plan, total_tokens))] if total_tokens else []
    if certificate:
        more += [Fact("search", "; ".join(filter(None, (search_words(certificate), certificate.changes))))]
    more += [Fact("next", Words(next_step, "code"))] if next_step else []
    headline = plan_headline(plan, figures)
    yield Sheet(title=headline.title, about=headline.about, facts=[*headline.facts, *more])
    yield Sheet(facts=[Fact("layout", Words(str(plan.candidate), "code")), Fact("time", largest_parts(prediction))])
    yield Sheet(tables=[stage_table(plan, figures)], notes=[f"headroom {headroom_words(plan, certificate)}"])
    if answers:
        yield answers_sheet(plan, answers)
    padded = "".join(f"; {dim} padded to {size}" for dim, size in plan.padding.items())
    basis = [Words(f"for engine {plan.engine} with kernels {plan.kernels}{padded}", "soft")]
    yield Sheet(notes=[*basis, Words(f"prediction {prediction.basis}", "warning"), *plan_warnings(plan)])


def plan_headline(plan: Plan, figures: Node) -> Sheet:
    """Return the question, then the plan in words with its speed, memory and cost."""
    prediction, peak = figures["prediction"], figures["peak_bytes"]
    step, low, high = (prediction[key].figure() for key in ("step_time_s", "low_s", "high_s"))
    # By both conventions: with all pairs of attention, and with those that no mask hides.
    causal = prediction["mfu_causal"]
    masked: Cell = (" (", causal.figure(), " causal)") if causal else ""
    missing = peak.value - prediction_of(plan).capacity_bytes
    left_free = kept_free_words(plan, format_bytes(figures["usable_bytes"].value))
    room: Cell = f"{format_bytes(-missing)} free{left_free and f'; {left_free}'}"
    if missing > 0:
        room = Words(f"{format_bytes(missing)} too much", "bad")
    capacity = prediction["capacity_bytes"].figure()
    return Sheet(
        title=question_words(plan),
        about=work_words(plan),
        facts=[
            Fact("plan", Words(layout_words(plan), "strong")),
            Fact("step", step, (f" of {software_of(plan)} (", low, " to ", high, ")")),
            Fact("speed", prediction["tokens_per_s"].figure(lambda count: format_count(count, "tokens/s")),
                 (", MFU ", prediction["mfu"].figure(), masked)),
            Fact("memory", peak.figure(), (" of ", capacity, " on the fullest rank, ", room)),
            day_fact(plan, figures["dollars"]),
        ],
    )  # fmt: skip


def plan_warnings(plan: Plan) -> list[Words]:
    """Return whether a plan is too large, what it does not promise, what of it was never measured, what is compiled."""
    prediction = prediction_of(plan)
    missing = prediction.peak_bytes - prediction.capacity_bytes
    full = f"does not fit: {format_bytes(missing)} too much on the fullest rank"
    warnings = [Words(full, "bad")] if missing > 0 else []
    warnings += [Words(line, "warning") for line in program_lines(plan)]
    compiled = [Words(compiled_words(prediction.compiling), "soft")] if prediction.compiling else []
    return [*warnings, *doubts(prediction.outside), *_reserved_words(plan), *compiled]


def question_words(plan: Plan) -> Cell:
    """Name the model, its size, and the ranks that it is planned for."""
    cluster = plan.cluster
    lnc = f" at lnc {cluster.lnc}" if cluster.lnc else ""
    place = f"{cluster.num_nodes} x {cluster.name}{lnc}" if cluster.name != LOCAL else "this machine"
    size = f" ({format_count(plan.model.num_parameters)} parameters)"
    return Words(plan.model.name, "strong"), f"{size} on {place}: {counted(cluster.num_ranks, 'rank')}"


def work_words(plan: Plan) -> str:
    """Say what a step works through, in which formats."""
    workload, precision = plan.workload, plan.workload.precision
    masters = f" with {precision.masters} masters" if precision.masters else ""
    masters = " with stochastic rounding" if precision.rounds_stochastically else masters
    usual = {"products": None, "gradients": "fp32", "moments": "fp32"}
    formats = "".join(f" and {dtype} {part}" for part in usual if (dtype := getattr(precision, part)) != usual[part])
    documents = " of separate documents" if workload.documents == "separate" else ""
    even = f", busiest expert {workload.expert_imbalance:.0%} above the mean" if plan.model.num_experts else ""
    over = "each sequence" if workload.router_balance_over == "sequence" else "each micro-batch"
    losses = ((workload.router_balance_loss, f"balance loss over {over}"), (workload.router_z_loss, "router z-loss"))
    losses = (*losses, (workload.router_bias_speed, "the sign of an expert's excess off its bias"))
    trained = "".join(f", {coefficient:g} x {loss}" for coefficient, loss in losses if coefficient)
    return (
        f"{counted(workload.global_batch, 'sequence')} of {counted(workload.seq_len, 'token')}{documents} a step, "
        f"{precision.weights}{masters}{formats}, {workload.optimizer}, {zero_words(plan)}{even}{trained}"
    )


def largest_parts(prediction: Prediction) -> str:
    """Name the largest parts of the time."""
    parts = sorted(prediction.time_parts.items(), key=lambda part: -part[1])
    shares = [(TIME_WORDS.get(part, part), time_s / prediction.step_time_s) for part, time_s in parts]
    return ", ".join(f"{words} {share:.0%}" for words, share in shares if share >= _LEAST_SHARE)


def headroom_words(plan: Plan, certificate: Certificate | None = None) -> str:
    """Say how much memory stays free, and how much faster the same mesh would be with less headroom."""
    words = f"leaves {_short_percent(plan.headroom)} of {format_bytes(plan.cluster.rank_memory_bytes)} free"
    words += " of tensors" if load_kernels(plan.kernels).reserved else ""
    step_s = prediction_of(plan).step_time_s
    times_s = certificate.by_headroom if certificate else dict[float, float]()
    gains = {headroom: 1 - time_s / step_s for headroom, time_s in times_s.items()}
    if gains and max(gains.values()) < _NO_GAIN:
        return f"{words}; this mesh gains nothing with less"
    if gains:
        listed = (f"{gain:.1%} less with {_short_percent(headroom)} free" for headroom, gain in gains.items())
        words += f"; this mesh would take {', '.join(listed)}"
    return words


def _short_percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _reserved_words(plan: Plan) -> list[Words]:
    """Say how far the peak is known where an allocator reserves more than is in use, and whether it may not fit."""
    interval, usable = prediction_of(plan).peak_interval_bytes, plan.cluster.rank_memory_bytes
    if not interval:
        return []
    low, high = map(format_bytes, interval)
    words = f"peak memory is {low} to {high}, by what PyTorch's allocator reserved in published runs"
    spills = f", and a rank has {format_bytes(usable)}" if interval[1] > usable else ""
    return [Words(words + spills, "warning" if spills else "soft")]


def doubts(outside: Mapping[str, str], most: int | None = None) -> Iterator[Words]:
    """Say of what a prediction has no measured run, of the first ``most`` or of all; warn where it errs to one side.

    >>> for line in doubts({"recompute": "mixed, and rows have full, none", "mfu": "63% of all pairs"}):
    ...     print(line.kind, line.text, sep=": ")
    soft: less certain: no measured run mixed recompute kinds
    warning: likely too fast: MFU 63% of all pairs
    """
    features = {feature: text for feature, text in outside.items() if feature != "mfu"}
    for feature, text in [*features.items()][:most]:
        value, _, rows = text.partition(_ROWS)
        have = _FEATURES.get(feature, feature + " {}").format(value)
        lacks = "mixed recompute kinds" if (feature, value) == ("recompute", "mixed") else f"had {have}"
        runs = f" (they had {rows})" if rows and lacks.startswith("had") else ""
        yield Words(f"less certain: no measured run {lacks}{runs}", "soft")
    if most is not None and len(features) > most:
        yield Words(f"less certain in {counted(len(features) - most, 'point')} more; -v names them", "soft")
    if "mfu" in outside:
        yield Words(f"likely too fast: MFU {outside['mfu']}", "warning")


def day_fact(plan: Plan, dollars: Node) -> Fact:
    """Say how many tokens a day trains on, and what it costs at which price."""
    tokens = tokens_a_day(plan)
    if not plan.dollars:
        return Fact("day", tokens)
    usd = plan.dollars.price_usd_per_node_hour * 24 * plan.cluster.num_nodes
    billion = dollars["usd_per_billion_tokens"].figure()
    return Fact("day", tokens, (f" for {format_dollars(usd)}: ", billion, f" a billion ({_price_words(plan.cluster)})"))


def _price_words(cluster: Cluster) -> str:
    """Say whose price dollars are of."""
    if at_user_price(cluster):
        return f"your price, {format_dollars(cluster.price_usd_per_node_hour or 0.0)} a node hour"
    return f"price of {cluster.price_date or 'an unknown date'}"


def total_words(plan: Plan, total_tokens: float) -> str:
    """Say how long all of the tokens take, what they cost, and both at the slow end of the prediction."""
    times = prediction_of(plan).high_s / prediction_of(plan).step_time_s
    slow = f"; up to {total_cell(plan, total_tokens, times)}" if times > 1 else ""
    take = "takes" if total_tokens == 1 else "take"
    return f"{tokens_words(total_tokens)} {take} {total_cell(plan, total_tokens)}{slow}"


def total_cell(plan: Plan, total_tokens: float, times: float = 1.0) -> str:
    """Say the time and the dollars of all of the tokens alone, where steps take so many ``times`` what is predicted."""
    total = total_json(plan, total_tokens) or {}
    return training_words(times * total["time_s"], total["usd"] and times * total["usd"])


def time_sheet(figures: Node) -> Sheet:
    """Return where the seconds of a step go; the parts add up to it."""
    parts, step_s = figures["prediction"]["time_parts"], figures["prediction"]["step_time_s"].value
    rows = [
        (TIME_WORDS.get(name, name), time_s.figure(format_seconds), percent(time_s.value / step_s),
         Bar(time_s.value / step_s, parts=time_bar({name: time_s.value}, step_s)))
        for name, time_s in sorted(parts.entries(), key=lambda entry: -entry[1].value)
    ]  # fmt: skip
    return Sheet(name="time", title="Where the time goes", tables=[Table("", ("part", ">time", ">share", ""), rows)])


def stage_table(plan: Plan, figures: Node, most_rows: int = MOST_ROWS) -> Table:
    """Return what each pipeline rank does: its layers, what it computes again, its seconds and its memory."""
    memories, capacity = prediction_of(plan).stage_memory, prediction_of(plan).capacity_bytes
    times, rows = figures["pipeline_ranks"], list[list[Cell]]()
    for ranks in _row_groups(len(memories), most_rows):
        fullest = max(memories[rank].total for rank in ranks)
        seconds: list[Cell] = []
        if times:
            busiest = max((times[rank] for rank in ranks), key=lambda rank: rank["work_s"].value)
            seconds = [busiest[key].figure() for key in ("work_s", "sending_s", "idle_s")]
        share = fullest / capacity
        rows.append([*_place(plan, ranks), again_of(plan, ranks), *seconds, _gib(fullest), f"{share:.0%}",
                     Bar(share, 10)])  # fmt: skip
    shared = "; of ranks that share a row, the most" if len(rows) < len(memories) else ""
    title = f"Pipeline ranks: seconds of a step, memory in GiB of {_gib(capacity)}{shared}"
    names = (">work", ">sends", ">idle") if times else ()
    columns = (*_PLACE, "recomputed", *names, ">memory", ">used", "")
    return Table(title, columns, rows, whole=_PLACE, drop=("nodes", *names[1:2], ">used", "recomputed"))


def memory_table(
    plan: Plan, figures: Node, sizes: Mapping[str, Sequence[str]] = _SIZES, most_rows: int = MOST_ROWS
) -> Table:
    """Return what each pipeline rank holds, in parts that add up to its peak; ``sizes`` names those of a column."""
    memories, capacity = figures["prediction"]["stage_memory"], prediction_of(plan).capacity_bytes
    rows: list[list[Cell]] = []
    for ranks in _row_groups(len(memories.value), most_rows):
        parts = max((memories[rank]["parts"] for rank in ranks), key=lambda parts: sum(parts.value.values()))
        peak, listed = sum(parts.value.values()), {name for names in sizes.values() for name in names}
        cells = [_sum(parts, names) for names in sizes.values()]
        unlisted = [name for name in parts.value if name not in listed]
        cells += [_sum(parts, unlisted)] if sizes is _SIZES else []
        rows.append([*_place(plan, ranks), *cells, _gib(peak), f"{peak / capacity:.0%}", Bar(peak / capacity)])
    shared = "; of ranks that share a row, the fullest" if len(rows) < len(memories.value) else ""
    title = f"Memory per pipeline rank in GiB, of {_gib(capacity)}{shared}"
    numbers = [*(f">{name}" for name in sizes), *([">other"] if sizes is _SIZES else []), ">total"]
    return Table(title, (*_PLACE, *numbers, ">used", ""), rows, whole=_PLACE, drop=("nodes", ">used", "layers"))


def _sum(parts: Node, names: Sequence[str]) -> Cell:
    """Return the size of a part of memory, or of several together."""
    if len(names) == 1 and names[0] in parts.value:
        return parts[names[0]].figure(_gib)
    return _gib(sum(parts.value.get(name, 0) for name in names))


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _place(plan: Plan, ranks: range) -> tuple[str, ...]:
    return ranks_text(ranks), layers_of(plan, ranks), nodes_of(plan, ranks)


def _row_groups(num_ranks: int, most_rows: int = MOST_ROWS) -> list[range]:
    """Return which pipeline ranks share a row: the first and the last never do, because they hold more than layers.

    >>> [len(ranks) for ranks in _row_groups(64)]
    [1, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2, 1]
    """
    size = 1 if num_ranks <= most_rows else -(-(num_ranks - 2) // (most_rows - 2))
    middle = [range(first, min(first + size, num_ranks - 1)) for first in range(1, num_ranks - 1, size)]
    return [range(1), *middle, *([range(num_ranks - 1, num_ranks)] if num_ranks > 1 else [])]


def refused_sheet(record: Node, proven: str) -> Sheet:
    """Return what was searched and refused, by a record or a certificate of a search, and what is ``proven``."""
    refusals = sorted(record["refusals"], key=lambda refusal: -refusal["num_points"].value)
    columns: dict[str, Column] = {"rule": "rule_id", ">points": "num_points", "for example": "example"}
    num_points, num_legal = record["num_points"].value, record["num_legal"].value
    are = "is" if num_legal == 1 else "are"
    about = f"Of {counted(num_points, 'layout', form=',')} {num_legal:,} {are} legal; "
    return Sheet(
        name="refused",
        title="What was refused, and why",
        about=f"{about}one may be refused by several Rules.",
        tables=[Table("", [*columns], sheet_rows(refusals, columns), whole=("rule",), drop=(">points",))],
        notes=[proven, Words(record["accounting"].value, "soft")],
    )


def rejections_sheet(rejections: Sequence[Rejection]) -> Sheet:
    """Return why something may not run, one reason after the other with its source; lines to paste stay whole."""
    facts: list[Fact] = []
    for rejection in rejections:
        reason, mark, line = rejection.message.partition(_LINE)
        facts += [Fact(Words("refused", "bad"), reason + mark.rstrip())]
        facts += [Fact("", Words(line, "code"))] if mark else []
        facts += [Fact("", Words(rejection.source, "soft"))]
    return Sheet(facts=facts)


def proof_sheet(proof: "Proof") -> Sheet:
    """Return per block what was executed and how far it is from the unsharded program."""
    facts = [Fact("", Words(proof.candidate, "code"))]
    for block in proof.blocks:
        counts = ", ".join(f"{count} {kind}" for kind, count in block.collectives.items()) or "no collectives"
        label = Words("equal", "good") if block.holds else Words("DIFFERS", "bad")
        differ = f"differ by at most {block.error:.0e} of the largest" if block.error else "are the same bits"
        facts.append(Fact(label, f"{block.name}: {counted(block.num_results, 'result')} {differ}; {counts}"))
    notes = [Words(f"not kept: {feature}", "warning") for feature in proof.lost]
    about = (
        "loss and every gradient in FP64 against the unsharded model; the plan, shrunk to a small model and few ranks:"
    )
    verdict = "the sharding computes the same" if proof.holds else "the sharding computes something else"
    return Sheet(title=f"Proof on virtual ranks: {verdict}", about=about, facts=facts, notes=notes)


def frontier_sheets(plans: Sequence[Plan], gap: float, ended: str) -> Iterator[Sheet]:
    """Yield a row for each plan, fastest first, with bars of its time and memory; then the candidates."""
    if ended != "complete":
        yield Sheet(notes=[Words(f"The search was not finished ({ended}): there may be more", "bad")])
    slowest_s, rows = max(prediction_of(plan).step_time_s for plan in plans), list[list[Cell]]()
    for number, plan in enumerate(plans, 1):
        prediction, dollars, nodes = prediction_of(plan), plan.dollars, plan.cluster.num_nodes
        step_s, peak = prediction.step_time_s, prediction.peak_bytes
        cost = format_dollars(dollars.usd_per_step) if dollars else f"{nodes * step_s:,.0f}"
        bars = [Bar(max(share, 1 / 8), 8) for share in (step_s / slowest_s, peak / prediction.capacity_bytes)]
        cells = [str(nodes), format_seconds(step_s), bars[0], format_bytes(peak), bars[1], cost, axes_words(plan)]
        rows.append([str(number), *cells, Words(str(plan.candidate), "code")])
    cost = "cost a step" if any(plan.dollars for plan in plans) else "node seconds"
    columns = (">plan", ">nodes", ">step", "", ">peak memory", "", f">{cost}", "layout", "candidate")
    title = "What no other plan betters in time, memory and cost at once"
    words = f"each the fastest of its nodes and memory, within {format_at_most(gap)}; memory in steps of a tenth"
    yield Sheet(tables=[Table(title, columns, rows, drop=("layout",), below="candidate")])
    yield Sheet(notes=[Words(words, "soft"), *(Words(line, "warning") for line in program_lines(plans[0]))])
