"""The layouts in which the layer runs on both sides, and where GSPMD may send more than autoshard."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.gspmd.sent import Sent

Cut = Mapping[str, tuple[str, ...]]  # axis -> atoms of the mesh

# What each module of the layer reads and makes: a word for each position of a tensor, a letter for each axis there.
# b: batch, s: sequence, t: sequence of keys, k: key heads, g: queries of a key head, d: head dim, h: hidden, f: ffn
OPERATIONS: Mapping[str, str] = {
    "norm": "b s h -> b s h",
    "query": "b s h -> b s kgd",
    "key": "b s h -> b s kd",
    "value": "b s h -> b s kd",
    "turn_query": "b k g s d, s d, s d -> b k g s d",
    "turn_key": "b k 1 s d, s d, s d -> b k 1 s d",
    "scores": "b k g s d, b k 1 d t -> b k g s t",
    "softmax": "b k g s t, s t -> b k g s t",
    "mix": "b k g s t, b k 1 t d -> b k g s d",
    "out": "b s kgd -> b s h",
    "add": "b s h, b s h -> b s h",
    "norm_2": "b s h -> b s h",
    "gate": "b s h -> b s f",
    "up": "b s h -> b s f",
    "product": "b s f, b s f -> b s f",
    "down": "b s f -> b s h",
    "add_2": "b s h, b s h -> b s h",
}
PARAMETERS: Mapping[str, str] = {
    "norm.weight": "h", "query.weight": "kgd h", "key.weight": "kd h", "value.weight": "kd h", "out.weight": "h kgd",
    "norm_2.weight": "h", "gate.weight": "f h", "up.weight": "f h", "down.weight": "h f",
}  # fmt: skip
INPUTS: Mapping[str, str] = {"x": "b s h", "cos": "s d", "sin": "s d", "mask": "s t"}
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "between": ("norm", "add", "norm_2", "add_2"),
    "heads": ("query", "key", "value", "out"),
    "attention": ("turn_query", "turn_key", "scores", "softmax", "mix"),
    "mlp": ("gate", "up", "product", "down"),
}
# The odd parts (b 3, s 5, d 13, h 11, f 7) say which axes a number of elements counts, however these are cut.
SMALL: Mapping[str, int] = {"b": 6, "s": 40, "t": 40, "k": 4, "g": 2, "d": 26, "h": 22, "f": 56}
LLAMA_3_8B: Mapping[str, int] = {"b": 2, "s": 8192, "t": 8192, "k": 8, "g": 4, "d": 128, "h": 4096, "f": 14336}


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """What GSPMD sends beyond autoshard: how often, a collective of which tensor, and why."""

    kind: str
    cut: Cut
    over: tuple[str, ...]
    count: int
    why: str
    tensor: str = "b s h"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A mesh of 8 ranks, and the cuts of each group of operations, or of single ones."""

    mesh: Mapping[str, int]
    cuts: Mapping[str, Cut]  # by group or operation; those of "between" at the ends of the layer as well
    keys: int | None = None  # heads, where not those of the layer
    more: tuple[More, ...] = ()

    def cut(self, operation: str) -> Cut:
        """Return the cuts of an operation: its own, or those of its group along the axes that it has."""
        group = next(name for name, members in _GROUPS.items() if operation in members)
        axes = {*OPERATIONS[operation], *PARAMETERS.get(f"{operation}.weight", "")}
        return {
            axis: atoms for axis, atoms in self.cuts.get(operation, self.cuts.get(group, {})).items() if axis in axes
        }

    def sizes(self, layer: Mapping[str, int]) -> Mapping[str, int]:
        """Return the sizes of a layer's axes with this number of key heads, and as many of queries as before."""
        keys = self.keys or layer["k"]
        return {**layer, "k": keys, "g": layer["k"] * layer["g"] // keys}

    def more_sent(self, layer: Mapping[str, int]) -> Counter[Sent]:
        """Return what GSPMD sends beyond autoshard."""
        found: Counter[Sent] = Counter()
        for one in self.more:
            parts = math.prod(self.mesh[atom] for atoms in one.cut.values() for atom in atoms)
            elements = math.prod(self.sizes(layer)[axis] for axis in one.tensor if axis != " ") // parts
            found[Sent(kind=one.kind, elements=elements, over=one.over)] += one.count
        return found

    def description(self, layer: Mapping[str, int], *, compiled_only: bool) -> Mapping[str, Any]:
        """Return what the other environment needs: shapes, and partition specs of all that is annotated."""
        sizes, between = self.sizes(layer), self.cuts.get("between", {})
        tensors = {**INPUTS, "seed": "b s h", **PARAMETERS}
        cuts = {name: self.cut(name.removesuffix(".weight")) for name in PARAMETERS}
        cuts |= {"x": between, "seed": between}
        names = {"h": "hidden", "k": "keys", "g": "group", "d": "head", "f": "ffn"}
        return {
            "mesh": self.mesh,
            "sizes": {name: sizes[axis] for axis, name in names.items()},
            "shapes": {name: _shape(text, sizes) for name, text in tensors.items()},
            "specs": {name: _spec(text, cuts.get(name, {})) for name, text in tensors.items()},
            "operations": {name: self._annotations(name) for name in OPERATIONS},
            "leaves": _spec("b s h", between),
            "inputs": list(INPUTS),
            "wanted": ["x", *PARAMETERS],
            "compiled_only": compiled_only,
        }  # fmt: skip

    def _annotations(self, operation: str) -> Mapping[str, Any]:
        """Return a spec for each tensor that an operation reads or makes, and for its gradient.

        There is none where a sum over ranks is pending: annotations cannot say that, so GSPMD may sum where it likes.
        """
        cut, (reads, makes) = self.cut(operation), OPERATIONS[operation].split(" -> ")
        read, made = [(text, _spec(text, cut)) for text in reads.split(", ")], _spec(makes, cut)
        return {
            "reads": [[spec, spec if {*cut} <= {*text} else None] for text, spec in read],
            "makes": [made if {*cut} <= {*makes} else None, made],
        }


def _shape(text: str, sizes: Mapping[str, int]) -> list[int]:
    return [math.prod(sizes[axis] for axis in word) for word in text.split()]


def _spec(text: str, cut: Cut) -> list[list[str]]:
    """Return the atoms that cut each position of a tensor.

    >>> _spec("b s kgd", {"b": ("data",), "k": ("kv",), "g": ("rep",)})
    [['data'], [], ['kv', 'rep']]
    """
    return [[atom for axis in word for atom in cut.get(axis, ())] for word in text.split()]


_WHY = "GSPMD sums the gradient of each reader of a normed tensor apart, autoshard adds them first: {}"
_SPLIT = "GSPMD's reshape of kgd cuts k over all that cut kgd, as far as k goes, whatever is asked of k and g"
_ALL = _WHY.format("key, value; up")
_B: Cut = {"b": ("data",)}
_S: Cut = {**_B, "s": ("model",)}
_TP: Mapping[str, Cut] = {
    "heads": {**_B, "k": ("model",)}, "attention": {**_B, "k": ("model",)}, "mlp": {**_B, "f": ("model",)},
}  # fmt: skip
_KV: Cut = {**_B, "k": ("kv",), "g": ("rep",)}
_REP: Mapping[str, Cut] = {"heads": _KV, "attention": _KV, "mlp": {**_B, "f": ("kv", "rep")}}
_SWAPPED: Cut = {"s": ("model",), "k": ("data",)}
_CP: Cut = {**_B, "s": ("cp",)}
MEGATRON, FREE = "dp x tp, sequence parallel", "as the solver chooses"
CASES: Mapping[str, Case] = {
    "dp x tp": Case(
        mesh={"data": 2, "model": 4},
        cuts={"between": _B, **_TP},
        more=(More(kind="all_reduce", cut=_B, over=("model",), count=3, why=_ALL),),
    ),
    MEGATRON: Case(
        mesh={"data": 2, "model": 4},
        cuts={"between": _S, **_TP},
        more=(More(kind="reduce_scatter", cut=_B, over=("model",), count=3, why=_ALL),),
    ),
    "dp x kv x rep": Case(
        mesh={"data": 2, "kv": 2, "rep": 2},
        keys=2,
        cuts={"between": _B, **_REP},
        more=(
            More(kind="all_reduce", cut=_B, over=("kv", "rep"), count=1, why=_WHY.format("up")),
            More(kind="all_reduce", cut=_B, over=("kv",), count=2, why=_WHY.format("key, value")),
        ),
    ),
    "dp x kv x rep, sequence parallel": Case(
        mesh={"data": 2, "kv": 2, "rep": 2},
        keys=2,
        cuts={"between": {**_B, "s": ("kv", "rep")}, **_REP},
        more=(
            More(kind="reduce_scatter", cut=_B, over=("kv", "rep"), count=1, why=_WHY.format("up")),
            More(kind="reduce_scatter", cut=_B, over=("kv",), count=2, why=_WHY.format("key, value")),
        ),
    ),
    "dp x kv x rep, heads to spare": Case(
        mesh={"data": 2, "kv": 2, "rep": 2},
        cuts={"between": _B, **_REP},
        more=(
            More(kind="all_reduce", cut=_B, over=("kv", "rep"), count=1, why=_WHY.format("up")),
            More(kind="all_reduce", cut=_B, over=("kv",), count=2, why=_WHY.format("key, value")),
            More(
                kind="all_to_all", tensor="b k g s d", cut={**_B, "k": ("kv",), "g": ("rep",)}, over=("rep",), count=4,
                why=f"{_SPLIT}: the query, what is mixed, their gradients",
            ),
        ),
    ),
    "dp x cp": Case(mesh={"data": 2, "cp": 4}, cuts=dict.fromkeys(_GROUPS, _CP)),
    "dp x cp x tp, sequence parallel": Case(
        mesh={"data": 2, "cp": 2, "model": 2},
        cuts={
            "between": {**_B, "s": ("cp", "model")},
            "heads": {**_CP, "k": ("model",)}, "attention": {**_CP, "k": ("model",)}, "mlp": {**_CP, "f": ("model",)},
        },
        more=(More(kind="reduce_scatter", cut=_CP, over=("model",), count=3, why=_ALL),),
    ),
    "dp x heads exchanged for tokens": Case(
        mesh={"data": 2, "model": 4}, cuts={**dict.fromkeys(_GROUPS, _S), "attention": {**_B, "k": ("model",)}},
    ),
    FREE: Case(
        mesh={"data": 2, "model": 4},
        cuts={
            "between": _S, "heads": _SWAPPED, "attention": _SWAPPED, "mlp": {**_B, "f": ("model",)},
        },
        more=(
            More(kind="reduce_scatter", cut={"s": ("model",)}, over=("data",), count=2, why=_WHY.format("key, value")),
            More(kind="reduce_scatter", cut=_B, over=("model",), count=1, why=_WHY.format("up")),
        ),
    ),
}  # fmt: skip
# Here GSPMD's own result is wrong (torch-xla 2.9): a product whose sum over c is pending, read with other cuts.
WRONG = Case(
    mesh={"a": 2, "b": 2, "c": 2}, cuts={"out": {"s": ("b",), "k": ("c",)}, "add": {"s": ("a", "b"), "h": ("c",)}}
)
