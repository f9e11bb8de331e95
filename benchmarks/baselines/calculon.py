"""The formulas of Calculon (Isaev et al., SC'23) for a measured run, with the rates that its authors published.

``autoshard validate ROWS --predictor benchmarks/baselines/calculon.py:seconds`` scores them. Formulas and numbers are
of calculon-ai/calculon caa4b11: calculon/llm/layers.py (FLOPs and bytes of layers), calculon/llm/llm.py (the step),
systems/a100_80g.json and systems/h100_80g_nvl8.json. In all settings of its validation that fit in memory, the result
is within 0.2% of that of the published code (tests have five).

Simplified: no offloading, and nothing of tensor parallelism is sent behind kernels, as in all those settings. What data
parallelism sends is hidden behind backward where that is long enough ("data_par_overlap"), as the programs of most rows
do: with 16 or 64 replicas most of its settings are within 1%, few take up to 37% less, because its window counts the
memory traffic of collectives twice. Added, because Calculon has no
such thing and would be far off: the product of the vocabulary, spread evenly over all stages; gated feed-forward
networks; fewer keys than queries; flash attention, which writes no scores (and whose programs drop no numbers); ``cp``,
as so many tokens less; ZeRO-3, as ZeRO-1 (it hides what it gathers besides).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.calibration.measured_run import MeasuredRun
from autoshard.spec.kernels import load_kernels

_BYTES = 2  # of a number of FP16
# From so much work on, this share of a peak: gflops_efficiency and MB_efficiency of both files, which agree.
_MATRIX = ((128e9, 0.95), (16e9, 0.9), (1e9, 0.6), (0, 0.1))
_VECTOR = ((16e9, 0.95), (1e9, 0.5), (0, 0.1))
_MEMORY = ((100e6, 0.9), (10e6, 0.75), (1e6, 0.6), (0, 0.3))
_VECTOR_FLOPS = {"a100": 78e12, "": 120e12}  # the second: H100, and later chips
# Of a node and between nodes: what links reach, seconds to start, and by how much they slow down what computes; then
# bytes on a link for each of a message, and how many n-ths more where n ranks take part.
_LINKS, _LATENCY_S, _SLOWS = (0.65, 0.9), (1e-5, 2e-5), (0.15, 0.02)
_RING = {"reduce_scatter": (1.5, -1), "all_gather": (1.5, -1), "all_reduce": (2.0, -1), "p2p": (1.0, 0)}
_SWITCH = {"reduce_scatter": (1.0, 0), "all_gather": (1.0, 0), "all_reduce": (1.0, 1), "p2p": (1.0, 0)}
_BETWEEN = dict.fromkeys(_RING, (1.0, 0))
_ADAM_FLOPS, _ADAM_BYTES = 11, 12  # of a weight
_CORE = ("scores", "softmax", "drop scores")  # what selective recompute computes again


@dataclass(frozen=True, slots=True, kw_only=True)
class _Net:
    """One tier of the network."""

    bytes_per_s: float
    latency_s: float
    slows: float  # computing, by this share of the time in which it sends behind it
    ops: Mapping[str, tuple[float, int]]

    def seconds(self, op: str, message_bytes: float, ranks: int) -> float:
        """Return the time of a message among some ranks; alone they send nothing."""
        scale, offset = self.ops[op]
        size = message_bytes * scale * (1 + offset / ranks)
        return self.latency_s + size / self.bytes_per_s if ranks > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _System:
    """What a rank reaches."""

    matrix_flops_per_s: float
    vector_flops_per_s: float
    memory_bytes_per_s: float

    def seconds(self, flops: float, moved_bytes: float, *, matrix: bool = False) -> float:
        """Return the time of a layer: that of its FLOPs and then that of its bytes ("no_overlap")."""
        curve, peak = (_MATRIX, self.matrix_flops_per_s) if matrix else (_VECTOR, self.vector_flops_per_s)
        return flops / (peak * _reached(curve, flops)) + moved_bytes / (
            self.memory_bytes_per_s * _reached(_MEMORY, moved_bytes)
        )


def _reached(curve: Sequence[tuple[float, float]], work: float) -> float:
    return next(share for least, share in curve if work >= least)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """FLOPs and numbers that are moved in the forward pass, for the input's gradient, and for that of the weights."""

    name: str
    flops: tuple[float, float, float]
    moved: tuple[float, float, float]
    weights: float = 0.0
    matrix: bool = False

    def products_seconds(self, system: _System) -> float:
        """Return the time of the FLOPs of the backward pass, without that of its bytes."""
        return sum(system.seconds(flops, 0.0, matrix=self.matrix) for flops in self.flops[1:])

    def seconds(self, system: _System) -> tuple[float, float]:
        """Return the times of the forward and the backward pass."""
        forward, *backward = (
            system.seconds(flops, moved * _BYTES, matrix=self.matrix)
            for flops, moved in zip(self.flops, self.moved, strict=True)
        )
        return forward, sum(backward)


