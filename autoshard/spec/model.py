"""The architecture numbers of one decoder-only transformer."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from autoshard.errors import in_range, inside, require
from autoshard.spec.model_parts import (
    MAX_DIM,
    MAX_EXPERTS,
    LatentAttention,
    LinearAttention,
    RotaryScaling,
    Router,
    TracedDecoder,
)
from autoshard.spec.record import option
from autoshard.spec.repeats import compress, expand_counts

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]

# Far above every published model, and low enough that a typing error cannot make planning take days.
MAX_LAYERS = 10_000
LAYER = "layer"  # the kind of layers that the fields of a model describe
OTHER_BLOCKS = ("embed", "head", "update", "module")  # names of blocks that are no layers
_KIND_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers that differ from what the fields of their model say; None says that they do not differ there."""

    name: str
    dense_ffn: int | None = option(None)  # the width of an MLP that stands in the place of experts
    window: int | None = option(None)
    rotary_theta: float | None = option(None)  # whose frequencies are not scaled
    positions: Literal["none"] | None = option(None)  # which queries and keys do not say
    linear: LinearAttention | None = option(None)
    norm_place: Literal["before", "after", "both"] | None = option(None)
    lines: tuple[str, ...] = option(())  # of a layer of a decoder that was read off its code

    def __post_init__(self) -> None:
        name, taken = self.name, (LAYER, *OTHER_BLOCKS)
        bad_name = f"{name!r} must be small letters, digits and _, and none of {', '.join(taken)}"
        require(
            (bool(_KIND_NAME.fullmatch(name)) and name not in taken, "name", bad_name),
            *in_range(self, "dense_ffn", low=1, high=MAX_DIM),
            *in_range(self, "window", "rotary_theta", low=1),
            (not (self.positions and self.rotary_theta), "rotary_theta", "needs rotary positions"),
        )

    @property
    def bare(self) -> "LayerKind":
        """The kind without its lines."""
        return replace(self, lines=())

    def of_model(self, model: "ModelSpec") -> "ModelSpec":
        """Return the model whose layers are all of this kind."""
        changes: dict[str, Any] = {"window": self.window} if self.window else {}
        if self.dense_ffn:
            changes |= {"ffn": self.dense_ffn, "num_experts": 0, "experts_per_token": 0}
            changes |= {"shared_ffn": 0, "router": None, "router_bias": False, "shared_gated": False}
        if self.rotary_theta:
            changes |= {"rotary_theta": self.rotary_theta, "rotary_scaling": None}
        changes |= {"positions": self.positions} if self.positions else {}
        changes |= {"linear": self.linear} if self.linear else {}
        changes |= {"norm_place": self.norm_place} if self.norm_place else {}
        if model.traced and self.lines:
            changes["traced"] = replace(model.traced, layer=self.lines)
        return replace(model, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The architecture of a model: all that its parameters, its FLOPs and its legal cuts depend on.

    ``config`` of a field is its name in a ``config.json``. A new option is declared with ``record.option``. Where
    layers differ, ``order`` lists the kinds of all layers, ``dense*3/layer*58``: ``layer`` is what the fields say, and
    ``kinds`` has those that differ from it.
    """

    name: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm: Literal["rms", "layer"]
    norm_eps: float = field(metadata={"config": "rms_norm_eps"})
    activation: Activation
    gated_mlp: bool
    positions: Literal["rotary", "learned", "none"]
    rotary_fraction: float = 1.0
    rotary_theta: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    parallel_residual: bool = False
    tied_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    window: int | None = None
    source: str
    traced: TracedDecoder | None = None
    hidden_dropout: float = field(default=0.0, metadata={"config": "hidden_dropout"})
    attention_dropout: float = field(default=0.0, metadata={"config": "attention_dropout"})
    norm_place: Literal["before", "after", "both"] = option("before")  # of attention and of the MLP
    norm_offset: float = option(0.0)  # what a norm adds to its weight
    qk_norm_over: Literal["head", "all heads"] = option("head")
    query_scalar: float | None = option(None)  # scores are divided by its root; None is the width of a head
    scaled_embeddings: bool = option(False)  # by the root of the hidden size
    embedding_scale: float = option(1.0, config="embedding_multiplier")  # beside that root
    residual_scale: float = option(1.0, config="residual_multiplier")  # of what attention and MLPs add
    logit_divisor: float = option(1.0, config="logits_scaling")
    logit_cap: float | None = option(None, config="final_logit_softcapping")  # to which a tanh squeezes numbers
    score_cap: float | None = option(None, config="attn_logit_softcapping")
    drops_embeddings: bool = option(True)  # where numbers of hidden states are dropped
    router: Router | None = option(None)  # of experts; None is the softmax of the chosen logits
    shared_ffn: int = option(0)  # the width of an MLP beside the experts, through which all tokens go
    shared_gated: bool = option(False)  # whose result each token counts by a sigmoid of its own
    latent: LatentAttention | None = option(None)
    linear: LinearAttention | None = option(None)  # in the place of attention
    gated_attention: bool = option(False)  # whose result counts by sigmoids made of the hidden state
    sinks: bool = option(False)  # each query head has a learned number that joins the denominator of its softmax
    router_bias: bool = option(False)  # of the logits of experts
    # Where it is given, an MLP makes (up + 1) * gate * sigmoid(slope * gate): gate is at most the limit, and up lies
    # between the limit and its negative.
    glu_limit: float | None = option(None)
    glu_slope: float = option(1.0)
    kinds: tuple[LayerKind, ...] = option(())
    order: str = option("")

    def __post_init__(self) -> None:
        dims = ("hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab", "max_positions")
        experts, turned = self.num_experts, self.rotary_dims
        pairs = self.positions != "rotary" or (turned >= 2 and turned % 2 == 0)
        uneven = f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly"
        odd = f"rotary positions rotate pairs: {turned} of the {self.head_dim} numbers of a head are not pairs"
        rms = self.qk_norm and self.norm == "rms" and not self.norm_offset
        whole = "all heads together have RMS norms without an offset alone, and only where qk_norm is true"
        few = f"must be 0 (dense) or between 2 and {MAX_EXPERTS}, not {experts}"
        chosen = f"must lie between 1 and num_experts ({experts}); 0 for a dense model"
        dropouts = {"hidden_dropout": self.hidden_dropout, "attention_dropout": self.attention_dropout}
        require(
            *in_range(self, "num_layers", low=1, high=MAX_LAYERS),
            *in_range(self, *dims, low=1, high=MAX_DIM),
            (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads == 0, "num_kv_heads", uneven),
            (0 < self.rotary_fraction <= 1, "rotary_fraction", f"must lie in (0, 1], not {self.rotary_fraction}"),
            *in_range(self, "rotary_theta", "window", low=1),
            *in_range(self, "query_scalar", "embedding_scale", "residual_scale", "logit_divisor", positive=True),
            *in_range(self, "logit_cap", "score_cap", positive=True),
            *in_range(self, "norm_offset", low=0),
            (self.qk_norm_over == "head" or rms, "qk_norm_over", whole),
            (pairs, "head_dim", odd),
            *in_range(self, "norm_eps", positive=True),
            *((0 <= rate < 1, name, f"must lie in [0, 1), not {rate}") for name, rate in dropouts.items()),
            (experts == 0 or 2 <= experts <= MAX_EXPERTS, "num_experts", few),
            (min(1, experts) <= self.experts_per_token <= experts, "experts_per_token", chosen),
            *in_range(self, "shared_ffn", low=0, high=MAX_DIM),
            (self.shared_ffn > 0 or not self.shared_gated, "shared_gated", "needs shared_ffn"),
            (experts > 0 or not self.shared_ffn, "shared_ffn", "stands beside experts. Leave it out of a dense model"),
            *(self.router.checks(experts, self.experts_per_token) if self.router else ()),
            *self._order_checks(),
            *(self._latent_checks(self.latent) if self.latent else ()),
            *self._yarn_checks(),
            *self._glu_checks(),
        )
        for kind in self.kinds:
            kind.of_model(self._plain)  # refuses values that do not go together

    def _latent_checks(self, latent: LatentAttention) -> Iterator[tuple[bool, str, str]]:
        same = f"must be num_kv_heads, {self.num_kv_heads}: each query head has a key of its own where latent is given"
        yield self.num_heads == self.num_kv_heads, "num_heads", same
        yield latent.rotary_dim < self.head_dim, "latent.rotary_dim", f"must be below head_dim, {self.head_dim}"
        yield self.rotary_fraction == 1, "rotary_fraction", "must be 1: latent.rotary_dim says how much is turned"
        yield self.positions == "rotary", "positions", "must be rotary where latent is given"
        yield not self.qk_norm, "qk_norm", "must be false where latent is given: the narrow states are normed instead"
        yield self.norm == "rms", "norm", "must be rms where latent is given"

    def _yarn_checks(self) -> Iterator[tuple[bool, str, str]]:
        scaling = self.rotary_scaling
        if scaling and scaling.kind == "yarn":
            part = "must be 1 where rotary_scaling.mscale is not 0: scores as a whole grow"
            yield not scaling.mscale or self.rotary_fraction == 1, "rotary_fraction", part
            yield self.rotary_theta > 1, "rotary_theta", "must be above 1 where rotary_scaling is yarn"

    def _glu_checks(self) -> Iterator[tuple[bool, str, str]]:
        gated = self.gated_mlp and self.activation == "silu"
        yield from in_range(self, "glu_limit", "glu_slope", positive=True)
        yield self.glu_limit is None or gated, "glu_limit", "belongs to gated MLPs with silu"
        yield self.glu_limit is not None or self.glu_slope == 1, "glu_slope", "must be 1 where glu_limit is not given"
        yield self.num_experts > 0 or not self.router_bias, "router_bias", "needs experts"
        yield not (self.sinks and self.latent), "sinks", "must be false where latent is given"
        gate = "must be false where latent is given"
        yield not (self.gated_attention and self.latent), "gated_attention", gate

    def _order_checks(self) -> Iterator[tuple[bool, str, str]]:
        names = [kind.name for kind in self.kinds]
        yield len(set(names)) == len(names), "kinds", f"two kinds of layers have one name: {', '.join(names)}"
        if not self.order:
            yield not names, "order", f"missing, though there are other kinds of layers: {', '.join(names)}"
            return
        for kind in self.kinds:
            lines = f"are {'missing' if self.traced else 'only said'} of {kind.name} where the model was read off code"
            yield bool(kind.lines) == (self.traced is not None), "kinds", lines
        with inside("order"):
            listed = Counter(expand_counts(self.order))
        unknown, unused = listed.keys() - {LAYER, *names}, {*names} - listed.keys()
        yield not unknown, "order", f"names {', '.join(sorted(unknown))}. Kinds of layers: {', '.join((LAYER, *names))}"
        yield not unused, "kinds", f"order has no layer of kind {', '.join(sorted(unused))}"
        total = listed.total()
        yield total == self.num_layers, "order", f"lists {total} layers, and num_layers is {self.num_layers}"

    @property
    def _plain(self) -> "ModelSpec":
        """The model whose layers are all as its own fields say."""
        return replace(self, kinds=(), order="") if self.order else self

    @property
    def layer_order(self) -> tuple[str, ...]:
        """The kind of every layer."""
        return expand_counts(self.order) if self.order else (LAYER,) * self.num_layers

    @property
    def layer_counts(self) -> Mapping[str, int]:
        """How many layers there are of each kind, in the order in which the kinds first occur."""
        return Counter(expand_counts(self.order)) if self.order else {LAYER: self.num_layers}

    def of_kind(self, name: str) -> "ModelSpec":
        """Return the model whose layers are all of one of its kinds."""
        kind = next((kind for kind in self.kinds if kind.name == name), None)
        return kind.of_model(self._plain) if kind else self._plain

    def with_layers(self, count: int) -> "ModelSpec":
        """Return the model with its first layers alone, or with all of its kinds in turn where these lack one."""
        if not self.order:
            return replace(self, num_layers=count)
        kinds, first = tuple(self.layer_counts), self.layer_order[:count]
        if len({*first}) < len(kinds) or len(first) < count:
            first = tuple(kinds[number % len(kinds)] for number in range(count))
        other_kinds = tuple(kind for kind in self.kinds if kind.name in first)
        return replace(self, num_layers=count, kinds=other_kinds, order=compress(first) if other_kinds else "")

    def ffn_dim(self, kind: str) -> str:
        """Return the dim of the MLPs of a kind of layers: ``ffn``, or ``ffn_dense`` where they have another width."""
        return "ffn" if self.of_kind(kind).ffn == self.ffn else f"ffn_{kind}"

    def differences(self, now: "ModelSpec") -> Iterator[str]:
        """Yield the differences from this model to another, apart from their names."""
        bare = [replace(spec, traced=None, kinds=tuple(kind.bare for kind in spec.kinds)) for spec in (self, now)]
        for name in (spec_field.name for spec_field in fields(self) if spec_field.name not in ("name", "source")):
            before, after = (getattr(spec, name) for spec in bare)
            if before != after:
                yield f"{name} was {before} and is {after}"
        before, after = ({*spec.lines} for spec in (self, now))
        yield from (f"no more {line}" for line in sorted(before - after))
        yield from (f"new is {line}" for line in sorted(after - before))

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of all parts and kinds of layers of a decoder that was read off its code."""
        return (*(self.traced.lines if self.traced else ()), *(line for kind in self.kinds for line in kind.lines))

    @property
    def has_linear_layers(self) -> bool:
        """Whether some layers have linear attention."""
        return self.linear is not None or any(kind.linear for kind in self.kinds)

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that read the same key/value head: the size of dim ``q_group``."""
        return self.num_heads // self.num_kv_heads

    @property
    def widths(self) -> tuple[int, ...]:
        """Sizes of the MLPs of layers: that of the model, those of other kinds, and what is read off code."""
        shared = (self.shared_ffn,) if self.shared_ffn else ()
        sizes = self.traced.sizes if self.traced else dict[str, int]()
        of_code = (size for dim, size in sizes.items() if dim.startswith("ffn_"))
        return (self.ffn, *shared, *(kind.dense_ffn for kind in self.kinds if kind.dense_ffn), *of_code)

    @property
    def norm_has_bias(self) -> bool:
        """Whether each norm carries a bias beside its weight."""
        return self.norm == "layer"

    @property
    def score_scale(self) -> float | None:
        """The factor of attention's scores; None for 1 over the root of the width of a head."""
        growth = self.rotary_scaling.growth if self.rotary_scaling and self.positions == "rotary" else 1.0
        if self.query_scalar is None and growth == 1:
            return None
        return (self.query_scalar or self.head_dim) ** -0.5 * growth**2

    @property
    def rotary_dims(self) -> int:
        """How many numbers of each head are rotated (rounded down, as in Hugging Face); 0 without rotary positions."""
        if self.latent:
            return self.latent.rotary_dim
        return int(self.head_dim * self.rotary_fraction) if self.positions == "rotary" else 0

    @property
    def value_dim(self) -> int:
        """How many numbers a value of a head has."""
        return self.latent.value_dim if self.latent else self.head_dim

    def beyond_positions(self, seq_len: int) -> str:
        """Return a warning that a sequence is longer than the positions of the model; "" if it is not."""
        if seq_len <= self.max_positions:
            return ""
        longer = f"sequences of {seq_len} tokens are longer than the {self.max_positions} positions of {self.name}"
        return f"{longer}: it runs, but the model was not made for positions beyond them (rope_scaling extends them)"

    @property
    def num_parameters(self) -> int:
        """Number of parameters that gradients train; those of a tied output head are counted once, in the embedding."""
        if self.traced:
            return self.traced.num_parameters
        layers = sum(count * self.of_kind(kind)._layer_parameters for kind, count in self.layer_counts.items())
        final_norm = (2 if self.norm_has_bias else 1) * self.hidden
        tables = self.vocab * (1 if self.tied_embeddings else 2)
        learned = self.max_positions if self.positions == "learned" else 0
        return layers + final_norm + (tables + learned) * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of the experts among which routers choose."""
        kinds = ((self.of_kind(kind), count) for kind, count in self.layer_counts.items())
        return sum(count * kind.num_experts * kind._mlp_parameters for kind, count in kinds)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token meets: of the experts only those that it is sent to."""
        chosen = self.expert_parameters * self.experts_per_token // max(1, self.num_experts)
        return self.num_parameters - self.expert_parameters + chosen

    @property
    def _mlp_parameters(self) -> int:
        """Number of parameters of an MLP, or of one expert."""
        products = 2 if self.gated_mlp else 1
        return (products + 1) * self.hidden * self.ffn + (products * self.ffn + self.hidden) * self.mlp_bias

    @property
    def _layer_parameters(self) -> int:
        """Number of trained parameters of a layer that the fields describe."""
        attention = self._latent_parameters(self.latent) if self.latent else self._attention_parameters
        attention = self.linear.num_parameters(self.hidden) if self.linear else attention
        per_norm = 2 if self.norm_has_bias else 1
        products = 2 if self.gated_mlp else 1
        router = self.num_experts * (self.hidden + self.router_bias)
        norms = (4 if self.norm_place == "both" else 2) * per_norm * self.hidden
        shared = (products + 1) * self.hidden * self.shared_ffn
        shared += self.hidden * self.shared_gated
        shared += (products * self.shared_ffn + self.hidden) * (self.mlp_bias and self.shared_ffn > 0)
        return attention + max(1, self.num_experts) * self._mlp_parameters + shared + router + norms

    @property
    def _attention_parameters(self) -> int:
        heads = self.num_heads + 2 * self.num_kv_heads
        products = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden
        biases = heads * self.head_dim * self.qkv_bias + self.hidden * self.out_bias
        normed = self.num_heads + self.num_kv_heads if self.qk_norm_over == "all heads" else 2
        biases += self.num_heads * (self.sinks + self.head_dim * self.hidden * self.gated_attention)
        return products + biases + normed * (2 if self.norm_has_bias else 1) * self.head_dim * self.qk_norm

    def _latent_parameters(self, latent: LatentAttention) -> int:
        """Number of parameters of an attention with narrow states; biases are those of the products that make them."""
        narrow, read = latent.query_rank or 0, latent.query_rank or self.hidden
        made = narrow + latent.kv_rank + latent.rotary_dim
        of_heads = read * self.head_dim + latent.kv_rank * (self.head_dim - latent.rotary_dim + latent.value_dim)
        out = self.num_heads * latent.value_dim * self.hidden + self.hidden * self.out_bias
        return made * (self.hidden + self.qkv_bias) + narrow + latent.kv_rank + self.num_heads * of_heads + out
