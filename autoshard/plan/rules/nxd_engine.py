"""Rules of the nxd engine: what neuronx-distributed (2.28, the pinned release) executes, and what it gets wrong.

What its kernels for devices ask stands in ``nxd_kernels``. Lines are those of the tag v2.28.0.
"""

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import cast

from autoshard.graph.decoder import num_slots
from autoshard.plan.rules.columns import Columns
from autoshard.plan.rules.neuron import on_trn1
from autoshard.plan.rules.rule import Rule, Verdict, one_of, rule
from autoshard.spec.kernels import load_kernels
from autoshard.spec.record import options_on, show_value

NXD = "aws-neuron/neuronx-distributed src/neuronx_distributed/"
MOE = NXD + "modules/moe/"
SDK = "aws-neuron/aws-neuron-sdk "
_PRODUCTS = frozenset(("gate", "up", "act", "product", "down"))  # of experts, and what lies between them


def nxd_rule(
    subject: str, source: str, only: Callable[[Columns], bool] = lambda c: True
) -> Callable[[Callable[[Columns], Verdict]], Rule]:
    """Make a Rule that holds on this engine only, and there only for some questions."""
    return rule(subject, source=source, applies=lambda c: c.engine == "nxd" and only(c))


@nxd_rule("boundary", NXD + "parallel_layers/layers.py: a layer gathers and scatters the sequence, or nothing")
def nxd_boundary(c: Columns) -> Verdict:
    yield c.shared.boundary is None
    yield f"boundary={c.shared.boundary}: NxD's layers hand on hidden states cut along their tokens. Leave it out"


@nxd_rule("engine", NXD + "modules/qkv_linear.py:88: hardware types other than those of trn1 and trn2 raise")
def nxd_cluster(c: Columns) -> Verdict:
    yield c.cluster.engine == "nxd"
    yield f"engine=nxd: runs on trn1 and trn2 only, not on {c.cluster.name}. Use --engine torch"


@nxd_rule("schedule", NXD + "pipeline/scheduler.py: Train1F1BSchedule and TrainInterleavedSchedule are all there are")
def nxd_schedule(c: Columns) -> Verdict:
    yield one_of(c.schedule, ("1f1b", "interleaved"))
    yield f"schedule={c.schedule}: NxD builds only 1f1b and interleaved. Use schedule=1f1b"


@nxd_rule("stages", NXD + "pipeline/partition.py: create_partitions cuts behind layers, one or more for each stage")
def nxd_stages(c: Columns) -> Verdict:
    yield min(c.shared.stages or (1,)) >= 1
    yield "stages: every stage of NxD holds at least one layer. Give the first and the last one as well"


@nxd_rule(
    "zero",
    NXD + "trainer/trainer.py: use_master_weights without zero_one_enabled raises; parameters are never sharded. "
    "torch_xla zero_redundancy_optimizer.py: shards are fp32",
)
def nxd_zero(c: Columns) -> Verdict:
    weights, masters = c.workload.precision.weights, c.workload.precision.masters
    allowed = (1,) if masters is not None else (0, 1) if weights == "fp32" else (0,)
    yield one_of(c.zero, allowed)
    if c.zero == 3:
        yield "zero=3: NxD has no ZeRO-3; its parameters stay whole on every data-parallel rank. Use zero=1"
    if c.zero == 1:
        yield f"zero=1: NxD's ZeRO-1 keeps fp32 masters, and these {weights} weights have none"
    yield f"zero={c.zero}: NxD keeps {masters} masters only inside ZeRO-1. Use zero=1"


@nxd_rule(
    "precision",
    NXD + "trainer/trainer.py initialize_optimizer_from_class: use_fp32_grad_acc without zero_one_enabled raises; "
    "moments of torch.optim.AdamW have the format of the parameter",
)
def nxd_states(c: Columns) -> Verdict:
    have = c.workload.precision
    yield have.masters is not None or {have.gradients, have.moments} == {have.weights}
    states = f"no masters, but {have.gradients} gradients and {have.moments} moments"
    rest = f"without ZeRO-1 NxD keeps both in {have.weights}. Use bf16"
    yield f"precision={have.name}: has {states}; {rest}"


