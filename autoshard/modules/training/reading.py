"""A decoder of a user's code, made with its numbers and traced as a plan trains it."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from autoshard.engine.torch.formats import Formats
from autoshard.errors import InputError, require
from autoshard.graph.op import Array
from autoshard.modules.capture import Captured, read
from autoshard.modules.decoder.arguments import data_examples, planned_data, token_arguments
from autoshard.modules.decoder.ends import dims_of_samples, trained_end
from autoshard.modules.decoder.reading import MOST_FROZEN, captured_stack, frozen_buffers, without_caches
from autoshard.modules.decoder.segments import stack_of
from autoshard.modules.export import ExportedModule
from autoshard.modules.program import in_double
from autoshard.modules.training.graph import CodeGraph, code_graph
from autoshard.modules.training.inputs import CodeInputs
from autoshard.modules.training.parts import joining
from autoshard.plan.code import DataArgument, data_key
from autoshard.plan.plan import Plan

_FROZEN = f"is frozen{{}}: more than the {MOST_FROZEN:,} numbers of such weights that every host holds whole"
_UNFROZEN = "Train by a loop of your own with autoshard.shard, which cuts frozen weights, or let it require a gradient"
_NO_GRADIENT = "gets no gradient from the logits{}, so that a run cannot train it. Make it a buffer"
_OF_FORMATS = re.compile(r"RuntimeError: .*dtype", re.DOTALL)  # torch has no such function of several formats
_FEWEST = 2  # sequences, so that a batch is a dim


@dataclass(frozen=True, kw_only=True)
class TracedCode:
    """A decoder, and the graph of its code for one plan; ``buffers`` are those of the module, by path."""

    module: torch.nn.Module
    arguments: Mapping[str, str]  # those that samples bring, with what a batch calls them
    data: tuple[DataArgument, ...]  # of samples that are no tokens
    graph: CodeGraph
    buffers: Mapping[str, torch.Tensor]

    def weight(self, name: str) -> Array:
        """Return the module's numbers of a weight, as ``OpGraph.instances`` names it, along the dims of its block."""
        kind, number, parameter = name.split(".", 2)
        tensor = self.module.get_parameter(self.graph.paths[f"{kind}.{number}"][parameter])
        return as_array(tensor.detach()).reshape(self.graph.shape_of(name))

    def inputs(self, seed: int) -> CodeInputs:
        """Return what makes the inputs of blocks; random numbers follow from a seed."""
        formats = self.graph.captured.exported.buffers
        buffers = {path: buffer.to(formats.get(path, buffer.dtype)) for path, buffer in self.buffers.items()}
        return CodeInputs(self.graph, self.arguments, buffers, seed)


def as_array(tensor: torch.Tensor) -> Array:
    """Return the numbers of a tensor in a format that numpy has."""
    is_short = tensor.dtype in (torch.bfloat16, torch.float16)
    return np.asarray((tensor.float() if is_short else tensor).numpy())


