"""Which tokens queue together for the slots of experts: those that a rank has where they are counted.

An expert's slots are cut as the tokens are, so every group has its share of them, and who finds it full is dropped. A
program thereby says which tokens are dropped; what it must equal is the block whose queues count in the same groups.
"""

from collections.abc import Mapping
from dataclasses import replace

from autoshard.graph.block import Block
from autoshard.graph.kinds.experts import Slot, TokenGroup
from autoshard.layout.layout import Cuts
from autoshard.layout.program import Compute, Program
from autoshard.layout.shards import VirtualMesh


def queueing_apart(block: Block, program: Program, mesh: VirtualMesh, sizes: Mapping[str, int]) -> Block:
    """Return what a program of a block must equal on a mesh: the block, with tokens in the program's groups."""
    computes = (entry for entry in program.instructions if isinstance(entry, Compute))
    groups = {entry.op.name: _groups(entry.cuts, mesh, sizes) for entry in computes if isinstance(entry.op.kind, Slot)}
    ops = (replace(op, kind=Slot(groups=groups[op.name])) if op.name in groups else op for op in block.ops)
    return replace(block, ops=tuple(ops))


def _groups(cuts: Cuts, mesh: VirtualMesh, sizes: Mapping[str, int]) -> tuple[TokenGroup, ...]:
    batch, seq, slots = (mesh.all_bounds(sizes[dim], tuple(cuts.get(dim, ()))) for dim in ("batch", "seq", "slots"))
    found = (TokenGroup(batch=one, seq=two, slots=own) for one, two, own in zip(batch, seq, slots, strict=True))
    return tuple(dict.fromkeys(found))
