"""Nodes of a graph that torch has exported: their tensors, axes and places, and the user's line behind them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from autoshard.modules.program import TensorPlace

Node = Any  # a torch.fx.Node, whose arguments may be of any type


def tensors_of(arguments: Any) -> list[Node]:
    """Return the nodes among arguments, in order, each once."""
    if isinstance(arguments, torch.fx.Node):
        return [arguments] if isinstance(arguments.meta.get("val"), torch.Tensor) else []
    parts = arguments.values() if isinstance(arguments, Mapping) else arguments
    if not isinstance(arguments, Mapping | tuple | list):
        return []
    return list(dict.fromkeys(node for part in parts for node in tensors_of(part)))


def is_repeated(node: Node) -> bool:
    """Say whether a node reads one tensor in two places."""
    sources: list[Node] = []
    map_arg((node.args, node.kwargs), sources.append)
    return len({*sources}) < len(sources)


def replaced(arguments: Any, slots: Mapping[Node, TensorPlace]) -> Any:
    """Return arguments with slots in the places of their tensors."""
    if isinstance(arguments, torch.fx.Node):
        return slots[arguments]
    if isinstance(arguments, Mapping):
        return {key: replaced(value, slots) for key, value in arguments.items()}
    if isinstance(arguments, tuple | list):
        return tuple(replaced(value, slots) for value in arguments)
    return arguments


def fill_slots(arguments: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Put tensors into their slots."""
    if isinstance(arguments, TensorPlace):
        return tensors[arguments.number]
    return [fill_slots(value, tensors) for value in arguments] if isinstance(arguments, tuple) else arguments


def place_in_tree(path: tuple[Any, ...]) -> str:
    """Return the place of a part of arguments or results: keys and numbers with dots between them."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def torch_name(target: Any) -> str:
    """Return the name of torch's operation; nothing for an operation of a user, which may have the same name.

    >>> torch_name(torch.ops.aten.mul.Tensor), torch_name(len)
    ('mul', '')
    """
    return target._opname if getattr(target, "namespace", "") == "aten" else ""


def line_of(node: Node) -> str:
    """Return the line of the user's code behind a node."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    places = [number for number, line in enumerate(trace) if line.startswith('File "')]
    user_places = [number for number in places if f"{os.sep}torch{os.sep}" not in trace[number]]
    trace = trace[: user_places[-1] + 2] if user_places else trace  # the user's, where torch's modules go on
    if len(trace) > 2 and str(Path(__file__).with_name("local.py")) in trace[-2]:  # which calls a user's function
        trace = trace[:-2]
    return " ".join(trace[-2:]) or str(node.name)


def argument(node: Node, *names: str) -> Any:
    """Return an argument of an operation by the name in its schema, or its default; None where it has no such name."""
    stated = (
        dict(zip((parameter.name for parameter in node.target._schema.arguments), node.args, strict=False))
        | node.kwargs
    )
    defaults = {parameter.name: parameter.default_value for parameter in node.target._schema.arguments}
    return next((stated.get(name, defaults[name]) for name in names if name in defaults), None)


def arguments_of(node: Node, **changed: Any) -> tuple[Any, ...]:
    """Return all arguments of an operation in the order of its schema, some of them changed."""
    slots = {source: TensorPlace(number) for number, source in enumerate(tensors_of((node.args, node.kwargs)))}
    names = [parameter.name for parameter in node.target._schema.arguments]
    return tuple(changed[name] if name in changed else replaced(argument(node, name), slots) for name in names)


def axes_of(node: Node) -> tuple[int, ...]:
    """Return the axes that an operation names, counted from 0; all of them where it names none."""
    rank = node.args[0].meta["val"].dim()
    named: Any = argument(node, "dim", "dims")
    if not rank or named is None or len(named if isinstance(named, tuple | list) else (named,)) == 0:
        return tuple(range(rank))
    return tuple(axis % rank for axis in ([named] if isinstance(named, int) else named))
