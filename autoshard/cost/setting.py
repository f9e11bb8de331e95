"""Everything that prices a layout but the pipeline: sizes, atoms, rates, rings; numbers or columns of candidates."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.cost.block import BlockCost, Rates, Setting, ShardedBlock, block_cost
from autoshard.cost.calibration import Calibration
from autoshard.cost.rings import Number, mesh_ring
from autoshard.cost.sharded import atom_groups, sharded_block
from autoshard.graph.decoder import dim_sizes
from autoshard.layout.layout import local_sizes
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

ATOMS = ("edp", "ep", "cp", "kv", "rep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: which model on which cluster for which work, with which kernels and constants."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    kernels: str
    calibration: Calibration

    def block(self, kind: str, sequence_parallel: bool, drop: Recompute) -> ShardedBlock:
        """Return a block of the step, recomputed and sharded."""
        key = (self.model, self.workload, self.kernels)
        return sharded_block(key, kind, sequence_parallel, drop if kind == "layer" else Recompute())

    @property
    def rates(self) -> Rates:
        """What a rank reaches in the workload's number format."""
        return Rates.of(self.cluster, self.workload.precision.activations, self.calibration)


def setting_of(question: Question, candidate: Candidate) -> Setting:
    """Return the numbers of a single candidate."""
    mesh = mesh_of(candidate, question.model, question.cluster)
    blocks = all_blocks(question, candidate.sequence_parallel)
    efficiency = question.calibration.link_efficiency
    return Setting(
        sequence_parallel=candidate.sequence_parallel,
        sizes=dim_sizes(question.model, question.workload, candidate.mbs * candidate.dp),
        atoms={atom: mesh.size(atom) for atom in ATOMS},
        rings={atoms: mesh_ring(question.cluster, mesh, atoms, efficiency) for atoms in atom_groups(blocks)},
        zero=candidate.zero,
        cp_order=candidate.cp_order,
    )


def all_blocks(
    question: Question, sequence_parallel: bool, drop: Recompute | None = None
) -> Mapping[str, ShardedBlock]:
    """Return embedding, layer and head."""
    kinds = ("embed", "layer", "head")
    return {kind: question.block(kind, sequence_parallel, drop or Recompute()) for kind in kinds}


def price_block(question: Question, setting: Setting, kind: str, drop: Recompute) -> BlockCost:
    """Price one block of a layout."""
    sharded = question.block(kind, setting.sequence_parallel, drop)
    whole = question.block(kind, setting.sequence_parallel, Recompute())
    return block_cost(sharded, whole, setting, question.rates)


def boundary_bytes(question: Question, setting: Setting) -> Number:
    """Return the bytes of the hidden state that a rank hands to the next stage for one micro-batch."""
    layer = question.block("layer", setting.sequence_parallel, Recompute())
    assert layer.block.carry_in, "a layer takes the hidden state from the block before"
    cuts = layer.sharding.tensor_cuts[layer.block.carry_in]
    return layer.block.tensors[layer.block.carry_in].num_bytes(local_sizes(setting.sizes, cuts, setting.atoms))
