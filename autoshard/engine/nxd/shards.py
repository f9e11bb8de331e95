"""Which parts of our tensors a rank's tensors of NxD hold, in both directions; numpy only.

These are parameters of the engine's layers, which plans describe, and the tensors in files of NxD's own models, which
have the names and shapes that the vendor's converter writes and its examples and trainer load.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from autoshard.engine.hf_names import HEADS, HfNames
from autoshard.engine.patches import Axes, Patch, Range, Row, stacked
from autoshard.errors import Fault, InputError
from autoshard.graph.op import Array
from autoshard.plan.nxd.match import TP, FormParameter
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TpRank:
    """A rank of a tp group, and how the atoms of tp are counted: on trn1 ``rep`` is outermost, on trn2 ``kv``."""

    atoms: tuple[tuple[str, int], ...]  # outermost first
    index: int

    @classmethod
    def of(cls, mesh: Mesh, index: int) -> "TpRank":
        """Take the order of the atoms from a mesh."""
        return cls(atoms=tuple((atom, size) for atom, size in mesh.axes if atom in TP), index=index)

    def size(self, atoms: Sequence[str]) -> int:
        """Return into how many parts these atoms cut."""
        return math.prod(size for atom, size in self.atoms if atom in atoms)

    def coordinate(self, atoms: Sequence[str]) -> int:
        """Return the number of this rank's part of a dim that these atoms cut: as NxD cuts, in the order of ranks."""
        coordinate, rest, weight = 0, self.index, 1
        for atom, size in reversed(self.atoms):
            rest, place = divmod(rest, size)
            if atom in atoms:
                coordinate += weight * place
                weight *= size
        return coordinate

    def bounds(self, size: int, atoms: Sequence[str]) -> Range:
        """Return where the rank's part of a dim of this size begins and ends."""
        count, place = self.size(atoms), self.coordinate(atoms)
        assert size % count == 0, f"{size} does not divide by {count}"
        return place * (size // count), (place + 1) * (size // count)


def local_of(parameter: FormParameter, rank: TpRank, sizes: Mapping[str, int], whole: Mapping[str, Array]) -> Array:
    """Cut a rank's parameter out of our whole tensors; what is padded is zero."""
    unpadded = {
        dim: size for piece in parameter.pieces for dim, size in zip(piece.dims, whole[piece.tensor].shape, strict=True)
    }
    shape, patches = local_patches(parameter, rank, sizes, unpadded)
    local = np.zeros(shape, dtype=whole[parameter.pieces[0].tensor].dtype)
    for patch in patches:
        patch.view(local)[...] = whole[patch.tensor][patch.place]
    return local


def local_patches(
    parameter: FormParameter, rank: TpRank, sizes: Mapping[str, int], whole: Mapping[str, int]
) -> tuple[tuple[int, ...], Sequence[Patch]]:
    """Return a rank's shape of a parameter and what it holds; ``sizes`` are padded, those of our ``whole`` are not."""
    rows = (
        (
            Row(parameter.name, Axes(piece.axes), piece.tensor, Axes(tuple((dim,) for dim in piece.dims))),
            {dim: rank.bounds(sizes[dim], piece.cuts.get(dim, ())) for dim in piece.dims},
        )
        for piece in parameter.pieces
    )
    return stacked(rows, parameter.axis, whole)


# Queries, keys and values: one tensor or three of the layer that may copy keys; one of a plain layer; three layers.
Qkv = Literal["fused", "split", "plain", "apart"]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "gpt_neox")
_CUTS: Mapping[str, tuple[str, ...]] = {"kv_heads": ("kv",), "q_group": ("rep",), "ffn": TP, "vocab": TP}
_QKV = re.compile(r"(.*self_attn\.)([qkv])_proj\.(weight|bias)")
_HALF = re.compile(r"(.*mlp\.)(?:gate|up)_proj\.(weight|bias)")
# cited: neuronx_distributed/modules/moe/moe_parallel_layers.py: weights of experts are [experts, in, out].
_EXPERTS: Mapping[str, tuple[str, Axes]] = {
    "mlp.gate.weight": ("mlp.router.linear_router.weight", Axes.parse("experts hidden")),
    "mlp.experts.gate_up_proj": ("mlp.expert_mlps.mlp_op.gate_up_proj.weight", Axes.parse("experts hidden ffn")),
    "mlp.experts.down_proj": ("mlp.expert_mlps.mlp_op.down_proj.weight", Axes.parse("experts ffn hidden")),
}


