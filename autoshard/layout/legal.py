"""Which cuts of a block's forward operations are legal; backward is cut as the forward operation it belongs to.

The rules follow from what a kind says of its dims: any dim may be cut but those it needs whole, no atom cuts twice,
tied dims are cut as others are together, and who reads numbers of slots is cut along tokens as their queue is.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from autoshard.errors import Fault, nearest
from autoshard.graph.block import Block
from autoshard.graph.kinds.experts import Slot
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Dims, Op
from autoshard.layout.layout import Cuts, show_atoms


def faults(block: Block, cuts: Mapping[str, Cuts], atoms: Collection[str]) -> tuple[Fault, ...]:
    """Return all faults in the cuts of a block's forward operations on a mesh with these atoms."""
    ops, numbering = {op.name: op for op in cut_operations(block)}, queues(block)
    all_faults = [
        Fault(where=name, message=f"{block.kind} has no operation of this name to cut. {nearest(name, list(ops))}")
        for name in cuts
        if name not in ops
    ]
    for name, op in ops.items():
        if name not in cuts:
            all_faults.append(Fault(where=name, message="nothing says how it is cut; write {} to leave it whole"))
            continue
        messages = [*_misused(block, op, cuts[name], atoms), *_bound(op, cuts[name])]
        queue = numbering.get(name)
        if queue and queue.name in cuts:
            counted = f"its numbers of slots count within each part of the tokens of {queue.name}"
            right = {dim: cuts[queue.name].get(dim, ()) for dim in queue_tokens(queue)}
            messages += [
                f"{counted}; write {_written(dim, cut)} as there"
                for dim, cut in right.items()
                if cuts[name].get(dim, ()) != cut
            ]
        all_faults += [Fault(where=name, message=message) for message in messages]
    return tuple(all_faults)


def cut_operations(block: Block) -> tuple[Op, ...]:
    """Return the forward operations that have cuts of their own: all but delivers."""
    return tuple(op for op in block.select("micro_batch", "F") if not isinstance(op.kind, Deliver))


def op_dims(block: Block, op: Op) -> Dims:
    """Return the dims of an operation: those of its tensors, and those that it ties to them."""
    dims = [dim for name in (*op.inputs, *op.outputs) for dim in block.tensors[name].dims]
    return tuple(dict.fromkeys((*dims, *(dim for dim, _ in op.kind.tied_dims()))))


def together(cuts: Cuts, dims: Dims) -> tuple[str, ...]:
    """Return the atoms that cut a dim which is tied to these."""
    return tuple(atom for dim in dims for atom in cuts.get(dim, ()))


def _misused(block: Block, op: Op, cuts: Cuts, atoms: Collection[str]) -> Iterator[str]:
    """Yield dims and atoms that are not there, and atoms that cut more than one dim."""
    dims, tied = op_dims(block, op), dict(op.kind.tied_dims())
    where: dict[str, list[str]] = defaultdict(list)
    for dim, cut in cuts.items():
        if dim not in dims:
            yield f"has no dim {dim!r}. {nearest(dim, dims)}"
        for atom in cut:
            if atom not in atoms:
                yield f"{dim} is cut over {atom!r}, which the mesh does not have. {nearest(atom, list(atoms))}"
            if dim not in tied:
                where[atom].append(dim)
    for atom, several in where.items():
        if len(several) > 1:
            yield f"{atom} cuts {' and '.join(several)}; an atom cuts once in an operation. Take it from one of them"


def _bound(op: Op, cuts: Cuts) -> Iterator[str]:
    """Yield dims that must be whole but are cut, and tied dims that are cut otherwise than those they are tied to."""
    for dim in op.kind.whole_dims():
        if cuts.get(dim):
            yield f"{op.kind.label} needs all of {dim} on every rank; take {show_atoms(cuts[dim])} from it"
    for dim, source_dims in op.kind.tied_dims():
        right_cut = together(cuts, source_dims)
        if cuts.get(dim, ()) != right_cut:
            yield f"{dim} is cut as {' and '.join(source_dims)} together; write {_written(dim, right_cut)}"


def _written(dim: str, cut: tuple[str, ...]) -> str:
    return f"{dim}/{show_atoms(cut)}" if cut else f"{dim} whole"


def queue_tokens(queue: Op) -> Dims:
    """Return the dims of the tokens that a queue numbers."""
    return tuple(dim for _, source_dims in queue.kind.tied_dims() for dim in source_dims)


def queues(block: Block) -> Mapping[str, Op]:
    """Return the queue that counted the slot numbers, for each forward operation that reads such numbers."""
    counted: dict[str, Op] = {}
    readers: dict[str, Op] = {}
    for op in block.select("micro_batch", "F"):
        origins = [counted[name] for name in op.inputs if name in counted]
        if isinstance(op.kind, Slot):
            counted[op.outputs[0]] = op
        elif origins and isinstance(op.kind, Deliver):
            counted[op.outputs[0]] = origins[0]
        elif origins:
            readers[op.name] = origins[0]
    return readers
