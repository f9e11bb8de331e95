"""A legal cut of every operation that people would think of, without a search."""

from collections.abc import Mapping

from autoshard.graph.block import Block
from autoshard.layout.layout import Cuts
from autoshard.layout.legal import cut_operations, op_dims

MEANING: Mapping[str, tuple[str, ...]] = {
    "batch": ("edp", "ep"), "seq": ("cp",), "kv_heads": ("kv",), "q_group": ("rep",), "ffn": ("kv", "rep"),
    "vocab": ("kv", "rep"), "slots": ("edp", "cp"), "experts": ("ep",),
}  # fmt: skip


def cuts_by_meaning(block: Block, atoms: Mapping[str, int], *, sequence_parallel: bool) -> Mapping[str, Cuts]:
    """Cut every dim over the atoms that bear its meaning; the sequence takes tp where nothing else does."""
    found: dict[str, Cuts] = {}
    for op in cut_operations(block):
        tied = dict(op.kind.tied_dims())
        free = [dim for dim in op_dims(block, op) if dim not in tied and dim not in op.kind.whole_dims()]
        cuts: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for dim, meant in MEANING.items():
            if dim in free:
                cuts[dim] = tuple(atom for atom in meant if atom in atoms and atom not in used)
                used.update(cuts[dim])
        tokens = any(kind in type(op.kind).__name__ for kind in ("Slot", "Dispatch", "Combine"))
        if sequence_parallel and "seq" in cuts and not used & {"kv", "rep"} and not tokens:
            cuts["seq"] += tuple(atom for atom in ("kv", "rep") if atom in atoms)
        found[op.name] = {
            **cuts, **{dim: tuple(atom for other in others for atom in cuts[other]) for dim, others in tied.items()}
        }  # fmt: skip
    return found
