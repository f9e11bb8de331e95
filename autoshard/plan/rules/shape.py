"""Rules of arithmetic: what must divide what, on every cluster and engine."""

from autoshard.plan.rules.columns import Column, Columns
from autoshard.plan.rules.rule import Rule, implies, listed
from autoshard.plan.rules.tensor_sizes import allowed_tp

_DERIVED = "derived: "


def _ranks(c: Columns) -> str:
    want, inner = c.cluster.num_ranks, c.tp * c.pp * c.cp
    head = f"tp={c.tp},pp={c.pp},cp={c.cp},dp={c.dp}: uses {inner * c.dp} ranks, but the cluster has {want}"
    if want % inner == 0:
        return f"{head}. Use dp={want // inner}, or leave dp out"
    return f"{head}. tp*pp*cp is {inner} and must divide {want}"


def use_tp(c: Columns) -> str:
    """Say which sizes of tp the model and the cluster accept."""
    sizes = allowed_tp(c.model, c.cluster)
    replicas = {size: size // c.model.num_kv_heads for size in sizes if size > c.model.num_kv_heads}
    held = f" (at {max(replicas)} every KV head is held {replicas[max(replicas)]} times)" if replicas else ""
    return f"Use tp {listed(sizes)} on {c.cluster.name}{held}"


def _heads(c: Columns) -> str:
    return f"tp={c.tp}: {c.model.num_heads} query heads of {c.model.name} do not divide by {c.tp}. {use_tp(c)}"


def _kv_heads(c: Columns) -> str:
    heads = c.model.num_kv_heads
    return (
        f"tp={c.tp}: {heads} KV heads of {c.model.name} neither divide by {c.tp} nor divide it, so they can "
        f"be neither cut nor replicated evenly. {use_tp(c)}"
    )


def _kv_heads_allow(c: Columns) -> Column:
    heads = c.model.num_kv_heads
    return (heads % c.tp == 0) | (c.tp % heads == 0)


def _ffn(c: Columns) -> str:
    return f"tp={c.tp}: the MLP width {c.model.ffn} of {c.model.name} does not divide by {c.tp}. {use_tp(c)}"


def _layers(c: Columns) -> str:
    return (
        f"pp={c.pp},vp={c.vp}: {c.model.num_layers} layers of {c.model.name} cannot fill {c.num_stages} "
        f"stages. Use pp*vp of at most {c.model.num_layers}"
    )


def _stages_count(c: Columns) -> str:
    return (
        f"stages: lists {c.num_stage_entries} stages, but pp*vp is {c.num_stages}. List {c.num_stages}, or "
        "leave stages out for the even split"
    )


def _stages_sum(c: Columns) -> str:
    difference = c.num_stage_layers - c.model.num_layers
    verb = f"remove {difference}" if difference > 0 else f"add {-difference}"
    return (
        f"stages: the stages hold {c.num_stage_layers} layers together, but {c.model.name} has "
        f"{c.model.num_layers}: {verb}"
    )


def _recompute_count(c: Columns) -> str:
    return (
        f"recompute={c.recompute}: names {c.num_recomputes} stages, but pp*vp is {c.num_stages}. Give one "
        f"for all stages, or {c.num_stages}"
    )


def _recompute_layers(c: Columns) -> str:
    return (
        f"recompute={c.recompute}: {c.num_short_stages} stages have fewer layers than their full:K. Use "
        "full for all layers of a stage, or a smaller K"
    )


def _batch(c: Columns) -> str:
    batch, group = c.workload.global_batch, c.dp * c.mbs
    near = tuple(size for size in (batch // group * group, (batch // group + 1) * group) if size)
    return (
        f"dp={c.dp},mbs={c.mbs}: a step of {batch} sequences does not divide by dp*mbs={group}. Use a "
        f"global batch of {listed(near)}, or another mbs"
    )


def _experts(c: Columns) -> str:
    return f"ep={c.ep}: {c.model.num_experts} experts of {c.model.name} do not divide by {c.ep}"


def _ep_in_dp(c: Columns) -> str:
    return f"ep={c.ep},dp={c.dp}: ep is cut out of dp and must divide it. Use an ep that divides {c.dp}"


def _positions(c: Columns) -> str:
    return (
        f"seq_len={c.workload.seq_len}: {c.model.name} has learned positions for {c.model.max_positions} "
        f"tokens only. Use --seq-len {c.model.max_positions} or less"
    )


def _rounds(c: Columns) -> str:
    return (
        f"schedule=interleaved: {c.num_micro_batches} micro-batches do not divide by pp={c.pp}. Use a "
        f"global batch that is a multiple of dp*mbs*pp={c.dp * c.mbs * c.pp}"
    )


RULES = (
    Rule(
        id="ranks",
        subject="tp,pp,cp,dp",
        allows=lambda c: c.tp * c.pp * c.cp * c.dp == c.cluster.num_ranks,
        message=_ranks,
        source=_DERIVED + "every rank of the cluster stands at exactly one place of the mesh; ep is a part of dp",
    ),
    Rule(
        id="heads",
        subject="tp",
        allows=lambda c: c.model.num_heads % c.tp == 0,
        message=_heads,
        source=_DERIVED + "attention is cut by whole query heads (Shoeybi et al. 2019, arXiv:1909.08053, section 3)",
    ),
    Rule(
        id="kv-heads",
        subject="tp",
        allows=_kv_heads_allow,
        message=_kv_heads,
        source="aws-neuron/neuronx-distributed src/neuronx_distributed/modules/qkv_linear.py: "
        "kv_size_multiplier replicates whole KV heads; the torch engine cuts tp = kv * rep the same way",
    ),
    Rule(
        id="ffn",
        subject="tp",
        allows=lambda c: c.model.ffn % c.tp == 0,
        message=_ffn,
        source=_DERIVED + "column and row parallel linears hold equal shares of the MLP width",
    ),
    Rule(
        id="layers",
        subject="pp,vp",
        allows=lambda c: c.num_stages <= c.model.num_layers,
        message=_layers,
        source=_DERIVED + "every stage holds at least one layer (NxD's create_partitions asks for the same)",
    ),
    Rule(
        id="stages-count",
        subject="stages",
        allows=lambda c: (c.num_stage_entries == 0) | (c.num_stage_entries == c.num_stages),
        message=_stages_count,
        source=_DERIVED + "there are pp*vp stages",
    ),
    Rule(
        id="stages-sum",
        subject="stages",
        allows=lambda c: (c.num_stage_entries == 0) | (c.num_stage_layers == c.model.num_layers),
        message=_stages_sum,
        source=_DERIVED + "every layer lies on exactly one stage",
    ),
    Rule(
        id="recompute-count",
        subject="recompute",
        allows=lambda c: (c.num_recomputes == 1) | (c.num_recomputes == c.num_stages),
        message=_recompute_count,
        source=_DERIVED + "there are pp*vp stages",
    ),
    Rule(
        id="recompute-layers",
        subject="recompute",
        allows=lambda c: c.num_short_stages == 0,
        message=_recompute_layers,
        source=_DERIVED + "a stage cannot recompute layers that it does not hold",
    ),
    Rule(
        id="batch",
        subject="dp,mbs",
        allows=lambda c: c.workload.global_batch % (c.dp * c.mbs) == 0,
        message=_batch,
        source=_DERIVED + "every data-parallel rank runs the same number of equal micro-batches",
    ),
    Rule(
        id="experts",
        subject="ep",
        allows=lambda c: c.model.num_experts % c.ep == 0,
        message=_experts,
        source=_DERIVED + "every expert-parallel rank holds the same number of whole experts",
    ),
    Rule(
        id="ep-in-dp",
        subject="ep",
        allows=lambda c: c.dp % c.ep == 0,
        message=_ep_in_dp,
        source="aws-neuron/neuronx-distributed src/neuronx_distributed/parallel_layers/parallel_state.py: "
        "the size of expert data parallelism is world / (tp * pp * ep)",
    ),
    Rule(
        id="positions",
        subject="seq_len",
        allows=lambda c: c.model.positions != "learned" or c.workload.seq_len <= c.model.max_positions,
        message=_positions,
        source=_DERIVED + "a learned position table has one row per position",
    ),
    Rule(
        id="interleaved-rounds",
        subject="schedule",
        allows=lambda c: implies(c.schedule == "interleaved", c.num_micro_batches % c.pp == 0),
        message=_rounds,
        source="aws-neuron/neuronx-distributed src/neuronx_distributed/pipeline/scheduler.py "
        "get_step_schedule; Megatron-LM asks for the same",
    ),
)