@nxd_rule(
    "zero,tp",
    NXD + "parallel_layers/grads.py bucket_allreduce_gradients: over expert-data-parallel groups, which "
    "parallel_state.py builds without cp, and does not permute as it does tp and dp",
)
def nxd_zero_groups(c: Columns) -> Verdict:
    in_two_parts = tuple(placement.tp for placement in c.cluster.placements if placement.name == "paired")  # of a node
    same_sums = (c.dp == 1) | (one_of(c.tp, in_two_parts) ^ True)
    yield (c.zero != 0) | ((c.cp == 1) & same_sums)
    mixed = f"with this tp mix the shards of different ranks on {c.cluster.name}"
    wrong = mixed if c.cp == 1 else "count every rank of cp, over which it has averaged before"
    yield f"zero=0,tp={c.tp},cp={c.cp}: NxD adds up gradients over groups of its own, which {wrong}. Use zero=1"


@nxd_rule("zero_group", NXD + "optimizer/zero_redundancy_optimizer.py: sharding groups are those of data parallelism")
def nxd_zero_group(c: Columns) -> Verdict:
    yield c.shared.zero_group is None
    yield f"zero_group={c.shared.zero_group}: NxD divides states over all ranks that share weights. Leave it out"


@nxd_rule("weight_group", NXD + "trainer/trainer.py: parameters are never sharded")
def nxd_weight_group(c: Columns) -> Verdict:
    yield c.shared.weight_group is None
    yield f"weight_group={c.shared.weight_group}: NxD's parameters stay whole on every rank of dp. Leave it out"


@nxd_rule("ep", MOE + "model.py:229 and 239 reduce over the world group; router gradients are wrong too (model.py:206)")
def nxd_ep(c: Columns) -> Verdict:
    yield c.ep == 1
    why = "NxD sums what experts make over all ranks instead of tp, which mixes tokens of data-parallel ranks"
    yield f"ep={c.ep}: {why}. Use ep=1"


@nxd_rule(
    "pp",
    SDK + "archive/nxd-training/known_issues.rst: weight sharing between embedding and head under a pipeline. "
    "NxD's own pipeline code can share weights (pipeline/partition.py); the stated limit is followed",
    only=lambda c: c.model.tied_embeddings,
)
def nxd_tied(c: Columns) -> Verdict:
    yield c.pp == 1
    why = f"{c.model.name} ties its output head to its embedding, and NxD pipelines do not support that"
    yield f"pp={c.pp}: {why}. Use pp=1, or a card with untied embeddings"


@nxd_rule("cp_kind,cp_order", NXD + "utils/batch_utils.py cuts contiguous pieces; kernels/ring_attention_kernel.py")
def nxd_cp_form(c: Columns) -> Verdict:
    yield (c.cp == 1) | ((c.cp_kind == "ring") & (c.cp_order == "contiguous"))
    have = f"cp_kind={c.cp_kind},cp_order={c.cp_order}"
    yield f"{have}: NxD runs cp as a ring over contiguous pieces. Use cp_kind=ring,cp_order=contiguous"


@nxd_rule(
    "cp",
    SDK + "release-notes/components/nxd-core.rst and nxd-training.rst, 2.23: context parallelism up to 32k tokens on "
    "trn1, beta; nothing is said about trn2",
    only=lambda c: not on_trn1(c),
)
def nxd_cp_trn1(c: Columns) -> Verdict:
    yield c.cp == 1
    yield f"cp={c.cp}: NxD documents ring attention on trn1 only, not on {c.cluster.name}. Use cp=1"


@nxd_rule("cp,kernels", "aws-neuron/neuronx-distributed examples/training/llama/modeling_llama_nxd.py CoreAttention")
def nxd_core_cp(c: Columns) -> Verdict:
    yield (c.cp == 1) | (c.kernels != "nxd_core")
    yield f"cp={c.cp},kernels=nxd_core: NxD's CoreAttention knows whole sequences only. Use cp=1 or kernels=nxd"


