"""Choices of a plan in words: how a model is cut, what is computed again, where layers lie."""

import math
from collections.abc import Mapping, Sequence

from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import Certificate, Ratio
from autoshard.plan.folding import expert_ranks
from autoshard.plan.plan import Compiling, Plan, Prediction
from autoshard.plan.recompute import Recompute
from autoshard.plan.verify import unrun_precision
from autoshard.report.sheet import Part
from autoshard.spec.kernels import load_kernels
from autoshard.units import (
    DAY_S,
    counted,
    format_at_most,
    format_bytes,
    format_change,
    format_dollars,
    format_seconds,
    format_training,
)

TIME_WORDS = {
    "compute": "compute",
    "waiting": "waiting for kernels to start",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "host": "transfers to and from host memory",
    "pp": "sends between stages",
    "bubble": "waiting in the pipeline",
    "dp": "gradients and weights over dp",
    "update": "optimizer update",
    "fixed": "fixed time of every step",
}
_LARGE = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand"))
_AXES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data"}
_MOST_CHUNKS = 3  # whose layers a row names
_MOST_KINDS = 2  # of recompute that a row names
_LARGE_SHARE = 0.095  # from which on tenths of a percent are not printed
_SURE = 0.99


def prediction_of(plan: Plan) -> Prediction:
    """Return the prediction of a plan that has one."""
    assert plan.prediction, "only predicted plans are shown"
    return plan.prediction


def ratio_words(ratio: Ratio) -> str:
    """Say how much less or more time one plan takes than another, the 80% interval, and the chance that it is faster.

    >>> ratio_words(Ratio(value=0.76, low=0.65, high=0.9, faster=0.98))
    '24% less time (10% to 35%); chance to be faster: 98%'
    >>> ratio_words(Ratio(value=1.02, low=0.95, high=1.1, faster=0.36))
    '2.0% more time (5.0% less to 10% more); chance to be faster: 36%'
    >>> ratio_words(Ratio(value=1.0002, low=0.95, high=1.05, faster=0.5))
    'as much time (5.0% less to 5.0% more); chance to be faster: 50%'
    """
    side = "less" if ratio.value < 1 else "more"
    time = "as much time" if format_change(ratio.value - 1) == "0.0%" else f"{share_words(ratio.value - 1)} {side} time"
    ends = sorted((ratio.low, ratio.high), reverse=ratio.value < 1)
    texts = [share_words(end - 1) for end in ends]
    if not (ratio.low < 1 < ratio.high):
        within = " to ".join(texts)
    else:
        within = f"{share_words(ratio.low - 1)} less to {share_words(ratio.high - 1)} more"
    return f"{time} ({within}); chance to be faster: {chance_words(ratio.faster)}"


def share_words(share: float) -> str:
    """Print a share without its sign, small ones to a tenth of a percent."""
    return f"{abs(share):.0%}" if abs(share) >= _LARGE_SHARE else f"{abs(share):.1%}"


def signed_words(share: float) -> str:
    """Print by which share something differs, as ``share_words`` does."""
    return format_change(share, 0 if abs(share) >= _LARGE_SHARE else 1)


def chance_words(chance: float) -> str:
    """Print a chance; none is certain.

    >>> chance_words(0.999), chance_words(0.5), chance_words(0.001)
    ('more than 99%', '50%', 'less than 1%')
    """
    return "more than 99%" if chance > _SURE else "less than 1%" if chance < 1 - _SURE else f"{chance:.0%}"


def percent(share: float) -> str:
    """Print a share to a tenth of a percent."""
    return f"{share:.1%}"


def time_bar(time_parts: Mapping[str, float], whole_s: float) -> tuple[Part, ...]:
    """Return the parts of a step as shares of ``whole_s`` for a bar, always in the same order."""
    step_s = sum(time_parts.values())
    return tuple(
        Part(
            size=time_parts[name] / whole_s,
            kind=f"t-{name}",
            tip=f"{TIME_WORDS.get(name, name)}: {format_seconds(time_parts[name])}, {time_parts[name] / step_s:.1%}",
        )
        for name in sorted(time_parts, key=[*TIME_WORDS, *time_parts].index)
    )


