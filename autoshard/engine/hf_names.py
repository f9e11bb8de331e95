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
from typing import Literal

from autoshard.engine.patches import Axes, Patch, Row, parts_of
from autoshard.engine.programs import tied_instances
from autoshard.errors import InputError, nearest
from autoshard.graph.block import OpGraph
from autoshard.graph.op import Dims
from autoshard.plan.lowering import StepGraph
from autoshard.spec.hf.types import SAME_CODE
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload

# ``published``: as the files on the Hub are named; ``module``: as transformers 5 names them in a module's state dict.
Form = Literal["published", "module"]
Names = tuple[tuple[str, str, str], ...]  # their name, its axes, our name; a model has those rows of which it has ours

# What lies together in one tensor, and how many of it.
FUSED: Mapping[str, int] = {"qkv": 3, "gate_up": 2}
# Dims of ours where files have their parts in another order: a head begins with the two halves that are turned.
_IN_PARTS: Mapping[str, str] = {
    "head_dim": "first_half+second_half+plain_dim", "rotary_dim": "first_half+second_half"
}  # fmt: skip
# Tensors that old files carry although they follow from the configuration, by the ends of their names; and the heads,
# which files of tied models may repeat.
DERIVED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
HEADS = ("lm_head.weight", "embed_out.weight")
_FURTHER = ".eh_proj.weight"  # of a module that predicts further tokens: a product of an embedding and a hidden state


def _norm(theirs: str, ours: str, over: str = "hidden") -> Names:
    return (f"{theirs}.weight", over, f"{ours}.weight"), (f"{theirs}.bias", over, f"{ours}.bias")


def _linear(theirs: str, out: str, read: str, *ours: str) -> Names:
    """Return the rows of a product and its bias; in ``out``, ``|`` separates the axes of tensors that lie together."""
    both = tuple(zip(out.split("|"), ours, strict=True))
    weights = tuple((f"{theirs}.weight", f"{axes} {read}", f"{name}.weight") for axes, name in both)
    return (*weights, *((f"{theirs}.bias", axes, f"{name}_shift.bias") for axes, name in both))


def _turned(theirs: str, out: str, read: str, *ours: str) -> Names:
    """Return the rows of a product whose weight is stored transposed, [in, out]."""
    rows = _linear(theirs, out, read, *ours)
    turned = {f"{axes} {read}": f"{read} {axes}" for axes in out.split("|")}
    return tuple((name, turned.get(axes, axes), our) for name, axes, our in rows)


def _under(prefix: str, ours: str, names: Names) -> Names:
    return tuple((f"{prefix}{theirs}", axes, f"{ours}{name}") for theirs, axes, name in names)


