"""Whole weights from Hugging Face form to ours and back, for numpy arrays and torch tensors alike.

Only methods that both have are called: ``reshape``, ``swapaxes`` and slices.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from autoshard.engine.hf_names import DERIVED, FUSED, HEADS, HF_NAMES, Form
from autoshard.errors import Fault, InputError, nearest
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.evaluate import instances
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload

A = TypeVar("A")
Empty = Callable[..., Any]  # ``numpy.empty`` or ``torch.empty``: called with a shape and ``dtype=``


@dataclass(frozen=True, slots=True)
class Axes:
    """How the axes of a tensor are made of dims; where a dim has a number, one slice along it is meant.

    >>> axes = Axes.parse("hidden (qkv:1 kv_heads head_dim)")
    >>> axes.shape({"hidden": 8, "qkv": 3, "kv_heads": 2, "head_dim": 4}), axes.dims
    ((8, 24), ('hidden', 'kv_heads', 'head_dim'))
    """

    groups: tuple[tuple[str, ...], ...]
    chosen: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> "Axes":
        """Read the text form of the table."""
        found = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", text)]
        parts = [dim.partition(":") for group in found for dim in group]
        groups = tuple(tuple(dim.partition(":")[0] for dim in group) for group in found)
        return cls(groups, tuple((dim, int(number)) for dim, _, number in parts if number))

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims of the slice that is meant, in order."""
        return tuple(dim for group in self.groups for dim in group if dim not in dict(self.chosen))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(math.prod(sizes[dim] for dim in group) for group in self.groups)

    def place(self, tensor: Any, sizes: Mapping[str, int]) -> tuple[Any, tuple[int | slice, ...]]:
        """Return the tensor with an axis for every dim, and the index of the slice."""
        every = [dim for group in self.groups for dim in group]
        index = tuple(dict(self.chosen).get(dim, slice(None)) for dim in every)
        return tensor.reshape(tuple(sizes[dim] for dim in every)), index


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor by name, or a slice of it."""

    tensor: str
    axes: Axes


@dataclass(frozen=True, slots=True)
class Row:
    """The same numbers there and here."""

    theirs: Part
    ours: Part


@dataclass(frozen=True, slots=True)
class HfNames:
    """The tensors of one model in one Hugging Face form, each with its place among ours."""

    rows: tuple[Row, ...]
    sizes: Mapping[str, int]
    tied: Mapping[str, str]  # our tensors that only share another's values, in no file: theirs -> the owner's

    @classmethod
    def of(cls, family: str, model: ModelSpec, form: Form = "published") -> "HfNames":
        """Expand the table of a ``model_type`` for a model."""
        if family not in HF_NAMES:
            raise InputError.of("model_type", f"{family!r} has no table of names. {nearest(family, list(HF_NAMES))}")
        workload = Workload(seq_len=1, global_batch=1, precision=Precision.named("fp32"))
        graph = decoder_graph(model, workload, load_kernels("torch_cpu"), micro_batch=1)
        tied = {_instance(other): _instance(owner) for other, owner in graph.tied.items()}
        dims = {f"{name}.{t.name}": t.dims for name, block in instances(graph) for t in block.parameters}
        wanted = {name: axes for name, axes in dims.items() if name not in tied}
        rows = tuple(_expanded(HF_NAMES[family][form], model, wanted))
        missing = sorted(wanted.keys() - {row.ours.tensor for row in rows})
        if missing:
            raise InputError.of("model_type", f"{family} has no tensors for {_listed(missing)} of {model.name}")
        return cls(rows, {**graph.sizes, **FUSED}, tied)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor of theirs."""
        return {row.theirs.tensor: row.theirs.axes.shape(self.sizes) for row in self.rows}


def from_hf(family: str, model: ModelSpec, tensors: Mapping[str, A], empty: Empty) -> dict[str, A]:
    """Return our weights, named as in ``graph/evaluate``, of a whole model in either form; they may share memory."""
    forms: tuple[Form, ...] = ("published", "module")
    tables = [HfNames.of(family, model, form) for form in forms]
    names = max(tables, key=lambda table: len(table.shapes.keys() & tensors.keys()))
    faults = list(_faults(names, tensors))
    if faults:
        raise InputError(faults)
    ours = _moved(((row.theirs, row.ours) for row in names.rows), tensors, names.sizes, empty)
    return ours | {other: ours[owner] for other, owner in names.tied.items()}


def to_hf(
    family: str, model: ModelSpec, weights: Mapping[str, A], empty: Empty, form: Form = "published"
) -> dict[str, A]:
    """Return the tensors of a Hugging Face model with our weights; a tied head is left out, as their files do."""
    names = HfNames.of(family, model, form)
    return _moved(((row.ours, row.theirs) for row in names.rows), weights, names.sizes, empty)


def _instance(parameter: str) -> str:
    kind, _, name = parameter.partition(".")
    return f"{kind}.0.{name}"


def _expanded(table: Sequence[tuple[str, str, str]], model: ModelSpec, wanted: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of what the model has, one per layer and expert."""
    for theirs, axes, ours in table:
        layers = range(model.num_layers if "{layer}" in ours else 1)
        apart = "{expert}" in theirs
        experts = range(model.num_experts if apart else 1)
        for layer, expert in product(layers, experts):
            name = ours.format(layer=layer)
            if name in wanted:
                dims = [f"{dim}:{expert}" if apart and dim == "experts" else dim for dim in wanted[name]]
                there = Part(theirs.format(layer=layer, expert=expert), Axes.parse(axes))
                yield Row(there, Part(name, Axes.parse(" ".join(dims))))


def _faults(names: HfNames, tensors: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what is missing, what nobody knows, and what has another shape."""
    shapes = names.shapes
    for name, shape in shapes.items():
        if name not in tensors:
            yield Fault(where=name, message="missing")
        elif tuple(tensors[name].shape) != shape:
            yield Fault(where=name, message=f"has shape {tuple(tensors[name].shape)}, the model asks for {shape}")
    needless = (*DERIVED, *HEADS) if names.tied else DERIVED
    for name in tensors:
        if name not in shapes and not name.endswith(needless):
            yield Fault(where=name, message="is no tensor of this model")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _moved(
    pairs: Iterable[tuple[Part, Part]], tensors: Mapping[str, A], sizes: Mapping[str, int], empty: Empty
) -> dict[str, A]:
    """Return the target tensors; one that is made of slices is allocated and filled."""
    made: dict[str, Any] = {}
    for source, target in pairs:
        split, index = source.axes.place(tensors[source.tensor], sizes)
        piece = _ordered(split[index], source.axes.dims, target.axes.dims)
        shape = target.axes.shape(sizes)
        if not target.axes.chosen:
            made[target.tensor] = piece.reshape(shape)
            continue
        if target.tensor not in made:
            made[target.tensor] = empty(shape, dtype=piece.dtype)
        split, index = target.axes.place(made[target.tensor], sizes)
        split[index] = piece
    return made


def _ordered(tensor: Any, dims: Sequence[str], wanted: Sequence[str]) -> Any:
    """Return the tensor with its axes in the wanted order."""
    assert sorted(dims) == sorted(wanted), f"{dims} are not {wanted}"
    now = list(dims)
    for place, dim in enumerate(wanted):
        at = now.index(dim)
        tensor = tensor.swapaxes(place, at)
        now[place], now[at] = now[at], now[place]
    return tensor
