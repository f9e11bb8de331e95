"""What blocks of a decoder's code read beside weights and hidden states: tokens, and what the code makes of them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx.node import map_aggregate

from autoshard.engine.torch.formats import NOWHERE
from autoshard.modules.export import ExportedModule
from autoshard.modules.nodes import Node
from autoshard.modules.training.graph import BATCH, CodeGraph
from autoshard.run.protocol import HOST

Tensors = Mapping[str, torch.Tensor]


class CodeInputs:
    """Masks, tables of positions and tokens, which depend on no weight: every rank computes them of a whole batch."""

    def __init__(self, code: CodeGraph, tokens: str, buffers: Tensors) -> None:
        """Take the code, the name of the argument that takes tokens, and the buffers of the module by path."""
        self._code, self._tokens, self._buffers = code, tokens, buffers
        exported = code.captured.exported
        of_batch = _made_of(exported, tokens)
        nodes = {node.name: node for named in code.nodes.values() for node in named.values()}
        self._changing = [node for name, node in nodes.items() if name in of_batch]
        self._fixed = [node for name, node in nodes.items() if name not in of_batch]
        self._graphs = {id(some): _on_host(exported.part(some)) for some in (self._changing, self._fixed)}
        self._same: Tensors | None = None  # those that are the same for every batch
        self._last: tuple[Any, Tensors] = None, {}  # the tokens of which the others were made last

    def has(self, block: str, tensor: str) -> bool:
        """Whether the code makes this input of a block."""
        return tensor in self._code.nodes.get(block, {})

    def is_same(self, block: str, tensor: str) -> bool:
        """Whether an input is the same for every batch."""
        return self._code.nodes[block][tensor] in self._fixed

    def whole(self, block: str, tensor: str, batch: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        """Return an input for a micro-batch, along the dims that the block has for it."""
        node, sizes = self._code.nodes[block][tensor], self._code.graph.sizes
        dims = self._code.graph.block_of(block).tensors[tensor].dims
        if device == NOWHERE:
            return torch.empty([sizes[dim] for dim in dims], dtype=node.meta["val"].dtype, device=device)
        value = (self._of_all() if node in self._fixed else self._of_batch(batch["tokens"]))[node.name]
        traced = [self._code.num_traced if dim == BATCH else sizes[dim] for dim in dims]
        laid = value.detach().reshape(traced)
        return (laid.narrow(dims.index(BATCH), 0, sizes[BATCH]) if BATCH in dims else laid).to(device)

    def _of_all(self) -> Tensors:
        if self._same is None:
            zeros = torch.zeros_like(self._code.captured.exported.arguments[self._tokens], device=HOST)
            self._same = self._values(self._fixed, zeros)
        return self._same

    def _of_batch(self, tokens: Any) -> Tensors:
        if self._last[0] is not tokens:
            repeated = torch.from_numpy(tokens).to(torch.int64).repeat(self._code.num_traced // len(tokens), 1)
            like = self._code.captured.exported.arguments[self._tokens]
            self._last = tokens, self._values(self._changing, repeated.to(like.dtype))
        return self._last[1]

    def _values(self, nodes: list[Node], tokens: torch.Tensor) -> Tensors:
        exported = self._code.captured.exported
        arguments = {**exported.arguments, self._tokens: tokens}
        values = exported.values(self._graphs[id(nodes)], arguments, self._buffers)
        return {node.name: value for node, value in zip(nodes, values, strict=True)}


def _on_host(part: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Let a part of a graph make its tensors on the host, wherever the module was traced."""

    def host(argument: Any) -> Any:
        return torch.device(HOST) if isinstance(argument, torch.device) else argument

    for node in part.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = map_aggregate(node.args, host), map_aggregate(node.kwargs, host)
    part.recompile()
    return part


def _made_of(exported: ExportedModule, argument: str) -> set[str]:
    """Return the names of the nodes that depend on an argument."""
    names = {argument}
    for node in exported.nodes:
        if names.intersection(_names(node.all_input_nodes)):
            names.add(node.name)
    return names


def _names(nodes: Iterable[Node]) -> set[str]:
    return {node.name for node in nodes}
