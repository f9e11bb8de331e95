"""A function that the user marks as one operation: anything goes inside, and each rank runs it on its parts."""

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch

from autoshard.errors import require

NAMESPACE = "autoshard_local_"  # of the operations, with the name of their module behind
_FORM = '"batch seq _, batch -> batch seq _": the dims of what it takes, an arrow, the dims of what it returns'
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDims:
    """The dims of each tensor that a local function takes and returns; a name that begins with _ is needed whole."""

    given: tuple[tuple[str, ...], ...]
    made: tuple[tuple[str, ...], ...]
    where: str

    @classmethod
    def of(cls, text: str, where: str) -> "LocalDims":
        """Read a text; each _ gets a name of its own, which says its place: in a result, that of the first tensor."""
        sides = [[one.split() for one in side.split(",")] for side in text.split("->")]
        require((len(sides) == 2, where, f'"{text}" is not like {_FORM}'))
        given = [
            [f"_{n}.{at}" if one == "_" else one for at, one in enumerate(each)] for n, each in enumerate(sides[0])
        ]
        made = [[f"_0.{at}" if one == "_" else one for at, one in enumerate(each)] for each in sides[1]]
        known = {one for each in given for one in each}
        for each in (*sides[0], *sides[1]):
            for one in each:
                require((re.fullmatch(r"[A-Za-z_]\w*|[1-9]\d*", one) is not None, where, f"{one} is no name of a dim"))
                twice = one[0] != "_" and not one.isdigit() and each.count(one) > 1
                require((not twice, where, f"{one} stands twice in one tensor; write _ for what is needed whole"))
        require(*((not one.isdigit(), where, f"{one} is a number, which only results have; write _") for one in known))
        message = "nothing says how long {} of a result is; write a number, or a name that an input has"
        unknown = [one for each in made for one in each if one not in known and not one.isdigit()]
        require(*((False, where, message.format(one.partition("0.")[0])) for one in unknown))
        return cls(given=tuple(map(tuple, given)), made=tuple(map(tuple, made)), where=where)

    @property
    def cut(self) -> list[str]:
        """The dims that may be cut."""
        return list(dict.fromkeys(one for each in self.given for one in each if one[0] != "_"))

    def lengths(self, tensors: Sequence[torch.Tensor]) -> Mapping[str, int]:
        """Return how long the dims are; refuse tensors that do not have them."""
        found: dict[str, int] = {}
        count = f"takes {len(self.given)} tensors, not {len(tensors)}"
        require((len(tensors) == len(self.given), self.where, count))
        for number, (names, tensor) in enumerate(zip(self.given, tensors, strict=True), start=1):
            ranks = f"names {len(names)} dims of tensor {number}, which has {tensor.dim()}"
            require((len(names) == tensor.dim(), self.where, ranks))
            for name, size in zip(names, tensor.shape, strict=True):
                own = found.setdefault(name, size)
                require((own == size, self.where, f"{name} is {size} long in tensor {number}, and {own} before"))
        return found

    def shapes(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        """Return the shapes of the results."""
        found = self.lengths(tensors)
        return [tuple(int(one) if one.isdigit() else found[one] for one in each) for each in self.made]


@overload
def local(dims: str) -> Callable[[Function], Function]: ...
@overload
def local(dims: Function) -> Function: ...
def local(dims: Any) -> Any:
    """Make a function of tensors one operation of a traced module, whatever it does inside.

    The text names the dims of what it takes and returns: "batch seq _, batch -> batch seq _". A named dim may be cut:
    parts of the inputs must give these parts of the results, or, where a result lacks it, parts of a sum. Names that
    begin with _ are needed whole. Without a text, all is whole, and the result is like the first tensor.
    """
    return functools.partial(_local, dims) if isinstance(dims, str) else _local("", dims)


def _local(text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    code, title = getattr(function, "__code__", None), getattr(function, "__qualname__", type(function).__name__)
    where = f'File "{code.co_filename}", line {code.co_firstlineno}, in {title}' if code else title
    known = LocalDims.of(text, where) if text else None
    operation = _operation(function, where, title.replace("<locals>", "").replace("<lambda>", "unnamed"))

    @functools.wraps(function, updated=())
    def call(*tensors: Any, **keywords: Any) -> Any:
        taken = [isinstance(one, torch.Tensor) for one in tensors]
        require((all(taken) and bool(taken) and not keywords, where, "takes tensors only, by position"))
        dims = ["_" + " _" * (one.dim() - 1) if one.dim() else "" for one in tensors]
        found = operation(list(tensors), text or f"{', '.join(dims)} -> {dims[0]}")
        return tuple(found) if known and len(known.made) > 1 else found[0]

    return call


def _operation(function: Callable[..., Any], where: str, title: str) -> Any:
    """Register a function as an operation of torch, whose last argument is its text."""
    space, name = (re.sub(r"\W+", "_", one).strip("_") for one in (NAMESPACE + function.__module__, title))
    free = (f"{name}_{count}" if count else name for count in itertools.count())
    name = next(one for one in free if not hasattr(getattr(torch.ops, space), one))

    def run(tensors: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
        before, wanted = _versions(tensors), LocalDims.of(text, where).shapes(tensors)
        found = function(*tensors)
        found = list(found) if isinstance(found, tuple | list) else [found]
        shapes = [tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__ for one in found]
        require((shapes == wanted, where, f"returns {shapes}, and its dims say {wanted}"))
        require(
            (_versions(tensors) == before, where, "changes a tensor in place that it was given; let it change a clone")
        )
        return [one.to(_format(tensors)) for one in found]

    def forward(tensors: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
        return [one.clone(memory_format=torch.contiguous_format) for one in run(tensors, text)]

    def shaped(tensors: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
        return [tensors[0].new_empty(one, dtype=_format(tensors)) for one in LocalDims.of(text, where).shapes(tensors)]

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[0])
        ctx.text = inputs[1]

    def backward(ctx: Any, upstream: Sequence[torch.Tensor]) -> Any:
        own = [one.detach().requires_grad_(one.requires_grad) for one in ctx.saved_tensors]
        with torch.enable_grad():
            pairs = [(a, b) for a, b in zip(run(own, ctx.text), upstream, strict=True) if a.requires_grad]
        wanted = [one for one in own if one.requires_grad]
        found = iter(
            torch.autograd.grad([a for a, _ in pairs], wanted, [b for _, b in pairs], allow_unused=True)
            if pairs
            else [None] * len(wanted)
        )
        return [next(found) if one.requires_grad else None for one in own], None

    schema = "(Tensor[] tensors, str dims) -> Tensor[]"
    operation: Any = torch.library.custom_op(f"{space}::{name}", forward, mutates_args=(), schema=schema)
    operation.register_fake(shaped)
    operation.register_autograd(backward, setup_context=keep)
    return operation


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if one.is_inference() else one._version for one in tensors]


def _format(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the format of results: that of the first tensor that holds no whole numbers."""
    return next((one.dtype for one in tensors if one.is_floating_point()), tensors[0].dtype)
