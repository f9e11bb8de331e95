"""A part of an exported graph, which runs by itself."""

import copy
from collections.abc import Sequence

import torch

from autoshard.modules.nodes import Node

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def part_of(whole: torch.fx.GraphModule, nodes: Sequence[Node]) -> torch.fx.GraphModule:
    """Return the part of a graph that computes these nodes, for tensors that may lie in memory in any way."""
    graph = copy.deepcopy(whole.graph)
    copies = dict(zip(whole.graph.nodes, graph.nodes, strict=True))
    results = [copies[node] for node in nodes]
    needed = {*results}
    for node in reversed(graph.nodes):
        if node.op == "output":
            node.args = (tuple(results),)
        elif node in needed:
            needed |= {*node.all_input_nodes}
            if node.target in _VIEWS:
                node.target = torch.ops.aten.reshape.default
        elif node.op != "placeholder":
            graph.erase_node(node)
    return torch.fx.GraphModule(whole, graph)
