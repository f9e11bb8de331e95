"""Rules of the nxd engine: what neuronx-distributed (release 2.29) executes, and what it gets wrong."""

from autoshard.plan.rules.columns import Column, Columns
from autoshard.plan.rules.neuron import on_trn1
from autoshard.plan.rules.rule import Rule, one_of

_NXD = "aws-neuron/neuronx-distributed src/neuronx_distributed/"
_NXDT = "aws-neuron/neuronx-distributed-training src/neuronx_distributed_training/"
_SDK = "aws-neuron/aws-neuron-sdk "
_NKI = "aws-neuron/nki-samples "  # the last published source of the kernels that come with the compiler
FLASH_TILE = 2048  # tokens: kernels/flash_attn.py:199
RING_TILE = 1024  # tokens: kernels/ring_attention_kernel.py:148
LONG_RING, LONG_RING_TILE = 4096, 2048  # tokens: get_seq_tile_size of the same file
HEAD_TILE = 128  # partitions of the matrix unit's memory


def on_nxd(c: Columns) -> bool:
    """Hold for plans of the nxd engine."""
    return c.engine == "nxd"


def _cluster(c: Columns) -> str:
    return f"engine=nxd: runs on Trainium only, not on {c.cluster.name}. Use --engine torch"


def _schedule(c: Columns) -> str:
    return f"schedule={c.schedule}: NxD builds only 1f1b and interleaved. Use schedule=1f1b"


def _zero_allows(c: Columns) -> Column:
    precision = c.workload.precision
    if precision.masters is not None:
        return c.zero == 1
    return one_of(c.zero, (0, 1)) if precision.weights == "fp32" else c.zero == 0


def _zero(c: Columns) -> str:
    if c.zero == 3:
        return "zero=3: NxD has no ZeRO-3; its parameters stay whole on every data-parallel rank. Use zero=1"
    if c.zero == 1:
        return f"zero=1: NxD's ZeRO-1 keeps fp32 masters, and these {c.workload.precision.weights} weights have none"
    return f"zero={c.zero}: NxD keeps {c.workload.precision.masters} masters only inside ZeRO-1. Use zero=1"


def _states_allows(c: Columns) -> Column:
    precision = c.workload.precision
    return precision.masters is not None or {precision.gradients, precision.moments} == {precision.weights}


def _states(c: Columns) -> str:
    precision = c.workload.precision
    return (
        f"precision={precision.name or precision.weights}: has no masters, but {precision.gradients} gradients and "
        f"{precision.moments} moments; without ZeRO-1 NxD keeps both in {precision.weights}. Use bf16"
    )


def _paired(c: Columns) -> tuple[int, ...]:
    """Return the sizes of tp whose groups lie in two parts of a node."""
    return tuple(rule.tp for rule in c.cluster.placements if rule.name == "paired")


def _zero_groups_allows(c: Columns) -> Column:
    alike = (c.dp == 1) | (one_of(c.tp, _paired(c)) ^ True)
    return (c.zero != 0) | ((c.cp == 1) & alike)


def _zero_groups(c: Columns) -> str:
    mixed = f"with this tp mix the shards of different ranks on {c.cluster.name}"
    wrong = mixed if c.cp == 1 else "count every rank of cp, over which it has averaged before"
    return f"zero=0,tp={c.tp},cp={c.cp}: NxD adds up gradients over groups of its own, which {wrong}. Use zero=1"


def _odd_pp(c: Columns) -> str:
    return (
        f"pp={c.pp}: NxD sends between stages in groups of two, and with an odd number of them rank 0 would be in two "
        f"groups of one collective. Use pp={c.pp - 1} or {c.pp + 1}"
    )


def _ep(c: Columns) -> str:
    return (
        f"ep={c.ep}: NxD reduces the expert layer's output over all ranks instead of tp, which mixes the "
        "tokens of different data-parallel ranks. Use ep=1"
    )


