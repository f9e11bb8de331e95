"""The tensors of NxD's own models, one rank's part of each: what Hugging Face has, cut over tp and partly fused.

Names and shapes are those that the vendor's converter writes and its examples and trainer load.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from autoshard.engine.hf_names import HfNames
from autoshard.engine.nxd.shards import TpRank
from autoshard.engine.patches import Axes, Patch, Range, Row
from autoshard.errors import Fault, InputError
from autoshard.spec.model import ModelSpec

# Queries, keys and values: one tensor or three of the layer that may copy keys; one of a plain layer; three layers.
Qkv = Literal["fused", "split", "plain", "apart"]
_ENDS = {"fused": "_qkv", "plain": ""}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "gpt_neox")
_TP = ("kv", "rep")
_CUTS: Mapping[str, tuple[str, ...]] = {"kv_heads": ("kv",), "q_group": ("rep",), "ffn": _TP, "vocab": _TP}
_QKV = re.compile(r"(.*self_attn\.)([qkv])_proj\.(weight|bias)")
_HALF = re.compile(r"(.*mlp\.)(?:gate|up)_proj\.(weight|bias)")
_TABLE = "embed.0.embed.weight"
# cited: neuronx_distributed/modules/moe/moe_parallel_layers.py: weights of experts are [experts, in, out].
_EXPERTS: Mapping[str, tuple[str, Axes]] = {
    "mlp.gate.weight": ("mlp.router.linear_router.weight", Axes.parse("experts hidden")),
    "mlp.experts.gate_up_proj": ("mlp.expert_mlps.mlp_op.gate_up_proj.weight", Axes.parse("experts hidden ffn")),
    "mlp.experts.down_proj": ("mlp.expert_mlps.mlp_op.down_proj.weight", Axes.parse("experts ffn hidden")),
}


@dataclass(frozen=True, slots=True)
class Stacked:
    """Parts of a tensor of theirs, one behind the other along an axis; which block of the model it is of."""

    rows: tuple[Row, ...]
    axis: int
    block: str  # embed.0, layer.3, head.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NxdNames:
    """The tensors of one model, whole, or on one rank of tp."""

    model: ModelSpec
    tensors: Mapping[str, Stacked]
    sizes: Mapping[str, int]
    padded: Mapping[str, int]
    cuts: Mapping[str, Range] = field(default_factory=dict[str, Range])

    @classmethod
    def of(cls, family: str, model: ModelSpec, qkv: Qkv, vocab: int) -> "NxdNames":
        """Expand the table; ``vocab`` is padded."""
        if family not in FAMILIES:
            raise InputError.of("model_type", f"NxD has no layout for {family}. It has some for {', '.join(FAMILIES)}")
        names = HfNames.of(family, model, "module" if family == "mixtral" else "published")
        found: dict[str, list[Row]] = {}
        for row in (*names.rows, *_tied(names)):
            renamed = _renamed(row, qkv)
            found.setdefault(renamed.theirs, []).append(renamed)
        tensors = {name: Stacked(tuple(rows), _axis(rows), _block(name, rows[0])) for name, rows in found.items()}
        return cls(model=model, tensors=tensors, sizes=names.sizes, padded={**names.sizes, "vocab": vocab})

    def at(self, rank: TpRank) -> "NxdNames":
        """Return the names with what a rank holds."""
        parts = {dim: rank.size(atoms) for dim, atoms in _CUTS.items()}
        faults = [
            Fault(where="tp", message=f"{self.padded[dim]} {dim} of {self.model.name} do not divide by {count}")
            for dim, count in parts.items()
            if self.padded.get(dim, 0) % count
        ]
        if faults:
            raise InputError(faults)
        cuts: dict[str, Range] = {}
        for dim, count in parts.items():
            size, place = self.padded.get(dim, 0) // count, rank.coordinate(_CUTS[dim])
            cuts[dim] = place * size, (place + 1) * size
        return replace(self, cuts=cuts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a rank's tensor."""
        behind = self.tensors[name]
        shapes = [row.shape(self.sizes, self.cuts) for row in behind.rows]
        if _fused_within(behind.rows):
            return shapes[0]
        along = sum(shape[behind.axis] for shape in shapes)
        return (*shapes[0][: behind.axis], along, *shapes[0][behind.axis + 1 :])

    def patches(self, name: str) -> Iterator[Patch]:
        """Yield what a rank's tensor holds."""
        behind, start = self.tensors[name], 0
        for row in behind.rows:
            shape = row.shape(self.sizes, self.cuts)
            starts = [start if axis == behind.axis else 0 for axis in range(len(shape))]
            if patch := row.patch(self.sizes, self.cuts, starts):
                yield patch
            start += 0 if _fused_within(behind.rows) else shape[behind.axis]


def qkv_of(names: Collection[str]) -> Qkv:
    """Tell from the names of tensors how queries, keys and values lie."""
    ends = {name.partition(".qkv_proj.")[2] for name in names}
    return (
        "fused" if "weight_qkv" in ends else "split" if "weight_q" in ends else "plain" if "weight" in ends else "apart"
    )


def _tied(names: HfNames) -> Iterator[Row]:
    """Yield the head of a model whose head is its embedding: NxD saves it twice."""
    for row in names.rows:
        if names.tied and row.ours == _TABLE:
            yield replace(row, theirs="embed_out.weight" if row.theirs.startswith("gpt_neox") else "lm_head.weight")


def _renamed(row: Row, qkv: Qkv) -> Row:
    """Return the row under NxD's name."""
    if qkv != "apart" and (found := _QKV.fullmatch(row.theirs)):
        before, which, kind = found.groups()
        return replace(row, theirs=f"{before}qkv_proj.{kind}{_ENDS.get(qkv, f'_{which}')}")
    if found := _HALF.fullmatch(row.theirs):
        return replace(row, theirs=f"{found[1]}gate_up_proj.{found[2]}")
    for end, (name, axes) in _EXPERTS.items():
        if row.theirs.endswith(f".{end}"):
            return replace(row, theirs=row.theirs.removesuffix(end) + name, axes=axes)
    return row


def _fused_within(rows: Sequence[Row]) -> bool:
    """Whether the axes themselves say where each part lies, as in an interleaved QKV."""
    return bool(rows[0].axes.slices)


def _axis(rows: Sequence[Row]) -> int:
    return 2 if rows[0].axes == _EXPERTS["mlp.experts.gate_up_proj"][1] else 0


def _block(name: str, row: Row) -> str:
    return (
        "head.0" if name in ("lm_head.weight", "embed_out.weight") else row.ours.rpartition(".")[0].rpartition(".")[0]
    )