def _linear(name: str, rows: float, inner: float, outer: float) -> _Layer:
    moved = rows * inner + rows * outer + inner * outer
    flops, weights = 2 * rows * inner * outer, inner * outer
    return _Layer(name=name, flops=(flops, flops, flops), moved=(moved, moved, moved), weights=weights, matrix=True)


def _product(name: str, count: float, rows: float, inner: float, outer: float) -> _Layer:
    flops, moved = 2 * count * rows * inner * outer, count * (rows * inner + inner * outer + rows * outer)
    return _Layer(name=name, flops=(flops, 2 * flops, 0.0), moved=(moved, moved, 0.0), matrix=True)


def _elementwise(name: str, size: float, flops: tuple[float, float], moved: tuple[float, float]) -> _Layer:
    """Return a layer with so many FLOPs and moved numbers for each of its numbers, in both passes."""
    return _Layer(
        name=name,
        flops=(flops[0] * size, flops[1] * size, 0.0),
        moved=(moved[0] * size, moved[1] * size, 0.0),
    )


def _norm(name: str, size: float, hidden: float) -> _Layer:
    moved = 2 * size + 2 * hidden
    return _Layer(name=name, flops=(9 * size, 14 * size, 7 * size), moved=(moved, moved, moved), weights=2 * hidden)


def _block(run: MeasuredRun) -> list[_Layer]:
    """Return the layers of a block on one rank, for one micro-batch."""
    at, model = run.candidate, run.model
    seq, tokens = run.workload.seq_len, at.mbs * run.workload.seq_len / at.cp
    hidden, heads = model.hidden, model.num_heads / at.tp
    queries, keys = heads * model.head_dim, model.num_kv_heads / at.tp * model.head_dim
    ffn = model.ffn * max(1, model.experts_per_token) / at.tp
    between = tokens * hidden / (at.tp if at.sequence_parallel else 1)
    scores = heads * seq * seq / at.cp * at.mbs
    writes_scores = any(one.score_bytes.forward for one in load_kernels(run.kernels).kernels)
    drop = ((1.0, 1.0), (2.5, 2.5))  # with a mask of one byte a number
    dropped = [_elementwise("drop", between, *drop)] if writes_scores else []
    core = [_elementwise("softmax", scores, (5, 8), (2, 2)), _elementwise("drop scores", scores, *drop)]
    gate = [_linear("gate", tokens, hidden, ffn), _elementwise("gated", tokens * ffn, (1, 2), (3, 3))]
    # A fork adds the gradients of its users up; the sum of a residual has two operands.
    fork, residual = _elementwise("fork", between, (0, 2), (0, 3)), _elementwise("sum", between, (1, 2), (3, 3))
    return [
        fork,
        _norm("norm", between, hidden),
        _elementwise("fork of q, k, v", tokens * hidden, (0, 3), (0, 4)),
        _linear("query", tokens, hidden, queries),
        _linear("key", tokens, hidden, keys),
        _linear("value", tokens, hidden, keys),
        _product("scores", at.mbs * heads, seq / at.cp, model.head_dim, seq),
        *(core if writes_scores else []),
        _product("values", at.mbs * heads, seq / at.cp, seq, model.head_dim),
        _linear("out", tokens, queries, hidden),
        *dropped,
        residual,
        fork,
        _norm("norm", between, hidden),
        _linear("up", tokens, hidden, ffn),
        *(gate if model.gated_mlp else []),
        _elementwise("activation", tokens * ffn, (8, 13), (2, 2)),
        _linear("down", tokens, ffn, hidden),
        *dropped,
        residual,
    ]


def _tp_seconds(run: MeasuredRun, system: _System, net: _Net) -> tuple[float, float]:
    """Return the time of tensor parallelism of a block in both passes, and of what is sent again for backward.

    Gathers and scatters of sequence parallelism, or all-reduces; each moves its message through memory, and sums it.
    Sent again are all of them under full recompute, or else the gathers ("seq_par_ag_redo").
    """
    at = run.candidate
    size = at.mbs * run.workload.seq_len / at.cp * run.model.hidden
    moved, sums = 2 * size * _BYTES, size * (at.tp - 1) / at.tp
    if at.tp == 1:
        return 0.0, 0.0
    ops = ("all_gather", "reduce_scatter") if at.sequence_parallel else ("all_reduce",)
    links_s = [2 * net.seconds(op, size * _BYTES, at.tp) for op in ops]
    copies_s = 2 * system.seconds(0.0, moved) if at.sequence_parallel else 0.0
    gathers_s = links_s[0] if at.sequence_parallel else 0.0
    again_s = sum(links_s) if _kind(run) == "full" else gathers_s
    return 2 * (sum(links_s) + copies_s + 2 * system.seconds(sums, moved)), again_s


def _kind(run: MeasuredRun) -> str:
    """Return which recompute most stages have."""
    kinds = [one.kind for one in run.candidate.recompute]
    return max(kinds, key=kinds.count)


