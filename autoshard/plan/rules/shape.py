"""Rules of arithmetic, on every cluster and engine: which size must divide which; and against useless options."""

import math
from collections.abc import Mapping

from autoshard.errors import nearest
from autoshard.plan.candidate import boundary_fault, even_stages
from autoshard.plan.rules.columns import Columns, Mask, kernels_fault
from autoshard.plan.rules.rule import Verdict, implies, listed, one_of, rule
from autoshard.schedule.builders import builders
from autoshard.spec.cluster import Cluster
from autoshard.spec.kernels import libraries_of, load_kernels, program_table, table_fault
from autoshard.spec.model import ModelSpec
from autoshard.spec.repeats import compress
from autoshard.units import counted

_DERIVED = "derived: "
_NXD = "aws-neuron/neuronx-distributed src/neuronx_distributed/"
_STAGES = _DERIVED + "there are pp*vp stages"

# (platform, lnc) -> tp
NEURON_TP: Mapping[tuple[str, int | None], tuple[int, ...]] = {
    ("trn1", None): (1, 8, 32),
    ("trn2", 1): (1, 4, 8, 32, 64, 128),
    ("trn2", 2): (1, 4, 16, 32, 64),
}


def platform_tp(cluster: Cluster) -> tuple[int, ...]:
    """List the sizes of tp that the platform's collectives serve; elsewhere any size that fits a node."""
    sizes = NEURON_TP.get((cluster.platform, cluster.lnc))
    return sizes or tuple(size for size in range(1, cluster.ranks_per_node + 1) if cluster.ranks_per_node % size == 0)


def tp_remedy(c: Columns) -> str:
    """Return the remedy of a refused tp: the sizes that both the model and the cluster accept, 1 among them."""
    model = c.model
    sizes = tuple(
        size
        for size in platform_tp(c.cluster)
        if model.num_heads % size == 0
        and (model.num_kv_heads % size == 0 or size % model.num_kv_heads == 0)
        and _common_width(model) % size == 0
    )
    most = max(sizes)
    copies = f" (at {most} every KV head is held {most // model.num_kv_heads} times)"
    return f"Use tp {listed(sizes)} on {c.cluster.name}{copies if most > model.num_kv_heads else ''}"


def _common_width(model: ModelSpec) -> int:
    """Return what divides all widths of a model's MLPs."""
    return math.gcd(*model.widths)


@rule(
    "router_balance_loss,router_z_loss",
    source=_DERIVED + "only mixtures of experts have routers",
    applies=lambda c: c.workload.trains_routers,
)
def routers(c: Columns) -> Verdict:
    yield c.model.num_experts > 0
    name = "router_balance_loss" if c.workload.router_balance_loss else "router_z_loss"
    yield f"{name}={getattr(c.workload, name):g}: {c.model.name} has no experts, so no router. Leave it out"


@rule(
    "router_bias_speed",
    source=_DERIVED + "only routers with a correction have a bias to move",
    applies=lambda c: c.workload.router_bias_speed > 0,
)
def router_bias(c: Columns) -> Verdict:
    yield c.model.router is not None and c.model.router.correction
    yield f"router_bias_speed={c.workload.router_bias_speed:g}: {c.model.name} has no correction bias. Leave it out"


@rule("tp,pp,cp,dp", source=_DERIVED + "every rank stands at exactly one place of the mesh; ep is a part of dp")
def ranks(c: Columns) -> Verdict:
    have, inner = c.cluster.num_ranks, c.tp * c.pp * c.cp
    yield inner * c.dp == have
    uses = counted(int(inner * c.dp), "rank")
    head = f"tp={c.tp},pp={c.pp},cp={c.cp},dp={c.dp}: uses {uses}, but the cluster has {have}"
    if have % inner == 0:
        yield f"{head}. Use dp={have // inner}, or leave dp out"
    yield f"{head}. tp*pp*cp is {inner} and must divide {have}"


@rule("tp", source=_DERIVED + "attention is cut by whole query heads (Shoeybi et al. 2019, arXiv:1909.08053)")
def heads(c: Columns) -> Verdict:
    yield c.model.num_heads % c.tp == 0
    why = f"{c.model.num_heads} query heads of {c.model.name} do not divide by {c.tp}"
    if c.model.traced and c.model.num_heads == 1:
        why = f"{c.model.name} has no attention with several heads, which tp cuts"
    yield f"tp={c.tp}: {why}. {tp_remedy(c)}"


