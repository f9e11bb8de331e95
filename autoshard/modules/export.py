"""A module as torch exports it: how it is called, what it returns, and the part that depends on no parameter."""

import inspect
import os
import re
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as tree  # as torch.export lays arguments and results out
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from autoshard.errors import InputError, require
from autoshard.modules.local import MARK
from autoshard.modules.nodes import Node, place_in_tree
from autoshard.modules.rewriting.complex_numbers import write_as_pairs
from autoshard.modules.rewriting.decomposing import decomposed
from autoshard.modules.rewriting.guesses import without_guesses
from autoshard.modules.rewriting.inlining import gradients_inside_autocast, inline
from autoshard.modules.rewriting.parts import part_of
from autoshard.modules.rewriting.quiet import quietly
from autoshard.modules.rewriting.randomness import RandomInput, take_random_inputs, unseeded
from autoshard.modules.state.recording import recorded
from autoshard.modules.state.tree import ModuleTree
from autoshard.modules.state.watching import WatchedState
from autoshard.run.protocol import HOST


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """How a module is called, as far as what it computes depends on that."""

    layout: tree.TreeSpec  # of the arguments
    looks: tuple[Any, ...]  # shape and format of tensors, and the other arguments themselves
    with_gradient: frozenset[int]  # which arguments get one
    modes: tuple[bool | None, ...]  # of all submodules: whether they train
    trained: frozenset[str]  # all paths of the parameters that get a gradient
    autocast: torch.dtype | None
    gradients: bool | None  # whether they are on; None where forward does not ask

    @classmethod
    def of(
        cls, modules: ModuleTree, layout: tree.TreeSpec, flat: Sequence[Any], *, asks_gradients: bool = True
    ) -> "ModuleCall":
        """Return how a module is called just now."""
        device = next((parameter.device.type for parameter in modules.parameters() if parameter is not None), HOST)
        casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        tensors = {number: value for number, value in enumerate(flat) if isinstance(value, torch.Tensor)}
        return cls(
            layout=layout,
            looks=tuple(
                (value.shape, value.dtype) if isinstance(value, torch.Tensor) else (type(value), value)
                for value in flat
            ),
            with_gradient=frozenset(
                number for number, tensor in tensors.items() if tensor.requires_grad and torch.is_grad_enabled()
            ),
            modes=modules.modes(),
            trained=modules.trained(),
            autocast=torch.get_autocast_dtype(device) if casts else None,
            gradients=torch.is_grad_enabled() if asks_gradients else None,
        )

    def serves(self, later: "ModuleCall") -> bool:
        """Say whether what was traced for this call computes a later call, which may need fewer gradients."""
        names = (field.name for field in fields(self) if field.name not in ("with_gradient", "gradients"))
        same = all(getattr(self, name) == getattr(later, name) for name in names)
        return same and self.gradients in (None, later.gradients) and self.with_gradient >= later.with_gradient


