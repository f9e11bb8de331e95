"""The decoder-only transformer as a graph, operation by operation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from types import FunctionType

from autoshard.errors import inside, require
from autoshard.extensions import EXTENSIONS, called
from autoshard.graph.block import Block, OpGraph
from autoshard.graph.builder import BlockBuilder, finish
from autoshard.graph.kinds.attention import Attend, Join, Rotary, fraction_of
from autoshard.graph.kinds.dropout import DROPOUT_KEYS, Drop
from autoshard.graph.kinds.experts import Dispatch
from autoshard.graph.kinds.indexing import Lookup, Pick
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.norm import MeanSquare, Norm, Rescale
from autoshard.graph.kinds.opaque import Opaque
from autoshard.graph.kinds.optimizer import ClipScale
from autoshard.graph.kinds.pointwise import Add, Cast, Multiply, Reduce, ScaleBy, SoftCap, Unary
from autoshard.graph.kinds.sinks import SinkAttend
from autoshard.graph.linear import emit_gated, linear_attention
from autoshard.graph.mlps import SHARED, emit_linear, mixture, mlp
from autoshard.graph.op import Dims
from autoshard.graph.router import add_router_losses
from autoshard.graph.written import emit_written, parse_lines
from autoshard.spec.kernels import Kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_parts import LatentAttention, TracedDecoder
from autoshard.spec.workload import Workload

_RESIDUAL: Dims = ("batch", "seq", "hidden")
_HEADS: Dims = ("kv_heads", "q_group", "head_dim")
_KV: Dims = ("kv_heads", "head_dim")
_STREAMS = {"embed_drop": 0, "attn_drop": 1, "mlp_drop": 2}  # of a block; that of its attention is 0
LOGITS = ("unembed", "unembed_shift", "logit_cap")  # operations of a head, of which the last one gives its logits
_KEYS_ALONG = (("seq", "kv_seq"),)


def decoder_graph(model: ModelSpec, workload: Workload, kernels: Kernels, *, micro_batch: int) -> OpGraph:
    """Write down one training step; ``micro_batch`` counts the sequences of a micro-batch over all of dp.

    >>> from autoshard.spec.model_catalogue import load_model
    >>> from autoshard.spec.kernels import load_kernels
    >>> from autoshard.spec.workload import Precision
    >>> workload = Workload(seq_len=64, global_batch=8, precision=Precision.named("bf16"))
    >>> graph = decoder_graph(load_model("tiny-llama"), workload, load_kernels("torch_engine"), micro_batch=1)
    >>> [block.kind for block in graph.blocks]
    ['embed', 'layer', 'head']
    """
    tied = {"head.unembed.weight": "embed.embed.weight"} if model.tied_embeddings else {}
    if model.traced:
        blocks = _traced_blocks(model, model.traced, workload, kernels)
    else:
        layers = (_layer_block(model, kind, workload, kernels) for kind in model.layer_counts)
        blocks = (_embed_block(model, workload, kernels), *layers, _head_block(model, workload, kernels))
    return OpGraph(
        sizes=dim_sizes(model, workload, kernels, micro_batch),
        blocks=blocks,
        order=model.layer_order,
        update=update_block(workload, blocks),
        tied=tied,
    )


def dim_sizes(model: ModelSpec, workload: Workload, kernels: Kernels, micro_batch: int) -> Mapping[str, int]:
    """Return the size of every dim; slots hold all choices, evenly spread, times the capacity."""
    sizes = {
        "batch": micro_batch,
        "seq": workload.seq_len,
        "kv_seq": workload.seq_len,
        "kv_heads": model.num_kv_heads,
        "q_group": model.queries_per_kv_head,
        "head_dim": model.head_dim,
        "hidden": model.hidden,
        "vocab": model.vocab,
        "ffn": model.ffn,
        **{model.ffn_dim(kind): model.of_kind(kind).ffn for kind in model.layer_counts},
    }
    if latent := model.latent:
        sizes |= {"latent_kv": latent.kv_rank, "rotary_dim": latent.rotary_dim, "value_dim": latent.value_dim}
        sizes |= {"plain_dim": model.head_dim - latent.rotary_dim}
        sizes |= {"latent_q": latent.query_rank} if latent.query_rank else {}
    if linear := next((spec.linear for name in model.layer_counts if (spec := model.of_kind(name)).linear), None):
        sizes |= {"delta_heads": linear.key_heads, "delta_group": linear.value_heads // linear.key_heads}
        sizes |= {"delta_key": linear.key_dim, "delta_value": linear.value_dim, "taps": linear.taps}
    if model.positions == "learned":
        sizes["positions"] = model.max_positions
    if model.num_experts:
        sizes["experts"], sizes["choices"] = model.num_experts, model.experts_per_token
        capacity = workload.expert_capacity
        if capacity is None and kernels.pads_experts:
            capacity = model.num_experts / model.experts_per_token
        if model.shared_ffn:
            sizes[SHARED] = model.shared_ffn
        sizes["slots"] = num_slots(model, micro_batch * workload.seq_len, capacity)
    return {**sizes, **(model.traced.sizes if model.traced else {})}


def num_slots(model: ModelSpec, num_tokens: int, expert_capacity: float | None) -> int:
    """Return how many tokens an expert takes of those routed together; without a capacity, if evenly spread."""
    choices = num_tokens * model.experts_per_token
    capacity = Fraction(expert_capacity or 1).limit_denominator(1000)
    return -(-choices * capacity.numerator // (model.num_experts * capacity.denominator))


def _embed_block(model: ModelSpec, workload: Workload, kernels: Kernels) -> Block:
    b = BlockBuilder(workload.precision, workload.optimizer)
    tokens = b.input("tokens", ("batch", "seq"), "int64")
    scale = model.embedding_scale * (math.sqrt(model.hidden) if model.scaled_embeddings else 1.0)
    x = b.emit("embed", Lookup(scale=scale), b.weight("embed.weight", "vocab", "hidden"), tokens)
    if model.positions == "learned":
        where = (b.input("positions", ("seq",), "int64"), *_document_starts(b, workload))
        place = b.emit("place", Lookup(), b.weight("place.weight", "positions", "hidden"), *where)
        x = b.emit("embed_add", Add(), x, place)
    x = _dropped(b, model, "embed_drop", x) if model.drops_embeddings else x
    return finish(b, "embed", kernels, gives=(x,), ties=_embed_ties(model))


def _embed_ties(model: ModelSpec) -> Mapping[str, str]:
    return {"embed.weight": "head.unembed.weight.sum"} if model.tied_embeddings else {}


def _layer_block(whole: ModelSpec, kind: str, workload: Workload, kernels: Kernels) -> Block:
    model = whole.of_kind(kind)
    b = BlockBuilder(workload.precision, workload.optimizer)
    x = b.deliver_as(b.add("x", _RESIDUAL), "block_in")
    attended = _norm_after(b, model, "attn_post_norm", _attention(b, model, workload, x))
    attended = _dropped(b, model, "attn_drop", _scaled(b, "attn_scale", attended, model.residual_scale))
    after = b.deliver_as(b.emit("attn_add", Add(), x, attended), "mlp_residual")
    source = x if model.parallel_residual else after
    drops = workload.expert_capacity is not None
    settled = kernels.settles_experts and model.num_experts > 0  # of the slots; of the tokens where none is dropped
    normed = b.deliver_as(_norm_before(b, model, "mlp_norm", source), "mlp_in", settles=settled and not drops)
    if model.num_experts:
        mlp_output = mixture(b, model, workload, normed, settles=settled and drops)
    else:
        mlp_output = _written_mlp(b, model, normed, whole.ffn_dim(kind))
    mlp_output = _norm_after(b, model, "mlp_post_norm", mlp_output)
    mlp_output = _dropped(b, model, "mlp_drop", _scaled(b, "mlp_scale", mlp_output, model.residual_scale))
    y = b.emit("mlp_add", Add(), after, mlp_output)
    gives = (y, *add_router_losses(b, workload))
    return finish(b, kind, kernels, takes=(x,), gives=gives, repeat=whole.layer_counts[kind])


def _written_mlp(b: BlockBuilder, model: ModelSpec, x: str, ffn: str) -> str:
    """Write the MLP of a layer down, by the function of a loaded file if one has it."""
    user_mlp = EXTENSIONS.of(FunctionType).get("mlp")
    if user_mlp is None:
        return mlp(b, model, x, ffn=ffn)
    given = called("mlp", user_mlp, b, model, x)
    message = f"must return what b.emit gives, the name of a value, not {given!r}"
    require((isinstance(given, str) and given in b.tensors, "--extend mlp", message))
    return given


def _head_block(model: ModelSpec, workload: Workload, kernels: Kernels) -> Block:
    b = BlockBuilder(workload.precision, workload.optimizer)
    x = b.deliver_as(b.add("x", _RESIDUAL), "head_in")
    normed = _scaled(b, "logit_scale", _norm(b, model, "final_norm", x, "hidden"), 1 / model.logit_divisor)
    normed = b.deliver_as(normed, "unembed_in")
    weight = b.weight("unembed.weight", "vocab", "hidden")
    logits = b.emit("unembed", Einsum(dims=("batch", "seq", "vocab")), normed, weight)
    if model.logit_cap:
        logits = b.emit("logit_cap", SoftCap(cap=model.logit_cap, dtype="fp32"), logits)
    return _with_loss(b, model, kernels, (x, logits))


def _with_loss(b: BlockBuilder, model: ModelSpec, kernels: Kernels, ends: tuple[str, str]) -> Block:
    """Finish the head, whose ``ends`` are the hidden state that it takes and its logits."""
    x, logits = ends
    if model.traced and model.traced.data:
        _emit_sample_loss(b, logits)
    else:
        emit_loss(b, logits)
    ties = {"unembed.weight": None} if model.tied_embeddings else {}
    return finish(b, "head", kernels, takes=(x,), gives=("loss",), ties=ties)


def emit_loss(b: BlockBuilder, logits: str) -> None:
    """Emit the loss of logits, in FP32: the sum over all tokens of the batch, each with its weight."""
    labels = b.input("labels", ("batch", "seq"), "int64")
    token_weight = b.input("token_weight", ("batch", "seq"), "fp32")
    if b.tensors[logits].dtype != "fp32":
        logits = b.emit("logits_fp32", Cast(dtype="fp32"), logits)
    top = b.emit("top", Reduce(function="max", over=("vocab",)), logits)
    shifted = b.emit("shifted", Add(sign=-1), logits, top)
    power = b.emit("power", Unary(function="exp"), shifted)
    total = b.emit("total", Reduce(function="sum", over=("vocab",)), power)
    log_total = b.emit("log_total", Unary(function="log"), total)
    picked = b.emit("picked", Pick(over="vocab"), shifted, labels)
    token_loss = b.emit("token_loss", Add(sign=-1), log_total, picked)
    weighted = b.emit("weighted", Multiply(), token_loss, token_weight)
    b.emit("loss", Reduce(function="sum", over=("batch", "seq")), weighted)


def _emit_sample_loss(b: BlockBuilder, output: str) -> None:
    """Emit a loss of which nothing is known but that each sample has its own part of the sum."""
    dims = b.tensors[output].dims
    require(("batch" in dims, "head", f"ends in [{' '.join(dims)}], and each sample must have a result"))
    whole = tuple(dim for dim in dims if dim != "batch")
    part = b.emit("sample_loss", Opaque(does="loss", dims=("batch",), whole=whole), output)
    if b.tensors[part].dtype != "fp32":
        part = b.emit("sample_loss_fp32", Cast(dtype="fp32"), part)
    b.emit("loss", Reduce(function="sum", over=("batch",)), part)


def _traced_blocks(model: ModelSpec, traced: TracedDecoder, workload: Workload, kernels: Kernels) -> tuple[Block, ...]:
    """Write down the blocks of a decoder whose code was read."""
    embed, head = (BlockBuilder(workload.precision, workload.optimizer) for _ in range(2))
    with inside("model.traced"):
        x = _emit_traced(embed, traced.embed, workload, kernels)
        last = head.add("x", traced.carried)
        logits = _emit_traced(head, traced.head, workload, kernels)
        return (
            finish(embed, "embed", kernels, gives=(x,), ties=_embed_ties(model)),
            *(_traced_layer(model, kind, workload, kernels) for kind in model.layer_counts),
            _with_loss(head, model, kernels, (last, logits)),
        )


def _traced_layer(model: ModelSpec, kind: str, workload: Workload, kernels: Kernels) -> Block:
    b, of_kind = BlockBuilder(workload.precision, workload.optimizer), model.of_kind(kind).traced
    assert of_kind, f"{model.name} was read off no code"
    x = b.add("x", of_kind.carried)
    y = _emit_traced(b, of_kind.layer, workload, kernels)
    gives = (y, *add_router_losses(b, workload))
    return finish(b, kind, kernels, takes=(x,), gives=gives, repeat=model.layer_counts[kind])


def _emit_traced(b: BlockBuilder, lines: Sequence[str], workload: Workload, kernels: Kernels) -> str:
    """Emit the lines of a part; return the name of its result."""
    ops, settled = parse_lines(lines), ""
    counting = [op for op in ops if isinstance(op.kind, Rotary | Attend) or "positions[seq]:int64" in op.operands]
    starts = _document_starts(b, workload) if counting else ()
    reads = [op for op in ops if isinstance(op.kind, Dispatch)]
    if reads and kernels.settles_experts:  # as in the layers of cards
        settled = reads[0].name if workload.expert_capacity is not None else reads[0].operands[0]
    return emit_written(b, ops, {op.name: starts for op in counting}, settled)


def _norm(b: BlockBuilder, model: ModelSpec, name: str, x: str, over: str, eps: float | None = None) -> str:
    weights = [b.weight(f"{name}.weight", over)]
    if model.norm_has_bias:
        weights.append(b.weight(f"{name}.bias", over))
    kind = Norm(function=model.norm, over=over, eps=eps or model.norm_eps, offset=model.norm_offset)
    return b.emit(name, kind, x, *weights)


def _norm_before(b: BlockBuilder, model: ModelSpec, name: str, x: str) -> str:
    return x if model.norm_place == "after" else _norm(b, model, name, x, "hidden")


def _norm_after(b: BlockBuilder, model: ModelSpec, name: str, x: str) -> str:
    return x if model.norm_place == "before" else _norm(b, model, name, x, "hidden")


def _head_norm(b: BlockBuilder, model: ModelSpec, name: str, x: str, heads: Dims) -> str:
    """Norm queries or keys: each head, or all of them together by a mean square to which each rank adds its heads."""
    if model.qk_norm_over == "head":
        return _norm(b, model, f"{name}_norm", x, "head_dim")
    count = model.head_dim * (model.num_heads if heads == _HEADS else model.num_kv_heads)
    square = b.emit(f"{name}_square", MeanSquare(over=heads, count=count), x)
    return b.emit(f"{name}_rescale", Rescale(eps=model.norm_eps), x, square, b.weight(f"{name}_norm.weight", *heads))


def _attention(b: BlockBuilder, model: ModelSpec, workload: Workload, x: str) -> str:
    normed = b.deliver_as(_norm_before(b, model, "attn_norm", x), "attn_in")
    if model.linear:
        return linear_attention(b, model, normed)
    query, key, value = (_latent_heads if model.latent else _plain_heads)(b, model, workload, normed)
    b.deliver_as(query, "q_in")
    b.deliver_as(key, "k_in", _KEYS_ALONG)
    b.deliver_as(value, "v_in", _KEYS_ALONG)
    width = "value_dim" if model.latent else "head_dim"
    kind = (SinkAttend if model.sinks else Attend)(
        window=model.window, dropped=model.attention_dropout, scale=model.score_scale, value_width=width,
        cap=model.score_cap,
    )  # fmt: skip
    sinks = [b.weight("sink.bias", "kv_heads", "q_group")] if model.sinks else []
    mixed = b.emit("attend", kind, query, key, value, *_positions(b, workload), *_attention_draws(b, model), *sinks)
    values = ("kv_heads", "q_group", width)
    mixed = emit_gated(b, mixed, normed, values, function="sigmoid") if model.gated_attention else mixed
    result = emit_linear(b, "o", b.deliver_as(mixed, "o_in"), ("hidden",), values, bias=model.out_bias)
    return b.deliver_as(result, "attn_out")


def _positions(b: BlockBuilder, workload: Workload) -> tuple[str, ...]:
    """Return the inputs with the positions of queries and keys, and, if they matter, where documents start."""
    where = b.input("positions", ("seq",), "int64"), b.input("key_positions", ("kv_seq",), "int64")
    return (*where, *_document_starts(b, workload))


def _turned(b: BlockBuilder, workload: Workload, name: str, rotary: Rotary, x: str) -> str:
    positions, _, *starts = _positions(b, workload)
    return b.emit(f"{name}_rotary", rotary, x, positions, *starts)


def _plain_heads(b: BlockBuilder, model: ModelSpec, workload: Workload, x: str) -> tuple[str, str, str]:
    """Make queries, keys and values of the hidden state."""
    query = emit_linear(b, "q", x, _HEADS, ("hidden",), bias=model.qkv_bias)
    key = emit_linear(b, "k", x, _KV, ("hidden",), bias=model.qkv_bias)
    value = emit_linear(b, "v", x, _KV, ("hidden",), bias=model.qkv_bias)
    if model.qk_norm:
        query, key = _head_norm(b, model, "q", query, _HEADS), _head_norm(b, model, "k", key, _KV)
    if model.positions == "rotary":
        rotary = Rotary(fraction=model.rotary_fraction, theta=model.rotary_theta, scaling=model.rotary_scaling)
        query, key = _turned(b, workload, "q", rotary, query), _turned(b, workload, "k", rotary, key)
    return query, key, value


def _latent_heads(b: BlockBuilder, model: ModelSpec, workload: Workload, x: str) -> tuple[str, str, str]:
    """Make queries, keys and values of narrow states, and the part of a key that says positions of the hidden state."""
    latent = model.latent
    assert latent, f"{model.name} has no narrow states"
    if latent.query_rank:
        query = emit_linear(b, "q_up", _narrow(b, model, latent, "q", x), _HEADS, ("latent_q",), bias=False)
    else:
        query = emit_linear(b, "q", x, _HEADS, ("hidden",), bias=False)
    shared = emit_linear(b, "k_shared", x, ("rotary_dim",), ("hidden",), bias=model.qkv_bias)
    narrow = _narrow(b, model, latent, "kv", x)
    key = emit_linear(b, "k_up", narrow, ("kv_heads", "plain_dim"), ("latent_kv",), bias=False)
    value = emit_linear(b, "v_up", narrow, ("kv_heads", "value_dim"), ("latent_kv",), bias=False)
    whole = Rotary(fraction=1.0, theta=model.rotary_theta, scaling=model.rotary_scaling, over="rotary_dim")
    part = replace(whole, fraction=fraction_of(latent.rotary_dim, model.head_dim), over="head_dim")
    query = _turned(b, workload, "q", part, query)
    return query, b.emit("k_join", Join(), _turned(b, workload, "k", whole, shared), key), value


def _narrow(b: BlockBuilder, model: ModelSpec, latent: LatentAttention, name: str, x: str) -> str:
    down = emit_linear(b, f"{name}_down", x, (f"latent_{name}",), ("hidden",), bias=model.qkv_bias)
    return _norm(b, model, f"{name}_down_norm", down, f"latent_{name}", latent.norm_eps)


def _scaled(b: BlockBuilder, name: str, x: str, factor: float) -> str:
    return x if factor == 1 else b.emit(name, ScaleBy(factor=factor), x)


def _dropped(b: BlockBuilder, model: ModelSpec, name: str, x: str) -> str:
    """Drop numbers of a hidden state, if the model does."""
    if not model.hidden_dropout:
        return x
    positions = b.input("positions", ("seq",), "int64")
    columns, keys = b.input("columns", ("hidden",), "int64"), b.input(DROPOUT_KEYS, ("batch",), "int64")
    return b.emit(name, Drop(dropped=model.hidden_dropout, stream=_STREAMS[name]), x, keys, positions, columns)


def _attention_draws(b: BlockBuilder, model: ModelSpec) -> tuple[str, ...]:
    """Return the inputs by which attention draws random numbers; none if it drops no probabilities."""
    if not model.attention_dropout:
        return ()
    heads = (("kv_numbers", "kv_heads"), ("group_numbers", "q_group"))
    return (
        b.input(DROPOUT_KEYS, ("batch",), "int64"),
        *(b.input(name, (dim,), "int64") for name, dim in heads),
    )


def _document_starts(b: BlockBuilder, workload: Workload) -> tuple[str, ...]:
    """Return the input with the position where the document of each token starts; none if documents are joined."""
    if workload.documents == "joined":
        return ()
    return (b.input("document_starts", ("batch", "seq"), "int64"),)


def update_block(workload: Workload, blocks: tuple[Block, ...]) -> Block:
    """Write the one place that sees all gradients: every ``<block>.<parameter>.square``, repeats summed."""
    b = BlockBuilder(workload.precision)
    squares = [
        b.add(f"{block.kind}.{op.name}", (), "fp32", "input")
        for block in blocks
        for op in block.select("step")
        if op.name.endswith(".square")
    ]
    b.append("clip", ClipScale(limit=workload.clip_norm), squares, source="clip", phase="step")
    return Block(kind="update", repeat=1, tensors=b.tensors, ops=tuple(b.ops), fused=(), saved=(), takes=(), gives=())
