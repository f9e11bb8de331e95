"""Diagonals that are filled in place, written as masks: torch writes them by places in memory."""

from typing import Any

import torch
import torch.fx

from autoshard.modules.nodes import Node, argument

_aten: Any = torch.ops.aten


def mask_diagonals(graph: torch.fx.Graph) -> None:
    """Write a fill by a mask in the place of each fill of a diagonal."""
    for node in graph.find_nodes(op="call_function", target=_aten.fill_diagonal_.default):
        filled, number, wraps = (argument(node, name) for name in ("self", "fill_value", "wrap"))
        with graph.inserting_before(node):
            mask = _diagonal(graph, filled, wraps)
            masked = graph.call_function(_aten.masked_fill_.Scalar, (filled, mask, number))
        masked.meta = {**node.meta}
        node.replace_all_uses_with(masked)
        graph.erase_node(node)


def _diagonal(graph: torch.fx.Graph, filled: Node, wraps: bool) -> Node:
    """Return where all dims have the same index. In a tall matrix that wraps, a diagonal begins again after one row."""
    value = filled.meta["val"]

    def call(target: Any, *args: Any, **options: Any) -> Node:
        node = graph.call_function(target, args, options)
        node.meta = {key: entry for key, entry in filled.meta.items() if key != "val"}
        return node

    def along(axis: int) -> Node:
        numbers = call(_aten.arange.default, value.shape[axis], device=value.device)
        return call(_aten.view.default, numbers, [-1 if place == axis else 1 for place in range(value.dim())])

    rows = along(0)
    if wraps and value.dim() == 2:
        rows = call(_aten.remainder.Scalar, rows, value.shape[1] + 1)
    mask = call(_aten.eq.Tensor, rows, along(1))
    for axis in range(2, value.dim()):
        mask = call(_aten.logical_and.default, mask, call(_aten.eq.Tensor, rows, along(axis)))
    return mask
