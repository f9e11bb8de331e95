"""Fewer views in a graph of torch's operations: one for equal ones, one for a view of a view."""

from itertools import permutations
from typing import Any

import torch
from torch.fx import Graph, Node

PLACE, VALUE = "place", "val"  # what nodes say of themselves: where they run, and (from torch) how their result looks
_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_VIEWS = (
    _aten.view.default, _aten._unsafe_view.default, _aten.permute.default, _aten.t.default, _aten.transpose.int,
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.expand.default, _aten.slice.Tensor,
)  # fmt: skip
_MOST_DIMS = 5  # of which all orders are tried


def shorten_views(graph: Graph) -> None:
    """Let all that read one view of a tensor, in one function, share it; leave out views that look like the tensor.

    What an operation changes in place goes by the name of the tensor that it changes.
    """
    sources: dict[Node, Node] = {}
    views: dict[object, Node] = {}
    for node in graph.nodes:
        if node.target in _SAME or _returns_what_it_changes(node):
            node.replace_all_uses_with(node.args[0])
        elif node.target in _VIEWS:
            base = node.args[0]
            assert isinstance(base, Node), "a view is of a tensor"
            source = sources.get(base, base)
            source = source if source.meta.get(PLACE) == node.meta[PLACE] else base
            look = _look(node)
            if look == _look(source):
                node.replace_all_uses_with(source)
            elif (source, look) in views and views[source, look].meta[PLACE] == node.meta[PLACE]:
                node.replace_all_uses_with(views[source, look])
            else:
                views[source, look], sources[node] = node, source
                if source is not base:
                    _read_directly(node, source)


def changes_in_place(node: Node) -> bool:
    """Say whether an operation changes one of its inputs."""
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def is_view(node: Node) -> bool:
    """Say whether an operation computes nothing."""
    schema: Any = getattr(node.target, "_schema", None)
    return schema is None or (bool(schema.returns[0].alias_info) and not schema.is_mutable)


def _returns_what_it_changes(node: Node) -> bool:
    returns: Any = node.target._schema.returns if changes_in_place(node) else ()  # pyright: ignore
    return len(returns) == 1 and bool(returns[0].alias_info) and returns[0].alias_info.is_write


def _look(node: Node) -> tuple[torch.Size, tuple[int, ...], object, torch.dtype]:
    tensor: torch.Tensor = node.meta[VALUE]
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _read_directly(node: Node, source: Node) -> None:
    """Make a view of a view one of the source itself, if one operation does."""
    tensor: torch.Tensor = source.meta[VALUE]
    look = _look(node)
    orders = permutations(range(tensor.dim())) if tensor.dim() == len(look[0]) <= _MOST_DIMS else ()
    order = next((order for order in orders if _has(tensor.permute(order), look)), None)
    if order is not None:
        node.target, node.args = _aten.permute.default, (source, [*order])
        return
    try:
        viewed = tensor.view(look[0])
    except (RuntimeError, ValueError):  # no view has this shape: both operations stay
        return
    if _has(viewed, look):
        node.target, node.args = _aten.view.default, (source, [*look[0]])


def _has(tensor: torch.Tensor, look: tuple[torch.Size, tuple[int, ...], object, torch.dtype]) -> bool:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) == look