def traced_code(
    module: torch.nn.Module,
    plan: Plan,
    formats: Formats,
    inputs: Mapping[str, Any] | None = None,
    *,
    doubles: bool = False,
) -> TracedCode:
    """Trace a decoder in training, for a micro-batch of a plan; refuse what a run of it would not compute.

    If it ``doubles``, the operations are those of the formats, and round nothing.
    """
    dtype, arguments = formats.of(plan.workload.precision.activations), token_arguments(module, inputs or ())
    count, model = plan.micro_batch * plan.mesh.size("dp"), plan.model
    data = planned_data(inputs or {}, model.traced.data) if model.traced else ()
    arguments = {argument.name: data_key(argument.name) for argument in data} or arguments
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    tokens = torch.zeros(max(count, _FEWEST), plan.workload.seq_len, dtype=torch.int64, device=device)
    examples = data_examples(inputs or {}, data, len(tokens), dtype) if data else dict.fromkeys(arguments, tokens)
    of_tokens = () if data else arguments

    def traced() -> Captured:
        exported = ExportedModule.of(module.train(), {**(inputs or {}), **examples})
        return read(exported, results=[trained_end(read(exported), of_tokens).name])

    with without_caches(module):
        captured = _captured(module, dtype, lambda: captured_stack(module, traced, of_tokens))
    require(*((not why, where, why) for where, why in _faults(captured, arguments)))
    end = trained_end(captured, of_tokens)
    samples = dims_of_samples(captured, end)
    stack = stack_of(captured.program, end.value, samples)
    alone = "is a mean over two sequences, of which a micro-batch has one. Plan with --fix mbs=2 or more sequences"
    require((not end.is_loss or count >= _FEWEST, end.name, alone))
    if plan.mesh.size("dp") > 1 or count < _FEWEST:
        remedy = "Write it for each sequence by itself, or plan with --fix dp=1,mbs=2 or more sequences"
        for where, name in joining(stack, end.logits):
            raise InputError.of(
                where, f"{name} joins tokens of several sequences, which ranks of dp compute apart. {remedy}"
            )
    if doubles:
        captured = replace(captured, program=in_double(captured.program))
        stack = stack_of(captured.program, end.value, samples)
    graph = code_graph(captured, stack, end, plan.workload, count, doubles=doubles)
    buffers = {path: buffer.detach() for path, buffer in module.named_buffers()}
    return TracedCode(module=module, arguments=arguments, data=data, graph=graph, buffers=buffers)


def _faults(captured: Captured, arguments: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what of a module in training a run does not do."""
    yield from (("module", message) for message in captured.exported.own_gradients)
    for result in captured.program.results:
        if result.is_buffer:
            yield result.name, "is a buffer that forward changes, which a run does not keep; return it, or leave it out"
    yield from _untrained(captured)
    yield from _read_beside(captured, arguments)


def _untrained(captured: Captured) -> Iterator[tuple[str, str]]:
    """Yield the first of the weights that would not be trained, for each reason why."""
    paths = {value: captured.parameters.get(value.name, "") for value in captured.program.values}
    frozen = [path for path in paths.values() if path and path not in captured.exported.call.trained]
    unreached = [
        path for value, path in paths.items() if path and value not in captured.program.trained and path not in frozen
    ]
    for untrained, message in ((frozen, f"{_FROZEN}. {_UNFROZEN}"), (unreached, _NO_GRADIENT)):
        if untrained:
            yield untrained[0], message.format(f", as {len(untrained) - 1:,} more are" if len(untrained) > 1 else "")


def _read_beside(captured: Captured, arguments: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the tensors beside tokens that the module takes and reads."""
    exported = captured.exported
    read_nodes = {node.name for node in exported.part([*captured.inputs.values()]).graph.nodes if node.users}
    for name, example in exported.arguments.items():
        if name not in arguments and name in read_nodes and isinstance(example, torch.Tensor):
            (tokens, *_), what = arguments, "the data of a run are tokens and, as targets, the next ones"
            remedy = "make it inside, or let the module return a loss: then samples may bring any tensors"
            yield f"inputs.{name}", f"is read beside {tokens}, and {what}; {remedy}"


def _captured(module: torch.nn.Module, dtype: torch.dtype, trace: Callable[[], Captured]) -> Captured:
    """Trace a module whose weights have a format; its buffers too where code joins them with what weights make."""
    buffers = {path: buffer for path, buffer in module.named_buffers() if buffer.is_floating_point()}
    try:
        with _in_format(module, dtype, frozen_buffers(module)):
            return trace()
    except InputError as error:
        if not _OF_FORMATS.search(str(error)) or all(buffer.dtype == dtype for buffer in buffers.values()):
            raise
    with _in_format(module, dtype, [*buffers]):
        return trace()


@contextmanager
def _in_format(module: torch.nn.Module, dtype: torch.dtype, buffers: Collection[str]) -> Iterator[None]:
    """Give weights and some buffers the format in which a plan computes, as long as a module is traced."""
    tensors = [*module.parameters(), *map(module.get_buffer, buffers)]
    numbers = [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point()]
    try:
        for tensor, data in numbers:
            tensor.data = data.to(dtype)
        yield
    finally:
        for tensor, data in numbers:
            tensor.data = data
