"""Inlining of subgraphs in which torch switches gradients or autocast: their nodes move into the graph around them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx

from autoshard.errors import InputError
from autoshard.modules.nodes import Node, line_of

_GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def is_mapped(node: Node) -> bool:
    """Say whether a node belongs to a function that torch.func maps, which torch can write as plain operations."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "_add_batch_dim"


@contextmanager
def gradients_inside_autocast(told: Callable[[], object]) -> Iterator[None]:
    """Call ``told`` where gradients are switched inside of autocast, which torch leaves out of its graph."""
    cast: Any = torch.autocast
    switch: Any = torch.set_grad_enabled
    enter, leave, begin = cast.__enter__, cast.__exit__, switch.__init__
    inside: list[torch.autocast] = []

    def entered(self: torch.autocast) -> Any:
        inside.append(self)
        return enter(self)

    def left(self: torch.autocast, *error: Any) -> Any:
        inside.pop()
        return leave(self, *error)

    def switched(self: torch.set_grad_enabled, mode: bool) -> None:
        if inside and mode != torch.is_grad_enabled():
            told()
        begin(self, mode)

    cast.__enter__, cast.__exit__, switch.__init__ = entered, left, switched
    try:
        yield
    finally:
        cast.__enter__, cast.__exit__, switch.__init__ = enter, leave, begin


def inline(graph_module: torch.fx.GraphModule, device: str, autocast: torch.dtype | None) -> None:
    """Write what a module computes with gradients or autocast on or off where it does so.

    Without gradients it is constant. Ranks compute under the autocast that is around the module: a part with
    another stays apart, and is refused where it depends on parameters.
    """
    for node in [*graph_module.graph.nodes]:
        if node.op != "call_function" or node.target not in (_GRADIENTS, _AUTOCAST):
            continue
        if node.target is _GRADIENTS:
            enabled, source, *operands = node.args
        else:
            kind, dtype, casts, _, source, *operands = node.args
            enabled = True
            if kind == device and (dtype if casts else None) != autocast:
                continue
        inside: torch.fx.GraphModule = getattr(graph_module, source.target)
        inline(inside, device, autocast)
        _write_in(graph_module, node, inside, operands, keeps_gradients=enabled)
    graph_module.recompile()


def _write_in(
    outside: torch.fx.GraphModule, node: Node, inside: torch.fx.GraphModule, operands: Sequence[Any], *,
    keeps_gradients: bool,
) -> None:  # fmt: skip
    """Write the nodes of one graph into another, in the place of a node."""
    graph, placeholders = outside.graph, inside.graph.find_nodes(op="placeholder")
    copies = dict(zip(placeholders, operands, strict=True))
    with graph.inserting_before(node):
        for inner_node in inside.graph.nodes:
            if inner_node.op == "get_attr":
                name = f"{node.name}_{inner_node.target}"
                setattr(outside, name, getattr(inside, inner_node.target))
                copies[inner_node] = graph.get_attr(name)
            elif inner_node.op == "call_function":
                copies[inner_node] = graph.node_copy(inner_node, copies.__getitem__)
        (output,) = inside.graph.find_nodes(op="output")
        results = [copies[result] for result in output.args[0]]
        for number, result in enumerate(results if not keeps_gradients else ()):
            results[number] = graph.call_function(torch.ops.aten.detach.default, (result,))
            results[number].meta = {**result.meta}
    for reader in [*node.users]:
        reader.replace_all_uses_with(results[reader.args[1]])
        graph.erase_node(reader)
    graph.erase_node(node)


def refused_casts(graph_module: torch.fx.GraphModule, node: Node, around: torch.dtype | None) -> InputError:
    """Return the error that names a part of a module whose autocast differs from that of the module."""
    _, dtype, casts, _, source, *_ = node.args
    inside: torch.fx.GraphModule = getattr(graph_module, source.target)
    line = next(
        (line_of(inner_node) for inner_node in inside.graph.nodes if inner_node.op == "call_function"), line_of(node)
    )
    inner_cast, outside = (_named(cast) for cast in (dtype if casts else None, around))
    message = (
        f"runs with {inner_cast} inside of a module that is called with {outside}; call the module as it is inside"
    )
    return InputError.of(line, message)


def _named(dtype: torch.dtype | None) -> str:
    return f"autocast to {str(dtype).removeprefix('torch.')}" if dtype else "autocast off"
