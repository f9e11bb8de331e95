"""One rank's share of an operation: evaluated on its blocks, with indices counted from the start of a block."""

from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.graph.block import Block
from autoshard.graph.kinds.indexing import Lookup, Pick, Place, ScatterAdd, places
from autoshard.graph.op import Array, Call, OpKind
from autoshard.layout.program import Compute


def evaluate_local(
    block: Block,
    compute: Compute,
    sizes: Mapping[str, int],
    held: Mapping[str, tuple[int, int]],
    arrays: Sequence[Array],
) -> tuple[Array, ...]:
    """Evaluate an operation on one rank's blocks; ``held`` gives start and stop of every dim that is cut."""
    local_sizes = {**sizes, **{dim: stop - start for dim, (start, stop) in held.items()}}
    call = block.call(compute.op, local_sizes)
    dim = _indexed_dim(compute.op.kind, call)
    if dim is None or dim not in held:
        return compute.op.kind.evaluate(call, *arrays)
    return (_evaluate_inside(compute.op.kind, call, arrays, *held[dim]),)


def _indexed_dim(kind: OpKind, call: Call) -> str | None:
    """Return the dim that an operation's indices count along."""
    match kind:
        case Pick(over=over) | Place(over=over):
            return over
        case ScatterAdd(dims=dims):
            return dims[0]
        case Lookup():
            return call.inputs[0].dims[0]
        case _:
            return None


def _evaluate_inside(kind: OpKind, call: Call, arrays: Sequence[Array], start: int, stop: int) -> Array:
    """Evaluate an indexing operation on a block of what is indexed: what lies outside counts as zero."""
    values, *where = arrays
    index = places(*where)
    inside = (index >= start) & (index < stop)
    local = np.where(inside, index - start, 0)
    if start == stop:
        return np.zeros([call.sizes[dim] for dim in call.outputs[0].dims])
    match kind:
        case Lookup() | Pick():
            (found,) = kind.evaluate(call, values, local)
            return found * inside.reshape(*inside.shape, *[1] * (found.ndim - inside.ndim))
        case _:
            kept = inside.reshape(*inside.shape, *[1] * (values.ndim - inside.ndim))
            return kind.evaluate(call, values * kept, local)[0]


def joined_attention(first: tuple[Array, Array] | None, second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Join two parts of an attention, each normalised on its own; a part that saw no key weighs nothing."""
    if first is None:
        return second
    (mixed, lse), (part, weight) = first, second
    top = np.maximum(lse, weight)
    reference = np.where(np.isfinite(top), top, 0)
    shares = np.exp(lse - reference), np.exp(weight - reference)
    total = shares[0] + shares[1]
    seen = np.where(total > 0, total, 1)
    joined = (mixed * shares[0][..., None] + part * shares[1][..., None]) / seen[..., None]
    return joined, np.where(total > 0, np.log(seen) + reference, -np.inf)
