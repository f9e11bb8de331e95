"""The arguments of a module's forward that samples bring: tokens, or any tensors."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

from autoshard.errors import require
from autoshard.plan.code import DataArgument

_NEXT = ("targets", "target", "target_ids", "target_seq")


def token_arguments(module: torch.nn.Module, inputs: Collection[str]) -> Mapping[str, str]:
    """Return the arguments that take tokens, and the next ones, with what a batch calls these.

    ``inputs`` are arguments that somebody has given.
    """
    following = argument_of_next(module, inputs)
    return {first_argument(module): "tokens", **({following: "labels"} if following else {})}


def first_argument(module: torch.nn.Module) -> str:
    """Return the name of the argument that takes tokens."""
    names = [parameter.name for parameter in inspect.signature(module.forward).parameters.values()]
    require((bool(names), "module", "has a forward without arguments; a decoder takes tokens"))
    return names[0]


def argument_of_next(module: torch.nn.Module, inputs: Collection[str] = ()) -> str:
    """Return the name of the argument that takes the next token of each; "" if there is none, or nothing asks for it.

    ``inputs`` are arguments that somebody has given.
    """
    arguments = inspect.signature(module.forward).parameters.values()
    asked_for = (
        argument.name for argument in arguments if argument.default is argument.empty or argument.name in inputs
    )
    return next((name for name in asked_for if name in _NEXT), "")


def with_two_samples(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return example inputs of a single sample twice, so that a batch is a dim; others as they are."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    if not tensors or not all(tensor.dim() and tensor.shape[0] == 1 for tensor in tensors):
        return inputs
    return {
        name: value.repeat(2, *[1] * (value.dim() - 1)) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def planned_data(inputs: Mapping[str, Any], names: Collection[str]) -> tuple[DataArgument, ...]:
    """Describe the arguments of these names by example inputs, of which each sample brings a row."""
    examples = {name: inputs[name] for name in names if name in inputs}
    counts = {name: example.shape[0] if example.dim() else 0 for name, example in examples.items()}
    first, sizes = next(iter(counts), ""), "a row for each sample"
    message = f"must have {sizes}: {first} has {counts.get(first)}"
    require(*((count == counts[first] and count > 0, f"inputs.{name}", message) for name, count in counts.items()))
    require(*((name in examples, f"inputs.{name}", "is no argument by itself; pass tensors by name") for name in names))
    return tuple(_described_argument(name, example) for name, example in examples.items())


def data_examples(
    inputs: Mapping[str, Any], data: Collection[DataArgument], count: int, dtype: torch.dtype
) -> Mapping[str, torch.Tensor]:
    """Return inputs of so many samples, all like the first of the example; fractions have the format of a plan."""
    examples: dict[str, torch.Tensor] = {}
    for argument in data:
        row = inputs[argument.name][:1]
        rows = row.repeat(count, *[1] * (row.dim() - 1))
        examples[argument.name] = rows.to(dtype) if rows.is_floating_point() else rows
    return examples


def _described_argument(name: str, example: torch.Tensor) -> DataArgument:
    is_whole = not example.is_floating_point() and example.dtype != torch.bool
    has_numbers = example.device.type != "meta" and bool(example.numel())
    return DataArgument(
        name=name, shape=tuple(example.shape[1:]), dtype=str(example.dtype).removeprefix("torch."),
        below=(max(1, int(example.max()) + 1) if has_numbers else 2) if is_whole else 0,
    )  # fmt: skip
