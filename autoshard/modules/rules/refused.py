"""Operations that no program holds: each is refused by its name, with the line that calls it."""

from collections.abc import Collection
from typing import Any

import torch

from autoshard.errors import InputError
from autoshard.modules.local import MARK
from autoshard.modules.nodes import Node, argument, line_of, torch_name

_NETS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def refuse_random(node: Node, written: Collection[str]) -> None:
    """Refuse an operation that draws numbers, unless its name is among those of which is written how."""
    name = torch_name(node.target)
    drops = name in ("dropout", "feature_dropout") and node.args[1] and node.args[2]
    drops = drops or (name in _NETS and argument(node, "dropout") and argument(node, "train"))
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if drops or (is_random and name not in written):
        raise InputError.of(line_of(node), f"{name or node.target} draws random numbers; call .eval(), or leave it out")


def refuse_operation(node: Node, name: str) -> None:
    """Refuse what is no operation on tensors, what changes one, and what takes or gives other than dense real ones."""
    schema, output = getattr(node.target, "_schema", None), node.meta["val"]
    if schema is None:
        raise InputError.of(line_of(node), f"{name} is no operation on tensors that autoshard sees into. {MARK}")
    if schema.is_mutable:
        raise InputError.of(line_of(node), f"{name} changes a tensor in place, which only operations of torch may do")
    parts = [part for part in (output if isinstance(output, tuple | list) else [output]) if part is not None]
    reads = [read.meta.get("val") for read in node.all_input_nodes]
    shapes = [getattr(part, "shape", (part,)) for part in parts]
    is_sized = all(isinstance(size, int) for shape in shapes for size in shape)
    if not is_sized or any(isinstance(read, torch.SymInt | torch.SymFloat | torch.SymBool) for read in reads):
        verb = "takes numbers" if is_sized else "gives numbers or a shape"
        raise InputError.of(line_of(node), f"{name} {verb} that only a run knows. {MARK}")
    for part in (part for part in parts if isinstance(part, torch.Tensor)):
        if part.is_complex():
            raise InputError.of(line_of(node), f"{name} gives complex numbers, which are not supported. {MARK}")
        refuse_sparse(node, part, f"{name} gives")


def refuse_sparse(node: Node, value: Any, what: str) -> None:
    """Refuse a sparse tensor."""
    if value.layout != torch.strided:
        message = f"{what} a sparse tensor, which is not supported; give its indices and numbers, and use index_add"
        raise InputError.of(line_of(node), message)
