"""What blocks of a decoder's code read beside weights and hidden states: tokens, and what the code makes of them."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.fx.node import map_aggregate

from autoshard.engine.torch.formats import NOWHERE
from autoshard.graph.kinds.dropout import dropout_keys
from autoshard.graph.op import Array, Dims
from autoshard.modules.export import ExportedModule
from autoshard.modules.nodes import Node
from autoshard.modules.rewriting.randomness import RandomInput
from autoshard.modules.training.graph import BATCH, CodeGraph
from autoshard.modules.training.parts import LOSS_SHARE
from autoshard.run.placement import Bounds
from autoshard.run.protocol import HOST

Tensors = Mapping[str, torch.Tensor]
_ALL = -1  # the number of all micro-batches
_CODE = "code"  # whose layers draw from streams of their own


class CodeInputs:
    """Masks, tables of positions and tokens, which depend on no weight: every rank computes them of a whole batch."""

    def __init__(self, code: CodeGraph, arguments: Mapping[str, str], buffers: Tensors, seed: int) -> None:
        """Take the code, the arguments that samples bring as a batch calls them, and the buffers of the module by path.

        Random numbers follow from a seed.
        """
        self._code, self._arguments, self._buffers, self._seed = code, arguments, buffers, seed
        exported = code.captured.exported
        self._random = {draw.name: draw for draw in exported.random}
        of_batch = _made_of(exported, {*arguments, *self._random})
        nodes = {node.name: node for named in code.nodes.values() for node in named.values()}
        nodes = {name: node for name, node in nodes.items() if name not in self._random}
        self._changing = [node for name, node in nodes.items() if name in of_batch]
        self._fixed = [node for name, node in nodes.items() if name not in of_batch]
        self._graphs = {id(part): _on_host(exported.part(part)) for part in (self._changing, self._fixed)}
        self._same: Tensors | None = None  # those that are the same for every batch
        self._last: tuple[Any, Tensors] = None, {}  # the tokens of which the others were made last

    def has(self, block: str, tensor: str) -> bool:
        """Whether the code makes this input of a block."""
        return tensor == LOSS_SHARE or tensor in self._code.nodes.get(block, {})

    def turn(self, block: str, tensor: str, micro_batch: int) -> int | None:
        """Return the number under which a step keeps an input: one for all micro-batches; None if it keeps none.

        Random numbers are as large as what they are for, and are read once.
        """
        if tensor == LOSS_SHARE:
            return _ALL
        node = self._code.nodes[block][tensor]
        return None if node.name in self._random else _ALL if node in self._fixed else micro_batch

    def part(
        self, place: tuple[str, str], batch: Mapping[str, Any], bounds: Bounds, device: torch.device
    ) -> torch.Tensor:
        """Return a part of an input for a micro-batch, along the dims that its block has for it."""
        block, tensor = place
        if tensor == LOSS_SHARE:
            return torch.tensor(self._code.loss_share, device=device)
        node, dims = self._code.nodes[block][tensor], self._code.graph.block_of(block).tensors[tensor].dims
        if device == NOWHERE:
            shape = [stop - start for start, stop in bounds]
            return torch.empty(shape, dtype=node.meta["val"].dtype, device=device)
        if node.name in self._random:
            return self._drawn(self._random[node.name], dims, batch["samples"], bounds, device)
        return self._whole(node, dims, batch)[tuple(slice(*ends) for ends in bounds)].contiguous().to(device)

    def _drawn(
        self, drawn: RandomInput, dims: Dims, samples: Array, bounds: Bounds, device: torch.device
    ) -> torch.Tensor:
        """Draw a part of random numbers: those of a sequence follow from its number in the run, on any ranks."""
        sizes = [self._code.graph.sizes[dim] for dim in dims]
        if not dims or dims[0] != BATCH:
            return drawn.part(self._key(samples).to(device), sizes, bounds)
        (first, last), *inner = bounds
        keys = dropout_keys(self._seed, samples[first:last], _CODE).tolist()
        sequences = [drawn.part(torch.tensor(key, device=device), [1, *sizes[1:]], [(0, 1), *inner]) for key in keys]
        return (
            torch.cat(sequences) if sequences else torch.empty([stop - start for start, stop in bounds], device=device)
        )

    def _key(self, samples: Array) -> torch.Tensor:
        """Return the key of what a micro-batch draws as a whole: that of its first sequence."""
        (key,) = dropout_keys(self._seed, samples[:1], _CODE).tolist()
        return torch.tensor(key)

    def _whole(self, node: Node, dims: Dims, batch: Mapping[str, Any]) -> torch.Tensor:
        sizes = self._code.graph.sizes
        value = (self._of_all() if node in self._fixed else self._of_batch(batch))[node.name]
        traced = [self._code.num_traced if dim == BATCH else sizes[dim] for dim in dims]
        laid = value.detach().reshape(traced)
        return laid.narrow(dims.index(BATCH), 0, sizes[BATCH]) if BATCH in dims else laid

    def _of_all(self) -> Tensors:
        if self._same is None:
            examples = self._code.captured.exported.arguments
            zeros = {name: torch.zeros_like(examples[name], device=HOST) for name in self._arguments}
            self._same = self._values(self._fixed, zeros, self._key(np.zeros(1, np.int64)))
        return self._same

    def _of_batch(self, batch: Mapping[str, Any]) -> Tensors:
        tokens = batch["tokens"]
        if self._last[0] is not tokens:
            count, examples = self._code.num_traced // len(tokens), self._code.captured.exported.arguments
            wholes = {name: torch.from_numpy(batch[key]) for name, key in self._arguments.items()}
            like = {
                name: whole.repeat(count, *[1] * (whole.dim() - 1)).to(examples[name].dtype)
                for name, whole in wholes.items()
            }
            self._last = tokens, self._values(self._changing, like, self._key(batch["samples"]))
        return self._last[1]

    def _values(self, nodes: list[Node], tokens: Tensors, key: torch.Tensor) -> Tensors:
        exported = self._code.captured.exported
        arguments = {**exported.arguments, **tokens}
        values = exported.values(self._graphs[id(nodes)], arguments, self._buffers, key)
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


def _made_of(exported: ExportedModule, inputs: Collection[str]) -> set[str]:
    """Return the names of the nodes that depend on some inputs of a graph."""
    names = {*inputs}
    for node in exported.nodes:
        if names.intersection(_names(node.all_input_nodes)):
            names.add(node.name)
    return names


def _names(nodes: Iterable[Node]) -> set[str]:
    return {node.name for node in nodes}