@rule("tp", source=_NXD + "modules/qkv_linear.py: kv_size_multiplier repeats whole KV heads; torch does the same")
def kv_heads(c: Columns) -> Verdict:
    have = c.model.num_kv_heads
    yield (have % c.tp == 0) | (c.tp % have == 0)
    why = f"{have} KV heads of {c.model.name} neither divide by {c.tp} nor divide it: no even cut, and no even copies"
    yield f"tp={c.tp}: {why}. {tp_remedy(c)}"


@rule("tp", source=_DERIVED + "column and row parallel linears hold equal shares of the MLP width")
def ffn(c: Columns) -> Verdict:
    yield _common_width(c.model) % c.tp == 0
    widths = listed(c.model.widths)
    yield f"tp={c.tp}: the MLP width {widths} of {c.model.name} does not divide by {c.tp}. {tp_remedy(c)}"


@rule(
    "pp,vp", source=_DERIVED + "an even split gives every stage its share; ``stages`` may leave the ends without layers"
)
def layers(c: Columns) -> Verdict:
    have, stages = c.model.num_layers, c.num_stages
    yield (stages <= have) | (c.shared.stages is not None and len(c.shared.stages) == stages)
    count = int(stages)
    why = f"{counted(have, 'layer')} of {c.model.name} cannot fill {counted(count, 'stage')}"
    bare = f", or --at with stages={compress(map(str, even_stages(have, count)))}" if count <= have + 2 else ""
    yield f"pp={c.pp},vp={c.vp}: {why}. Use pp*vp of at most {have}{bare}"


@rule("stages", source=_STAGES)
def stages_count(c: Columns) -> Verdict:
    count = len(c.shared.stages or ())
    yield (count == 0) | (count == c.num_stages)
    remedy = f"List {c.num_stages}, or leave stages out for the even split"
    yield f"stages: lists {counted(count, 'stage')}, but pp*vp is {c.num_stages}. {remedy}"


@rule("stages", source=_DERIVED + "every layer lies on exactly one stage")
def stages_sum(c: Columns) -> Verdict:
    have = c.model.num_layers
    layers = sum(c.shared.stages) if c.shared.stages else have
    yield layers == have
    remedy = f"remove {layers - have}" if layers > have else f"add {have - layers}"
    yield f"stages: the stages hold {counted(layers, 'layer')} together, but {c.model.name} has {have}: {remedy}"


@rule("recompute", source=_STAGES)
def recompute_count(c: Columns) -> Verdict:
    count = len(c.shared.recompute)
    yield (count == 1) | (count == c.num_stages)
    remedy = f"Give one for all stages, or {c.num_stages}"
    yield f"recompute={c.recompute}: names {counted(count, 'stage')}, but pp*vp is {c.num_stages}. {remedy}"