@nxd_rule(
    "tp",
    NXD + "modules/qkv_linear.py:607-631: GQAQKVColumnParallelLinear raises when a bias is made",
    only=lambda c: c.model.qkv_bias,
)
def nxd_qkv_bias(c: Columns) -> Verdict:
    have = c.model.num_kv_heads
    yield have % c.tp == 0
    why = f"{c.model.name} has biases on q, k and v, and NxD's layer that copies the {have} KV heads has none"
    yield f"tp={c.tp}: {why}. Use a tp that divides {have}"


@nxd_rule("kernels", "derived: a card's options choose layers of NxD", only=lambda c: c.model.traced is not None)
def nxd_code(c: Columns) -> Verdict:
    yield False
    yield f"{c.model.name} was read off its code, and NxD has no layers for it. Use --engine torch, on trn2 or GPUs"


@nxd_rule("kernels", "derived: the nxd engine builds all layers of a model alike", only=lambda c: bool(c.model.order))
def nxd_layers(c: Columns) -> Verdict:
    yield False
    kinds = ", ".join(f"{count} {kind}" for kind, count in c.model.layer_counts.items())
    why = f"{c.model.name} has layers of several kinds ({kinds}), and the nxd engine builds one"
    yield f"{why}. Use --engine torch, on trn2 or GPUs"


def _unbuilt(c: Columns) -> str:
    """Name the options of a model for which the nxd engine builds nothing; layers of several kinds have a Rule."""
    options = {name: value for name, value in options_on(c.model).items() if name not in ("kinds", "order")}
    options |= {"mlp_bias of experts": True} if c.model.num_experts and c.model.mlp_bias else {}
    scaling = c.model.rotary_scaling
    options |= {"rotary_scaling.mscale": scaling.mscale} if scaling and scaling.mscale else {}
    texts = (f"{name} {show_value(value)}" if not is_dataclass(value) else name for name, value in options.items())
    return ", ".join(texts)


@nxd_rule(
    "kernels", "derived: the nxd engine builds layers of NxD and those of Llama", only=lambda c: bool(_unbuilt(c))
)
def nxd_options(c: Columns) -> Verdict:
    yield False
    why = f"{c.model.name} has {_unbuilt(c)}, for which the nxd engine builds nothing"
    yield f"{why}. Use --engine torch, on trn2 or GPUs"


@nxd_rule("seq_len", NXD + "kernels/flash_attn.py and ring_attention_kernel.py: causal is the only mask")
def nxd_window(c: Columns) -> Verdict:
    window, length = c.model.window, c.workload.seq_len
    yield window is None or length <= window
    why = f"{c.model.name} attends to a window of {window} tokens, and NxD's kernels have no window"
    yield f"seq_len={length}: {why}. Use --seq-len {window} or less, where the window hides nothing"


@nxd_rule("documents", NXD + "kernels/flash_attn.py:162 and ring_attention_kernel.py:118: causal is the only mask")
def nxd_documents(c: Columns) -> Verdict:
    yield c.workload.documents == "joined"
    torch_engine = "" if on_trn1(c) else ", or --engine torch"
    yield (
        "documents=separate: NxD's attention knows no mask but the causal one, and counts positions from the start of "
        f"the sequence, so that documents in one sequence see each other. Use documents=joined{torch_engine}"
    )


@nxd_rule(
    "kernels",
    NXD + "parallel_layers/random.py: a rank draws by a seed of its own, so that another layout drops other numbers; "
    "kernels/flash_attn.py and ring_attention_kernel.py are called without dropout",
    only=lambda c: bool(c.model.hidden_dropout or c.model.attention_dropout),
)
def nxd_dropout(c: Columns) -> Verdict:
    yield False
    drops = {"hidden_dropout": c.model.hidden_dropout, "attention_dropout": c.model.attention_dropout}
    stated = " and ".join(f"{name} {rate:g}" for name, rate in drops.items() if rate)
    torch_engine = "" if on_trn1(c) else ", or use --engine torch"
    why = f"{c.model.name} has {stated}, but NxD's ranks drop other numbers in every layout"
    yield f"{why}. Write 0 in its config{torch_engine}"


