"""Legal cuts of operations: those that people would think of, and every one there is; and meshes at random."""

from collections.abc import Iterator, Mapping, Sequence
from random import Random

from autoshard.graph.block import Block
from autoshard.graph.op import Op
from autoshard.layout.layout import Cuts
from autoshard.layout.legal import cut_operations, op_dims, queue_tokens, queues, together
from autoshard.spec.mesh import Mesh

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


def legal_cuts(block: Block, op: Op, atoms: Sequence[str], settled: Mapping[str, Cuts] | None = None) -> Iterator[Cuts]:
    """Yield every legal cut of a forward operation; one ``settled`` for a queue binds those who read its numbers."""
    queue, known = queues(block).get(op.name), settled or {}
    fixed = (
        {dim: known[queue.name].get(dim, ()) for dim in queue_tokens(queue)} if queue and queue.name in known else {}
    )
    bound = {*op.kind.whole_dims(), *dict(op.kind.tied_dims()), *fixed}
    dims = op_dims(block, op)
    free = [dim for dim in dims if dim not in bound]
    taken = {atom for cut in fixed.values() for atom in cut}
    for placed in _placements(len(free), tuple(atom for atom in atoms if atom not in taken)):
        cuts = {**dict.fromkeys(dims, ()), **fixed, **dict(zip(free, placed, strict=True))}
        yield {**cuts, **{dim: together(cuts, others) for dim, others in op.kind.tied_dims()}}


def _placements(places: int, atoms: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield every way to put atoms, in any order, into places or nowhere.

    >>> list(_placements(1, ("a", "b")))
    [((),), (('b',),), (('a',),), (('b', 'a'),), (('a', 'b'),)]
    """
    if not atoms:
        yield ((),) * places
        return
    *others, last = atoms
    for held in _placements(places, tuple(others)):
        yield held
        for place, cut in enumerate(held):
            for at in range(len(cut) + 1):
                yield (*held[:place], (*cut[:at], last, *cut[at:]), *held[place + 1 :])


def random_mesh(rng: Random) -> Mesh:
    """Up to three atoms, some of size one, over 2 to 16 ranks."""
    while True:
        mesh = Mesh.virtual(**{name: rng.choice([1, 2, 2, 3, 4]) for name in ("edp", "cp", "kv")[: rng.randint(1, 3)]})
        if 1 < mesh.num_ranks <= 16:
            return mesh
