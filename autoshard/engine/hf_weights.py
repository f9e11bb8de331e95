"""Weights from Hugging Face form to ours and back, for numpy arrays and torch tensors alike."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar, cast

from autoshard.engine.hf_names import DERIVED, FUSED, HEADS, HF_NAMES, Form
from autoshard.engine.patches import Axes, Patch, Row
from autoshard.errors import Fault, InputError, nearest
from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.evaluate import instances
from autoshard.graph.op import Dims
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload

A = TypeVar("A")
Empty = Callable[..., Any]  # ``numpy.empty`` or ``torch.empty``: called with a shape and ``dtype=``


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
        wanted, graph = _parameters(model)
        tied = {_instance(other): _instance(owner) for other, owner in graph.tied.items()}
        rows = tuple(_expanded(HF_NAMES[family][form], model, wanted))
        missing = sorted(wanted.keys() - {row.ours for row in rows})
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
        return {row.theirs: row.shape(self.sizes) for row in self.rows}

    def patches(self) -> Mapping[str, Sequence[Patch]]:
        """Return for every tensor of theirs what it holds of ours."""
        found: dict[str, list[Patch]] = {}
        for row in self.rows:
            patch = row.patch(self.sizes)
            assert patch, f"{row.theirs} is nothing but padding"
            found.setdefault(row.theirs, []).append(patch)
        return found

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
    """Return our weights, named as in ``graph/evaluate``, of a whole model in either form."""
    names = HfNames.fitting(family, model, tensors.keys())
    shapes = {name: tuple(cast(Any, tensor).shape) for name, tensor in tensors.items()}
    faults = list(names.faults(shapes))
    if faults:
        raise InputError(faults)
    ours = {name: empty(shape, dtype=_some(tensors).dtype) for name, shape in shapes_of(model).items()}
    for name, patches in names.patches().items():
        for patch in patches:
            ours[patch.tensor][patch.place] = patch.view(tensors[name])
    return ours | {other: ours[owner] for other, owner in names.tied.items()}


def to_hf(
    family: str, model: ModelSpec, weights: Mapping[str, A], empty: Empty, form: Form = "published"
) -> dict[str, A]:
    """Return the tensors of a Hugging Face model with our weights; a tied head is left out, as their files do."""
    names = HfNames.of(family, model, form)
    theirs = {name: empty(shape, dtype=_some(weights).dtype) for name, shape in names.shapes.items()}
    for name, patches in names.patches().items():
        for patch in patches:
            patch.view(theirs[name])[...] = cast(Any, weights[patch.tensor])[patch.place]
    return theirs


def _some(tensors: Mapping[str, Any]) -> Any:
    return next(iter(tensors.values()))


def shapes_of(model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every tensor of ours; of tied ones, the owner's."""
    dims, graph = _parameters(model)
    return {name: tuple(graph.sizes[dim] for dim in found) for name, found in dims.items()}


def _parameters(model: ModelSpec) -> tuple[Mapping[str, Dims], OpGraph]:
    workload = Workload(seq_len=1, global_batch=1, precision=Precision.named("fp32"))
    graph = decoder_graph(model, workload, load_kernels("torch_cpu"), micro_batch=1)
    tied = {_instance(other) for other in graph.tied}
    dims = {f"{name}.{t.name}": t.dims for name, block in instances(graph) for t in block.parameters}
    return {name: found for name, found in dims.items() if name not in tied}, graph


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
                there = theirs.format(layer=layer, expert=expert)
                yield Row(there, Axes.parse(axes), name, Axes.parse(" ".join(dims)))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
