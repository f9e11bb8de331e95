"""Rules of the Neuron runtime: which groups of ranks its collectives serve on trn1 and trn2."""

from autoshard.plan.rules.columns import Column, Columns
from autoshard.plan.rules.rule import Rule, implies, listed, one_of
from autoshard.plan.rules.shape import use_tp
from autoshard.plan.rules.tensor_sizes import platform_of, platform_tp

_NXDT_INIT = (
    "aws-neuron/neuronx-distributed-training src/neuronx_distributed_training/models/megatron/megatron_init.py:131-155"
)


def on_trn1(c: Columns) -> bool:
    """Hold on trn1 and trn1n."""
    return platform_of(c.cluster) == "trn1"


def on_trn2(c: Columns) -> bool:
    """Hold on trn2 and trn2u."""
    return platform_of(c.cluster) == "trn2"


def on_neuron(c: Columns) -> bool:
    """Hold on every Trainium cluster."""
    return platform_of(c.cluster) != ""


def _tp_allows(c: Columns) -> Column:
    return one_of(c.tp, platform_tp(c.cluster))


def _trn1_tp(c: Columns) -> str:
    note = " (older guides list 2 and NxD has a strided group for 4; NxD Training accepts neither)"
    return (
        f"tp={c.tp}: trn1 runs tp {listed(platform_tp(c.cluster))}{note if one_of(c.tp, (2, 4)) else ''}. {use_tp(c)}"
    )


def _trn2_tp(c: Columns) -> str:
    return (
        f"tp={c.tp}: trn2 with lnc {c.cluster.lnc} runs tp {listed(platform_tp(c.cluster))}, whose groups "
        f"lie on its torus. {use_tp(c)}"
    )


def _trn1_dp_allows(c: Columns) -> Column:
    groups = c.dp * c.cp  # what NxD Training calls data parallel: all that is not tp or pp
    alone = one_of(groups, (1, 8)) | (groups >= 32)
    together = (groups == 1) | (groups * c.tp >= 32)
    return implies(c.pp > 1, implies(c.tp == 1, alone) & implies(c.tp > 1, together))


def _trn1_dp(c: Columns) -> str:
    groups = c.dp * c.cp
    need = "1, 8 or at least 32" if c.tp == 1 else f"1 or at least {32 // c.tp}"
    return (
        f"tp={c.tp},pp={c.pp},dp={c.dp}: with a pipeline and tp={c.tp} on trn1, dp*cp must be {need}, not "
        f"{groups}. Change pp, so that dp*cp does"
    )


def _spans_evenly(size: Column, stride: Column, node: int) -> Column:
    """Say whether groups of ``size`` ranks, ``stride`` apart, meet every node they touch in the same way."""
    reach = size * stride
    inside_node = node % reach == 0
    one_per_node = stride % node == 0
    whole_steps = (node % stride == 0) & (reach % node == 0)
    return (size == 1) | inside_node | one_per_node | whole_steps


def _axes(c: Columns) -> list[tuple[str, Column, Column]]:
    """List name, size and stride of each axis, innermost first."""
    axes: list[tuple[str, Column, Column]] = []
    stride: Column = 1
    for name, size in (("tp", c.tp), ("cp", c.cp), ("ep", c.ep), ("edp", c.edp), ("pp", c.pp)):
        axes.append((name, size, stride))
        stride = stride * size
    return axes


def _symmetry_allows(c: Columns) -> Column:
    fits: Column = True
    for _, size, stride in _axes(c):
        fits = fits & _spans_evenly(size, stride, c.cluster.ranks_per_node)
    return fits


def _symmetry(c: Columns) -> str:
    node = c.cluster.ranks_per_node
    uneven = [
        f"{name} ({size} ranks, {stride} apart)"
        for name, size, stride in _axes(c)
        if not _spans_evenly(size, stride, node)
    ]
    return (
        f"tp={c.tp},pp={c.pp},cp={c.cp},dp={c.dp}: groups of {', '.join(uneven)} do not meet every node of "
        f"{node} ranks in the same way, which collectives between nodes need. Use sizes that divide {node} "
        "or are multiples of it"
    )


RULES = (
    Rule(
        id="trn1-tp",
        subject="tp",
        applies=on_trn1,
        allows=_tp_allows,
        message=_trn1_tp,
        source=f"{_NXDT_INIT}: tp is 1, 8 or 32. Followed, although release 2.26 no longer calls this check, "
        "because every recipe for trn1 in examples/conf uses 8 or 32. aws-neuron/aws-neuron-sdk "
        "about-neuron/transformers/generative-llm-inference-with-neuron.rst:237 lists 2, 8 and 32, and "
        "neuronx-distributed parallel_layers/parallel_state.py:594 has a path for 4 that no recipe uses",
    ),
    Rule(
        id="trn1-dp",
        subject="dp,pp",
        applies=on_trn1,
        allows=_trn1_dp_allows,
        message=_trn1_dp,
        source=f"{_NXDT_INIT}. Followed as the only statement about these groups, although release 2.26 no "
        "longer calls this check and one of its recipes breaks it (examples/conf/"
        "megatron_llama_70b_config.yaml: tp 8, pp 16 on 8 nodes, so dp 2)",
    ),
    Rule(
        id="trn2-tp",
        subject="tp",
        applies=on_trn2,
        allows=_tp_allows,
        message=_trn2_tp,
        source="aws-neuron/neuronx-distributed "
        "src/neuronx_distributed/parallel_layers/parallel_state.py:341-390 get_logic_chosen: which replica "
        "groups work per logical core size (by its comment the others do not; its code does not stop them)",
    ),
    Rule(
        id="node-symmetry",
        subject="tp,cp,ep,dp,pp",
        applies=on_neuron,
        allows=_symmetry_allows,
        message=_symmetry,
        source="aws-neuron/aws-neuron-sdk neuron-runtime/explore/internode-collective-comm.rst:71: groups "
        "between nodes have the same number of ranks, at the same local indices, on every node",
    ),
)
