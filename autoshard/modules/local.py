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
OF_TORCH = f"{NAMESPACE}torch"  # of functions of torch
_FORM = '"batch seq _, batch -> batch seq _": the dims of what it takes, an arrow, the dims of what it returns'
MARK = "A function that autoshard.local marks may do so"
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDims:
    """The dims of each tensor that a local function takes and returns; a name that begins with _ is needed whole."""

    inputs: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    where: str

    @classmethod
    def of(cls, text: str, where: str) -> "LocalDims":
        """Read a text. A _ is named after its tensor and axis; in a result, after that axis of the first tensor."""
        sides = [[tensor.split() for tensor in side.split(",")] for side in text.split("->")]
        require((len(sides) == 2, where, f'"{text}" is not like {_FORM}'))
        inputs = [
            [f"_{n}.{at}" if name == "_" else name for at, name in enumerate(names)] for n, names in enumerate(sides[0])
        ]
        results = [[f"_0.{at}" if name == "_" else name for at, name in enumerate(names)] for names in sides[1]]
        input_dims = {dim for dims in inputs for dim in dims}
        for names in (*sides[0], *sides[1]):
            for name in names:
                require(
                    (re.fullmatch(r"[A-Za-z_]\w*|[1-9]\d*", name) is not None, where, f"{name} is no name of a dim")
                )
                twice = name[0] != "_" and not name.isdigit() and names.count(name) > 1
                require((not twice, where, f"{name} stands twice in one tensor; write _ for what is needed whole"))
        require(
            *((not dim.isdigit(), where, f"{dim} is a number, which only results have; write _") for dim in input_dims)
        )
        message = "nothing says how long {} of a result is; write a number, or a name that an input has"
        unknown = [dim for dims in results for dim in dims if dim not in input_dims and not dim.isdigit()]
        require(*((False, where, message.format(dim.partition("0.")[0])) for dim in unknown))
        return cls(inputs=tuple(map(tuple, inputs)), results=tuple(map(tuple, results)), where=where)

    @property
    def cut(self) -> list[str]:
        """The dims that may be cut."""
        return list(dict.fromkeys(dim for dims in self.inputs for dim in dims if dim[0] != "_"))

    def lengths(self, tensors: Sequence[torch.Tensor]) -> Mapping[str, int]:
        """Return the size of each dim; refuse tensors that do not fit the text."""
        sizes: dict[str, int] = {}
        count = f"takes {len(self.inputs)} tensors, not {len(tensors)}"
        require((len(tensors) == len(self.inputs), self.where, count))
        for number, (names, tensor) in enumerate(zip(self.inputs, tensors, strict=True), start=1):
            ranks = f"names {len(names)} dims of tensor {number}, which has {tensor.dim()}"
            require((len(names) == tensor.dim(), self.where, ranks))
            for name, size in zip(names, tensor.shape, strict=True):
                first_size = sizes.setdefault(name, size)
                require(
                    (
                        first_size == size,
                        self.where,
                        f"{name} is {size} long in tensor {number}, and {first_size} before",
                    )
                )
        return sizes

    def shapes(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        """Return the shapes of the results."""
        sizes = self.lengths(tensors)
        return [tuple(int(dim) if dim.isdigit() else sizes[dim] for dim in dims) for dims in self.results]


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
    stated_dims = LocalDims.of(text, where) if text else None
    operation = registered(function, where, title.replace("<locals>", "").replace("<lambda>", "unnamed"))

    @functools.wraps(function, updated=())
    def call(*tensors: Any, **keywords: Any) -> Any:
        are_tensors = [isinstance(argument, torch.Tensor) for argument in tensors]
        require((all(are_tensors) and bool(are_tensors) and not keywords, where, "takes tensors only, by position"))
        dims = ["_" + " _" * (tensor.dim() - 1) if tensor.dim() else "" for tensor in tensors]
        results = operation(list(tensors), text or f"{', '.join(dims)} -> {dims[0]}")
        return tuple(results) if stated_dims and len(stated_dims.results) > 1 else results[0]

    return call


def registered(function: Callable[..., Any], where: str, title: str) -> Any:
    """Register a function as an operation of torch; the operation's last argument is the text of the dims.

    ``where`` says where it is written, and ``title`` what it is called.
    """
    module = getattr(function, "__module__", None) or "torch"  # which functions of C++ do not say
    space, name = (re.sub(r"\W+", "_", text).strip("_") for text in (NAMESPACE + module, title))
    free = (f"{name}_{count}" if count else name for count in itertools.count())
    name = next(candidate for candidate in free if not hasattr(getattr(torch.ops, space), candidate))

    def run(tensors: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
        before, stated_shapes = _versions(tensors), LocalDims.of(text, where).shapes(tensors)
        results = function(*tensors)
        results = list(results) if isinstance(results, tuple | list) else [results]
        shapes = [
            tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__ for result in results
        ]
        require((shapes == stated_shapes, where, f"returns {shapes}, and its dims say {stated_shapes}"))
        require(
            (_versions(tensors) == before, where, "changes a tensor in place that it was given; let it change a clone")
        )
        return [result.to(_format(tensors)) for result in results]

    def forward(tensors: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
        return [result.clone(memory_format=torch.contiguous_format) for result in run(tensors, text)]

    def shaped(tensors: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
        return [
            tensors[0].new_empty(shape, dtype=_format(tensors)) for shape in LocalDims.of(text, where).shapes(tensors)
        ]

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[0])
        ctx.text = inputs[1]

    def backward(ctx: Any, upstream: Sequence[torch.Tensor]) -> Any:
        copies = [saved.detach().requires_grad_(saved.requires_grad) for saved in ctx.saved_tensors]
        with torch.enable_grad():
            pairs = [(a, b) for a, b in zip(run(copies, ctx.text), upstream, strict=True) if a.requires_grad]
        trained = [copy for copy in copies if copy.requires_grad]
        gradients = iter(
            torch.autograd.grad([a for a, _ in pairs], trained, [b for _, b in pairs], allow_unused=True)
            if pairs
            else [None] * len(trained)
        )
        return [next(gradients) if copy.requires_grad else None for copy in copies], None

    schema = "(Tensor[] tensors, str dims) -> Tensor[]"
    operation: Any = torch.library.custom_op(f"{space}::{name}", forward, mutates_args=(), schema=schema)
    operation.register_fake(shaped)
    operation.register_autograd(backward, setup_context=keep)
    return operation


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _format(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the format of results: that of the first tensor that holds no whole numbers."""
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), tensors[0].dtype)
