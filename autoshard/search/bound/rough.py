"""Rough seconds of layouts from their sizes alone, by which a search chooses where to look first.

They are rules of thumb in numbers: products at their rate, every message at the bandwidth of the slowest link of
its group, nothing hidden, the bubble of 1F1B, and full recompute. No bound and no prediction rests on them.
"""

from collections.abc import Mapping

import numpy as np

from autoshard.cost.setting import Question
from autoshard.graph.kinds.optimizer import UPDATES
from autoshard.schedule.waves import Floats, Ints
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import DTYPE_BYTES

_WAYS, _LAUNCHES = 3, 20  # passes through a layer, and kernels of each
_IN_PARTS = 1.15  # how often as long a layer takes whose attention runs in parts, over cp
_FLOPS = 8  # of a weight and a token, with full recompute
_USABLE = 0.8  # of a rank's memory
_TOO_LARGE = 8  # power of how many times too much memory a layout takes, by which its seconds grow
_OF_LOGITS = 4  # times the logits of a micro-batch that the head holds
_WORKING = 16  # numbers of the hidden size that a layer keeps for a token while its backward runs


def rough_seconds(question: Question, rows: Mapping[str, Ints], zero: int = 1) -> Floats:
    """Return rough seconds of a step of every layout; far more than it would take where it may not fit in memory."""
    model, cluster = question.model, question.cluster
    tp, pp, cp, dp, mbs = (rows[key].astype(np.float64) for key in ("tp", "pp", "cp", "dp", "mbs"))
    counts = np.maximum(1.0, question.workload.global_batch / (dp * mbs))
    layers = np.ceil(model.num_layers / pp)
    passes_s = (counts + pp - 1) * layers * _layer_s(question, rows)
    weights = _weights(model, rows)
    sent_bytes = (3 if zero == 3 else 2) * DTYPE_BYTES[question.workload.precision.weights] * weights
    summed_s = (dp * cp > 1) * sent_bytes / _bandwidth(cluster, tp * cp * dp)
    number_bytes = DTYPE_BYTES[question.workload.precision.activations]
    tokens = mbs * question.workload.seq_len / (cp * tp)
    kept_layers = np.minimum(pp, counts) * layers + _WORKING * (1 + model.experts_per_token)
    saved = number_bytes * tokens * model.hidden * kept_layers
    logits = _OF_LOGITS * number_bytes * tokens * model.vocab
    states = weights * _state_bytes(question, dp * cp if zero else np.ones_like(dp), zero)
    full = (states + saved + logits) / (_USABLE * cluster.rank_memory_bytes)
    return (passes_s + summed_s) * np.maximum(1.0, full) ** _TOO_LARGE


def _layer_s(question: Question, rows: Mapping[str, Ints]) -> Floats:
    """Return the seconds of a micro-batch in a layer, all passes, or of the host that starts its kernels."""
    model, cluster, rates = question.model, question.cluster, question.rates
    tp, cp, ep, mbs = (rows[key].astype(np.float64) for key in ("tp", "cp", "ep", "mbs"))
    tokens = mbs * question.workload.seq_len / (cp * tp)  # on a rank, where tp cuts them between the products
    compute_s = _FLOPS * model.active_parameters / model.num_layers * tokens / rates.matrix_flops_per_s
    hidden_bytes = DTYPE_BYTES[question.workload.precision.activations] * model.hidden * tokens
    tp_s = 8 * (tp - 1) * hidden_bytes / _bandwidth(cluster, tp)
    cp_s = 4 * (cp - 1) * hidden_bytes * model.num_kv_heads / model.num_heads / _bandwidth(cluster, tp * cp)
    ep_s = 6 * (1 - 1 / ep) * hidden_bytes * model.experts_per_token / _bandwidth(cluster, tp * cp * ep)
    started_s = _WAYS * (rates.layer_s + _LAUNCHES * rates.launch_s + rates.experts_s * (model.num_experts > 0))
    return np.maximum(compute_s + tp_s + cp_s + ep_s, started_s) * np.where(cp > 1, _IN_PARTS, 1.0)


def _weights(model: ModelSpec, rows: Mapping[str, Ints]) -> Floats:
    """Return how many weights a rank has."""
    of_experts = model.expert_parameters
    return (model.num_parameters - of_experts + of_experts / rows["ep"]) / (rows["tp"] * rows["pp"])


def _state_bytes(question: Question, num_shards: Floats, zero: int) -> Floats:
    """Return the bytes of a weight on a rank: itself and its gradient, and its share of master and moments."""
    parts = question.workload.precision.state_bytes(UPDATES[question.workload.optimizer].num_moments)
    itself = parts["weights"] + parts["gradients"]
    divided = sum(parts.values()) - (0 if zero == 3 else itself)
    return sum(parts.values()) - divided + divided / num_shards


def _bandwidth(cluster: Cluster, spans: Floats) -> Floats:
    """Return the bytes a second of a rank whose group spans so many ranks in a row."""
    link_bandwidths = np.array([link.bandwidth_bytes_per_s / link.ranks_per_port for link in cluster.links])
    sizes = np.array([cluster.domain_ranks(link.domain) for link in cluster.links])
    level = np.minimum(np.searchsorted(sizes, spans), len(sizes) - 1)
    return link_bandwidths[level]
