"""Complex numbers of a traced module, written as pairs of real ones: rotary positions are products of them.

What follows from no parameter and no input, such as a table of rotations, stays complex: ranks compute it once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from autoshard.modules.nodes import Node, argument, axes_of, torch_name

_aten: Any = torch.ops.aten
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def write_as_pairs(graph_module: torch.fx.GraphModule) -> None:
    """Write pairs of numbers in the place of complex ones that begin at ``view_as_complex``, as far as is known how."""
    writer = _PairWriter(graph_module.graph)
    for node in [*graph_module.graph.nodes]:
        if node.op == "call_function":
            writer.look(node)
    if writer.replaced:
        for node in reversed(writer.replaced):
            if not node.users:  # what is not known of keeps its complex operands
                graph_module.graph.erase_node(node)
        graph_module.recompile()


def is_complex(node: Any) -> bool:
    """Say whether a value is a node with complex numbers."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_complex()


class _PairWriter:
    """Writes nodes with pairs in the last dim, and remembers for which complex nodes they stand."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph, self.pairs, self.replaced = graph, dict[Node, Node](), list[Node]()
        self._meta: Mapping[str, Any] = {}

    def look(self, node: Node) -> None:
        """Write the pairs of a node, or give its reader the pairs of what it reads."""
        name = torch_name(node.target)
        if node.target is _aten.view_as_complex.default:
            self.pairs[node] = node.args[0]
        elif not any(operand in self.pairs for operand in node.all_input_nodes):
            return
        elif node.target is _aten.view_as_real.default:
            node.replace_all_uses_with(self.pairs[node.args[0]])
        elif is_complex(node) and (write := _WRITTEN.get(name)):
            self._meta = {key: value for key, value in node.meta.items() if key != "val"}
            with self.graph.inserting_before(node):
                written = write(self, node)
            if written is None:  # it stays complex, and is refused by its name
                return
            self.pairs[node] = written
        elif name != "_assert_tensor_metadata":
            return
        self.replaced.append(node)

    def call(self, target: Any, *args: Any) -> Node:
        """Write an operation; return its result."""
        node = self.graph.call_function(target, args)
        node.meta = {**self._meta, "val": target(*map_arg(args, lambda read: read.meta["val"]))}
        return node

    def pair(self, value: Any) -> Node:
        """Return the pairs of a complex node."""
        if value in self.pairs:
            return self.pairs[value]
        plain = self.call(_aten.resolve_conj.default, value) if value.meta["val"].is_conj() else value
        return self.call(_aten.view_as_real.default, plain)

    def parts(self, value: Node) -> tuple[Node, Node]:
        """Return the real and the imaginary part of a complex node."""
        pair = self.pair(value)
        return self.call(_aten.select.int, pair, -1, 0), self.call(_aten.select.int, pair, -1, 1)

    def product(self, node: Node) -> Node | None:
        """Multiply two complex nodes, or one by a real one."""
        first, second = node.args
        if isinstance(first, complex) or isinstance(second, complex):
            return None
        if not (is_complex(first) and is_complex(second)):
            scaled, factor = (first, second) if is_complex(first) else (second, first)
            is_tensor = isinstance(factor, torch.fx.Node)
            factor = self.call(_aten.unsqueeze.default, factor, -1) if is_tensor else factor
            return self.times(self.pair(scaled), factor)
        (real, imaginary), (other_real, other_imaginary) = self.parts(first), self.parts(second)
        result = (
            self.call(_aten.sub.Tensor, self.times(real, other_real), self.times(imaginary, other_imaginary)),
            self.call(_aten.add.Tensor, self.times(real, other_imaginary), self.times(imaginary, other_real)),
        )
        return self.call(_aten.stack.default, result, -1)

    def times(self, first: Node, second: Node) -> Node:
        """Multiply two real nodes."""
        return self.call(_aten.mul.Tensor, first, second)

    def sum(self, node: Node) -> Node | None:
        """Add or subtract two complex nodes."""
        if node.kwargs or not all(map(is_complex, node.args)):  # alpha, or a real number
            return None
        first, second = map(self.pair, node.args)
        return self.call(node.target, first, second)

    def conjugate(self, node: Node) -> Node:
        """Turn the sign of imaginary parts."""
        real, imaginary = self.parts(node.args[0])
        return self.call(_aten.stack.default, (real, self.call(_aten.neg.default, imaginary)), -1)

    def alike(self, node: Node) -> Node:
        """Do to pairs what was done to complex numbers."""
        return self.call(node.target, self.pair(node.args[0]), *node.args[1:])

    def resized(self, node: Node) -> Node:
        """Give pairs another shape; the last dim stays."""
        pair = self.pair(node.args[0])
        target = _aten.expand.default if torch_name(node.target) == "expand" else _aten.reshape.default
        return self.call(target, pair, [*node.meta["val"].shape, 2])

    def along(self, node: Node) -> Node:
        """Do the same to pairs along dims that are counted from the front."""
        source, name = node.args[0], torch_name(node.target)
        rank = source.meta["val"].dim() + (name == "unsqueeze")
        words = [parameter.name for parameter in node.target._schema.arguments[1:]]
        values = [argument(node, word) for word in words]
        counted = [value % rank if word.startswith("dim") else value for word, value in zip(words, values, strict=True)]
        return self.call(node.target, self.pair(source), *counted)

    def joined(self, node: Node) -> Node:
        """Join pairs along a dim that is counted from the front."""
        dim: int = argument(node, "dim") % node.meta["val"].dim()
        return self.call(node.target, [self.pair(part) for part in node.args[0]], dim)

    def permuted(self, node: Node) -> Node:
        """Change the order of dims; that of pairs stays the last."""
        return self.call(node.target, self.pair(node.args[0]), [*axes_of(node), node.meta["val"].dim()])

    def converted(self, node: Node) -> Node:
        """Give pairs the format of parts of the result."""
        return self.call(_aten.to.dtype, self.pair(node.args[0]), _REAL[node.meta["val"].dtype])


_Write = Callable[[_PairWriter, Node], Node | None]
_WRITTEN: Mapping[str, _Write] = {
    "mul": _PairWriter.product,
    **dict.fromkeys(("add", "sub"), _PairWriter.sum),
    **dict.fromkeys(("_conj", "conj", "conj_physical"), _PairWriter.conjugate),
    **dict.fromkeys(("neg", "clone", "detach", "alias", "resolve_conj", "contiguous"), _PairWriter.alike),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "expand", "squeeze"), _PairWriter.resized),
    **dict.fromkeys(("unsqueeze", "slice", "select", "transpose"), _PairWriter.along),
    **dict.fromkeys(("cat", "stack"), _PairWriter.joined),
    "permute": _PairWriter.permuted,
    **dict.fromkeys(("to", "_to_copy"), _PairWriter.converted),
}
