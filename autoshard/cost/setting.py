"""Everything that prices a layout but the pipeline: sizes, atoms, rates, rings; numbers or columns of candidates."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.cost.block import BlockCost, Blocks, BlockWork, Setting, block_cost, block_work
from autoshard.cost.calibration import Calibration
from autoshard.cost.collective import Number, Ring, mesh_ring
from autoshard.cost.compute import Rates
from autoshard.cost.sharded import atom_groups
from autoshard.cost.terms import CostTerm
from autoshard.layout.layout import local_sizes
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.lowering import ATOMS, StepGraph
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster import Cluster
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: which model on which cluster for which work, with which kernels, constants and further terms."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    kernels: str
    calibration: Calibration
    terms: tuple[CostTerm, ...] = ()  # a plan states its own in its provenance

    @property
    def step(self) -> StepGraph:
        """What the graph is made of."""
        return StepGraph(model=self.model, workload=self.workload, kernels=self.kernels)

    @property
    def rates(self) -> Rates:
        """What a rank reaches in the workload's number format."""
        kernels = load_kernels(self.kernels)
        return Rates.of(self.cluster, self.workload.precision, self.calibration, host_computes=kernels.host_computes)


def setting_of(question: Question, candidate: Candidate, blocks: Blocks) -> Setting:
    """Return the numbers of a single candidate whose blocks are these."""
    mesh = mesh_of(candidate, question.model, question.cluster)
    return Setting(
        blocks=blocks,
        sizes=question.step.sizes(candidate.mbs * candidate.dp),
        atoms={atom: mesh.size(atom) for atom in ATOMS},
        rings=rings_of(question, mesh, blocks),
        zero=candidate.zero,
        cp_order=candidate.cp_order,
    )


def rings_of(question: Question, mesh: Mesh, blocks: Blocks) -> Mapping[tuple[str, ...], Ring]:
    """Return the ring of every group of ranks that some message or some weight's gradient needs."""
    groups = atom_groups(blocks.every())
    return {atoms: mesh_ring(question.cluster, mesh, atoms, question.calibration) for atoms in groups}


def work_of(question: Question, setting: Setting, kind: str, drop: Recompute) -> BlockWork:
    """Count what one block of a layout does."""
    whole = setting.blocks.block(kind, Recompute())
    return block_work(setting.blocks.block(kind, drop), whole, setting, question.cluster.chip.matrix_tile)


def price_block(question: Question, setting: Setting, kind: str, drop: Recompute) -> BlockCost:
    """Price one block of a layout."""
    return block_cost(work_of(question, setting, kind, drop), setting.rings, question.rates)


def boundary_bytes(setting: Setting) -> Number:
    """Return the bytes of the hidden state that a rank hands to the next stage for one micro-batch."""
    layer = setting.blocks.block("layer", Recompute())
    assert layer.block.carry_in, "a layer takes the hidden state from the block before"
    local = local_sizes(setting.sizes, layer.sharding.boundary, setting.atoms)
    return layer.block.tensors[layer.block.carry_in].num_bytes(local)
