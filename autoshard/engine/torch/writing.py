"""Writes what was recorded as plain Python: one function for each pass of a block, or several that a compiler takes."""

import keyword
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.engine.torch.recording import Operation

NAMES: Mapping[str, str] = {"F": "forward", "B": "backward", "I": "input_gradients", "W": "weight_gradients"}
_TAKEN = ("given", "calls", "constants", "values", "some", "torch", "aten", "device", "inf", "nan")
_HEAD = '''"""What a rank runs of {title}, made from the table of the plan.

given(name) is a weight, a sum of gradients, or what another block hands over. calls are collectives and what differs by
batch, constants what follows from the plan alone. values are kept from a forward pass for its backward pass.
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
        return (name for one in self.statements for name in one.reads)


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
            name = re.sub(r"\W", "_", value)
            while keyword.iskeyword(name) or name in self.tensors or name in _TAKEN or re.match(r"[tc_\d]\d*$", name):
                name = f"{name}_"
            self._set(tensor, name)

    def of(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor: one of its own, if it has none."""
        if id(tensor) not in self.names:
            self.num_unnamed += 1
            self._set(tensor, f"t{self.num_unnamed}")
        return self.names[id(tensor)]

    def inline(self, operation: Operation) -> None:
        """Write a view in place, where its result is read."""
        reads = tuple(name for one in operation.reads for name in self.behind(one))
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


def statement(operation: Operation, variables: Variables) -> Statement:
    """Write an operation as a method of its first tensor where torch has one, else by its full name."""
    reads = tuple(name for one in operation.reads for name in variables.behind(one))
    writes = tuple(variables.of(one) for one in operation.results)
    text = _Text(variables).call(operation)
    if not writes:
        return Statement(text=text, reads=reads)
    several = operation.is_list or len(operation.func._schema.returns) > 1
    places = [variables.of(one) if isinstance(one, torch.Tensor) else "_" for one in operation.found]
    return Statement(text=f"{', '.join(places)}{',' if several else ''} = {text}", reads=reads, writes=writes)


@dataclass(frozen=True, slots=True)
class _Text:
    variables: Variables

    def call(self, operation: Operation) -> str:
        """Return the call of an operation."""
        func, args = operation.func, list(operation.args)
        special = _SPECIAL.get(str(func))
        if special and (found := special(self, operation)):
            return found
        named = [f"{name}={self.argument(one)}" for name, one in operation.kwargs.items() if not _is_default(name, one)]
        name, schema = func.overloadpacket.__name__, func._schema
        owned = bool(schema.arguments) and schema.arguments[0].name == "self" and hasattr(torch.Tensor, name)
        if owned and args and isinstance(args[0], torch.Tensor) and "out" not in operation.kwargs:
            return f"{self.argument(args[0])}.{name}({', '.join([*map(self.argument, args[1:]), *named])})"
        return f"aten.{name}.{func._overloadname}({', '.join([*map(self.argument, args), *named])})"

    def argument(self, one: Any) -> str:
        """Return an argument."""
        match one:
            case torch.Tensor():
                inlined = self.variables.inlined.get(id(one))
                return inlined[0] if inlined else self.variables.of(one)
            case torch.device():
                return "device"
            case list() | tuple():
                return f"[{', '.join(map(self.argument, one))}]"
            case float() if math.isinf(one) or math.isnan(one):
                return str(one)
            case _:
                return repr(one)


def _is_default(name: str, one: Any) -> bool:
    return one is None or (name == "pin_memory" and not one) or (name == "layout" and one == torch.strided)


def _narrow(text: _Text, operation: Operation) -> str:
    missing: tuple[Any, ...] = (None, 0, 0, None, 1)[len(operation.args) :]
    x, dim, start, _, step = (*operation.args, *missing)
    if step != 1:
        return ""
    size = x.shape[dim]
    begin = min(max(0, start + size if start < 0 else start), size)
    return f"{text.argument(x)}.narrow({dim}, {begin}, {operation.results[0].shape[dim]})"


def _index(text: _Text, operation: Operation) -> str:
    x, index = operation.args
    if any(one is None for one in index):
        return ""
    return f"{text.argument(x)}[{', '.join(map(text.argument, index))}]"


def _cast(text: _Text, operation: Operation) -> str:
    given = {name: one for name, one in operation.kwargs.items() if not _is_default(name, one)}
    return f"{text.argument(operation.args[0])}.to({given['dtype']})" if given.keys() == {"dtype"} else ""


_SPECIAL: Mapping[str, Callable[[_Text, Operation], str]] = {
    "aten.slice.Tensor": _narrow,
    "aten.index.Tensor": _index,
    "aten._to_copy.default": _cast,
    "aten._unsafe_view.default": lambda text, operation: "{}.view({})".format(*map(text.argument, operation.args)),
}


# -- functions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PassText:
    """A pass of a block: its steps, the ``values`` that it takes and leaves, and its result."""

    pass_: str
    steps: tuple[Step, ...]
    taken: Mapping[str, str]  # variables by the values that they are
    stays: frozenset[str]  # values that are not taken out
    kept: Mapping[str, str]  # variables by the values that they are, which are made here and left for later
    result: str  # the variable returned, or None
    constants: tuple[str, ...]

    @property
    def name(self) -> str:
        """The function's name."""
        return NAMES[self.pass_]

    def whole(self) -> str:
        """Return one function."""
        return self._function(self.steps)

    def in_pieces(self) -> tuple[str, Mapping[str, tuple[str, ...]]]:
        """Return functions of the pieces that a compiler may take, one that calls them, and what each reads."""
        functions, pieces = list[str](), dict[str, tuple[str, ...]]()
        steps, together = list[Step](), list[Step]()
        wanted = {self.result, *self.kept.values()}
        for number, step in enumerate((*self.steps, None)):
            if step and step.compiles:
                together.append(step)
            elif step and step.takes:
                steps.append(step)
            else:
                if _num_computing(together) < _FEWEST:
                    steps += together
                else:
                    later = {name for step in self.steps[number:] for name in step.reads} | wanted
                    name = f"{self.name}_part_{len(functions) + 1}"
                    text, pieces[name], call = piece(name, together, later)
                    functions.append(text)
                    steps.append(call)
                together.clear()
                steps += [step] if step else []
        return "\n\n".join([*functions, self._function(steps)]), pieces

    def _function(self, steps: Sequence[Step]) -> str:
        values = ", values" if self.pass_ != "F" else ""
        head = [f"def {self.name}(given, calls, constants{values}):"]
        if self.constants:
            head.append(f"    {', '.join(self.constants)}, = constants")
        ends = {self.result, *self.kept.values()}
        used = {name for step in steps for name in step.reads} | ends
        for value, variable in self.taken.items():
            found = f"values[{value!r}]" if value in self.stays else f"values.pop({value!r})"
            if variable in used:
                head.append(f"    {variable} = {found}")
            elif value not in self.stays:
                head.append(f"    {found}")
        body = _body(steps, ends)
        if self.pass_ == "F":
            kept = ", ".join(f"{value!r}: {variable}" for value, variable in self.kept.items())
            return "\n".join([*head, *body, f"    return {self.result}, {{{kept}}}", ""])
        left = [f"    values[{value!r}] = {variable}" for value, variable in self.kept.items()]
        return "\n".join([*head, *body, *left, f"    return {self.result}", ""])


_FEWEST = 2  # operations that a compiler can make something of


def _num_computing(steps: Iterable[Step]) -> int:
    """Count statements that are not only views of tensors."""
    views = re.compile(r"\.(view|t|expand|unsqueeze|squeeze|permute|transpose|narrow|select|detach)\(.*\)$")
    return sum(not views.search(one.text) for step in steps for one in step.statements)


def _body(steps: Sequence[Step], ends: set[str]) -> Iterator[str]:
    """Yield the lines of statements; a variable is deleted after the last line that reads it."""
    last: dict[str, int] = {}
    flat = [one for step in steps for one in step.statements]
    for number, one in enumerate(flat):
        last |= dict.fromkeys((*one.reads, *one.writes), number)
    number = 0
    for step in steps:
        if step.statements:
            yield f"    # {step.comment}"
        for one in step.statements:
            yield f"    {one.text}"
            gone = [
                name for name in dict.fromkeys((*one.reads, *one.writes)) if last[name] == number and name not in ends
            ]
            if gone:
                yield f"    del {', '.join(gone)}"
            number += 1


def piece(name: str, steps: Sequence[Step], later: set[str]) -> tuple[str, tuple[str, ...], Step]:
    """Write steps as a function that empties its list of inputs.

    Return its text, the names of the inputs, and the step that calls it.
    """
    made = [name for step in steps for one in step.statements for name in one.writes]
    reads = tuple(dict.fromkeys(one for step in steps for one in step.reads if one not in made))
    writes = tuple(dict.fromkeys(one for one in made if one in later))
    taken = [f"    {', '.join(reads)}, = some", "    some.clear()"] if reads else []  # a rank may have only zeros
    lines = [f"def {name}(some):", *taken]
    text = "\n".join([*lines, *_body(steps, set(writes)), f"    return [{', '.join(writes)}]", ""])
    given = Statement(text=f"some = [{', '.join(reads)}]", reads=reads, writes=("some",))
    left = f"{', '.join(writes)}, = " if writes else ""
    call = Statement(text=f"{left}{name}(some)", reads=("some",), writes=writes)
    names = ", ".join(dict.fromkeys(step.comment.split(" ")[0].rstrip(":") for step in steps))
    return text, reads, Step(comment=names, statements=(given, call))


def module(blocks: Sequence[str], device: torch.device, functions: Iterable[str]) -> str:
    """Return the text of a file."""
    title = f"{blocks[0]}{f' and {len(blocks) - 1} equal blocks' if blocks[1:] else ''}"
    return "\n\n".join([_HEAD.format(title=title, device=device), *functions])