def _tied(c: Columns) -> str:
    return (
        f"pp={c.pp}: {c.model.name} ties its output head to its embedding, and NxD pipelines do not support "
        "that. Use pp=1, or a card with untied embeddings"
    )


def _cp_form_allows(c: Columns) -> Column:
    return (c.cp == 1) | ((c.cp_kind == "ring") & (c.cp_order == "contiguous"))


def _cp_form(c: Columns) -> str:
    return (
        f"cp_kind={c.cp_kind},cp_order={c.cp_order}: NxD runs context parallelism as a ring over contiguous "
        "pieces. Use cp_kind=ring,cp_order=contiguous"
    )


def _cp_platform(c: Columns) -> str:
    return f"cp={c.cp}: NxD documents ring attention on trn1 only, not on {c.cluster.name}. Use cp=1"


def ring_length_allows(length: Column) -> Column:
    """Hold for lengths of a rank's part of a sequence that are whole tiles of the ring kernel."""
    return (length % RING_TILE == 0) & ((length < LONG_RING) | (length % LONG_RING_TILE == 0))


def _ring_seq_allows(c: Columns) -> Column:
    return (c.cp == 1) | ring_length_allows(c.workload.seq_len // c.cp)


def _ring_seq(c: Columns) -> str:
    length = c.workload.seq_len // c.cp
    tile = LONG_RING_TILE if length >= LONG_RING else RING_TILE
    return (
        f"cp={c.cp}: NxD's ring attention works on tiles of {tile} tokens, and each rank has {length}. "
        f"Use a --seq-len that is a multiple of {tile * c.cp}"
    )


def _head_dim_allows(c: Columns) -> Column:
    return (c.kernels == "nxd_core") | (c.model.head_dim <= HEAD_TILE)


def _head_dim(c: Columns) -> str:
    return (
        f"kernels={c.kernels}: {c.model.name} has heads of {c.model.head_dim}, and NxD's attention kernels take "
        f"up to {HEAD_TILE}. Use kernels=nxd_core with cp=1"
    )


def _ring_head_dim_allows(c: Columns) -> Column:
    return (c.cp == 1) | (c.model.head_dim >= HEAD_TILE)  # of larger ones nxd-head-dim speaks


def _ring_head_dim(c: Columns) -> str:
    return (
        f"cp={c.cp}: {c.model.name} has heads of {c.model.head_dim}, and where they are smaller than {HEAD_TILE} "
        "the backward pass of NxD's ring attention normalises with the sums of other queries. Use cp=1"
    )


def _flash_seq_allows(c: Columns) -> Column:
    return (c.cp > 1) | (c.kernels == "nxd_core") | (c.workload.seq_len % FLASH_TILE == 0)


def _flash_seq(c: Columns) -> str:
    seq = c.workload.seq_len
    return (
        f"seq_len={seq}: NxD's flash attention takes multiples of {FLASH_TILE} tokens. Use --seq-len "
        f"{max(1, round(seq / FLASH_TILE)) * FLASH_TILE}, or kernels=nxd_core"
    )


def _core_cp(c: Columns) -> str:
    return f"cp={c.cp},kernels=nxd_core: NxD's CoreAttention knows whole sequences only. Use cp=1 or kernels=nxd"


def _qkv_bias_allows(c: Columns) -> Column:
    return (c.model.num_kv_heads % c.tp == 0) if c.model.qkv_bias else True


def _qkv_bias(c: Columns) -> str:
    return (
        f"tp={c.tp}: {c.model.name} has biases on q, k and v, and NxD's layer that replicates the "
        f"{c.model.num_kv_heads} KV heads cannot hold them. Use a tp that divides {c.model.num_kv_heads}"
    )


def _window_allows(c: Columns) -> Column:
    return c.model.window is None or c.workload.seq_len <= c.model.window


def _window(c: Columns) -> str:
    return (
        f"seq_len={c.workload.seq_len}: {c.model.name} attends to a window of {c.model.window} tokens, and "
        f"NxD's kernels have no window. Use --seq-len {c.model.window} or less, where the window hides "
        "nothing"
    )


def _documents(c: Columns) -> str:
    remedy = "documents=joined" if on_trn1(c) else "documents=joined, or --engine torch"
    return (
        "documents=separate: NxD's attention knows no mask but the causal one, and counts positions from the start of "
        f"the sequence, so that documents in one sequence see each other. Use {remedy}"
    )


def _fp16(c: Columns) -> str:
    return (
        f"precision: fp16 with tp={c.tp}, but NxD's cut embedding returns bf16 for every type but fp32. "
        "Use bf16, or tp=1"
    )


def _boundary(c: Columns) -> str:
    return f"boundary={c.boundary}: NxD's layers take and give hidden states cut along their tokens. Leave boundary out"


RULES = (
    Rule(
        id="nxd-boundary",
        subject="boundary",
        applies=on_nxd,
        allows=lambda c: c.boundary == "",
        message=_boundary,
        source=_NXD + "parallel_layers/layers.py: a layer gathers and scatters the sequence, or nothing",
    ),
    Rule(
        id="nxd-cluster",
        subject="engine",
        applies=on_nxd,
        allows=lambda c: c.cluster.engine == "nxd",
        message=_cluster,
        source=_NXD + "utils/utils.py: reads the Neuron hardware type of the instance",
    ),
    Rule(
        id="nxd-schedule",
        subject="schedule",
        applies=on_nxd,
        allows=lambda c: one_of(c.schedule, ("1f1b", "interleaved")),
        message=_schedule,
        source=_NXD + "pipeline/scheduler.py: Train1F1BSchedule and TrainInterleavedSchedule are all there are",
    ),
    Rule(
        id="nxd-zero",
        subject="zero",
        applies=on_nxd,
        allows=_zero_allows,
        message=_zero,
        source=_NXD + "trainer/trainer.py: use_master_weights without zero_one_enabled raises; "
        "there is no sharding of parameters. torch_xla zero_redundancy_optimizer.py: shards are fp32",
    ),
    Rule(
        id="nxd-states",
        subject="precision",
        applies=on_nxd,
        allows=_states_allows,
        message=_states,
        source=_NXD + "trainer/trainer.py initialize_optimizer_from_class: use_fp32_grad_acc without zero_one_enabled "
        "raises; moments of torch.optim.AdamW have the format of the parameter",
    ),
    Rule(
        id="nxd-zero-groups",
        subject="zero,tp",
        applies=on_nxd,
        allows=_zero_groups_allows,
        message=_zero_groups,
        source=_NXD + "parallel_layers/grads.py bucket_allreduce_gradients: over expert-data-parallel groups, which "
        "parallel_state.py builds without cp, and does not permute as it does tp and dp",
    ),
    Rule(
        id="nxd-odd-pp",
        subject="pp",
        applies=on_nxd,
        allows=lambda c: (c.pp == 1) | (c.pp % 2 == 0),
        message=_odd_pp,
        source=_NXD
        + "parallel_layers/parallel_state.py get_pipeline_model_parallel_sr_group: of three stages [0,1] and "
        "[2,0] are groups of one all-gather",
    ),
    Rule(
        id="nxd-ep",
        subject="ep",
        applies=on_nxd,
        allows=lambda c: c.ep == 1,
        message=_ep,
        source=_NXD + "modules/moe/model.py:227-240 reduces over the world group under expert parallelism; "
        "router gradients are wrong too (model.py:206)",
    ),
    Rule(
        id="nxd-tied",
        subject="pp",
        applies=on_nxd,
        allows=lambda c: c.pp == 1 if c.model.tied_embeddings else True,
        message=_tied,
        source=_SDK + "archive/nxd-training/known_issues.rst: weight sharing between embedding and head under a "
        "pipeline. NxD's own pipeline code can share weights (pipeline/partition.py); the stated limit is "
        "followed",
    ),
    Rule(
        id="nxd-cp-form",
        subject="cp_kind,cp_order",
        applies=on_nxd,
        allows=_cp_form_allows,
        message=_cp_form,
        source=_NXD + "utils/batch_utils.py cuts contiguous pieces; kernels/ring_attention_kernel.py is the only "
        "context-parallel attention",
    ),
    Rule(
        id="nxd-cp-trn1",
        subject="cp",
        applies=lambda c: on_nxd(c) and not on_trn1(c),
        allows=lambda c: c.cp == 1,
        message=_cp_platform,
        source=_SDK + "release-notes/components/nxd-core.rst and nxd-training.rst, 2.23: context parallelism up to 32k "
        "tokens on trn1, beta; nothing is said about trn2",
    ),
    Rule(
        id="nxd-ring-seq",
        subject="cp",
        applies=on_nxd,
        allows=_ring_seq_allows,
        message=_ring_seq,
        source=_NXD + "kernels/ring_attention_kernel.py:148, and get_seq_tile_size, of whose tiles the kernel wants "
        "whole ones",
    ),
    Rule(
        id="nxd-head-dim",
        subject="kernels",
        applies=on_nxd,
        allows=_head_dim_allows,
        message=_head_dim,
        source=_NKI + "8370e11 src/nki_samples/reference/attention.py:369 (flash_fwd) and 7af4e4d contributed/"
        "neuron-team-kernels/attention.py (ring_attention_fwd): we do not support head_dim > 128",
    ),
    Rule(
        id="nxd-ring-head-dim",
        subject="cp",
        applies=on_nxd,
        allows=_ring_head_dim_allows,
        message=_ring_head_dim,
        source=_NKI + "7af4e4d contributed/neuron-team-kernels/attention.py:805 (ring_attention_bwd): from the second "
        "step on it reads the log-sum-exp of head_dim queries in each tile of 128",
    ),
    Rule(
        id="nxd-flash-seq",
        subject="seq_len",
        applies=on_nxd,
        allows=_flash_seq_allows,
        message=_flash_seq,
        source=_NXD + "kernels/flash_attn.py:199 raises for other lengths",
    ),
    Rule(
        id="nxd-core-cp",
        subject="cp,kernels",
        applies=on_nxd,
        allows=lambda c: (c.cp == 1) | (c.kernels != "nxd_core"),
        message=_core_cp,
        source="aws-neuron/neuronx-distributed examples/training/llama/modeling_llama_nxd.py CoreAttention: a "
        "product of a rank's own queries and keys",
    ),
    Rule(
        id="nxd-qkv-bias",
        subject="tp",
        applies=on_nxd,
        allows=_qkv_bias_allows,
        message=_qkv_bias,
        source=_NXD + "modules/qkv_linear.py:607-631: GQAQKVColumnParallelLinear raises when a bias is made",
    ),
    Rule(
        id="nxd-window",
        subject="seq_len",
        applies=on_nxd,
        allows=_window_allows,
        message=_window,
        source=_NXD + "kernels/flash_attn.py and ring_attention_kernel.py: causal is the only mask",
    ),
    Rule(
        id="nxd-documents",
        subject="documents",
        applies=on_nxd,
        allows=lambda c: c.workload.documents == "joined",
        message=_documents,
        source=_NXD + "kernels/flash_attn.py:162 and ring_attention_kernel.py:118: causal is the only mask",
    ),
    Rule(
        id="nxd-fp16",
        subject="precision,tp",
        applies=on_nxd,
        allows=lambda c: (c.tp == 1) | (c.workload.precision.weights != "fp16"),
        message=_fp16,
        source=_NXD + "parallel_layers/layers.py:363: ParallelEmbedding forces bfloat16 when tp is above 1",
    ),
)