@dataclass(frozen=True, kw_only=True)
class ExportedModule:
    """The graph of a module's forward pass for arguments of some shapes, with what a call must look like."""

    program: Any  # an ExportedProgram
    signature: inspect.Signature
    call: ModuleCall
    state: WatchedState  # that the forward pass has read
    examples: tuple[Any, ...]  # the arguments one by one; tensors on the meta device
    paths: Mapping[str, str]  # of parameters, by placeholder; tied ones have the path of the first
    own_gradients: tuple[str, ...]  # what of the backward pass is the user's own, and is not traced
    random: tuple[RandomInput, ...]  # tensors that a call draws

    @classmethod
    def of(cls, module: torch.nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> "ExportedModule":
        """Export a module for example inputs: positional ones, or a mapping of names."""
        signature = inspect.signature(module.forward)
        flat, layout = flattened(signature, *((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {}))
        return cls.called(module, signature, layout, flat)

    @classmethod
    def called(
        cls, module: torch.nn.Module, signature: inspect.Signature, layout: tree.TreeSpec, flat: Sequence[Any]
    ) -> "ExportedModule":
        """Export a module for arguments one by one."""
        separate: list[Any] = []  # torch takes two arguments that are one object for one
        for value in flat:
            again = isinstance(value, torch.Tensor) and any(value is earlier for earlier in separate)
            separate.append(value.detach().clone().requires_grad_(value.requires_grad) if again else value)
        args, kwargs = tree.tree_unflatten(separate, layout)
        try:
            hooks, plain = _without_own_hooks(module), without_guesses()
            with _own_gradients(module) as gradients, hooks, plain, recorded(module) as record, quietly(), unseeded():
                program = torch.export.export(module, args, kwargs, strict=False)
            call = ModuleCall.of(ModuleTree.of(module), layout, flat, asks_gradients=record.asks_gradients)
            inline(program.graph_module, _device(module), call.autocast)
            program = decomposed(program)
            write_as_pairs(program.graph_module)
            random = take_random_inputs(program.graph_module)
        except InputError:  # of a function that the user marks
            raise
        except _BY_NUMBERS as error:
            raise InputError.of(_own_line(error), f"decides by numbers that only a run knows. {MARK}") from None
        except Exception as error:  # the module itself raises anything, and torch does
            raise InputError.of(*_not_traced(error)) from error
        for path, parameter in [*program.named_parameters()]:  # or else it would hold all numbers of them
            program.state_dict[path] = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        first: dict[int, str] = {}  # tied weights are one parameter
        tied = {
            path: first.setdefault(id(parameter), path)
            for path, parameter in module.named_parameters(remove_duplicate=False)
        }
        specs = program.graph_signature.input_specs
        return cls(
            program=program,
            signature=signature,
            call=call,
            state=record.watched(),
            own_gradients=tuple(dict.fromkeys(gradients)),
            random=random,
            examples=tuple(value.to("meta") if isinstance(value, torch.Tensor) else value for value in flat),
            paths={spec.arg.name: tied[str(spec.target)] for spec in specs if spec.kind.name == "PARAMETER"},
        )

    @cached_property
    def buffers(self) -> Mapping[str, torch.dtype]:
        """The buffers that it reads, by path, with the formats in which it does."""
        specs = [spec for spec in self.program.graph_signature.input_specs if spec.kind.name == "BUFFER"]
        values = {node.name: node.meta["val"] for node in self.nodes if node.op == "placeholder"}  # some are no tensors
        return {spec.target: values[spec.arg.name].dtype for spec in specs}

    @cached_property
    def structure(self) -> tree.TreeSpec:
        """How the parts of a result are put together. Torch makes a new class whenever it is asked."""
        return self.program.call_spec.out_spec

    @property
    def nodes(self) -> Iterator[Node]:
        """The graph in order."""
        return iter(self.program.graph_module.graph.nodes)

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The example arguments by placeholder."""
        specs = self.program.graph_signature.input_specs
        names = [spec.arg.name for spec in specs if spec.kind.name == "USER_INPUT"]
        return dict(zip(names, self.examples, strict=True))

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, exact: bool = False) -> Mapping[str, Any]:
        """Return the arguments of a call by placeholder; refuse those that differ from the example in number or shape.

        Numbers may be in double instead if they are ``exact``.
        """
        values, layout = flattened(self.signature, args, kwargs)
        require((layout == self.call.layout, "inputs", "have another structure than the example inputs; shard again"))
        named_values = dict(zip(self.arguments, values, strict=True))
        pairs = [(name, example, named_values[name]) for name, example in self.arguments.items()]
        if exact:
            not_double = [value for _, _, value in pairs if _is_floating(value) and value.dtype != torch.float64]
            require((not not_double, "inputs", "a proof computes in double: give module.double(), and such inputs"))
        pairs = [
            (name, example.double() if exact and _is_floating(example) else example, value)
            for name, example, value in pairs
        ]
        require(*((_is_like(example, value), name, _unlike(example, value)) for name, example, value in pairs))
        return named_values

    def returned(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield what it returns and the buffers that it changes: place or path, node or number, whether a buffer."""
        signature, (output,) = self.program.graph_signature, [node for node in self.nodes if node.op == "output"]
        count = len(signature.user_outputs)
        numbered = tree.tree_unflatten(list(range(count)), self.structure)
        try:
            places = {number: place_in_tree(path) for path, number in tree.tree_flatten_with_path(numbered)[0]}
        except ValueError:  # a class that torch takes apart, but of whose parts it knows no names
            places = {number: str(number) for number in range(count)}
        user = 0
        for spec, node in zip(signature.output_specs, output.args[0], strict=True):
            if spec.kind.name == "USER_OUTPUT":
                yield places[user] or "result", node, False
                user += 1
            elif spec.kind.name == "BUFFER_MUTATION":
                yield spec.target, node, True
            else:
                is_input = spec.kind.name == "USER_INPUT_MUTATION"
                what, remedy = ("input", "let it change a clone") if is_input else ("parameter", "make it a buffer")
                if "embedding_renorm" in str(node.target):
                    remedy = "give its embedding no max_norm, and scale the rows that it returns"
                raise InputError.of("module", f"changes its {what} {spec.target} in place; {remedy}")

    def result(self, flat: Sequence[Any]) -> Any:
        """Return what the module returns, made of its parts."""
        return tree.tree_unflatten(list(flat), self.structure)

    def part(self, nodes: Sequence[Node]) -> torch.fx.GraphModule:
        """Return the part of the graph that computes these nodes."""
        return part_of(self.program.graph_module, nodes)

    def varying(self) -> set[Node]:
        """Return the nodes whose values may differ between calls: what follows from a placeholder, or is drawn."""
        varying: set[Node] = set()
        for node in self.nodes:
            is_drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if node.op != "call_function" or is_drawn or not varying.isdisjoint(node.all_input_nodes):
                varying.add(node)
        return varying

    def values(
        self,
        part: torch.fx.GraphModule,
        arguments: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
        key: torch.Tensor | None = None,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run a part of the graph; ``key`` is that of the call, which random numbers follow from."""
        inputs = self.placeholders(part, arguments, buffers, key, parameters)
        with torch.set_grad_enabled(parameters is not None):
            return part(*inputs)

    def placeholders(
        self,
        part: torch.fx.GraphModule,
        arguments: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
        key: torch.Tensor | None = None,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> list[Any]:
        """Return what a part of the graph takes; random numbers are drawn only where it reads them."""
        inputs: list[Any] = []
        for spec in self.program.graph_signature.input_specs:
            match spec.kind.name:
                case "USER_INPUT":
                    inputs.append(arguments[spec.arg.name])
                case "BUFFER":
                    inputs.append(buffers[spec.target])
                case "PARAMETER":
                    inputs.append(parameters and parameters[self.paths[spec.arg.name]])
                case _:
                    inputs.append(self.program.constants[spec.target])
        if self.random:
            assert key is not None, "a call that draws has a key"
            used = {node.name for node in part.graph.nodes if node.op == "placeholder" and node.users}
            inputs += [drawn.whole(key) if drawn.name in used else None for drawn in self.random]
        return inputs


def _device(module: torch.nn.Module) -> str:
    return next((parameter.device.type for parameter in module.parameters()), "cpu")


_BY_NUMBERS = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
_INNER_GRADIENTS = ("fake tensor in the exported program constant", "functorch tensor", "no attribute 'constant'")
_MARK = "mark a function that calls it: @autoshard.local(...)"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextmanager
def _without_own_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Leave out the hooks of the module itself, which calls them around its sharded program as well."""
    hooks_by_name = {name: getattr(module, name) for name in _HOOKS}
    try:
        for name, hooks in hooks_by_name.items():
            setattr(module, name, type(hooks)())
        yield
    finally:
        for name, hooks in hooks_by_name.items():
            setattr(module, name, hooks)


@contextmanager
def _own_gradients(module: torch.nn.Module) -> Iterator[list[str]]:
    """Collect faults: lines that call functions with a backward pass of the user's, hooks of tensors and submodules."""
    base: Any = torch.autograd.Function
    tensors: Any = torch.Tensor
    apply, register = base.__dict__["apply"], tensors.register_hook
    faults = [
        f"{path}: has a hook of its backward pass, which would not be called; remove it"
        for path, submodule in module.named_modules()
        if path and (submodule._backward_hooks or submodule._backward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
    ]

    def noted(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        is_users = kind.__module__.partition(".")[0] != "torch"
        if is_users or kind is CheckpointFunction:
            remedy = _MARK if is_users else "give checkpoint use_reentrant=False"
            line = _line(traceback.extract_stack()[:-1])
            faults.append(f"{line}: {kind.__name__} has a backward pass of its own, which is not traced; {remedy}")
        return apply.__func__(kind, *args, **kwargs)

    def hooked(*_: Any) -> RemovableHandle:
        line = _line(traceback.extract_stack()[:-1])
        faults.append(f"{line}: the hook of a tensor would not be called; {_MARK}")
        return RemovableHandle(OrderedDict[int, Any]())

    def switched() -> None:
        line = _line(traceback.extract_stack()[:-2])
        faults.append(f"{line}: gradients are switched inside of autocast, which is not traced; switch them around it")

    base.apply, tensors.register_hook = classmethod(noted), hooked
    try:
        with gradients_inside_autocast(switched):
            yield faults
    finally:
        base.apply, tensors.register_hook = apply, register


def _own_line(error: BaseException) -> str:
    """Return the last line of an error's traceback that is not torch's, or the line of the node that it names."""
    _, _, named = str(error).partition("Original traceback:\n")
    of_node = " ".join(line.strip() for line in named.splitlines()[:2])
    return of_node or _line(traceback.extract_tb(error.__traceback__))


def _not_traced(error: Exception) -> tuple[str, str]:
    """Say where and why torch does not trace a module."""
    text = str(error).strip().partition("\n")[0]
    if "Cache'>" in text:
        return "module", "takes or returns a cache, which programs do not have; pass use_cache=False"
    if foreign := re.search(r"(Found|Unsupported input type) <class '(.*?)'>", text):
        verb, kind = "returns" if foreign[1] == "Found" else "takes", foreign[2]
        remedy = f"a tuple or a dict, or call torch.export.register_dataclass({kind.rpartition('.')[2]}) before"
        return "module", f"{verb} a {kind}, whose parts torch does not know; make it {remedy}"
    line = _own_line(error)
    if any(words in text for words in _INNER_GRADIENTS):
        what = "a gradient inside of forward, or another function that torch cannot trace"
        return line, f"takes {what}; write it as operations"
    return line, f"cannot be traced: {type(error).__name__}: {text}"


def _line(frames: Sequence[traceback.FrameSummary]) -> str:
    users = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename and frame.line]
    if not users or users[-1].filename == __file__:
        return "module"
    return f'File "{users[-1].filename}", line {users[-1].lineno}, in {users[-1].name} {users[-1].line}'


def flattened(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], tree.TreeSpec]:
    """Return the arguments of a call one by one, and how they are laid out."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError.of("inputs", f"do not fit the module's forward{signature}: {error}") from None
    return tree.tree_flatten((bound.args, bound.kwargs))


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_like(example: Any, value: Any) -> bool:
    if isinstance(example, torch.Tensor):
        return isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (example.shape, example.dtype)
    return type(value) is type(example) and value == example


def _unlike(example: Any, value: Any) -> str:
    """Say how an argument differs from the example."""

    def said(value: Any) -> str:
        is_tensor = isinstance(value, torch.Tensor)
        return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}" if is_tensor else repr(value)

    return f"is {said(value)}, and the module was traced for {said(example)}; shard it again for these inputs"