def axes_words(layout: Candidate | Plan) -> str:
    """Say how many ranks work together in which way; where no plan says more, ep alone shares experts out.

    >>> axes_words(Candidate(tp=8, pp=4, dp=2, ep=2))
    'tensor 8 x pipeline 4 x data 2, experts over 2'
    """
    candidate, over = (layout.candidate, expert_ranks(layout)) if isinstance(layout, Plan) else (layout, layout.ep)
    sizes = [(word, getattr(candidate, axis)) for axis, word in _AXES.items()]
    words = " x ".join(f"{word} {size}" for word, size in sizes if size > 1) or "one rank"
    return words + (f", experts over {over}" if over > 1 else "")


def zero_words(plan: Plan) -> str:
    """Say over which ranks a plan divides its states, and its weights where these rest over others."""
    groups = f" over groups of {counted(plan.zero_group, 'rank')}" if plan.zero_group else ""
    weights = f" (weights over {counted(plan.weight_group, 'rank')})" if plan.weight_group else ""
    return f"ZeRO-{plan.zero}{groups}{weights}"


def layout_words(plan: Plan) -> str:
    """Say in words what the candidate of a plan says in keys, but for its lists of stages."""
    candidate, schedule = plan.candidate, plan.schedule
    sizes = sorted({stage.num_layers for stage in plan.stages})
    batches = f"{counted(schedule.num_micro_batches, 'micro-batch', 'es')} of {counted(plan.micro_batch, 'sequence')}"
    parts = [axes_words(plan), f"{schedule.builder} with {batches}"]
    if len(plan.stages) > 1:
        layers = counted(sizes[0], "layer") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} layers"
        parts.append(f"{len(plan.stages)} stages of {layers}")
    parts.append(recompute_words(candidate))
    if candidate.tp > 1 and not plan.sp:
        parts.append("no sequence parallelism")
    if candidate.cp > 1:
        parts.append("attention by " + ("rings" if plan.cp_kind == "ring" else "exchange of heads"))
    return "; ".join(parts)


def recompute_words(candidate: Candidate) -> str:
    """Say what a plan computes again for the backward pass, in a few words."""
    kinds = dict.fromkeys(candidate.recompute)
    if len(kinds) > 1:
        return "recompute differs by stage"
    (kind,) = kinds
    words = {"none": "no recompute", "full": "full recompute"}.get(str(kind.on_device))
    return (words or f"recompute of {again_words(kind.on_device)}") + ", activations in host memory" * kind.offload


def again_words(kind: Recompute) -> str:
    """Say what a stage computes again: ``nothing``, ``everything``, ``all of 4 layers``, or names of operations."""
    if kind.offload:
        return f"{again_words(kind.on_device)} (host memory)"
    if kind.kind == "selective":
        return ", ".join(kind.ops)
    return "nothing" if kind.kind == "none" else f"all of {kind.num_layers}" if kind.num_layers else "everything"


