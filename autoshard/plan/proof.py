"""A plan tried out on one machine: shrunk to few ranks and a small model, and proven on virtual ranks.

The proof executes the shrunk plan as its own table lists, and compares the results with those of the unsharded model.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.graph.block import Block
from autoshard.graph.decoder import dim_sizes
from autoshard.graph.kinds.indexing import random_document_starts
from autoshard.graph.op import Array
from autoshard.graph.written import parse_lines
from autoshard.layout.interpret import Interpreter, queueing_apart
from autoshard.layout.table import table_for_sizes
from autoshard.plan.build import build_plan
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.tables import plan_blocks, plan_programs, step_graph_of, table_setting, with_strategies
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import LayerKind, ModelSpec
from autoshard.spec.model_parts import LatentAttention, LinearAttention, Router, TracedDecoder
from autoshard.spec.record import option
from autoshard.spec.repeats import compress

MAX_RANKS = 16
_KEPT_FIRST = ("tp", "cp", "ep", "pp", "dp")  # what is given up last when not all axes fit
_HIDDEN, _HEAD_DIM, _HIDDEN_DIM = 16, 8, "hidden"
TOLERANCE = 1e-9  # relative to the largest result of a block; everything is computed in float64


def shrink(plan: Plan, max_ranks: int = MAX_RANKS) -> tuple[Plan, tuple[str, ...]]:
    """Return a small plan, and every feature of the large one that it does not have.

    Every axis with more than one rank keeps two, as far as they fit, and the model is scaled to match. Key/value
    replication, padding of the vocabulary, kinds of recompute, chunks and the rest of the candidate stay.
    """
    large, (sizes, lost) = plan.candidate, _sizes(plan, max_ranks)
    if sizes["pp"] == 1:
        if large.schedule != "1f1b":
            lost.append(f"schedule={large.schedule}: there is only one pipeline rank")
        large = replace(large, vp=1, schedule="1f1b", recompute=large.recompute[:1])
    stages = sizes["pp"] * large.vp
    recompute, order = _layers(plan, stages, lost)
    small = replace(
        large,
        **sizes,
        mbs=min(large.mbs, 2),
        sp=None if sizes["tp"] == 1 else large.sp,
        recompute=recompute,
        stages=None,
        place=None,
        cp_kind="ring" if sizes["cp"] == 1 else large.cp_kind,
        cp_order="contiguous" if sizes["cp"] == 1 else large.cp_order,
        lnc=None,
    )
    model = _model(_with_order(plan.model, order), sizes, padded="vocab" in plan.padding)
    workload = replace(
        plan.workload,
        seq_len=min(4 * small.cp * small.tp, model.max_positions),
        global_batch=small.dp * small.mbs * max(2, 2 * small.pp),
    )
    ranks, links = small.num_ranks, plan.cluster.links
    inside = [link for link in links if link.domain in ("chip", "node")] or [links[0]]  # a tray of a rack has none
    inside[-1] = replace(inside[-1], domain="node")  # of a node of one chip its only link; here a rank is a chip
    cluster = replace(  # the platform, on one node of just so many ranks; fewer share a port
        plan.cluster,
        name=f"{plan.cluster.name} (shrunk)",
        num_nodes=1,
        chips_per_node=ranks,
        ranks_per_chip=1,
        nodes_per_ultraserver=1,
        links=tuple(replace(link, ranks_per_port=math.gcd(link.ranks_per_port, ranks)) for link in inside),
        placements=(),
    )
    made = build_plan(small, model, cluster, workload, plan.engine, provenance={"shrunk from": str(plan.candidate)})
    blocks, atoms = plan_blocks(made), dict(made.mesh.axes)
    tables = {name: table_for_sizes(table, atoms) for name, table in plan.strategies.items() if name in blocks}
    return with_strategies(made, tables), tuple(lost)


def _sizes(plan: Plan, max_ranks: int) -> tuple[dict[str, int], list[str]]:
    """Give two ranks to every axis in use (four to tp where key/value heads are replicated); name those that lack them.

    Axes come in the order in which they are wanted.
    """
    large, lost = plan.candidate, list[str]()
    sizes: dict[str, int] = dict.fromkeys(_KEPT_FIRST, 1)
    for axis in _KEPT_FIRST:
        before = getattr(large, axis)
        size = 1 if before == 1 else 4 if axis == "tp" and plan.mesh.size("rep") > 1 else 2
        if axis == "dp":
            size = sizes["ep"] * (2 if before > large.ep else 1)
        trial = {**sizes, axis: size}
        trial["dp"] = max(trial["dp"], trial["ep"])
        if trial["tp"] * trial["cp"] * trial["pp"] * trial["dp"] <= max_ranks:
            sizes = trial
        else:
            lost.append(f"{axis}={before}: no room for it on {max_ranks} ranks")
    return sizes, lost


def _layers(plan: Plan, stages: int, lost: list[str]) -> tuple[tuple[Recompute, ...], tuple[str, ...]]:
    """Return what so many stages compute again, and the kind of each layer: only what has a table in the plan.

    What no stage has is named in ``lost``.
    """
    drops = tuple(dict.fromkeys(stage.recompute for stage in plan.stages if stage.num_layers))
    if len(drops) > stages:
        lost.append(f"{len(drops) - stages} of {len(drops)} kinds of recompute: there are only {stages} stages")
    names, tabled = tuple(plan.model.layer_counts), {(kind, drop.on_device) for kind, drop in plan.layers}
    drops = tuple(replace(drop, num_layers=len(names)) if drop.num_layers else drop for drop in drops)
    recompute = tuple(drops[stage % len(drops)] for stage in range(stages))

    def order_of(recompute: Sequence[Recompute]) -> tuple[str, ...]:
        order, turns = list[str](), Counter[Recompute]()
        for drop in (stage.of_layer(number).on_device for stage in recompute for number in range(2 * len(names))):
            suited = [name for name in names if drop.kind == "none" or (name, drop) in tabled]
            order.append(suited[turns[drop] % len(suited)])
            turns[drop] += 1
        return tuple(order)

    if {*order_of(recompute)} < {*names}:  # a stage of plain layers has all kinds
        lost.append(f"recompute={recompute[-1]} of the last stage: no layer of another kind computes that again")
        recompute = (*recompute[:-1], Recompute())
    return recompute, order_of(recompute)


def _with_order(model: ModelSpec, order: Sequence[str]) -> ModelSpec:
    return replace(model, num_layers=len(order), order=compress(order) if model.order else "")


def _model(model: ModelSpec, sizes: Mapping[str, int], *, padded: bool) -> ModelSpec:
    """Scale the architecture: at least one head, one block of every cut dim per rank, and options as they are."""
    tp, replicas = sizes["tp"], 2 if sizes["tp"] == 4 else 1
    kv_heads = max(tp // replicas, 1)
    queries_per_head = 2 * replicas if model.queries_per_kv_head > 1 else 1
    return replace(
        model,
        name=f"{model.name} (shrunk)",
        hidden=_HIDDEN,
        ffn=8 * tp,
        num_heads=kv_heads * queries_per_head,
        num_kv_heads=kv_heads,
        head_dim=_HEAD_DIM,
        vocab=8 * tp - 1 if padded and tp > 1 else 8 * tp,
        max_positions=64 * sizes["cp"] * tp,
        num_experts=_num_experts(model, 2 * sizes["ep"]) if model.num_experts else 0,
        shared_ffn=8 * tp if model.shared_ffn else 0,
        window=5 if model.window else None,
        glu_limit=0.5 if model.glu_limit else None,  # which some numbers of a small model exceed
        kinds=tuple(_shrunk_kind(kind, 8 * tp) for kind in model.kinds),
        latent=model.latent and _narrowed(model.latent, tp),
        linear=model.linear and _few_states(model.linear, tp),
        traced=model.traced and replace(model.traced, sizes=_sizes_of_code(model, model.traced, 8 * tp)),
    )


def _sizes_of_code(model: ModelSpec, traced: TracedDecoder, usual: int) -> Mapping[str, int]:
    """Return small sizes of dims that no card has; what a reader calls the hidden size has that size."""
    parts = (traced.embed, traced.layer, traced.head, *(kind.lines for kind in model.kinds))
    pairs = {pair for lines in parts for op in parse_lines(lines) for pair in getattr(op.kind, "rename", ())}
    renamed = {dim for pair in pairs if _HIDDEN_DIM in pair for dim in pair}
    return {dim: _HIDDEN if dim in renamed else usual for dim in traced.sizes}


def _num_experts(model: ModelSpec, least: int) -> int:
    """Return how many experts a small model has: twice as many as are chosen, also of the groups of its router."""
    router, chosen = model.router or Router(), model.experts_per_token
    within = -(-chosen // router.chosen_groups) * router.groups
    unit = 2 * router.groups
    return -(-max(least, 2 * chosen, within) // unit) * unit


def _narrowed(latent: LatentAttention, tp: int) -> LatentAttention:
    narrow = 6 * tp if latent.query_rank else None
    return replace(latent, query_rank=narrow, kv_rank=4 * tp, rotary_dim=_HEAD_DIM // 2, value_dim=_HEAD_DIM - 2)


def _few_states(linear: LinearAttention, tp: int) -> LinearAttention:
    group = min(2, linear.value_heads // linear.key_heads)
    return replace(linear, key_heads=tp, value_heads=group * tp, key_dim=4, value_dim=6)


def _shrunk_kind(kind: LayerKind, ffn: int) -> LayerKind:
    return replace(
        kind,
        dense_ffn=2 * ffn if kind.dense_ffn else None,
        window=3 if kind.window else None,
        linear=kind.linear and _few_states(kind.linear, ffn // 8),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProof:
    """One block: the largest difference, how many results were compared, which collectives were executed."""

    name: str
    error: float
    num_results: int
    collectives: Mapping[str, int]  # kind -> how many
    bar: float = option(TOLERANCE)

    @property
    def holds(self) -> bool:
        """Whether the sharded block computes the same."""
        return self.error <= self.bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was executed instead of the plan, what that leaves out, and the outcome per block."""

    candidate: str
    lost: tuple[str, ...]
    blocks: tuple[BlockProof, ...]

    @property
    def holds(self) -> bool:
        """Whether every block computes the same."""
        return all(block.holds for block in self.blocks)