@dataclass(frozen=True, slots=True)
class StackedRows:
    """The parts of one of NxD's tensors, which lie one behind the other along an axis, and the block of the model."""

    rows: tuple[Row, ...]
    axis: int
    block: str  # embed.0, layer.3, head.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NxdNames:
    """The tensors of one model, whole, or on one rank of tp."""

    model: ModelSpec
    tensors: Mapping[str, StackedRows]
    sizes: Mapping[str, int]
    padded: Mapping[str, int]
    cuts: Mapping[str, Range] = field(default_factory=dict[str, Range])

    @classmethod
    def of(cls, family: str, model: ModelSpec, qkv: Qkv, vocab: int) -> "NxdNames":
        """Return NxD's tensors of a model, each with the rows of the table that it holds; ``vocab`` is padded."""
        if family not in FAMILIES:
            raise InputError.of("model_type", f"NxD has no layout for {family}. It has some for {', '.join(FAMILIES)}")
        names = HfNames.of(family, model, "module" if family == "mixtral" else "published")
        rows = list(names.rows)
        if names.tied:  # NxD saves the embedding once more, as the head
            head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
            rows += [replace(row, theirs=head) for row in rows if row.ours == "embed.0.embed.weight"]
        rows_of: dict[str, list[Row]] = {}
        for row in rows:
            renamed = _renamed(row, qkv)
            rows_of.setdefault(renamed.theirs, []).append(renamed)
        tensors = {
            name: StackedRows(
                tuple(parts),
                axis=2 if parts[0].axes == _EXPERTS["mlp.experts.gate_up_proj"][1] else 0,
                block="head.0" if name in HEADS else parts[0].ours.rsplit(".", 2)[0],
            )
            for name, parts in rows_of.items()
        }
        return cls(model=model, tensors=tensors, sizes=names.sizes, padded={**names.sizes, "vocab": vocab})

    def at(self, rank: TpRank) -> "NxdNames":
        """Return the same tensors, cut to a rank's parts; refuse a model whose dims do not divide."""
        faults = [
            Fault(where="tp", message=f"{self.padded[dim]} {dim} of {self.model.name} do not divide by {count}")
            for dim, count in ((dim, rank.size(atoms)) for dim, atoms in _CUTS.items())
            if self.padded.get(dim, 0) % count
        ]
        if faults:
            raise InputError(faults)
        return replace(self, cuts={dim: rank.bounds(self.padded.get(dim, 0), atoms) for dim, atoms in _CUTS.items()})

    def stacked(self, name: str) -> tuple[tuple[int, ...], Sequence[Patch]]:
        """Return the shape of a rank's tensor, and the patches of ours that it holds."""
        tensor = self.tensors[name]
        return stacked(((row, self.cuts) for row in tensor.rows), tensor.axis, self.sizes)


def qkv_of(names: Collection[str]) -> Qkv:
    """Tell from the names of tensors how queries, keys and values lie."""
    ends = {name.partition(".qkv_proj.")[2] for name in names}
    if "weight_qkv" in ends:
        return "fused"
    return "split" if "weight_q" in ends else "plain" if "weight" in ends else "apart"


def _renamed(row: Row, qkv: Qkv) -> Row:
    """Return the row under NxD's name."""
    if qkv != "apart" and (match := _QKV.fullmatch(row.theirs)):
        before, which, kind = match.groups()
        end = {"fused": "_qkv", "split": f"_{which}", "plain": ""}[qkv]
        return replace(row, theirs=f"{before}qkv_proj.{kind}{end}")
    if match := _HALF.fullmatch(row.theirs):
        return replace(row, theirs=f"{match[1]}gate_up_proj.{match[2]}")
    for end, (name, axes) in _EXPERTS.items():
        if row.theirs.endswith(f".{end}"):
            return replace(row, theirs=row.theirs.removesuffix(end) + name, axes=axes)
    return row
