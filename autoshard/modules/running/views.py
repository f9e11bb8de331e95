"""Fewer views among recorded operations: one for equal ones, one for a view of a view."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import torch

from autoshard.engine.torch.recording import Operation, with_stand_ins

Look = tuple[torch.Size, tuple[int, ...], object, torch.dtype]
_aten = torch.ops.aten
_VIEWS = (
    _aten.view.default, _aten._unsafe_view.default, _aten.permute.default, _aten.t.default, _aten.transpose.int,
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.expand.default, _aten.slice.Tensor,
)  # fmt: skip
_MOST_DIMS = 5  # of which all orders are tried


def with_fewer_views(operations: Sequence[Operation], stand_ins: dict[int, torch.Tensor]) -> Iterator[Operation]:
    """Yield the operations of a function, where all that read one view of a tensor share it.

    A view that looks like its tensor is left out. ``stand_ins`` has the tensors that stand for those of operations that
    are left out, by id; more are added.
    """
    sources: dict[int, torch.Tensor] = {}  # of views
    views: dict[tuple[int, Look], torch.Tensor] = {}
    for operation in operations:
        operation = with_stand_ins(operation, stand_ins)
        if operation.is_same:
            stand_ins[id(operation.results[0])] = operation.args[0]
            continue
        if operation.func in _VIEWS:
            base: torch.Tensor = operation.args[0]
            (view,) = operation.results
            source, look = sources.get(id(base), base), _look(view)
            stand_in = source if look == _look(source) else views.get((id(source), look))
            if stand_in is not None:
                stand_ins[id(view)] = stand_in
                continue
            views[id(source), look], sources[id(view)] = view, source
            if source is not base:
                operation = _of_source(operation, source, look)
        yield operation


def _look(tensor: torch.Tensor) -> Look:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _of_source(operation: Operation, source: torch.Tensor, look: Look) -> Operation:
    """Make a view of a view one of the source itself, if one operation does."""
    orders = permutations(range(source.dim())) if source.dim() == len(look[0]) <= _MOST_DIMS else ()
    order = next((order for order in orders if _look(source.permute(order)) == look), None)
    if order is not None:
        return replace(operation, func=_aten.permute.default, args=(source, [*order]))
    try:
        viewed = source.view(look[0])
    except (RuntimeError, ValueError):  # no view has this shape: both operations stay
        return operation
    if _look(viewed) != look:
        return operation
    return replace(operation, func=_aten.view.default, args=(source, [*look[0]]))