@rule("recompute", source=_DERIVED + "a stage cannot recompute layers that it does not hold")
def recompute_layers(c: Columns) -> Verdict:
    layer_counts = [recompute.num_layers or 0 for recompute in c.shared.recompute]
    stages, count = c.shared.stages, max(len(layer_counts), len(c.shared.stages or ()))
    if count == 1 and stages is None:
        yield (max(layer_counts) <= c.model.num_layers // c.num_stages) | (c.num_stages > c.model.num_layers)
    else:  # Rules of their own refuse other numbers of stages, and of layers
        layers = stages or even_stages(c.model.num_layers, count)
        layer_counts = layer_counts * count if len(layer_counts) == 1 else layer_counts
        fits = all(want <= have for want, have in zip(layer_counts, layers, strict=False))
        yield (c.num_stages != count) | fits | (count > c.model.num_layers)
    yield f"recompute={c.recompute}: some stages have fewer layers than their full:K. Use full, or a smaller K"


@rule("dp,mbs", source=_DERIVED + "every data-parallel rank runs the same number of equal micro-batches")
def batch(c: Columns) -> Verdict:
    size, group = c.workload.global_batch, c.dp * c.mbs
    yield size % group == 0
    near = tuple(int(multiple) for multiple in (size // group * group, (size // group + 1) * group) if multiple)
    remedy = f"Use a global batch of {listed(near)}, or another mbs"
    yield f"dp={c.dp},mbs={c.mbs}: a step of {counted(size, 'sequence')} does not divide by dp*mbs={group}. {remedy}"


@rule("ep", source=_DERIVED + "every expert-parallel rank holds the same number of whole experts")
def experts(c: Columns) -> Verdict:
    have, fold = c.model.num_experts, c.shared.fold or "none"
    ranks = c.ep * (c.tp if "tp" in fold else 1) * (c.cp if "cp" in fold else 1)
    yield have % ranks == 0
    also = f",fold={fold}" if fold != "none" else ""
    yield f"ep={c.ep}{also}: {have} experts of {c.model.name} do not divide by {ranks}"


@rule("ep", source=_NXD + "parallel_layers/parallel_state.py: expert data parallelism is world / (tp * pp * ep)")
def ep_in_dp(c: Columns) -> Verdict:
    yield c.dp % c.ep == 0
    yield f"ep={c.ep},dp={c.dp}: ep is cut out of dp and must divide it. Use an ep that divides {c.dp}"


@rule("seq_len", source=_DERIVED + "a learned position table has one row per position")
def positions(c: Columns) -> Verdict:
    have, length = c.model.max_positions, c.workload.seq_len
    yield c.model.positions != "learned" or length <= have
    yield f"seq_len={length}: {c.model.name} has learned positions for {have} tokens only. Use --seq-len {have} or less"


@rule("seq_len", source=_DERIVED + "samples that are no tokens have as many positions as the code makes of them")
def positions_of_data(c: Columns) -> Verdict:
    have, length = c.model.max_positions, c.workload.seq_len
    of_data = c.model.traced is not None and bool(c.model.traced.data)
    yield not of_data or length == have
    yield f"seq_len={length}: a sample of {c.model.name} has {have} positions. Leave --seq-len out"


@rule("schedule", source=_NXD + "pipeline/scheduler.py get_step_schedule; Megatron-LM asks for the same")
def interleaved_rounds(c: Columns) -> Verdict:
    in_rounds = tuple(name for name, builder in builders().items() if builder.in_rounds)
    yield implies(one_of(c.schedule, in_rounds), c.num_micro_batches % c.pp == 0)
    remedy = f"Use a global batch that is a multiple of dp*mbs*pp={c.dp * c.mbs * c.pp}"
    count = int(c.num_micro_batches)
    divide = f"{counted(count, 'micro-batch', 'es')} {'does' if count == 1 else 'do'} not divide by pp={c.pp}"
    yield f"schedule={c.schedule}: {divide}. {remedy}"


@rule("cp", source=_DERIVED + "every context-parallel rank holds an equal piece of each sequence")
def cp_seq(c: Columns) -> Verdict:
    length = c.workload.seq_len
    yield length % c.cp == 0
    yield f"cp={c.cp}: a sequence of {length} does not divide by {c.cp}. Use a cp that divides it"


@rule("cp", source="Yang et al. 2024, arXiv:2412.06464: the state of linear attention goes from token to token")
def cp_linear(c: Columns) -> Verdict:
    yield (c.cp == 1) | (not c.model.has_linear_layers)
    yield f"cp={c.cp}: linear attention of {c.model.name} goes through whole sequences, token by token. Use cp=1"


@rule("documents", source="Yang et al. 2024, arXiv:2412.06464: the state of linear attention goes from token to token")
def linear_documents(c: Columns) -> Verdict:
    yield c.workload.documents == "joined" or not c.model.has_linear_layers
    why = f"linear attention of {c.model.name} keeps what it read of a sequence's earlier documents"
    yield f"documents=separate: {why}. Use documents=joined"


@rule("cp_order", source=_DERIVED + "rank i gets the pieces i and 2*cp-1-i (Llama 3, arXiv:2407.21783, 3.3.2)")
def zigzag_seq(c: Columns) -> Verdict:
    length = c.workload.seq_len
    yield implies(c.cp_order == "zigzag", length % (2 * c.cp) == 0)
    why = f"gives each rank two pieces, and a sequence of {length} does not divide by 2*cp={2 * c.cp}"
    yield f"cp_order=zigzag: {why}. Use cp_order=contiguous or another --seq-len"


@rule("sp", source=_NXD + "parallel_layers/mappings.py: a reduce-scatter needs the dim to divide by tp; torch as well")
def sp_seq(c: Columns) -> Verdict:
    # Under zig-zag a rank holds two pieces, but tp cuts them as one sequence, so the same number must divide.
    length = c.workload.seq_len // c.cp
    yield implies(c.sp, length % c.tp == 0)
    tokens = f"{counted(int(length), 'token')} of a sequence on each rank"
    why = f"the {tokens} {'does' if length == 1 else 'do'} not divide by tp={c.tp}"
    yield f"sp=true: {why}. Use sp=false, or a --seq-len that is a multiple of cp*tp={c.cp * c.tp}"


@rule("cp_kind", source="Jacobs et al. 2023, arXiv:2309.14509: a cut of the sequence becomes a cut of the heads")
def cp_heads(c: Columns) -> Verdict:
    have = c.model.num_kv_heads
    yield implies(c.cp_kind == "all_to_all", have % c.cp == 0)
    why = f"{have} KV heads of {c.model.name} do not divide by cp={c.cp}"
    yield f"cp_kind=all_to_all: {why}. Use cp_kind=ring, or a smaller cp"


@rule(
    "cp_kind,tp",
    source="autoshard: in the order of the mesh, heads from an all-to-all over cp would be cut over tp first",
)
def cp_heads_tp(c: Columns) -> Verdict:
    yield implies(c.cp_kind == "all_to_all", c.tp == 1)
    why = f"heads are cut over cp, so they cannot be cut over tp={c.tp} too"
    yield f"cp_kind=all_to_all: {why}. Use cp_kind=ring or tp=1"


_NO_EFFECT = "autoshard: an option without effect is refused, because the user meant something by it"


@rule("sp", source=_NO_EFFECT)
def sp_effect(c: Columns) -> Verdict:
    yield implies(c.sp, c.tp > 1)
    yield "sp=true: cuts activations over tp, and tp is 1. Use a tp above 1, or leave sp out"


@rule("cp_kind", source=_NO_EFFECT)
def cp_kind_effect(c: Columns) -> Verdict:
    yield implies(c.cp_kind != "ring", c.cp > 1)
    yield f"cp_kind={c.cp_kind}: says how cp exchanges keys and values, and cp is 1. Leave it out, or use cp=2"


@rule("cp_order", source=_NO_EFFECT)
def cp_order_effect(c: Columns) -> Verdict:
    yield implies(c.cp_order != "contiguous", c.cp > 1)
    yield f"cp_order={c.cp_order}: says how cp cuts the sequence, and cp is 1. Leave it out, or use cp=2"


@rule("ep", source=_NO_EFFECT)
def ep_effect(c: Columns) -> Verdict:
    yield (c.ep == 1) | (c.model.num_experts > 0)
    yield f"ep={c.ep}: {c.model.name} is dense; it has no experts to spread. Use ep=1"


@rule("fold,tp,cp", source=_NO_EFFECT)
def fold_effect(c: Columns) -> Verdict:
    fold = c.shared.fold or "none"
    yield (fold == "none" or c.model.num_experts > 0) & (c.tp > ("tp" in fold)) & (c.cp > ("cp" in fold))
    yield f"fold={fold}: lets ranks of {fold} hold other experts each. Use it with {fold} above 1 and a mixture"


@rule("kernels", source=_NO_EFFECT)
def library_effect(c: Columns) -> Verdict:
    libraries = libraries_of(c.kernels)
    yield not libraries or c.model.num_experts > 0
    why = f"{c.model.name} is dense; it has no experts to which {' and '.join(libraries)} would send tokens"
    yield f"kernels={c.kernels}: {why}. Use kernels={program_table(c.kernels)}"


@rule(
    "vp,schedule",
    source="derived: 1f1b, gpipe and zb_h1 know one stage per rank (Narayanan et al. 2021, arXiv:2104.04473, section "
    "2.2; Qi et al. 2023, arXiv:2401.10241, section 2), zb_v has two; interleaving one is 1f1b",
)
def vp_schedule(c: Columns) -> Verdict:
    right: Mask = True
    for name, builder in builders().items():
        fits = c.vp > 1 if builder.num_chunks is None else c.vp == builder.num_chunks
        right = right & implies(c.schedule == name, fits)
    yield right
    count = builders()[str(c.schedule)].num_chunks
    remedy = "schedule=interleaved, or vp=1" if count == 1 else f"vp={count or 2}"
    per_rank = {1: "one stage", None: "several stages"}.get(count, f"{count} stages")
    yield f"vp={c.vp}: schedule={c.schedule} runs {per_rank} per rank. Use {remedy}"


@rule("schedule", source=_NO_EFFECT)
def schedule_effect(c: Columns) -> Verdict:
    yield (c.schedule == "1f1b") | (c.pp > 1)
    yield f"schedule={c.schedule}: there is no pipeline with pp=1. Leave schedule out"


@rule("zero", source=_NO_EFFECT)
def zero_effect(c: Columns) -> Verdict:
    yield implies(c.zero == 3, c.dp * c.cp > 1)
    yield f"zero={c.zero}: there is nothing to spread over with dp=1 and cp=1. Leave zero out"


@rule("zero_group", source=_DERIVED + "a group holds all states once, and experts lie inside it")
def zero_group(c: Columns) -> Verdict:
    group, whole = c.shared.zero_group, c.dp * c.cp
    fits = (group or whole) % (c.ep * c.cp) == 0
    yield (group is None) | (fits & (whole % (group or whole) == 0) & (c.zero > 0))
    why = f"ZeRO divides states over a part of the {whole} ranks of dp and cp that holds whole ep and cp"
    yield f"zero_group={group}: {why}. Use zero=1 or 3, and a multiple of {c.ep * c.cp} that divides {whole}"


@rule("weight_group,zero", source=_DERIVED + "ranks that hold the same piece of the weights update a part of it each")
def weight_group(c: Columns) -> Verdict:
    group, whole = c.shared.weight_group, c.shared.zero_group or c.dp * c.cp
    fits = ((group or whole) % (c.ep * c.cp) == 0) & (whole % (group or whole) == 0)
    yield (group is None) | (c.engine == "nxd") | (fits & (c.zero == 3))
    why = f"weights rest over a part of the {whole} ranks that divide states, and it holds whole ep and cp"
    yield f"weight_group={group}: {why}. Use zero=3, and a multiple of {c.ep * c.cp} that divides {whole}"


@rule("boundary", source="derived: what is handed from block to block is a hidden state with nothing left to do about")
def boundary(c: Columns) -> Verdict:
    fault = boundary_fault(c.shared.boundary)
    yield fault == ""
    yield f"boundary={c.shared.boundary}: {fault}"


@rule("lnc", source="aws-neuron/aws-neuron-sdk about-neuron/arch/neuron-features/logical-neuroncore-config.rst")
def lnc(c: Columns) -> Verdict:
    have, lnc_asked = c.cluster.lnc, c.shared.lnc
    yield lnc_asked in (None, have)
    remedy = f"is planned with lnc {have}. Use lnc={have}, or leave lnc out"
    yield f"lnc={lnc_asked}: {c.cluster.name} {remedy if have else 'has no logical cores to configure. Leave lnc out'}"


@rule("place", source="derived: a placement is a permutation of the ranks of one node")
def place(c: Columns) -> Verdict:
    have, node = c.shared.place, c.cluster.ranks_per_node
    yield have is None or len(have.local_ranks) == node
    placed = len(have.local_ranks) if have else 0
    yield f"place={have}: places {counted(placed, 'rank')}, but a node of {c.cluster.name} has {node}: 0-{node - 1}"


@rule("kernels", source="autoshard/spec/kernel_tables: each table describes the kernels of one engine's platform")
def kernels(c: Columns) -> Verdict:
    fault = kernels_fault(c.kernels, c.engine)
    yield fault == ""
    yield f"kernels={c.kernels}: {fault}"


@rule("recompute", source="autoshard/spec/kernel_tables: what each framework can recompute selectively")
def recompute_ops(c: Columns) -> Verdict:
    # A framework's own name is right even where it computes nothing again.
    names = sorted({name for recompute in c.shared.recompute for name in recompute.ops})
    table: Mapping[str, tuple[str, ...]] = {}
    if names and not table_fault(c.kernels):
        table = load_kernels(c.kernels).sets
    known_names = tuple(dict.fromkeys((*table, *(op for ops in table.values() for op in ops))))
    wrong = [name for name in names if table and name not in known_names]
    yield not wrong
    faults = " ".join(f"{name} is not known to {c.kernels}. {nearest(name, known_names)}" for name in wrong)
    yield f"recompute={c.recompute}: {faults}"