def prove(plan: Plan) -> Proof:
    """Execute a shrunk plan's own collectives on virtual ranks and compare loss and every gradient with the unsharded.

    Pipeline stages run one after the other, so pp does not need ranks of its own here.
    """
    small, lost = shrink(plan)
    atoms = table_setting(small).atoms
    mesh = Mesh.virtual(**{atom: size for atom, size in atoms.items() if size > 1})
    # Every expert gets slots for all tokens, if none is to be dropped.
    capacity = small.workload.expert_capacity or float(small.model.num_experts) or None
    work = replace(small.workload, expert_capacity=capacity)
    sizes = dim_sizes(small.model, work, step_graph_of(small).platform, small.micro_batch * small.mesh.size("dp"))
    programs, generator, proofs = plan_programs(small), np.random.default_rng(0), list[BlockProof]()
    for name, block in plan_blocks(small).items():
        given = random_inputs(block, sizes, generator)
        whole, uncut = dict(given), queueing_apart(block, programs[name], mesh, sizes)
        uncut.run(uncut.select("micro_batch"), sizes, whole)
        sharded = Interpreter(block=block, mesh=mesh, sizes=sizes).run(programs[name], given)
        largest = max(float(np.abs(whole[result]).max()) for result in sharded)
        error = max(float(np.abs(values - whole[result]).max()) for result, values in sharded.items()) / largest
        kinds = Counter(change.collective.kind for change in programs[name].collectives())
        counts = dict(sorted(kinds.items()))
        proofs.append(BlockProof(name=name, error=error, num_results=len(sharded), collectives=counts))
    return Proof(candidate=str(small.candidate), lost=lost, blocks=tuple(proofs))


def random_inputs(block: Block, sizes: Mapping[str, int], generator: "np.random.Generator") -> dict[str, Array]:
    """Return random values for everything that a block is given; positions count up, sums start at zero.

    Documents are cut anywhere.
    """
    made = {output for op in block.ops for output in op.outputs}
    given: dict[str, Array] = {}
    for tensor in block.tensors.values():
        shape = [sizes[dim] for dim in tensor.dims]
        if tensor.name in made:
            continue
        if tensor.role == "state":
            given[tensor.name] = np.zeros(shape)
        elif tensor.name == "document_starts":
            given[tensor.name] = random_document_starts(generator, (sizes["batch"], sizes["seq"]))
        elif tensor.dtype == "int64" and len(shape) == 1:
            given[tensor.name] = np.arange(shape[0])
        elif tensor.dtype == "int64":
            given[tensor.name] = generator.integers(0, sizes["vocab"], shape)
        else:
            given[tensor.name] = np.asarray(generator.normal(size=shape))
    return given
