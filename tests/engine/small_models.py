"""Models small enough for numpy: every card reduced, every option alone, and a step of each on the graph."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.kinds.indexing import random_document_starts
from autoshard.graph.op import Array
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import LayerKind, ModelSpec
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.model_parts import LatentAttention, LinearAttention, RotaryScaling, Router
from autoshard.spec.workload import Documents, Precision, Workload

BATCH, SEQ = 3, 8
WINDOW = 3
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
EXPERTS = {"num_experts": 4, "experts_per_token": 2}
LLAMA3 = RotaryScaling(
    kind="llama3", factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8
)
GROUPED = Router(
    scores="sigmoid", scale=2.5, groups=2, chosen_groups=1, group_score="best two", correction=True
)  # fmt: skip
YARN = RotaryScaling(
    kind="yarn", factor=4.0, low_frequency_factor=0.25, high_frequency_factor=1.5, original_positions=16, mscale=0.7
)
LATENT: Mapping[str, Any] = {
    "num_heads": 2, "num_kv_heads": 2, "head_dim": 8,
    "latent": LatentAttention(query_rank=10, kv_rank=6, rotary_dim=4, value_dim=5),
}  # fmt: skip
LINEAR = LinearAttention(key_heads=2, value_heads=4, key_dim=4, value_dim=6, taps=3)
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "no option": {},
    "one head per key": {"num_heads": 2},
    "keys of one head": {"num_kv_heads": 1},
    "layer norm": {"norm": "layer"},
    "another eps": {"norm_eps": 0.3},
    "plain MLP": {"gated_mlp": False},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "relu": {"activation": "relu"},
    "plain relu": {"activation": "relu", "gated_mlp": False},
    "plain squared relu": {"activation": "relu2", "gated_mlp": False, "norm": "layer", "norm_offset": 1.0},
    "biases": BIASES,
    "query and key norm": {"qk_norm": True},
    "query and key layer norm": {"qk_norm": True, "norm": "layer"},
    "part of a head turned": {"rotary_fraction": 0.5},
    "another theta": {"rotary_theta": 50.0},
    "two kinds of layers": {
        "kinds": (LayerKind(name="local", window=WINDOW, rotary_theta=50.0),),
        "order": "local/layer",
    },
    "layers that turn nothing": {
        "kinds": (LayerKind(name="local", window=WINDOW), LayerKind(name="unrotated", positions="none")),
        "order": "local/unrotated",
    },
    "scaled embeddings, residuals and logits": {"embedding_scale": 3.0, "residual_scale": 0.4, "logit_divisor": 2.0},
    "capped scores and logits": {"score_cap": 0.3, "logit_cap": 0.4, "window": WINDOW},
    "norms behind": {"norm_place": "after"},
    "norms before and behind": {"norm_place": "both", "norm": "layer"},
    "one more than the weights of norms": {"norm_offset": 1.0, "qk_norm": True},
    "norm of all queries": {"qk_norm": True, "qk_norm_over": "all heads"},
    "norm of the queries of one key head": {"qk_norm": True, "qk_norm_over": "all heads", "num_kv_heads": 1},
    "narrow states": LATENT,
    "keys and values of a narrow state": {**LATENT, "latent": replace(LATENT["latent"], query_rank=None)},
    "narrow states, biases, in a window": {**LATENT, **BIASES, "window": WINDOW, "rotary_scaling": YARN},
    "yarn": {"rotary_scaling": YARN, "rotary_theta": 50.0},
    "another scale of scores": {"query_scalar": 3.0, "window": WINDOW},
    "scaled embeddings": {"scaled_embeddings": True, "tied_embeddings": True},
    "experts behind which norms are": {**EXPERTS, "norm_place": "after", "scaled_embeddings": True},
    "linear scaling": {"rotary_scaling": RotaryScaling(kind="linear", factor=4.0)},
    "llama3 scaling": {"rotary_scaling": LLAMA3, "rotary_theta": 50.0},
    "learned positions": {"positions": "learned"},
    "parallel residual": {"parallel_residual": True},
    "parallel residual, layer norm": {"parallel_residual": True, "norm": "layer"},
    "tied": {"tied_embeddings": True},
    "window": {"window": WINDOW},
    "window of one": {"window": 1},
    "window wider than the sequence": {"window": 2 * SEQ},
    "experts": EXPERTS,
    "linear attention": {"kinds": (LayerKind(name="linear", linear=LINEAR),), "order": "linear/layer"},
    "linear attention alone, of one head per key": {"linear": replace(LINEAR, value_heads=2)},
    "linear attention that moves further, behind norms": {
        "kinds": (LayerKind(name="linear", linear=replace(LINEAR, reach=2.0, norm_eps=1e-3), norm_place="before"),),
        "order": "linear/layer",
        "norm_place": "after",
    },
    "gated attention": {"gated_attention": True, "qk_norm": True},
    "sinks": {"sinks": True},
    "sinks in a window, another scale": {"sinks": True, "window": WINDOW, "query_scalar": 3.0},
    "clamped gates": {"glu_limit": 0.3},
    "steep clamped gates of experts with biases": {
        **EXPERTS,
        **BIASES,
        "glu_limit": 0.3,
        "glu_slope": 1.7,
        "shared_ffn": 12,
    },
    "routers with biases": {**EXPERTS, "router_bias": True},
    "one expert per token": {**EXPERTS, "experts_per_token": 1},
    "experts by scores that sum to less than one": {**EXPERTS, "router": Router(normalised=False, scale=2.0)},
    "corrected experts in groups, and one for all tokens": {**EXPERTS, "router": GROUPED, "shared_ffn": 12},
    "an MLP for all tokens by a share of each": {**EXPERTS, "shared_ffn": 12, "shared_gated": True},
    "experts and all else": {**EXPERTS, **BIASES, "norm": "layer", "qk_norm": True, "window": WINDOW},
}


def reduced(model: ModelSpec) -> ModelSpec:
    """Keep every option of a model and whether heads are shared, and make all its sizes small.

    There are two layers, of different kinds where the model has several.
    """
    kv_heads, group = min(model.num_kv_heads, 2), min(model.queries_per_kv_head, 2)
    first = model.with_layers(2)
    return replace(
        first,
        kinds=tuple(
            replace(
                kind,
                window=kind.window and WINDOW,
                dense_ffn=kind.dense_ffn and 40,
                linear=kind.linear and replace(LINEAR, reach=kind.linear.reach, norm_eps=kind.linear.norm_eps),
            )
            for kind in first.kinds
        ),
        hidden=16,
        ffn=24,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=8,
        vocab=32,
        max_positions=2 * SEQ,
        num_experts=min(model.num_experts, 4),
        experts_per_token=min(model.experts_per_token, 2),
        shared_ffn=min(model.shared_ffn, 40),
        router=model.router
        and (replace(model.router, groups=2, chosen_groups=1) if model.router.groups > 1 else model.router),
        window=WINDOW if model.window else None,
        glu_limit=0.3 if model.glu_limit else None,
        latent=model.latent and replace(LATENT["latent"], query_rank=model.latent.query_rank and 10),
    )


def small_models() -> Mapping[str, ModelSpec]:
    """Return every card reduced, those that become the same once, and a small Llama with each option."""
    base = reduced(load_model("tiny-llama"))
    cards = {name: reduced(load_model(name)) for name in model_names()}
    distinct = {replace(card, name="", source=""): name for name, card in reversed(cards.items())}
    options = {name: replace(base, **option) for name, option in OPTIONS.items()}
    return {name: cards[name] for name in sorted(distinct.values())} | options


def distinct_cards() -> list[str]:
    """Return one card of those that differ in sizes alone."""
    return [name for name in small_models() if name not in OPTIONS]


def roomy(model: ModelSpec) -> float | None:
    """Return the capacity at which every expert has room for every token, so that nothing is dropped."""
    return model.num_experts / model.experts_per_token if model.num_experts else None


def graph_of(
    model: ModelSpec, *, capacity: float | None = None, precision: str = "bf16", seq_len: int = SEQ, batch: int = BATCH,
    documents: Documents = "joined",
) -> OpGraph:  # fmt: skip
    """Return the graph of a small step with the kernels that torch has on a CPU."""
    named = Precision.named(precision)
    workload = Workload(
        seq_len=seq_len, global_batch=2 * batch, precision=named, expert_capacity=capacity, documents=documents
    )
    return decoder_graph(model, workload, load_kernels("torch_cuda"), micro_batch=batch)


def micro_batches(model: ModelSpec, rng: np.random.Generator, count: int = 2) -> Sequence[Mapping[str, Array]]:
    """Return random tokens, labels and documents, with token weights that differ; some are zero, as padding has."""
    shape, where = (BATCH, SEQ), np.arange(SEQ)
    return [
        {
            "tokens": rng.integers(0, model.vocab, shape),
            "labels": rng.integers(0, model.vocab, shape),
            "positions": where,
            "key_positions": where,
            "token_weight": rng.random(shape) * (rng.random(shape) < 0.8),
            "document_starts": random_document_starts(rng, shape),
        }
        for _ in range(count)
    ]