_QUERY, _KEY = "(kv_heads q_group head_dim)", "(kv_heads head_dim)"
_LLAMA_OUTSIDE: Names = (
    ("model.embed_tokens.weight", "vocab hidden", "embed.0.embed.weight"),
    *_norm("model.norm", "head.0.final_norm"),
    ("lm_head.weight", "vocab hidden", "head.0.unembed.weight"),
)
_ATTENTION_PRODUCTS: Names = (
    *_linear("self_attn.q_proj", _QUERY, "hidden", "q"),
    *_linear("self_attn.k_proj", _KEY, "hidden", "k"),
    *_linear("self_attn.v_proj", _KEY, "hidden", "v"),
    *_linear("self_attn.o_proj", "hidden", _QUERY, "o"),
)
_HEAD_NORMS = *_norm("self_attn.q_norm", "q_norm", "head_dim"), *_norm("self_attn.k_norm", "k_norm", "head_dim")
_LLAMA_ATTENTION: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_ATTENTION_PRODUCTS,
    *_HEAD_NORMS,
    *_norm("post_attention_layernorm", "mlp_norm"),
)
_POST_NORMED: Names = (  # norms behind attention and the MLP have other names than those before
    *_norm("post_attention_layernorm", "attn_post_norm"),
    *_norm("post_feedforward_layernorm", "mlp_post_norm"),
)
_GEMMA_ATTENTION: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_ATTENTION_PRODUCTS,
    *_HEAD_NORMS,
    *_norm("pre_feedforward_layernorm", "mlp_norm"),
    *_POST_NORMED,
)
_OLMO2_ATTENTION: Names = (
    *_ATTENTION_PRODUCTS,
    *_norm("self_attn.q_norm", "q_norm", _QUERY),
    *_norm("self_attn.k_norm", "k_norm", _KEY),
    *_POST_NORMED,
)
_EXAONE4_ATTENTION: Names = (*_ATTENTION_PRODUCTS, *_HEAD_NORMS, *_POST_NORMED)
_MINIMAX_ATTENTION: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_ATTENTION_PRODUCTS,
    *_norm("self_attn.q_norm", "q_norm", _QUERY),
    *_norm("self_attn.k_norm", "k_norm", _KEY),
    *_norm("post_attention_layernorm", "mlp_norm"),
)
_TURNED_LAST, _NARROW = "(kv_heads q_group plain_dim+first_half*second_half)", "latent_kv+first_half*second_half"
_KEYS_AND_VALUES = "(kv_heads plain_dim+value_dim)"
_LATENT_ATTENTION: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_linear("self_attn.q_proj", _TURNED_LAST, "hidden", "q"),
    *_linear("self_attn.q_a_proj", "latent_q", "hidden", "q_down"),
    *_norm("self_attn.q_a_layernorm", "q_down_norm", "latent_q"),
    *_linear("self_attn.q_b_proj", _TURNED_LAST, "latent_q", "q_up"),
    *_linear("self_attn.kv_a_proj_with_mqa", f"{_NARROW}|{_NARROW}", "hidden", "kv_down", "k_shared"),
    *_norm("self_attn.kv_a_layernorm", "kv_down_norm", "latent_kv"),
    *_linear("self_attn.kv_b_proj", f"{_KEYS_AND_VALUES}|{_KEYS_AND_VALUES}", "latent_kv", "k_up", "v_up"),
    *_linear("self_attn.o_proj", "hidden", "(kv_heads q_group value_dim)", "o"),
    *_norm("post_attention_layernorm", "mlp_norm"),
)
_LLAMA_MLP: Names = (
    *_linear("mlp.gate_proj", "ffn", "hidden", "gate"),
    *_linear("mlp.up_proj", "ffn", "hidden", "up"),
    *_linear("mlp.down_proj", "hidden", "ffn", "down"),
)
_EXPERTS_APART: Names = (
    ("block_sparse_moe.gate.weight", "experts hidden", "router.weight"),
    ("block_sparse_moe.experts.{expert}.w1.weight", "ffn hidden", "gate.weight"),
    ("block_sparse_moe.experts.{expert}.w3.weight", "ffn hidden", "up.weight"),
    ("block_sparse_moe.experts.{expert}.w2.weight", "hidden ffn", "down.weight"),
)
_EXPERTS_NAMED: Names = (
    ("mlp.gate.weight", "experts hidden", "router.weight"),
    ("mlp.experts.{expert}.gate_proj.weight", "ffn hidden", "gate.weight"),
    ("mlp.experts.{expert}.up_proj.weight", "ffn hidden", "up.weight"),
    ("mlp.experts.{expert}.down_proj.weight", "hidden ffn", "down.weight"),
)
_EXPERTS_STACKED: Names = (
    ("mlp.gate.weight", "experts hidden", "router.weight"),
    ("mlp.experts.gate_up_proj", "experts (gate_up:0 ffn) hidden", "gate.weight"),
    ("mlp.experts.gate_up_proj", "experts (gate_up:1 ffn) hidden", "up.weight"),
    ("mlp.experts.down_proj", "experts hidden ffn", "down.weight"),
)
_GPT_OSS_LAYER: Names = (  # as in BF16; published files have experts in MXFP4, which are read as these
    *_LLAMA_ATTENTION,
    ("self_attn.sinks", "(kv_heads q_group)", "sink.bias"),
    *_linear("mlp.router", "experts", "hidden", "router"),
    ("mlp.experts.gate_up_proj", "experts hidden (ffn gate_up:0)", "gate.weight"),
    ("mlp.experts.gate_up_proj", "experts hidden (ffn gate_up:1)", "up.weight"),
    ("mlp.experts.gate_up_proj_bias", "experts (ffn gate_up:0)", "gate_shift.bias"),
    ("mlp.experts.gate_up_proj_bias", "experts (ffn gate_up:1)", "up_shift.bias"),
    ("mlp.experts.down_proj", "experts ffn hidden", "down.weight"),
    ("mlp.experts.down_proj_bias", "experts hidden", "down_bias.bias"),
)
_CORRECTED_ROUTER: Names = (
    ("mlp.gate.e_score_correction_bias", "experts", "correction.weight"),
    ("mlp.shared_experts.gate_proj.weight", "ffn_shared hidden", "shared_gate.weight"),
    ("mlp.shared_experts.up_proj.weight", "ffn_shared hidden", "shared_up.weight"),
    ("mlp.shared_experts.down_proj.weight", "hidden ffn_shared", "shared_down.weight"),
)
_MINIMAX_BIAS = "e_score_correction_bias", "experts", "correction.weight"
_PHI3_LAYER: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_linear("self_attn.qkv_proj", f"{_QUERY}|>{_KEY}|>{_KEY}", "hidden", "q", "k", "v"),
    *_linear("self_attn.o_proj", "hidden", _QUERY, "o"),
    *_norm("post_attention_layernorm", "mlp_norm"),
    *_linear("mlp.gate_up_proj", "(gate_up:0 ffn)|(gate_up:1 ffn)", "hidden", "gate", "up"),
    *_linear("mlp.down_proj", "hidden", "ffn", "down"),
)
_NEIGHBOURS = "first_half*second_half+plain_dim"  # of a head that begins with what is turned
_NEIGHBOURS_TURNED: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_linear("self_attn.q_proj", f"(kv_heads q_group {_NEIGHBOURS})", "hidden", "q"),
    *_linear("self_attn.k_proj", f"(kv_heads {_NEIGHBOURS})", "hidden", "k"),
    *_linear("self_attn.v_proj", _KEY, "hidden", "v"),
    *_linear("self_attn.o_proj", "hidden", _QUERY, "o"),
    *_norm("post_attention_layernorm", "mlp_norm"),
)
_GLM4_LAYER: Names = (
    *_NEIGHBOURS_TURNED,
    *_norm("post_self_attn_layernorm", "attn_post_norm"),
    *_linear("mlp.gate_up_proj", "(gate_up:0 ffn)|(gate_up:1 ffn)", "hidden", "gate", "up"),
    *_linear("mlp.down_proj", "hidden", "ffn", "down"),
    *_norm("post_mlp_layernorm", "mlp_post_norm"),
)
_STARCODER2_LAYER: Names = (
    *_LLAMA_ATTENTION,
    *_linear("mlp.c_fc", "ffn", "hidden", "up"),
    *_linear("mlp.c_proj", "hidden", "ffn", "down"),
)
_NEOX_QKV = "(kv_heads qkv:0 q_group head_dim)|(kv_heads qkv:1 head_dim)|(kv_heads qkv:2 head_dim)"
_NEOX_LAYER: Names = (
    *_norm("input_layernorm", "attn_norm"),
    *_linear("attention.query_key_value", _NEOX_QKV, "hidden", "q", "k", "v"),
    *_linear("attention.dense", "hidden", _QUERY, "o"),
    *_norm("post_attention_layernorm", "mlp_norm"),
    *_linear("mlp.dense_h_to_4h", "ffn", "hidden", "up"),
    *_linear("mlp.dense_4h_to_h", "hidden", "ffn", "down"),
)
_NEOX: Names = (
    ("gpt_neox.embed_in.weight", "vocab hidden", "embed.0.embed.weight"),
    *_norm("gpt_neox.final_layer_norm", "head.0.final_norm"),
    *_under("gpt_neox.layers.{layer}.", "layer.{layer}.", _NEOX_LAYER),
)
_GPT2_QKV = "(qkv:0 kv_heads q_group head_dim)|(qkv:1 kv_heads head_dim)|(qkv:2 kv_heads head_dim)"
_GPT2_LAYER: Names = (
    *_norm("ln_1", "attn_norm"),
    *_turned("attn.c_attn", _GPT2_QKV, "hidden", "q", "k", "v"),
    *_turned("attn.c_proj", "hidden", _QUERY, "o"),
    *_norm("ln_2", "mlp_norm"),
    *_turned("mlp.c_fc", "ffn", "hidden", "up"),
    *_turned("mlp.c_proj", "hidden", "ffn", "down"),
)
_GPT2: Names = (
    ("wte.weight", "vocab hidden", "embed.0.embed.weight"),
    ("wpe.weight", "positions hidden", "embed.0.place.weight"),
    *_under("h.{layer}.", "layer.{layer}.", _GPT2_LAYER),
    *_norm("ln_f", "head.0.final_norm"),
)
_OLMO = (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", _OLMO2_ATTENTION + _LLAMA_MLP))
_LLAMA_LIKE = (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", _LLAMA_ATTENTION + _LLAMA_MLP))
_AS_LLAMA = (
    "llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3", "ministral3", "granite", "nemotron", "arcee", "jais2",
)  # fmt: skip
_HEAD: Names = (("lm_head.weight", "vocab hidden", "head.0.unembed.weight"),)
HF_NAMES: Mapping[str, Mapping[Form, Names]] = {
    **{family: {"published": _LLAMA_LIKE, "module": _LLAMA_LIKE} for family in _AS_LLAMA},
    **{
        family: {
            "published": _LLAMA_OUTSIDE + _under("model.layers.{layer}.", "layer.{layer}.", more + published),
            "module": _LLAMA_OUTSIDE + _under("model.layers.{layer}.", "layer.{layer}.", more + module),
        }
        for family, published, module, more in (
            ("mixtral", _EXPERTS_APART, _EXPERTS_STACKED, _LLAMA_ATTENTION),
            ("qwen3_moe", _EXPERTS_NAMED, _EXPERTS_STACKED, _LLAMA_ATTENTION + _LLAMA_MLP),
            ("glm4_moe", _EXPERTS_NAMED, _EXPERTS_STACKED, _LLAMA_ATTENTION + _LLAMA_MLP + _CORRECTED_ROUTER),
            ("dots1", _EXPERTS_NAMED, _EXPERTS_STACKED, _LLAMA_ATTENTION + _LLAMA_MLP + _CORRECTED_ROUTER),
            ("deepseek_v2", _EXPERTS_NAMED, _EXPERTS_STACKED, _LATENT_ATTENTION + _LLAMA_MLP + _CORRECTED_ROUTER),
            ("glm4_moe_lite", _EXPERTS_NAMED, _EXPERTS_STACKED, _LATENT_ATTENTION + _LLAMA_MLP + _CORRECTED_ROUTER),
            ("deepseek_v3", _EXPERTS_NAMED, _EXPERTS_STACKED, _LATENT_ATTENTION + _LLAMA_MLP + _CORRECTED_ROUTER),
            (
                "minimax_m2",
                (*_EXPERTS_APART, *_under("block_sparse_moe.", "", (_MINIMAX_BIAS,))),
                (*_EXPERTS_STACKED, *_under("mlp.", "", (_MINIMAX_BIAS,))),
                _MINIMAX_ATTENTION,
            ),
        )
    },
    **{
        family: {"published": names, "module": names}
        for family, names in (
            (
                "gemma3_text",
                (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", _GEMMA_ATTENTION + _LLAMA_MLP)),
            ),
            ("gpt_oss", (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", _GPT_OSS_LAYER))),
            ("olmo2", _OLMO),
            ("olmo3", _OLMO),
            *(
                (family, (*_LLAMA_OUTSIDE, *_under("model.layers.{layer}.", "layer.{layer}.", layer)))
                for family, layer in (
                    ("exaone4", _EXAONE4_ATTENTION + _LLAMA_MLP),
                    ("ernie4_5", _NEIGHBOURS_TURNED + _LLAMA_MLP),
                    ("glm4", _GLM4_LAYER),
                    ("phi3", _PHI3_LAYER),
                    ("starcoder2", _STARCODER2_LAYER),
                )
            ),
        )
    },
    "gpt2": {"published": _GPT2 + _HEAD, "module": _under("transformer.", "", _GPT2) + _HEAD},
    "gpt_neox": {
        "published": (*_NEOX, ("embed_out.weight", "vocab hidden", "head.0.unembed.weight")),
        "module": _NEOX + _HEAD,
    },
}


@dataclass(frozen=True, slots=True)
class HfNames:
    """The tensors of one model in one Hugging Face form, each with its place among ours."""

    rows: tuple[Row, ...]
    sizes: Mapping[str, int]
    tied: Mapping[str, str]  # our tensors that only share another's values, in no file: theirs -> the owner's

    @classmethod
    def of(cls, family: str, model: ModelSpec, form: Form = "published") -> "HfNames":
        """Return the rows of a ``model_type``'s table for every layer and expert of a model."""
        family = SAME_CODE.get(family, family)
        if family not in HF_NAMES:
            raise InputError.of("model_type", f"{family!r} has no table of names. {nearest(family, list(HF_NAMES))}")
        dims_of, graph = _parameters(model)
        tied = tied_instances(graph)
        rows = tuple(_expanded(HF_NAMES[family][form], model, dims_of))
        missing = sorted(dims_of.keys() - {row.ours for row in rows})
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            names = f"{', '.join(missing[:3])}{more}"
            raise InputError.of("model_type", f"{family} has no tensors for {names} of {model.name}")
        half, plain = model.rotary_dims // 2, model.head_dim - model.rotary_dims
        parts = {"first_half": half, "second_half": half, "plain_dim": plain}
        return cls(rows, {**graph.sizes, **FUSED, **parts}, tied)

    @classmethod
    def fitting(cls, family: str, model: ModelSpec, names: Collection[str]) -> "HfNames":
        """Return the rows of that form of the table which has most of these Hugging Face names."""
        forms: tuple[Form, ...] = ("published", "module")
        tables = [cls.of(family, model, form) for form in forms]
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
