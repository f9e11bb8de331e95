"""The tables of Hugging Face names, expanded for a model: what each of their tensors holds of ours."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from autoshard.engine.hf_names import FUSED, HF_NAMES, Form
from autoshard.engine.patches import Axes, Patch, Row
from autoshard.errors import InputError, nearest
from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.op import Dims
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload


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


def shapes_of(model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every tensor of ours; of tied ones, the owner's."""
    dims, graph = _parameters(model)
    return {name: tuple(graph.sizes[dim] for dim in found) for name, found in dims.items()}


def _parameters(model: ModelSpec) -> tuple[Mapping[str, Dims], OpGraph]:
    workload = Workload(seq_len=1, global_batch=1, precision=Precision.named("fp32"))
    graph = decoder_graph(model, workload, load_kernels("torch_cpu"), micro_batch=1)
    tied = {_instance(other) for other in graph.tied}
    dims = {f"{name}.{t.name}": t.dims for name, block in graph.instances() for t in block.parameters}
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
