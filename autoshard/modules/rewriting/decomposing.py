"""An exported program whose changes in place are results of their own."""

from collections.abc import Mapping
from typing import Any

from autoshard.modules.nodes import Node, argument
from autoshard.modules.rewriting.diagonals import mask_diagonals
from autoshard.modules.rewriting.inlining import is_mapped
from autoshard.modules.rewriting.randomness import draws


def decomposed(program: Any) -> Any:
    """Return a program of plain operations, which is the same where all of them are.

    Meanwhile its tensors have numbers, because torch makes attributes of their names, and some are no attributes that
    a graph may have: graph, code, class.
    """
    if not any(map(_is_rewritten, program.graph_module.graph.nodes)):
        return program
    mask_diagonals(program.graph_module.graph)
    signature = program.graph_signature
    targets = [spec.target for spec in signature.input_specs if spec.kind.name in ("PARAMETER", "BUFFER")]
    numbers = {target: f"tensor_{number}" for number, target in enumerate(dict.fromkeys(targets))}
    _rename(program, numbers)
    program = program.run_decompositions({})
    _rename(program, {number: target for target, number in numbers.items()})
    return program


def _rename(program: Any, names: Mapping[str, str]) -> None:
    for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        spec.target = names.get(spec.target, spec.target)
    for tensors in (program.state_dict, program.constants):
        renamed = {names.get(name, name): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)


def _is_rewritten(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or draws(node) or is_mapped(node):
        return draws(node) or is_mapped(node)
    tracked = schema.name == "aten::batch_norm" and argument(node, "running_mean") is not None
    return bool(schema.is_mutable) or (tracked and bool(argument(node, "training")))
