"""Rules of the kernels that NxD launches on devices: what their source asserts, or takes for granted without a word.

No run on a CPU meets them. Attention kernels and those of experts come with the compiler, whose source is not public;
lines are those of the last that was published, in aws-neuron/nki-samples: 0898a77 (2025-11-12) of attention in one
piece, 7af4e4d (2025-12-17) of the ring and of experts. The table in docs/developers/trainium.md names every kernel.
"""

from typing import cast

from autoshard.plan.rules.columns import Columns, Ints, Mask
from autoshard.plan.rules.nxd_engine import MOE, NXD, drops_tokens, nxd_rule
from autoshard.plan.rules.rule import Verdict

FLASH_TILE = 2048  # tokens: kernels/flash_attn.py:199
RING_TILE = 1024  # tokens: kernels/ring_attention_kernel.py:147
LONG_RING, LONG_RING_TILE = 4096, 2048  # tokens: kernels/ring_attention_kernel.py:40 (get_seq_tile_size)
TILE = 128  # rows of the matrix unit's memory
LEAST_HIDDEN, MOST_HIDDEN = 4096, 8192  # blockwise_mm.py:53
HIDDEN_TILE = 512  # columns that a kernel of experts takes at once: blockwise_mm.py:54
FFN_TILE = 16  # modules/moe/blockwise.py:893
_NKI = "aws-neuron/nki-samples "
_FLASH = _NKI + "0898a77 src/nki_samples/reference/attention.py"
_RING = _NKI + "7af4e4d contributed/neuron-team-kernels/attention.py"
_EXPERTS = _NKI + "7af4e4d contributed/neuron-team-kernels/blockwise_mm.py"
_EXPERTS_BACK = _NKI + "7af4e4d contributed/neuron-team-kernels/blockwise_mm_bwd.py"


@nxd_rule("seq_len", NXD + "kernels/flash_attn.py:200 'Only support sequence as multiples of 2K'")
def nxd_flash_seq(c: Columns) -> Verdict:
    length = c.workload.seq_len
    yield (c.cp > 1) | (c.kernels == "nxd_core") | (length % FLASH_TILE == 0)
    near = max(1, round(length / FLASH_TILE)) * FLASH_TILE
    why = f"NxD's flash attention takes multiples of {FLASH_TILE} tokens"
    yield f"seq_len={length}: {why}. Use --seq-len {near}, or kernels=nxd_core"


@nxd_rule(
    "kernels",
    f"{_FLASH}:369 (flash_fwd) and {_RING}:1016 (ring_attention_fwd) 'we do not support head_dim > 128'",
)
def nxd_head_dim(c: Columns) -> Verdict:
    yield (c.kernels == "nxd_core") | (c.model.head_dim <= TILE)
    why = f"{c.model.name} has heads of {c.model.head_dim}, and NxD's attention kernels take up to {TILE}"
    yield f"kernels={c.kernels}: {why}. Use kernels=nxd_core with cp=1"


@nxd_rule(
    "precision,kernels",
    f"{_FLASH}:371 (flash_fwd) and {_RING}:1018 (ring_attention_fwd) 'kernel_dtype = nl.bfloat16 if mixed_precision "
    "else q.dtype'; otherwise sums are in q.dtype too",
)
def nxd_kernel_fp16(c: Columns) -> Verdict:
    yield (c.kernels == "nxd_core") | (c.workload.precision.weights != "fp16")
    why = "NxD's attention kernels multiply fp16 in bf16, or else add up in fp16"
    yield f"kernels={c.kernels}: {why}. Use bf16, or kernels=nxd_core"


def ring_length_allows(length: Ints) -> Mask:
    """Hold for lengths of a rank's part of a sequence that are whole tiles of the ring kernel."""
    return (length % RING_TILE == 0) & ((length < LONG_RING) | (length % LONG_RING_TILE == 0))


@nxd_rule(
    "cp",
    NXD + "kernels/ring_attention_kernel.py:150 'Only support sequence as multiples of 1K', "
    f"and {_RING}:1049 'seqlen is not divisible by' what get_seq_tile_size gives",
)
def nxd_ring_seq(c: Columns) -> Verdict:
    length = c.workload.seq_len // c.cp
    yield (c.cp == 1) | ring_length_allows(length)
    tile = LONG_RING_TILE if length >= LONG_RING else RING_TILE
    yield (
        f"cp={c.cp}: NxD's ring attention works on tiles of {tile} tokens, and each rank has {length}. "
        f"Use a --seq-len that is a multiple of {tile * c.cp}"
    )


@nxd_rule(
    "cp",
    f"{_RING}:806 (ring_attention_bwd) 'send_lse_buf[ip_qk, i_q_seq_tile]': from the second step on it reads the "
    "log-sum-exp of head_dim queries in each tile of 128",
)
def nxd_ring_head_dim(c: Columns) -> Verdict:
    # Of heads that are larger nxd-head-dim speaks.
    yield (c.cp == 1) | (c.model.head_dim >= TILE)
    yield (
        f"cp={c.cp}: {c.model.name} has heads of {c.model.head_dim}, and where they are smaller than {TILE} "
        "the backward pass of NxD's ring attention normalises with the sums of other queries. Use cp=1"
    )


