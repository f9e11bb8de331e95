"""Writes what was recorded as plain Python: one function for each pass of a block, or several that a compiler takes."""

import keyword
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodDescriptorType
from typing import Any

import torch

from autoshard.engine.torch.recording import Operation

NAMES: Mapping[str, str] = {"F": "forward", "B": "backward", "I": "input_gradients", "W": "weight_gradients"}
# Names that functions use for something else than tensors of the block.
_RESERVED = ("source", "calls", "constants", "values", "inputs", "torch", "aten", "device", "inf", "nan")
_HEAD = '''"""What a rank runs of {title}, made from the table of the plan.

source(name) returns a weight, a sum of gradients, or what another block hands over. calls are collectives and what
differs by batch, constants what follows from the plan alone. A forward pass leaves values for its backward pass.
"""

from math import inf, nan

import torch

from autoshard.engine.torch.execution import by_rows

aten = torch.ops.aten
device = torch.device("{device}")
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A line of a function, the variables that it reads, and those that it makes."""

    text: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An instruction of the table as statements, below a comment."""

    comment: str
    statements: tuple[Statement, ...]
    compiles: bool = False  # whether a compiler may take it
    takes: bool = False  # whether it takes something from outside the block, and no more

    @property
    def reads(self) -> Iterator[str]:
        """Every variable that it reads."""
        return (name for line in self.statements for name in line.reads)


@dataclass(slots=True)
class Variables:
    """Names of tensors in a function: that of the value, or a number."""

    names: dict[int, str] = field(default_factory=dict)
    inlined: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)  # texts of views, and what they read
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    constants: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # with their numbers
    num_unnamed: int = 0

    def call(self, tensor: torch.Tensor, value: str) -> None:
        """Name a tensor after a value, unless it has a name."""
        if id(tensor) not in self.names:
            name = re.sub(r"\W|^(?=\d)", "_", value)
            while (
                keyword.iskeyword(name) or name in self.tensors or name in _RESERVED or re.match(r"[tc_\d]\d*$", name)
            ):
                name = f"{name}_"
            self._set(tensor, name)

    def of(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor; a tensor without a name gets a number."""
        if id(tensor) not in self.names:
            self.num_unnamed += 1
            self._set(tensor, f"t{self.num_unnamed}")
        return self.names[id(tensor)]

    def inline(self, operation: Operation) -> None:
        """Write a view in place, where its result is read."""
        reads = tuple(name for tensor in operation.reads for name in self.behind(tensor))
        self.inlined[id(operation.results[0])] = _Text(self).call(operation), reads

    def behind(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return the variables that the text of a tensor reads."""
        return self.inlined[id(tensor)][1] if id(tensor) in self.inlined else (self.of(tensor),)

    def constant(self, tensor: torch.Tensor, numbers: torch.Tensor) -> None:
        """Name a constant, and keep its numbers."""
        if id(tensor) not in self.names:
            name = f"c{len(self.constants) + 1}"
            self.constants[name] = tensor, numbers
            self._set(tensor, name)

    def _set(self, tensor: torch.Tensor, name: str) -> None:
        self.names[id(tensor)] = name
        self.tensors[name] = tensor


# -- one operation -------------------------------------------------------------------------------------


def statements(operations: Iterable[Operation], variables: Variables, read_once: Container[int]) -> Iterator[Statement]:
    """Write operations; a view that is ``read_once``, by the id of its result, stands where it is read."""
    for operation in operations:
        if operation.is_view and not operation.is_list and id(operation.results[0]) in read_once:
            variables.inline(operation)
        else:
            yield statement(operation, variables)


def statement(operation: Operation, variables: Variables) -> Statement:
    """Write an operation as a method of its first tensor where torch has one, else by its full name."""
    reads = tuple(name for tensor in operation.reads for name in variables.behind(tensor))
    writes = tuple(map(variables.of, operation.results))
    text = _Text(variables).call(operation)
    if not writes:
        return Statement(text=text, reads=reads)
    several = operation.is_list or len(operation.func._schema.returns) > 1
    places = [variables.of(value) if isinstance(value, torch.Tensor) else "_" for value in operation.returned]
    return Statement(text=f"{', '.join(places)}{',' if several else ''} = {text}", reads=reads, writes=writes)


@dataclass(frozen=True, slots=True)
class _Text:
    variables: Variables

    def call(self, operation: Operation) -> str:
        """Return the call of an operation."""
        func, args = operation.func, list(operation.args)
        special = _SPECIAL.get(str(func))
        if special and (text := special(self, operation)):
            return text
        options = [f"{name}={self.argument(option)}" for name, option in _options(operation).items()]
        name, schema = func.overloadpacket.__name__, func._schema
        of_torch = func.namespace == "aten"  # and no operation of a user that has the name of one of torch
        # A method in Python, such as index, may be another operation; methods take no lists with None, as of x[:, i].
        has_method = of_torch and isinstance(getattr(torch.Tensor, name, None), MethodDescriptorType)
        is_method = has_method and bool(schema.arguments) and schema.arguments[0].name == "self"
        is_method = is_method and not any(isinstance(part, list | tuple) and None in part for part in args)
        if is_method and args and isinstance(args[0], torch.Tensor) and "out" not in operation.kwargs:
            return f"{self.argument(args[0])}.{name}({', '.join([*map(self.argument, args[1:]), *options])})"
        space = "aten" if of_torch else f"torch.ops.{func.namespace}"
        return f"{space}.{name}.{func._overloadname}({', '.join([*map(self.argument, args), *options])})"

    def argument(self, argument: Any) -> str:
        """Return an argument."""
        match argument:
            case torch.Tensor():
                inlined = self.variables.inlined.get(id(argument))
                return inlined[0] if inlined else self.variables.of(argument)
            case torch.device():
                return "device"
            case list() | tuple():
                return f"[{', '.join(map(self.argument, argument))}]"
            case float() if math.isinf(argument) or math.isnan(argument):
                return str(argument)
            case _:
                return repr(argument)


def _options(operation: Operation) -> Mapping[str, Any]:
    """Return the options of an operation that differ from torch's defaults."""
    defaults = (("pin_memory", False), ("layout", torch.strided))
    return {
        name: option
        for name, option in operation.kwargs.items()
        if option is not None and (name, option) not in defaults
    }


def _narrow(text: _Text, operation: Operation) -> str:
    defaults: tuple[Any, ...] = (None, 0, 0, None, 1)
    x, dim, start, _, step = (*operation.args, *defaults[len(operation.args) :])
    if step != 1:
        return ""
    size = x.shape[dim]
    begin = min(max(0, start + size if start < 0 else start), size)
    return f"{text.argument(x)}.narrow({dim}, {begin}, {operation.results[0].shape[dim]})"


def _index(text: _Text, operation: Operation) -> str:
    x, index = operation.args
    if any(numbers is None for numbers in index):
        return ""
    return f"{text.argument(x)}[{', '.join(map(text.argument, index))}]"


def _cast(text: _Text, operation: Operation) -> str:
    options = _options(operation)
    return f"{text.argument(operation.args[0])}.to({options['dtype']})" if options.keys() == {"dtype"} else ""


def _reshaped(text: _Text, operation: Operation) -> str:
    """Write a view that copies where a tensor lies otherwise in memory than torch said when it computed no numbers."""
    x, shape = operation.args
    return f"{text.argument(x)}.reshape({text.argument(shape)})"


_SPECIAL: Mapping[str, Callable[[_Text, Operation], str]] = {
    "aten.slice.Tensor": _narrow,
    "aten.index.Tensor": _index,
    "aten._to_copy.default": _cast,
    "aten.view.default": _reshaped,
    "aten._unsafe_view.default": _reshaped,
}


# -- functions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PassText:
    """A pass of a block: its steps, which of the ``values`` it reads and writes, and its result.

    ``reads`` and ``writes`` map values to the variables of the function that hold them.
    """

    pass_: str
    steps: tuple[Step, ...]
    reads: Mapping[str, str]
    stays: frozenset[str]  # values that a later pass reads, too: others are removed when they are read
    writes: Mapping[str, str]
    result: str  # the variable that is returned, or None
    constants: tuple[str, ...]

    @property
    def name(self) -> str:
        """The function's name."""
        return NAMES[self.pass_]

    def whole(self) -> str:
        """Return one function."""
        return self._function(self.steps)

    def in_pieces(self) -> tuple[str, Mapping[str, tuple[str, ...]]]:
        """Return functions of the pieces that a compiler may take, one that calls them, and what each piece reads."""
        functions, pieces = list[str](), dict[str, tuple[str, ...]]()
        steps, together = list[Step](), list[Step]()
        ends = {self.result, *self.writes.values()}
        for number, step in enumerate((*self.steps, None)):
            if step and step.compiles:
                together.append(step)
            elif step and step.takes:
                steps.append(step)
            else:
                if _num_computing(together) < _FEWEST:
                    steps += together
                else:
                    later = {name for step in self.steps[number:] for name in step.reads} | ends
                    name = f"{self.name}_part_{len(functions) + 1}"
                    text, pieces[name], call = piece(name, together, later)
                    functions.append(text)
                    steps.append(call)
                together.clear()
                steps += [step] if step else []
        return "\n\n".join([*functions, self._function(steps)]), pieces

    def _function(self, steps: Sequence[Step]) -> str:
        values = ", values" if self.pass_ != "F" else ""
        head = [f"def {self.name}(source, calls, constants{values}):"]
        if self.constants:
            head.append(f"    {', '.join(self.constants)}, = constants")
        ends = {self.result, *self.writes.values()}
        used = {name for step in steps for name in step.reads} | ends
        for value, variable in self.reads.items():
            text = f"values[{value!r}]" if value in self.stays else f"values.pop({value!r})"
            if variable in used:
                head.append(f"    {variable} = {text}")
            elif value not in self.stays:
                head.append(f"    {text}")
        body = _body(steps, ends)
        if self.pass_ == "F":
            items = ", ".join(f"{value!r}: {variable}" for value, variable in self.writes.items())
            return "\n".join([*head, *body, f"    return {self.result}, {{{items}}}", ""])
        tail = [f"    values[{value!r}] = {variable}" for value, variable in self.writes.items()]
        return "\n".join([*head, *body, *tail, f"    return {self.result}", ""])


_FEWEST = 2  # operations that a compiler can make something of


def _num_computing(steps: Iterable[Step]) -> int:
    """Count statements that are not only views of tensors."""
    views = re.compile(r"\.(view|t|expand|unsqueeze|squeeze|permute|transpose|narrow|select|detach)\(.*\)$")
    return sum(not views.search(line.text) for step in steps for line in step.statements)


def _body(steps: Sequence[Step], ends: set[str]) -> Iterator[str]:
    """Yield the lines of statements; a variable is deleted after the last line that reads it."""
    last: dict[str, int] = {}
    for number, line in enumerate(line for step in steps for line in step.statements):
        last |= dict.fromkeys((*line.reads, *line.writes), number)
    number = 0
    for step in steps:
        if step.statements:
            yield f"    # {step.comment}"
        for line in step.statements:
            yield f"    {line.text}"
            names = dict.fromkeys((*line.reads, *line.writes))
            unread = [name for name in names if last[name] == number and name not in ends]
            if unread:
                yield f"    del {', '.join(unread)}"
            number += 1


def piece(name: str, steps: Sequence[Step], later: set[str]) -> tuple[str, tuple[str, ...], Step]:
    """Write steps as a function that empties its list of inputs.

    Return its text, the names of the inputs, and the step that calls it.
    """
    results = dict.fromkeys(name for step in steps for line in step.statements for name in line.writes)
    reads = tuple(dict.fromkeys(name for step in steps for name in step.reads if name not in results))
    writes = tuple(name for name in results if name in later)
    # A rank may have only zeros, and read nothing.
    unpacked = [f"    {', '.join(reads)}, = inputs", "    inputs.clear()"] if reads else []
    head = [f"def {name}(inputs):", *unpacked]
    text = "\n".join([*head, *_body(steps, set(writes)), f"    return [{', '.join(writes)}]", ""])
    packed = Statement(text=f"inputs = [{', '.join(reads)}]", reads=reads, writes=("inputs",))
    targets = f"{', '.join(writes)}, = " if writes else ""
    call = Statement(text=f"{targets}{name}(inputs)", reads=("inputs",), writes=writes)
    names = ", ".join(dict.fromkeys(step.comment.split(" ")[0].rstrip(":") for step in steps))
    return text, reads, Step(comment=names, statements=(packed, call))


def module(blocks: Sequence[str], device: torch.device, functions: Iterable[str]) -> str:
    """Return the text of a file."""
    title = f"{blocks[0]}{f' and {len(blocks) - 1} equal blocks' if blocks[1:] else ''}"
    return "\n\n".join([_HEAD.format(title=title, device=device), *functions])
