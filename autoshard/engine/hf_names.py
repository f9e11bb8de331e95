"""Hugging Face tensor names and ours: one table, read in both directions, expanded for a model.

A row names one of their tensors, how its axes are made of our dims, and which tensor of ours it holds. ``(a b)`` is
one axis made of two dims, ``qkv:1`` the second of those that lie together along ``qkv``, and ``>`` begins what lies
behind the rows before. Our dims are those of the graph, so a row says by itself what is transposed, split or
interleaved. Our names are those of ``OpGraph.instances``.

Rotary positions mostly need no permutation: architectures turn the halves of a head against each other, as the graph
does. (Meta's own Llama files turn neighbours; those of Hugging Face are permuted already.) GLM-4, ERNIE and DeepSeek
turn neighbours, the last behind what is not turned: there ``a+b`` is an axis of two parts one behind the other,
``a*b`` of two parts by turns.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from autoshard.engine.hf_tables import FUSED, HF_NAMES, Form, Names
from autoshard.engine.patches import Axes, Patch, Row, parts_of
from autoshard.engine.programs import tied_instances
from autoshard.errors import InputError, nearest
from autoshard.graph.block import OpGraph
from autoshard.graph.op import Dims
from autoshard.plan.lowering import StepGraph
from autoshard.spec.hf.types import SAME_CODE
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload

# Dims of ours where files have their parts in another order: a head begins with the two halves that are turned.
_IN_PARTS: Mapping[str, str] = {
    "head_dim": "first_half+second_half+plain_dim", "rotary_dim": "first_half+second_half"
}  # fmt: skip
# Tensors that old files carry although they follow from the configuration, by the ends of their names; and the heads,
# which files of tied models may repeat.
DERIVED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
HEADS = ("lm_head.weight", "embed_out.weight")
_FURTHER = ".eh_proj.weight"  # of a module that predicts further tokens: a product of an embedding and a hidden state


@dataclass(frozen=True, slots=True)
class HfNames:
    """The tensors of one model in one Hugging Face form, each with its place among ours."""

    rows: tuple[Row, ...]
    sizes: Mapping[str, int]
    tied: Mapping[str, str]  # our tensors that only share another's values, in no file: theirs -> the owner's

    @classmethod
    def of(cls, family: str, model: ModelSpec, form: Form = "published") -> "HfNames":
        """Return the rows of a ``model_type``'s table for every layer and expert of a model."""
        table, family = _tables(family), SAME_CODE.get(family, family)
        dims_of, graph = _parameters(model)
        tied = tied_instances(graph)
        rows = tuple(_expanded(table[form], model, dims_of))
        missing = sorted(dims_of.keys() - {row.ours for row in rows})
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            names = f"{', '.join(missing[:3])}{more}"
            raise InputError.of("model_type", f"{family} has no tensors for {names} of {model.name}")
        half, plain = model.rotary_dims // 2, model.head_dim - model.rotary_dims
        parts = {"first_half": half, "second_half": half, "plain_dim": plain}
        parts["group"] = graph.sizes.get("delta_group", 1)
        return cls(rows, {**graph.sizes, **FUSED, **parts}, tied)

    @classmethod
    def fitting(cls, family: str, model: ModelSpec, names: Collection[str]) -> "HfNames":
        """Return the rows of that form of the table which has most of these Hugging Face names."""
        tables = [cls.of(family, model, form) for form in _tables(family)]
        return max(tables, key=lambda table: len(table.shapes.keys() & set(names)))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every Hugging Face tensor."""
        shapes: dict[str, tuple[int, ...]] = {}
        for row in self.rows:
            shape = row.shape(self.sizes)
            before = shapes[row.theirs][0] if row.axes.behind else 0
            shapes[row.theirs] = (before + shape[0], *shape[1:])
        return shapes

    def patches(self) -> Mapping[str, Sequence[Patch]]:
        """Return for every Hugging Face tensor the patches of our tensors that it holds."""
        patches, ends = dict[str, list[Patch]](), dict[str, int]()
        for row in self.rows:
            shape = row.shape(self.sizes)
            start = ends[row.theirs] if row.axes.behind else 0
            ends[row.theirs] = start + shape[0]
            held = row.patches(self.sizes, starts=(start, *(0 for _ in shape[1:])))
            assert held, f"{row.theirs} is nothing but padding"
            patches.setdefault(row.theirs, []).extend(held)
        return patches


def _tables(family: str) -> Mapping[Form, Names]:
    """Return the tables of a ``model_type``, by the form of its names."""
    family = SAME_CODE.get(family, family)
    if family not in HF_NAMES:
        raise InputError.of("model_type", f"{family!r} has no table of names. {nearest(family, list(HF_NAMES))}")
    return HF_NAMES[family]


def further_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Return how the names of modules that predict further tokens begin; files have them as layers behind the last.

    >>> further_modules(["model.layers.60.input_layernorm.weight", "model.layers.61.eh_proj.weight"])
    ('model.layers.61.',)
    """
    return tuple(f"{name.removesuffix(_FURTHER)}." for name in names if name.endswith(_FURTHER))