def again_of(plan: Plan, ranks: Sequence[int]) -> str:
    """Say what the stages of neighbouring pipeline ranks compute again."""
    texts: dict[str, None] = {}
    for stage in (stage for stage in plan.stages if stage.rank in ranks):
        fully, all_of_it = stage.recompute.num_layers, counted(stage.num_layers, "layer")
        texts[f"{min(fully, stage.num_layers)} of {all_of_it}" if fully else again_words(stage.recompute)] = None
    return "; ".join([*texts][:_MOST_KINDS]) + ("; ..." if len(texts) > _MOST_KINDS else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Write numbers with runs of neighbours folded.

    >>> ranks_text([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def layers_of(plan: Plan, ranks: Sequence[int]) -> str:
    """Return which layers neighbouring pipeline ranks hold, chunk by chunk, and whether the embedding or the head."""
    chunks: dict[int, list[int]] = {}
    for stage in plan.stages:
        if stage.rank in ranks:
            chunks.setdefault(stage.chunk, []).extend(range(stage.first_layer, stage.first_layer + stage.num_layers))
    texts = [ranks_text(layers) for layers in chunks.values() if layers]
    before = "embed " if plan.stages[0].rank in ranks else ""
    after = " head" if plan.stages[-1].rank in ranks else ""
    return f"{before}{','.join(texts[:_MOST_CHUNKS])}{',...' if len(texts) > _MOST_CHUNKS else ''}{after}"


def nodes_of(plan: Plan, ranks: Sequence[int]) -> str:
    """Return on which nodes the layers of neighbouring pipeline ranks lie."""
    members = (member for rank in ranks for member in plan.mesh.ranks_of({"pp": rank}))
    nodes = sorted({member // plan.cluster.ranks_per_node for member in members})
    text = ranks_text(nodes)
    return f"{len(nodes)} nodes" if "," in text else text


def software_of(plan: Plan) -> str:
    """Say which program the seconds of a plan are about."""
    return load_kernels(plan.kernels).program


def program_lines(plan: Plan) -> list[str]:
    """Say what the plan does not promise of the user's code, and that the predicted time is another program's."""
    unlifted = [f"not as in the code: {note}" for note in plan.model.traced.unlifted] if plan.model.traced else []
    unlifted += [why] if (why := unrun_precision(plan)) else []
    if load_kernels(plan.kernels).engine:
        return unlifted
    runs = "`autoshard run` uses autoshard's torch engine, whose seconds are those of a plan without kernels="
    return [*unlifted, f"time and memory are those of {software_of(plan)}; {runs}"]


def search_words(certificate: Certificate) -> str:
    """Say how good the plan is among what was searched."""
    more = {"time": "faster", "memory": "smaller", "dollars": "cheaper"}[certificate.objective]
    best = {"time": "fastest", "memory": "smallest", "dollars": "cheapest"}[certificate.objective]
    near_even = f" (near-even splits of {certificate.num_near_even:,})" if certificate.num_near_even else ""
    of, gap = f"{counted(certificate.num_legal, 'legal layout', form=',')} searched{near_even}", certificate.gap
    if not certificate.bound:
        return f"{of} in part: how much {more} another could be is not known"
    return f"the {best} of {of}" if gap < 1e-9 else f"{of}: none can be more than {format_at_most(gap)} {more}"


def large_words(count: float) -> str:
    """Write a large number as people say it.

    >>> large_words(3.574e9), large_words(15e12), large_words(512)
    ('3.57 billion', '15 trillion', '512')
    """
    unit, word = next(((unit, f" {word}") for unit, word in _LARGE if count >= unit), (1.0, ""))
    return f"{count / unit:,.2f}".rstrip("0").rstrip(".") + word


def tokens_words(count: float) -> str:
    """Write a large number of tokens.

    >>> tokens_words(15e12), tokens_words(1)
    ('15 trillion tokens', '1 token')
    """
    return f"{large_words(count)} {'token' if count == 1 else 'tokens'}"


def training_words(time_s: float, usd: float | None) -> str:
    """Write how long a training takes and, where a price is known, what it costs.

    >>> training_words(30 * DAY_S, 1e6), training_words(3.2 * 3600, None)
    ('30.0 days and $1,000,000', '3.20 h')
    """
    took = format_training(time_s)
    return f"{took} and {format_dollars(usd)}" if usd is not None else took


def tokens_a_day(plan: Plan) -> str:
    """Write how many tokens a plan trains on in a day, as predicted."""
    return tokens_words(prediction_of(plan).tokens_per_s * DAY_S)


def kept_free_words(plan: Plan, of: str = "") -> str:
    """Say what the headroom keeps free: memory, or the room in which an allocator reserves blocks; "" of none."""
    share = f"{plan.headroom:.0%}{of and f' of {of}'}"
    if not plan.headroom:
        return ""
    if load_kernels(plan.kernels).reserved:
        return f"tensors leave {share}, which blocks of the allocator may fill"
    return f"{share} is kept free on purpose"


def spill_words(plan: Plan) -> str:
    """Say that the peak of memory may be above what a rank has, where an allocator's share is estimated; "" if not."""
    interval, usable = prediction_of(plan).peak_interval_bytes, plan.cluster.rank_memory_bytes
    if not interval or interval[1] <= usable:
        return ""
    safe = math.ceil(100 * load_kernels(plan.kernels).safe_headroom(usable)) / 100
    return f"may reach {format_bytes(interval[1], usable)}, which does not fit: --headroom {safe:g} leaves room for it"


def compiled_words(compiling: Compiling) -> str:
    """Say what is compiled before the first step, and how long that takes."""
    graphs = counted(compiling.num_graphs, "distinct graph")
    return f"before the first step, {graphs} to compile: {format_seconds(compiling.compile_s)} by {compiling.basis}"