@nxd_rule("precision,tp", NXD + "parallel_layers/layers.py:364: ParallelEmbedding forces bfloat16 when tp is above 1")
def nxd_fp16(c: Columns) -> Verdict:
    yield (c.tp == 1) | (c.workload.precision.weights != "fp16")
    why = f"fp16 with tp={c.tp}, but NxD's cut embedding returns bf16 for every type but fp32"
    yield f"precision: {why}. Use bf16, or tp=1"


@nxd_rule(
    "router_balance_loss,router_z_loss",
    MOE + "loss_function.py:5-49: one loss over the logits of all layers, of the tokens that a rank has; no z-loss",
    only=lambda c: c.workload.trains_routers,
)
def nxd_router_losses(c: Columns) -> Verdict:
    yield False
    torch_engine = "" if on_trn1(c) else ", or use --engine torch"
    name = "router_balance_loss" if c.workload.router_balance_loss else "router_z_loss"
    why = "NxD has no z-loss, and its balance loss is that of all layers together and of a rank's own tokens"
    yield f"{name}={getattr(c.workload, name):g}: {why}. Leave both out{torch_engine}"


def drops_tokens(c: Columns) -> bool:
    return c.model.num_experts > 0 and c.workload.expert_capacity is not None


@nxd_rule(
    "expert_capacity",
    MOE + "expert_mlps_v2.py validate_routed_experts_configs: up to num_experts / top_k",
    drops_tokens,
)
def nxd_expert_capacity(c: Columns) -> Verdict:
    capacity, model = c.workload.expert_capacity or 0, c.model
    yield capacity * model.experts_per_token <= model.num_experts
    most = f"{model.num_experts / model.experts_per_token:g}"
    yield (
        f"expert_capacity={capacity:g}: from {most} on no token is dropped, "
        f"and NxD sends every token through all {model.num_experts} experts. Leave expert_capacity out"
    )


@nxd_rule(
    "dp,cp,mbs", MOE + "expert_mlps_v2.py forward_capacity_factor: slots for the tokens of one rank", drops_tokens
)
def nxd_expert_slots(c: Columns) -> Verdict:
    capacity, ranks = c.workload.expert_capacity or 0, c.dp * c.cp
    slots = num_slots(c.model, cast(int, c.mbs * c.dp) * c.workload.seq_len, capacity)
    yield slots % ranks == 0
    yield (
        f"expert_capacity={capacity:g}: leaves each of {ranks} ranks a broken number of slots per expert, which NxD "
        f"rounds up on every rank. Use a multiple of 1/8, such as expert_capacity={max(1, round(8 * capacity)) / 8:g}"
    )


@nxd_rule(
    "mbs,sp", MOE + "model.py: with sequence parallelism tokens queue in the order [seq, batch, hidden]", drops_tokens
)
def nxd_expert_order(c: Columns) -> Verdict:
    tokens = c.workload.seq_len
    drops_none = num_slots(c.model, tokens, c.workload.expert_capacity) >= tokens
    yield (c.mbs == 1) | (c.sp ^ True) | (c.tp == 1) | drops_none
    yield (
        f"mbs={c.mbs}: which tokens are dropped depends on their order, and with sequence parallelism NxD lines up the "
        "sequences of a micro-batch position by position. Use mbs=1 or sp=false"
    )


@nxd_rule(
    "recompute",
    MOE + "experts.py: all products are one module; blockwise.py: one kernel, which is given what it keeps",
    only=lambda c: c.model.num_experts > 0 and c.kernels in ("nxd", "nxd_core"),
)
def nxd_expert_recompute(c: Columns) -> Verdict:
    again = [_PRODUCTS.intersection(load_kernels(c.kernels).resolve(drop.ops)) for drop in c.shared.recompute]
    yield all(ops == _PRODUCTS and drops_tokens(c) for ops in again if ops)
    if not drops_tokens(c):
        yield f"recompute={c.recompute}: the kernel for experts that drop no token keeps all it needs. Use none or full"
    yield (
        f"recompute={c.recompute}: of experts NxD computes all again or nothing. Use selective[LlamaMLP], none or full"
    )
