"""The numeric proof of a plan: shrunk, executed on virtual ranks as its own table lists, compared with the whole."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoshard.graph.block import Block
from autoshard.graph.decoder import dim_sizes
from autoshard.graph.kinds.indexing import random_document_starts
from autoshard.graph.op import Array
from autoshard.layout.interpret import Interpreter, queueing_apart
from autoshard.layout.program import Program
from autoshard.layout.shards import VirtualMesh
from autoshard.plan.plan import Plan
from autoshard.plan.shrink import shrink
from autoshard.plan.tables import plan_blocks, plan_programs, step_of, table_setting

TOLERANCE = 1e-9  # relative to the largest result of a block; everything is computed in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProof:
    """One block: the largest difference, how many results were compared, which collectives were executed."""

    name: str
    error: float
    num_results: int
    collectives: Mapping[str, int]  # kind -> how many

    @property
    def holds(self) -> bool:
        """Whether the sharded block computes the same."""
        return self.error <= TOLERANCE


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


def prove(plan: Plan, seed: int = 0) -> Proof:
    """Execute a shrunk plan's own collectives on virtual ranks and compare loss and every gradient with the unsharded.

    Pipeline stages run one after the other, so pp does not need ranks of its own here.
    """
    shrunk = shrink(plan)
    small = shrunk.plan
    atoms = table_setting(small).atoms
    mesh = VirtualMesh(atoms=tuple((atom, size) for atom, size in atoms.items() if size > 1))
    # Every expert gets slots for all tokens, if none is to be dropped.
    capacity = small.workload.expert_capacity or float(small.model.num_experts) or None
    work = replace(small.workload, expert_capacity=capacity)
    sizes = dim_sizes(small.model, work, step_of(small).platform, small.micro_batch * small.mesh.size("dp"))
    programs, blocks = plan_programs(small), plan_blocks(small)
    generator = np.random.default_rng(seed)
    proofs = tuple(_prove_block(name, blocks[name], programs[name], mesh, sizes, generator) for name in blocks)
    return Proof(candidate=str(small.candidate), lost=shrunk.lost, blocks=proofs)


def _prove_block(
    name: str, block: Block, program: Program, mesh: VirtualMesh, sizes: Mapping[str, int],
    generator: np.random.Generator,
) -> BlockProof:  # fmt: skip
    given = random_inputs(block, sizes, generator)
    whole, uncut = dict(given), queueing_apart(block, program, mesh, sizes)
    uncut.run(uncut.select("micro_batch"), sizes, whole)
    sharded = Interpreter(block=block, mesh=mesh, sizes=sizes).run(program, given)
    largest = max(float(np.abs(whole[result]).max()) for result in sharded)
    error = max(float(np.abs(values - whole[result]).max()) for result, values in sharded.items())
    kinds = Counter(change.collective.kind for change in program.collectives())
    return BlockProof(
        name=name, error=error / largest, num_results=len(sharded), collectives=dict(sorted(kinds.items()))
    )


def random_inputs(block: Block, sizes: Mapping[str, int], generator: np.random.Generator) -> dict[str, Array]:
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