def shapes_of(model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each of our tensors; for tied ones, the owner's."""
    dims, graph = _parameters(model)
    return {name: tuple(graph.sizes[dim] for dim in its_dims) for name, its_dims in dims.items()}


def exact_weights(model: ModelSpec) -> frozenset[str]:
    """Return our tensors that no format rounds: FP32 whatever the others have."""
    _, graph = _parameters(model)
    blocks = graph.instances()
    return frozenset(f"{name}.{t.name}" for name, block in blocks for t in block.parameters if t.dtype == "fp32")


def _parameters(model: ModelSpec) -> tuple[Mapping[str, Dims], OpGraph]:
    workload = Workload(seq_len=1, global_batch=1, precision=Precision.named("bf16"))
    graph = StepGraph(model=model, workload=workload, kernels="torch_engine").graph
    tied = tied_instances(graph)
    dims = {f"{name}.{t.name}": t.dims for name, block in graph.instances() for t in block.parameters}
    return {name: its_dims for name, its_dims in dims.items() if name not in tied}, graph


def _expanded(table: Sequence[tuple[str, str, str]], model: ModelSpec, dims_of: Mapping[str, Dims]) -> Iterator[Row]:
    """Yield the rows of the tensors that the model has, one per layer and expert."""
    for theirs, axes, ours in table:
        in_parts = _IN_PARTS if "_half" in axes else dict[str, str]()
        layers = range(model.num_layers if "{layer}" in ours else 1)
        by_expert = "{expert}" in theirs
        experts = range(model.num_experts if by_expert else 1)
        for layer, expert in product(layers, experts):
            name = ours.format(layer=layer)
            # Layers of another kind have other dims under this name, or another width of their MLP.
            width = next((dim for dim in dims_of.get(name, ()) if dim.startswith("ffn_")), "ffn")
            read = re.sub(r"\bffn\b", width, axes)
            dims = [in_parts.get(dim, dim) for dim in dims_of.get(name, ())]
            if name in dims_of and _dims_read(read, dims, by_expert=by_expert) == {*dims}:
                dims = [f"{dim}:{expert}" if by_expert and dim == "experts" else dim for dim in dims]
                there = theirs.format(layer=layer, expert=expert)
                yield Row(there, Axes.parse(read), name, Axes.parse(" ".join(dims)))


def _dims_read(axes: str, dims: Sequence[str], *, by_expert: bool) -> set[str]:
    """Return which dims of our tensor axes of theirs hold: without places among fused ones, with experts apart."""
    held = {part: dim for dim in dims for part in parts_of(dim)}
    words = re.findall(r"[a-z_+*]+(?![a-z_+*:0-9])", axes)
    read = {next((held[part] for part in parts_of(word) if part in held), word) for word in words}
    return read | ({"experts"} if by_expert else set())
