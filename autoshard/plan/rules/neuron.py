"""Rules of the Neuron runtime: which groups of ranks its collectives serve, and which engine and kernels run there."""

from autoshard.plan.rules.columns import Columns, Ints, Mask
from autoshard.plan.rules.rule import Verdict, implies, listed, one_of, rule
from autoshard.plan.rules.shape import platform_tp, tp_remedy

_NXDT_INIT = (
    "aws-neuron/neuronx-distributed-training src/neuronx_distributed_training/models/megatron/megatron_init.py:131-155"
)


def on_trn1(c: Columns) -> bool:
    """Hold on trn1 and trn1n."""
    return c.cluster.platform == "trn1"


@rule(
    "tp",
    applies=on_trn1,
    source=f"{_NXDT_INIT}: tp is 1, 8 or 32. Followed, although release 2.26 no longer calls this check, "
    "because every recipe for trn1 in examples/conf uses 8 or 32. aws-neuron/aws-neuron-sdk "
    "about-neuron/transformers/generative-llm-inference-with-neuron.rst:237 lists 2, 8 and 32, and "
    "neuronx-distributed parallel_layers/parallel_state.py:594 has a path for 4 that no recipe uses",
)
def trn1_tp(c: Columns) -> Verdict:
    sizes = platform_tp(c.cluster)
    note = " (older guides list 2 and NxD has a strided group for 4; NxD Training accepts neither)"
    yield one_of(c.tp, sizes)
    yield f"tp={c.tp}: trn1 runs tp {listed(sizes)}{note if one_of(c.tp, (2, 4)) else ''}. {tp_remedy(c)}"


@rule(
    "dp,pp",
    applies=on_trn1,
    source=f"{_NXDT_INIT}. Followed as the only statement about these groups, although release 2.26 no "
    "longer calls this check and one of its recipes breaks it (examples/conf/"
    "megatron_llama_70b_config.yaml: tp 8, pp 16 on 8 nodes, so dp 2)",
)
def trn1_dp(c: Columns) -> Verdict:
    groups = c.dp * c.cp  # what NxD Training calls data parallel: all that is not tp or pp
    alone = one_of(groups, (1, 8)) | (groups >= 32)
    together = (groups == 1) | (groups * c.tp >= 32)
    yield implies(c.pp > 1, implies(c.tp == 1, alone) & implies(c.tp > 1, together))
    need = "1, 8 or at least 32" if c.tp == 1 else f"1 or at least {32 // c.tp}"
    why = f"with a pipeline and tp={c.tp} on trn1, dp*cp must be {need}, not {groups}"
    yield f"tp={c.tp},pp={c.pp},dp={c.dp}: {why}. Use another pp or dp"


@rule(
    "tp",
    applies=lambda c: c.cluster.platform == "trn2",
    source="aws-neuron/neuronx-distributed src/neuronx_distributed/parallel_layers/parallel_state.py:341-390 "
    "get_logic_chosen: which groups work per logical core size, by its comment; its code does not stop the others",
)
def trn2_tp(c: Columns) -> Verdict:
    sizes = platform_tp(c.cluster)
    yield one_of(c.tp, sizes)
    why = f"trn2 with lnc {c.cluster.lnc} runs tp {listed(sizes)}, whose groups lie on its torus"
    yield f"tp={c.tp}: {why}. {tp_remedy(c)}"


@rule(
    "tp,cp,ep,dp,pp",
    applies=lambda c: c.cluster.platform != "",
    source="aws-neuron/aws-neuron-sdk neuron-runtime/explore/internode-collective-comm.rst:71: groups "
    "between nodes have the same number of ranks, at the same local indices, on every node",
)
def node_symmetry(c: Columns) -> Verdict:
    node = c.cluster.ranks_per_node
    axes: list[tuple[str, Ints, Ints, Mask]] = []  # name, size, stride and evenness of each, innermost first
    stride: Ints = 1
    fits: Mask = True
    for name, size in (("tp", c.tp), ("cp", c.cp), ("ep", c.ep), ("edp", c.edp), ("pp", c.pp)):
        reach = size * stride  # a group lies inside a node, has one rank on each node, or fills nodes step by step
        even = (size == 1) | (node % reach == 0) | (stride % node == 0) | ((node % stride == 0) & (reach % node == 0))
        axes.append((name, size, stride, even))
        stride, fits = reach, fits & even
    yield fits
    uneven = ", ".join(f"{name} ({size} ranks, {stride} apart)" for name, size, stride, even in axes if not even)
    yield (
        f"tp={c.tp},pp={c.pp},cp={c.cp},dp={c.dp}: groups of {uneven} do not meet every node of "
        f"{node} ranks in the same way, which collectives between nodes need. Use sizes that divide {node} "
        "or are multiples of it"
    )


@rule(
    "engine",
    applies=lambda c: c.engine == "torch" and on_trn1(c),
    source="AWS Neuron documentation, training/torchtitan (Neuron 2.33): TorchNeuron needs Trn2 or Trn3",
)
def torch_trn1(c: Columns) -> Verdict:
    yield False
    remedy = "Use --engine nxd" if c.model.traced is None else "Use --cluster trn2.48xlarge, or GPUs"
    yield f"engine=torch: PyTorch runs natively on trn2 and later, not on {c.cluster.name}. {remedy}"


@rule(
    "kernels",
    applies=lambda c: c.engine == "torch",
    source="AWS Neuron documentation, torch/about-pytorch-neuron (2.33): graphs go to Neuron's own compiler; the other "
    "tables say what GPUs and processors run",
)
def native_kernels(c: Columns) -> Verdict:
    neuron = c.cluster.platform != ""
    yield (c.kernels == "neuron_native") == neuron
    why = "PyTorch on Trainium runs neither GPU nor CPU kernels. Use kernels=neuron_native"
    only = f"these are Trainium's, not those of {c.cluster.name}. Use kernels={c.cluster.kernels}"
    yield f"kernels={c.kernels}: {why if neuron else only}"
