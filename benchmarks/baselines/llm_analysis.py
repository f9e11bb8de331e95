"""The formulas of llm-analysis (Cheng Li, cli99/llm-analysis d841e40) for a measured run.

``autoshard validate ROWS --predictor benchmarks/baselines/llm_analysis.py:seconds`` scores them. They are those of
llm_analysis/analysis.py, with the efficiencies of its script for training (examples/llama/run_train.sh): 0.5 of the
FLOPs of a chip, 0.9 of the rate of its memory, and the whole rate of every link. But for what follows, the result is
within 0.05% of that of the published code (a test).

Simplified: activations move as many bytes under recompute as without. Added, because it has no such thing and would be
far off: the bubble of a pipeline; the layers of the fullest stage, not the floor of layers over stages; links between
nodes where tensor parallelism leaves a node; ``cp``, as so many tokens less. Weights are gathered in every layer only
under ZeRO-3, not under all data parallelism.
"""

import math

from autoshard.calibration.measured_run import MeasuredRun
from autoshard.spec.kernels import load_kernels

_FLOPS_EFFICIENCY, _MEMORY_EFFICIENCY = 0.5, 0.9
_LEAST_MESSAGE_S = 8e-6  # intra_node_min_message_latency of gpu_configs/a100-sxm-80gb.json and h100-sxm-80gb.json
_BYTES, _NORM_BYTES = 2, 4
_BACKWARD = 2  # forward passes
_MASTER_BYTES, _GRADIENT_BYTES = 12, 4  # of a weight: FP32 copy and moments, FP32 gradient
_NORM_FLOPS = 5


def seconds(run: MeasuredRun) -> float:
    """Return the time of a step: micro-batches and bubble, then the optimizer."""
    at = run.candidate
    forward_s, again_s = forward_seconds(run)
    micro_batches = max(1, run.workload.global_batch // (at.dp * at.mbs))
    micro_batch_s = (1 + _BACKWARD) * forward_s + again_s
    return (micro_batches + at.pp - 1) * micro_batch_s + _optimizer_seconds(run)


def forward_seconds(run: MeasuredRun) -> tuple[float, float]:
    """Return the time of a micro-batch on a stage in the forward pass, and of what is computed again for backward."""
    at, model = run.candidate, run.model
    tokens = at.mbs * run.workload.seq_len / at.cp
    attention_s, ffn_s = _attention_seconds(run, tokens), _ffn_seconds(run, tokens)
    numbers = tokens * model.hidden
    norm_bytes = numbers * _NORM_BYTES / (at.tp if at.sequence_parallel else 1)
    norm_s = max(_NORM_FLOPS * numbers / _flops(run), norm_bytes / _memory(run))
    layer_s = attention_s + ffn_s + 2 * norm_s + 2 * _all_reduce_seconds(run, numbers)
    if at.zero == 3:
        layer_s = max(layer_s, _gather_seconds(run))
    layers = math.ceil(model.num_layers / at.pp)  # of the fullest stage
    embedding_s = model.vocab * model.hidden * _BYTES / _memory(run) + _all_reduce_seconds(run, numbers)
    head_s = 2 * tokens * model.vocab * model.hidden / (at.tp * at.pp * _flops(run))
    kinds = [one.kind for one in at.recompute]
    core_flops = 4 * tokens * run.workload.seq_len * model.hidden / (at.tp * at.pp)
    again = {
        "full": attention_s + ffn_s + 2 * norm_s,
        "selective": core_flops / _flops(run),
        "none": 0.0,
    }
    return layers * layer_s + embedding_s + head_s, layers * again[max(kinds, key=kinds.count)]


def _attention_seconds(run: MeasuredRun, tokens: float) -> float:
    at, model, seq = run.candidate, run.model, run.workload.seq_len
    weights = _attention_weights(run)
    flops = 2 * tokens * weights + 4 * tokens * seq * model.hidden
    writes_scores = any(one.score_bytes.forward for one in load_kernels(run.kernels).kernels)
    core = 2 * tokens * model.hidden + 4 * model.num_heads * tokens
    if writes_scores:
        core = 2 * model.num_heads * seq * tokens
    moved = core / at.tp + tokens * model.hidden * (1 / (at.tp if at.sequence_parallel else 1) + 4 / at.tp)
    return max(flops / at.tp / _flops(run), _BYTES * (weights / at.tp + moved) / _memory(run))


def _ffn_seconds(run: MeasuredRun, tokens: float) -> float:
    at, model = run.candidate, run.model
    weights, active = _ffn_weights(run), max(1, model.experts_per_token)
    moved = tokens * model.hidden / (at.tp if at.sequence_parallel else 1) + 2 * tokens * active * model.ffn / at.tp
    held = weights * max(1, model.num_experts) / at.ep
    return max(2 * tokens * weights * active / at.tp / _flops(run), _BYTES * (held / at.tp + moved) / _memory(run))


def _attention_weights(run: MeasuredRun) -> float:
    model = run.model
    return 2 * model.hidden * (model.num_heads + model.num_kv_heads) * model.head_dim


def _ffn_weights(run: MeasuredRun) -> float:
    """Return the weights of one feed-forward network."""
    return (3 if run.model.gated_mlp else 2) * run.model.hidden * run.model.ffn


def _flops(run: MeasuredRun) -> float:
    precision = run.workload.precision
    return run.cluster.chip.matrix_flops_per_s[precision.products or "bf16"] * _FLOPS_EFFICIENCY


def _memory(run: MeasuredRun) -> float:
    return run.cluster.chip.memory_bandwidth_bytes_per_s * _MEMORY_EFFICIENCY


def _link(run: MeasuredRun, ranks: int) -> float:
    """Return the bytes per second of the link of so many neighbours; between nodes they use all links of a node."""
    where, times = ("node", 1) if ranks <= run.cluster.ranks_per_node else ("cluster", run.cluster.ranks_per_node)
    return times * next(one.bandwidth_bytes_per_s for one in run.cluster.links if one.domain == where)


def _all_reduce_seconds(run: MeasuredRun, numbers: float) -> float:
    """Return the time of an all-reduce of tensor parallelism."""
    tp = run.candidate.tp
    if tp == 1:
        return 0.0
    return max(2 * numbers * _BYTES * (tp - 1) / tp / _link(run, tp), _LEAST_MESSAGE_S)


def _gather_seconds(run: MeasuredRun) -> float:
    """Return the time in which ZeRO-3 gathers the weights of a layer."""
    at = run.candidate
    sent = (_attention_weights(run) + _ffn_weights(run) * max(1, run.model.num_experts) / at.ep) * _BYTES
    return sent * (at.dp - 1) / at.dp / _link(run, at.tp * at.dp)


def _optimizer_seconds(run: MeasuredRun) -> float:
    """Return the time of reading what a rank holds of weights, gradients and states once."""
    at, model = run.candidate, run.model
    ffn = _ffn_weights(run) * max(1, model.num_experts) / at.ep
    layers = (_attention_weights(run) + ffn) * math.ceil(model.num_layers / at.pp)
    weights = (layers + model.vocab * model.hidden) / at.tp
    held = _MASTER_BYTES / (at.dp if at.zero else 1) + (_BYTES + _GRADIENT_BYTES) / (at.dp if at.zero == 3 else 1)
    return weights * held / _memory(run)
