"""Rules of the nxd engine for mixtures of experts: what its layer of experts takes, and what it cannot do by halves."""

from typing import cast

from autoshard.graph.decoder import num_slots
from autoshard.plan.rules.columns import Columns
from autoshard.plan.rules.rule import Verdict, rule

_MOE = "aws-neuron/neuronx-distributed src/neuronx_distributed/modules/moe/"
HIDDEN_TILE, MOST_HIDDEN = 512, 8192  # blockwise.py:712 of release 2.29
FFN_TILE = 16  # blockwise.py:893


def _routes(c: Columns) -> bool:
    return c.engine == "nxd" and c.model.num_experts > 0


def _drops(c: Columns) -> bool:
    return _routes(c) and c.workload.expert_capacity is not None


def _drops_some(c: Columns) -> bool:
    """Say whether tokens may lack a slot with an expert, so that their order matters."""
    tokens = c.workload.seq_len
    return _drops(c) and num_slots(c.model, tokens, c.workload.expert_capacity) < tokens


@rule(
    "expert_capacity",
    applies=_drops,
    source=_MOE + "expert_mlps_v2.py validate_routed_experts_configs: no capacity_factor from num_experts / top_k on",
)
def nxd_expert_capacity(c: Columns) -> Verdict:
    capacity, model = c.workload.expert_capacity or 0, c.model
    yield capacity * model.experts_per_token <= model.num_experts
    yield (
        f"expert_capacity={capacity:g}: from {model.num_experts / model.experts_per_token:g} on no token is dropped, "
        f"and NxD sends every token through all {model.num_experts} experts. Leave expert_capacity out"
    )


@rule(
    "dp,cp,mbs",
    applies=_drops,
    source=_MOE + "expert_mlps_v2.py forward_capacity_factor: slots are counted for the tokens of one rank",
)
def nxd_expert_slots(c: Columns) -> Verdict:
    capacity, ranks = c.workload.expert_capacity or 0, c.dp * c.cp
    slots = num_slots(c.model, cast(int, c.mbs * c.dp) * c.workload.seq_len, capacity)
    yield slots % ranks == 0
    yield (
        f"expert_capacity={capacity:g}: leaves each of {ranks} ranks a broken number of slots per expert, which NxD "
        f"rounds up on every rank. Use a multiple of 1/8, such as expert_capacity={max(1, round(8 * capacity)) / 8:g}"
    )


@rule(
    "mbs,sp",
    applies=_drops_some,
    source=_MOE + "model.py: hidden states are [seq, batch, hidden] with sequence parallelism, and queue in that order",
)
def nxd_expert_order(c: Columns) -> Verdict:
    yield (c.mbs == 1) | (c.sp ^ True) | (c.tp == 1)
    yield (
        f"mbs={c.mbs}: which tokens are dropped depends on their order, and with sequence parallelism NxD lines up the "
        "sequences of a micro-batch position by position. Use mbs=1 or sp=false"
    )


@rule(
    "tp",
    applies=lambda c: _routes(c) and c.workload.expert_capacity is None,
    source=_MOE + "blockwise.py can_use_blockwise_matmul_nki, check_blockwise_mm_kernel_compatibility: otherwise every "
    "token goes through all experts, with no more than a warning",
)
def nxd_dropless(c: Columns) -> Verdict:
    model = c.model
    tiled = model.hidden % HIDDEN_TILE == 0 and model.hidden <= MOST_HIDDEN and model.activation == "silu"
    yield (model.ffn % (FFN_TILE * c.tp) == 0) & tiled
    yield (
        f"tp={c.tp}: NxD's kernel for experts that drop no token takes hidden sizes that are multiples of "
        f"{HIDDEN_TILE} up to {MOST_HIDDEN}, parts of ffn that are multiples of {FFN_TILE}, and silu; not hidden "
        f"{model.hidden}, ffn {model.ffn} / {c.tp}, {model.activation}. Use a smaller tp, or an expert_capacity"
    )


@rule(
    "recompute",
    applies=_routes,
    source=_MOE + "experts.py: all products are one module; blockwise.py: one kernel, which is given what it keeps",
)
def nxd_expert_recompute(c: Columns) -> Verdict:
    yield c.experts_fault == ""
    yield f"recompute={c.recompute}: {c.experts_fault}"
