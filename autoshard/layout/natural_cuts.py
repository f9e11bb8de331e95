"""The natural sharding in the form that ``lower`` takes: a legal cut of every forward operation, and the boundary."""

from collections.abc import Mapping

from autoshard.graph.block import Block
from autoshard.graph.op import Op
from autoshard.layout.layout import Cuts
from autoshard.layout.legal import cut_operations, op_dims
from autoshard.layout.natural import TP, natural_sharding


def natural_cuts(block: Block, sequence_parallel: bool) -> Mapping[str, Cuts]:
    """Return the natural cut of every forward operation of a block; tied dims follow the dims that they are tied to."""
    found = natural_sharding(block, sequence_parallel=sequence_parallel, keeps_gathered=True).op_cuts
    return {op.name: _tied(block, op, found[op.name]) for op in cut_operations(block)}


def natural_boundary(sequence_parallel: bool) -> Cuts:
    """Return how the hidden state is cut between blocks.

    >>> natural_boundary(True)["seq"]
    ('cp', 'kv', 'rep')
    """
    return {"batch": ("edp", "ep"), "seq": ("cp", *(TP if sequence_parallel else ()))}


def _tied(block: Block, op: Op, cuts: Cuts) -> Cuts:
    """Cut tied dims as others are together; those leave tp to the operation's own dims, and keep their atoms."""
    ties = dict(op.kind.tied_dims())
    leading = {dim for others in ties.values() for dim in others}
    own = {dim: _without(cuts.get(dim, ()), TP) for dim in leading}
    taken = tuple(atom for atoms in own.values() for atom in atoms)
    free = [dim for dim in op_dims(block, op) if dim not in ties and dim not in leading]
    rest = {dim: () if dim in op.kind.whole_dims() else _without(cuts.get(dim, ()), taken) for dim in free}
    together = {dim: tuple(atom for other in others for atom in own[other]) for dim, others in ties.items()}
    return {dim: atoms for dim, atoms in {**own, **rest, **together}.items() if atoms}


def _without(atoms: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(atom for atom in atoms if atom not in others)
