"""Blocks with their sharding, made once per model, Kernels and kind of recompute, whatever the sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from autoshard.cost.block import ShardedBlock
from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.recompute import recompute
from autoshard.layout.natural import natural_sharding
from autoshard.plan.recompute import Recompute
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload


@cache
def step_graph(model: ModelSpec, workload: Workload, kernels: str) -> OpGraph:
    """Return the graph of one step for a micro-batch of one sequence; sizes are set where it is priced."""
    return decoder_graph(model, workload, load_kernels(kernels), micro_batch=1)


@cache
def sharded_block(
    graph_key: tuple[ModelSpec, Workload, str], kind: str, sequence_parallel: bool, drop: Recompute
) -> ShardedBlock:
    """Return a block of the step graph, recomputed and sharded."""
    model, workload, kernels_name = graph_key
    kernels = load_kernels(kernels_name)
    graph = step_graph(model, workload, kernels_name)
    block, whole = graph.block(kind), None
    if drop.kind != "none":
        block = recompute(block, kernels, None if drop.kind == "full" else drop.ops)
        whole = sharded_block(graph_key, kind, sequence_parallel, Recompute())
    sharding = natural_sharding(block, sequence_parallel=sequence_parallel, keeps_gathered=kernels.keeps_gathered)
    tied = [name.removeprefix(f"{kind}.") for name in graph.tied if name.startswith(f"{kind}.")]
    return ShardedBlock.of(block, sharding, whole=whole, tied=tied)


def atom_groups(blocks: Mapping[str, ShardedBlock]) -> frozenset[tuple[str, ...]]:
    """Return every group of atoms that some message or some weight's gradient needs a ring for."""
    groups = {message.collective.atoms for block in blocks.values() for message in block.sharding.messages}
    for block in blocks.values():
        for pending in block.sharding.parameter_pending.values():
            groups.update(part for part in split_pending(pending) if part)
    return frozenset(groups)


def split_pending(pending: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the atoms of a weight gradient's pending sum into those that share the optimizer's work and the others.

    >>> split_pending(("edp", "ep", "cp", "kv", "rep"))
    (('edp', 'ep', 'cp'), ('kv', 'rep'))
    """
    shards = tuple(atom for atom in ("edp", "ep", "cp") if atom in pending)
    return shards, tuple(atom for atom in pending if atom not in shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerWeight:
    """What norm, clip, AdamW and cast do for one weight, read off the graph's step phase."""

    vector_flops: float
    traffic_bytes: float


@cache
def per_weight(model: ModelSpec, workload: Workload, kernels: str) -> PerWeight:
    """Average the step phase over the weights of a layer."""
    graph = step_graph(model, workload, kernels)
    layer = graph.block("layer")
    calls = [(op.kind, layer.call(op, graph.sizes)) for op in layer.select("step")]
    weights = sum(tensor.num_elements(graph.sizes) for tensor in layer.parameters)
    return PerWeight(
        vector_flops=sum(kind.vector_flops(call) for kind, call in calls) / weights,
        traffic_bytes=sum(kind.traffic_bytes(call) for kind, call in calls) / weights,
    )
