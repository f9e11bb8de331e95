"""Rules of the nxd engine for mixtures of experts: what its layer of experts takes, and what it cannot do by halves."""

from autoshard.graph.decoder import num_slots
from autoshard.plan.rules.columns import Column, Columns
from autoshard.plan.rules.rule import Rule

_MOE = "aws-neuron/neuronx-distributed src/neuronx_distributed/modules/moe/"
HIDDEN_TILE, MOST_HIDDEN = 512, 8192  # blockwise.py:712 of release 2.29
FFN_TILE = 16  # blockwise.py:893


def _routes(c: Columns) -> bool:
    return c.engine == "nxd" and c.model.num_experts > 0


def _drops(c: Columns) -> bool:
    return _routes(c) and c.workload.expert_capacity is not None


def _capacity_allows(c: Columns) -> Column:
    return (c.workload.expert_capacity or 0) * c.model.experts_per_token <= c.model.num_experts


def _capacity(c: Columns) -> str:
    most = c.model.num_experts / c.model.experts_per_token
    return (
        f"expert_capacity={c.workload.expert_capacity:g}: from {most:g} on no token is dropped, and NxD sends every "
        f"token through all {c.model.num_experts} experts. Leave expert_capacity out"
    )


def _slots_allow(c: Columns) -> Column:
    if not c.model.num_experts:
        return True
    slots = num_slots(c.model, c.mbs * c.dp * c.workload.seq_len, c.workload.expert_capacity)
    return slots % (c.dp * c.cp) == 0


def _slots(c: Columns) -> str:
    better = max(1, round(8 * (c.workload.expert_capacity or 0))) / 8
    return (
        f"expert_capacity={c.workload.expert_capacity:g}: leaves each of {c.dp * c.cp} ranks a broken number of slots "
        "per expert, which NxD rounds up on every rank. Use a multiple of 1/8, such as "
        f"expert_capacity={better:g}"
    )


def _order(c: Columns) -> str:
    return (
        f"mbs={c.mbs}: which tokens are dropped depends on their order, and with sequence parallelism NxD lines up the "
        "sequences of a micro-batch position by position. Use mbs=1 or sp=false"
    )


def _dropless_allows(c: Columns) -> Column:
    tiled = c.model.hidden % HIDDEN_TILE == 0 and c.model.hidden <= MOST_HIDDEN and c.model.activation == "silu"
    return (c.model.ffn % (FFN_TILE * c.tp) == 0) & tiled


def _dropless(c: Columns) -> str:
    return (
        f"tp={c.tp}: NxD's kernel for experts that drop no token takes hidden sizes that are multiples of "
        f"{HIDDEN_TILE} up to {MOST_HIDDEN}, parts of ffn that are multiples of {FFN_TILE}, and silu; not hidden "
        f"{c.model.hidden}, ffn {c.model.ffn} / {c.tp}, {c.model.activation}. Use a smaller tp, or an expert_capacity"
    )


def _holds_all(c: Columns) -> bool:
    """Whether every expert has a slot for every token, so that their order does not matter."""
    tokens = c.workload.seq_len
    return num_slots(c.model, tokens, c.workload.expert_capacity) >= tokens


RULES = (
    Rule(
        id="nxd-expert-capacity",
        subject="expert_capacity",
        applies=_drops,
        allows=_capacity_allows,
        message=_capacity,
        source=_MOE
        + "expert_mlps_v2.py validate_routed_experts_configs: no capacity_factor from num_experts / top_k on",
    ),
    Rule(
        id="nxd-expert-slots",
        subject="dp,cp,mbs",
        applies=_drops,
        allows=_slots_allow,
        message=_slots,
        source=_MOE + "expert_mlps_v2.py forward_capacity_factor: slots are counted for the tokens of one rank",
    ),
    Rule(
        id="nxd-expert-order",
        subject="mbs,sp",
        applies=lambda c: _drops(c) and not _holds_all(c),
        allows=lambda c: (c.mbs == 1) | (c.sp ^ True) | (c.tp == 1),
        message=_order,
        source=_MOE
        + "model.py: hidden states are [seq, batch, hidden] with sequence parallelism, and queue in that order",
    ),
    Rule(
        id="nxd-dropless",
        subject="tp",
        applies=lambda c: _routes(c) and c.workload.expert_capacity is None,
        allows=_dropless_allows,
        message=_dropless,
        source=_MOE
        + "blockwise.py can_use_blockwise_matmul_nki, check_blockwise_mm_kernel_compatibility: otherwise every "
        "token goes through all experts, with no more than a warning",
    ),
    Rule(
        id="nxd-expert-recompute",
        subject="recompute",
        applies=_routes,
        allows=lambda c: c.experts_fault == "",
        message=lambda c: f"recompute={c.recompute}: {c.experts_fault}",
        source=_MOE + "experts.py: all products are one module; blockwise.py: one kernel, which is given what it keeps",
    ),
)
