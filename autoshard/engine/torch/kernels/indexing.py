"""Reading and writing rows by index, also where a rank holds only a part of what is indexed: the rest is zero."""

import torch

from autoshard.engine.torch.kernels.kernel import Kernel, Local, kernel, shape_of
from autoshard.graph.kinds.indexing import Lookup, Pick, Place, ScatterAdd, places
from autoshard.graph.op import Call


def _inside(index: torch.Tensor, bounds: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which indices lie in the rank's part, and where; those outside point to the first."""
    start, stop = bounds
    held = (index >= start) & (index < stop)
    return held, torch.where(held, index - start, 0)


def _along(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.reshape(*mask.shape, *[1] * (like.ndim - mask.ndim))


@kernel.register
def _lookup(kind: Lookup, call: Call, local: Local) -> Kernel:
    bounds, shape = local.bounds.get(call.inputs[0].dims[0]), shape_of(call, call.outputs[0].dims)

    def run(table: torch.Tensor, *where: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index = places(*where).to(table.device)  # positions lie with the host
        if bounds is None:
            return (table[index],)
        if not len(table):
            return (table.new_zeros(shape),)
        held, place = _inside(index, bounds)
        found = table[place]
        return (found * _along(held, found),)

    return run


@kernel.register
def _scatter_add(kind: ScatterAdd, call: Call, local: Local) -> Kernel:
    bounds, shape = local.bounds.get(kind.dims[0]), shape_of(call, kind.dims)

    def run(rows: torch.Tensor, *where: torch.Tensor) -> tuple[torch.Tensor, ...]:
        table, index = rows.new_zeros(shape), places(*where).to(rows.device)
        if bounds is not None:
            held, index = _inside(index, bounds)
            rows = rows * _along(held, rows)
        if len(table):
            table.index_add_(0, index.reshape(-1), rows.reshape(-1, *shape[1:]))
        return (table,)

    return run


@kernel.register
def _pick(kind: Pick, call: Call, local: Local) -> Kernel:
    axis, bounds = call.inputs[0].dims.index(kind.over), local.bounds.get(kind.over)

    def run(values: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if bounds is None:
            return (values.gather(axis, index.unsqueeze(axis)).squeeze(axis),)
        if not values.shape[axis]:
            return (values.new_zeros(index.shape),)
        held, place = _inside(index, bounds)
        return (values.gather(axis, place.unsqueeze(axis)).squeeze(axis) * held,)

    return run


@kernel.register
def _place(kind: Place, call: Call, local: Local) -> Kernel:
    axis, bounds, shape = kind.dims.index(kind.over), local.bounds.get(kind.over), shape_of(call, kind.dims)

    def run(values: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = values.new_zeros(shape)
        if bounds is not None:
            held, index = _inside(index, bounds)
            values = values * held
        if shape[axis]:
            result.scatter_(axis, index.unsqueeze(axis), values.unsqueeze(axis))
        return (result,)

    return run