@nxd_rule(
    "pp", NXD + "parallel_layers/parallel_state.py get_pipeline_model_parallel_sr_group: 3 stages give [0,1], [2,0]"
)
def nxd_odd_pp(c: Columns) -> Verdict:
    yield (c.pp == 1) | (c.pp % 2 == 0)
    yield (
        f"pp={c.pp}: NxD sends between stages in groups of two, and with an odd number of them rank 0 would be in two "
        f"groups of one collective. Use pp={c.pp - 1} or {c.pp + 1}"
    )


def _dropless(c: Columns) -> bool:
    return c.model.num_experts > 0 and not drops_tokens(c)


def _hidden_tile(c: Columns) -> int:
    return HIDDEN_TILE * (c.cluster.lnc or 1)  # two cores that are one share the hidden size


@nxd_rule(
    "tp",
    f"{_EXPERTS}:53 'Only support hidden dim size in range [4096, 8192]'; {_EXPERTS}:1397 'H_per_shard = H // "
    f"num_shards', loaded in tiles of 512 without a mask; {MOE}blockwise.py:893 'intermediate_size_tp % 16'. Where a "
    "check of NxD fails, every token goes through all experts, with no more than a warning",
    _dropless,
)
def nxd_dropless(c: Columns) -> Verdict:
    model, tile = c.model, _hidden_tile(c)
    tiled = model.hidden % tile == 0 and LEAST_HIDDEN <= model.hidden <= MOST_HIDDEN and model.activation == "silu"
    yield (model.ffn % (FFN_TILE * c.tp) == 0) & tiled
    yield (
        f"tp={c.tp}: NxD's kernel for experts that drop no token takes hidden sizes that are multiples of {tile} from "
        f"{LEAST_HIDDEN} to {MOST_HIDDEN}, parts of ffn that are multiples of {FFN_TILE}, and silu; not hidden "
        f"{model.hidden}, ffn {model.ffn} / {c.tp}, {model.activation}. Use a smaller tp, or an expert_capacity"
    )


@nxd_rule(
    "tp",
    f"{_EXPERTS_BACK}:38 'assert intermediate_size_tp > 128'; two cores that are one run a kernel without this check",
    lambda c: _dropless(c) and c.cluster.lnc != 2,
)
def nxd_expert_ffn(c: Columns) -> Verdict:
    yield c.model.ffn > TILE * c.tp
    why = f"NxD's backward kernel for experts that drop no token takes parts of ffn above {TILE}"
    yield f"tp={c.tp}: {why}, not {c.model.ffn} / {c.tp}. Use a smaller tp, or an expert_capacity"


@nxd_rule(
    "tp,mbs,cp",
    f"{_EXPERTS_BACK}:200 and 256 'int(np.ceil(T/I_TP))': so many tiles of 128 rows of the gradient of down_proj are "
    "set to zero before blocks are added to them, where ceil(I_TP / 128) are needed",
    _dropless,
)
def nxd_expert_tokens(c: Columns) -> Verdict:
    # One row more than there are tokens, for places in blocks that no token takes: modules/moe/blockwise.py:1157.
    rows, part = c.mbs * c.workload.seq_len // c.cp + 1, (c.model.ffn - 1) // c.tp + 1
    tiles = (rows + part - 1) // part
    yield tiles * TILE >= part
    yield (
        f"tp={c.tp},mbs={c.mbs}: NxD's backward kernel for experts that drop no token clears {cast(int, tiles) * TILE} "
        f"of {part} rows of a gradient to which it adds, because {rows - 1} tokens are few beside ffn / tp. "
        "Use a larger tp or mbs, or an expert_capacity"
    )


@nxd_rule(
    "precision",
    f"{MOE}blockwise.py:175 (_call_training_kernel) and 193 name no compute_dtype; {_EXPERTS}:1057 and 1383 "
    "'compute_dtype=nl.bfloat16', likewise backward",
    _dropless,
)
def nxd_expert_precision(c: Columns) -> Verdict:
    yield c.workload.precision.weights == "bf16"
    why = "NxD's kernels for experts that drop no token multiply in bf16, whatever the weights are"
    yield f"precision: {c.workload.precision.weights} weights, but {why}. Use bf16, or an expert_capacity"


@nxd_rule(
    "lnc",
    f"{_EXPERTS_BACK}:231 (initialize_gradient_outputs_shard) 'shard_E = E // num_shards': with an odd number the "
    "gradient of the last expert's shares is never set to zero",
    lambda c: _dropless(c) and c.cluster.lnc == 2,
)
def nxd_expert_cores(c: Columns) -> Verdict:
    yield c.model.num_experts % 2 == 0
    why = f"two cores that are one share the {c.model.num_experts} experts of {c.model.name}, and leave one out"
    yield f"lnc=2: {why}. Use --lnc 1, or an expert_capacity"
