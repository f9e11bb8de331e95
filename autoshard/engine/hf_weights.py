"""Weights from Hugging Face form to ours and back, whole or box by box, for numpy arrays and torch tensors alike.

Only methods that both have are called: ``reshape``, ``swapaxes`` and slices.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar, cast

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
class Slice:
    """A slice of a tensor of theirs, and where its numbers go in a box of ours."""

    tensor: str
    index: tuple[slice, ...]
    lengths: Mapping[str, int]  # of the dims of what is read, in their order
    dims: tuple[str, ...]  # the same dims in ours
    place: tuple[slice, ...]

    def laid(self, read: Any) -> Any:
        """Return what was read with the axes of our tensor."""
        split = read.reshape(tuple(self.lengths.values()))
        shape = tuple(part.stop - part.start for part in self.place)
        return _ordered(split, tuple(self.lengths), self.dims).reshape(shape)


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

    @classmethod
    def fitting(cls, family: str, model: ModelSpec, names: Collection[str]) -> "HfNames":
        """Expand the table of the form that has most of these names of theirs."""
        forms: tuple[Form, ...] = ("published", "module")
        tables = [cls.of(family, model, form) for form in forms]
        return max(tables, key=lambda table: len(table.shapes.keys() & set(names)))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor of theirs."""
        return {row.theirs.tensor: row.theirs.axes.shape(self.sizes) for row in self.rows}

    def faults(self, found: Mapping[str, tuple[int, ...]]) -> Iterator[Fault]:
        """Yield what is missing among tensors of these shapes, what nobody knows, and what has another shape."""
        for name, shape in self.shapes.items():
            if name not in found:
                yield Fault(where=name, message="missing")
            elif found[name] != shape:
                yield Fault(where=name, message=f"has shape {found[name]}, the model asks for {shape}")
        needless = (*DERIVED, *HEADS) if self.tied else DERIVED
        for name in found.keys() - self.shapes.keys():
            if not name.endswith(needless):
                yield Fault(where=name, message="is no tensor of this model")


def from_hf(family: str, model: ModelSpec, tensors: Mapping[str, A], empty: Empty) -> dict[str, A]:
    """Return our weights, named as in ``graph/evaluate``, of a whole model in either form; they may share memory."""
    names = HfNames.fitting(family, model, tensors.keys())
    shapes = {name: tuple(cast(Any, tensor).shape) for name, tensor in tensors.items()}
    faults = list(names.faults(shapes))
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


def slices(row: Row, sizes: Mapping[str, int], offsets: Sequence[int], lengths: Sequence[int]) -> Iterator[Slice]:
    """Yield what a row has of a box of our tensor, as slices of theirs that are whole ranges along every axis.

    >>> theirs = Part("qkv", Axes.parse("(kv_heads qkv:1 head_dim) hidden"))
    >>> row = Row(theirs, Part("k", Axes.parse("kv_heads head_dim hidden")))
    >>> sizes = {"kv_heads": 2, "qkv": 3, "head_dim": 4, "hidden": 8}
    >>> [found.index for found in slices(row, sizes, (0, 0, 0), (2, 4, 5))]
    [(slice(4, 8, None), slice(0, 5, None)), (slice(16, 20, None), slice(0, 5, None))]
    """
    ours = [dim for group in row.ours.axes.groups for dim in group]
    begin = dict(zip(ours, offsets, strict=True))
    box = {dim: (begin[dim], begin[dim] + length) for dim, length in zip(ours, lengths, strict=True)}
    chosen = {dim: (number, number + 1) for dim, number in row.ours.axes.chosen}
    if any(not box[dim][0] <= number < box[dim][1] for dim, (number, _) in chosen.items()):
        return
    wanted = {**box, **chosen, **{dim: (number, number + 1) for dim, number in row.theirs.axes.chosen}}
    for found in product(*(list(_ranges(group, wanted, sizes)) for group in row.theirs.axes.groups)):
        parts = {**chosen, **{dim: part for _, inside in found for dim, part in inside.items()}}
        yield Slice(
            tensor=row.theirs.tensor,
            index=tuple(along for along, _ in found),
            lengths={dim: parts[dim][1] - parts[dim][0] for dim in row.theirs.axes.dims},
            dims=row.ours.axes.dims,
            place=tuple(slice(parts[dim][0] - begin[dim], parts[dim][1] - begin[dim]) for dim in ours),
        )


def _ranges(
    group: Sequence[str], wanted: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]
) -> Iterator[tuple[slice, Mapping[str, tuple[int, int]]]]:
    """Cut a part of an axis that is made of dims into ranges; with each, the part of every dim that it is."""
    cut = max((place for place, dim in enumerate(group) if wanted[dim] != (0, sizes[dim])), default=0)
    outer, inner = group[:cut], math.prod(sizes[dim] for dim in group[cut + 1 :])
    for numbers in product(*(range(*wanted[dim]) for dim in outer)):
        row = 0
        for dim, number in zip((*outer, group[cut]), (*numbers, 0), strict=True):
            row = row * sizes[dim] + number
        low, high = wanted[group[cut]]
        fixed = {dim: (number, number + 1) for dim, number in zip(outer, numbers, strict=True)}
        yield slice((row + low) * inner, (row + high) * inner), {**{dim: wanted[dim] for dim in group}, **fixed}


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
