"""Functions of parts of a captured module: plain Python of torch's calls, compiled if the module is to be."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoshard.engine.torch.compiled import Piece, compiler_of
from autoshard.engine.torch.recording import Operation
from autoshard.engine.torch.writing import Step, Variables, piece, statement
from autoshard.modules.running.views import VALUE, is_view

_FEWEST = 2  # operations that a compiler can make something of


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFunction:
    """A part of a pass as a function of a list of tensors, which it empties; the nodes that it reads and makes."""

    run: Piece
    reads: tuple[Node, ...]
    writes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionWriter:
    """Writes functions of nodes, equal ones once, and compiles them if it ``compiles``."""

    device: torch.device
    compiles: bool = False
    functions: dict[object, Piece] = field(default_factory=dict[object, Piece])

    def function(self, nodes: Sequence[Node], read_later: Sequence[Node]) -> PartFunction:
        """Return a function of some nodes that makes those which are read later."""
        variables = Variables()
        named: dict[str, Node] = {}
        inside = {*nodes}
        for source in (source for node in nodes for source in node.all_input_nodes if source not in inside):
            named[variables.of(source.meta[VALUE])] = source
        statements = [
            line
            for node in nodes
            if node.target is not operator.getitem
            for line in [self._line(node, variables, read_later)]
            if line
        ]
        writes = {variables.of(node.meta[VALUE]): node for node in read_later}
        text, reads, call = piece("part", [Step(comment="", statements=tuple(statements))], set(writes))
        sources, casts = tuple(named[name] for name in reads), torch.is_autocast_enabled(self.device.type)
        looks = [(value.shape, value.stride(), value.dtype) for node in sources for value in [node.meta[VALUE]]]
        key = text, repr(looks), casts
        if key not in self.functions:
            run = self._compiled(text, nodes, [node.meta[VALUE] for node in sources])
            self.functions[key] = self._as_traced(run) if casts else run
        return PartFunction(
            run=self.functions[key], reads=sources, writes=tuple(writes[name] for name in call.statements[-1].writes)
        )

    def _line(self, node: Node, variables: Variables, read_later: Sequence[Node]) -> Any:
        """Write a node; a view with one reader stands where it is read."""
        operation = _operation(node)
        if is_view(node) and not operation.is_list and len(node.users) == 1 and node not in read_later:
            variables.inline(operation)
            return None
        return statement(operation, variables)

    def _compiled(self, text: str, nodes: Sequence[Node], examples: Sequence[torch.Tensor]) -> Piece:
        space: dict[str, Any] = {
            "torch": torch, "aten": torch.ops.aten, "device": self.device, "inf": inf, "nan": nan
        }  # fmt: skip
        exec(compile(text, "a part of the module", "exec"), space)
        run: Piece = space["part"]
        run.__name__ = "a part of the module"  # in warnings
        computes = sum(not is_view(node) for node in nodes) >= _FEWEST
        return compiler_of(self.device)(run, examples) if self.compiles and computes else run

    def _as_traced(self, run: Piece) -> Piece:
        """Run a function without casts: those of autocast are among its operations."""
        device = self.device.type

        def without_casts(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            with torch.autocast(device, enabled=False):
                return run(tensors)

        return without_casts


def _operation(node: Node) -> Operation:
    """Return a node as an operation on tensors: those that say how the results of nodes look."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta[VALUE])
    value = node.meta.get(VALUE)
    returned = tuple(_parts(node, value)) if isinstance(value, list | tuple) else (value,)
    in_place = node.target._schema.is_mutable  # pyright: ignore
    returns = node.target._schema.returns  # pyright: ignore
    results = () if in_place and len(returns) == 1 and returns[0].alias_info else returned
    return Operation(
        func=node.target, args=args, kwargs=kwargs, returned=returned,
        results=tuple(result for result in results if isinstance(result, torch.Tensor)),
    )  # fmt: skip


def _parts(node: Node, value: Sequence[Any]) -> Iterator[Any]:
    """Yield the results of an operation that has several; None for one that nothing reads."""
    readers = {user.args[1]: user.meta.get(VALUE) for user in node.users if user.target is operator.getitem}
    return (readers.get(number) for number in range(len(value)))