def _again_seconds(run: MeasuredRun, forward_s: Sequence[tuple[str, float]]) -> float:
    """Return the time of the layers of a block that are computed again for backward."""
    names = {"full": {name for name, _ in forward_s}, "selective": {*_CORE}}.get(_kind(run), set[str]())
    return sum(time_s for name, time_s in forward_s if name in names)


def _nets(run: MeasuredRun) -> tuple[_Net, _Net, _Net]:
    """Return the tiers of tp, pp and dp: a node has ranks of tp next to each other, then of dp, then of pp."""
    at, cluster = run.candidate, run.cluster
    inside = _RING if cluster.chip.name.startswith("a100") else _SWITCH
    speeds = [next(one for one in cluster.links if one.domain == where) for where in ("node", "cluster")]
    node, network = (
        _Net(bytes_per_s=link.bandwidth_bytes_per_s * reached, latency_s=latency_s, slows=slows, ops=ops)
        for link, reached, latency_s, slows, ops in zip(
            speeds, _LINKS, _LATENCY_S, _SLOWS, (inside, _BETWEEN), strict=True
        )
    )
    ranks = (at.tp * at.cp, cluster.num_ranks, at.tp * at.cp * at.dp)
    tp, pp, dp = (node if count <= cluster.ranks_per_node else network for count in ranks)
    return tp, pp, dp


def seconds(run: MeasuredRun) -> float:
    """Return the time of a step: micro-batches and bubble of the pipeline, data parallelism, the optimizer."""
    at, model, chip = run.candidate, run.model, run.cluster.chip
    system = _System(
        matrix_flops_per_s=chip.matrix_flops_per_s[run.workload.precision.products or "bf16"],
        vector_flops_per_s=next(rate for name, rate in _VECTOR_FLOPS.items() if chip.name.startswith(name)),
        memory_bytes_per_s=chip.memory_bandwidth_bytes_per_s,
    )
    block, (tp_net, pp_net, dp_net) = _block(run), _nets(run)
    times = [layer.seconds(system) for layer in block]
    again_s = _again_seconds(run, [(layer.name, one[0]) for layer, one in zip(block, times, strict=True)])
    tp_s, tp_again_s = _tp_seconds(run, system, tp_net)
    block_s = sum(map(sum, times)) + again_s + tp_s + tp_again_s
    tokens = at.mbs * run.workload.seq_len / at.cp
    head_s = sum(_linear("head", tokens, model.hidden, model.vocab / at.tp).seconds(system)) / at.pp
    sent_bytes = tokens * model.hidden * _BYTES / (at.tp if at.sequence_parallel else 1)
    p2p_s = pp_net.seconds("p2p", sent_bytes, 2) if at.pp > 1 else 0.0
    blocks, chunks = math.ceil(model.num_layers / at.pp), max(1, at.vp)
    chunk_s = blocks / chunks * block_s + head_s / chunks + 2 * p2p_s
    missing = at.pp * blocks - model.num_layers  # of a block less on later stages the bubble is shorter
    bubble_s = (at.pp - 1) * chunk_s - missing * block_s
    weights = [layer.weights for layer in block]
    shards = at.dp if at.zero else 1
    adam_s = sum(system.seconds(_ADAM_FLOPS * one / shards, _ADAM_BYTES * one / shards) for one in weights)
    products_s = sum(layer.products_seconds(system) for layer in block)
    again_products_s = _again_seconds(
        run, [(one.name, system.seconds(one.flops[0], 0, matrix=one.matrix)) for one in block]
    )
    behind_s = products_s + again_products_s + (0.0 if dp_net == tp_net else tp_s / 2 + tp_again_s)
    dp_s = _dp_seconds(run, dp_net, sum(weights) * _BYTES, (products_s + again_products_s, behind_s), blocks / chunks)
    micro_batches = max(1, run.workload.global_batch // (at.dp * at.mbs))
    return micro_batches * chunks * chunk_s + max(0.0, bubble_s) + blocks * adam_s + dp_s


def _dp_seconds(
    run: MeasuredRun, net: _Net, weight_bytes: float, backward_s: tuple[float, float], blocks: float
) -> float:
    """Return the time of data parallelism in a step that is not hidden behind backward ("data_par_overlap").

    ``backward_s`` is what computes in a block for one micro-batch, and that together with what is sent on other links;
    ``blocks`` are those of a chunk. Gradients of the last block have nothing to hide behind.
    """
    at = run.candidate
    if at.dp == 1:
        return 0.0
    ops = ("reduce_scatter", "all_gather") if at.zero else ("all_reduce",)
    block_s = sum(net.seconds(op, weight_bytes, at.dp) for op in ops)
    computes_s, behind_s = (one * at.pp * blocks for one in backward_s)
    chunk_s = blocks * block_s
    of_chunk_s = max(chunk_s - behind_s + computes_s * net.slows, chunk_s * net.slows)
    rest, (computes_s, behind_s) = blocks - 1, backward_s
    of_last_s = max(rest * (block_s - behind_s) + computes_s * net.slows, rest * block_s * net.slows)
    return block_s + (max(1, at.vp) - 1) * of_chunk_s + of_last_s
