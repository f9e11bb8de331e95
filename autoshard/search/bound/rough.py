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

_WAYS, _LAUNCHES, _RING = 3, 20, 6  # passes through a layer, kernels of each, and of each further part of attention
_IN_PARTS = 1.15  # how often as long a layer takes whose attention runs in parts, over cp
_FLOPS = 8  # of a weight and a token, with full recompute
_USABLE = 0.8  # of a rank's memory
_TOO_LARGE = 8  # power of how many times too much memory a layout takes, by which its seconds grow
_GATHERED = 4  # times the weights of a layer that ZeRO-3 holds whole, gradients among them
_OF_LOGITS = 2  # times the logits of a micro-batch that the head holds, while no layer works
_WORKING = 16  # numbers of the hidden size that a layer keeps for a token while its backward runs


def rough_seconds(question: Question, rows: Mapping[str, Ints], zero: int = 1) -> Floats:
    """Return rough seconds of a step of every layout; far more than it would take where it may not fit in memory."""
    model, cluster = question.model, question.cluster
    tp, pp, cp, dp, mbs = (rows[key].astype(np.float64) for key in ("tp", "pp", "cp", "dp", "mbs"))
    counts = np.maximum(1.0, question.workload.global_batch / (dp * mbs))
    layers = np.ceil(model.num_layers / pp)
    passes_s = (counts + pp - 1) * layers * _layer_s(question, rows)
    weights = _weights(model, rows, rows["ep"])
    times = 2 * counts + 1 if zero == 3 else 2  # ZeRO-3 gathers them for each pass of each micro-batch
    sent_bytes = times * DTYPE_BYTES[question.workload.precision.weights] * weights
    summed_s = (dp * cp > 1) * sent_bytes / _bandwidth(cluster, tp * cp * dp)
    number_bytes = DTYPE_BYTES[question.workload.precision.activations]
    tokens = mbs * question.workload.seq_len / (cp * tp)
    saved = np.minimum(pp, counts) * layers * model.hidden
    working = np.maximum(_WORKING * (1 + model.experts_per_token) * model.hidden, _OF_LOGITS * model.vocab)
    itself, divided = _state_bytes(question, zero)
    states = weights * itself + _weights(model, rows, 1 if zero else rows["ep"]) * divided / (dp * cp if zero else 1)
    gathered = (zero == 3) * _GATHERED * DTYPE_BYTES[question.workload.precision.weights] * weights / layers
    activations = number_bytes * tokens * (saved + working)
    full = (states + gathered + activations) / (_USABLE * cluster.rank_memory_bytes)
    both_s = np.hypot(passes_s, summed_s) if zero == 3 else passes_s + summed_s  # gathers run beside products
    return both_s * np.maximum(1.0, full) ** _TOO_LARGE


def _layer_s(question: Question, rows: Mapping[str, Ints]) -> Floats:
    """Return the seconds of a micro-batch in a layer, all passes, or of the host that starts its kernels."""
    model, cluster, rates = question.model, question.cluster, question.rates
    tp, cp, ep, mbs = (rows[key].astype(np.float64) for key in ("tp", "cp", "ep", "mbs"))
    tokens = mbs * question.workload.seq_len / (cp * tp)  # on a rank, where tp cuts them between the products
    compute_s = _FLOPS * model.active_parameters / model.num_layers * tokens / rates.matrix_flops_per_s
    hidden_bytes = DTYPE_BYTES[question.workload.precision.activations] * model.hidden * tokens
    tp_s = 8 * (tp - 1) * hidden_bytes / _bandwidth(cluster, tp)
    cp_s = 4 * (cp - 1) * hidden_bytes * model.num_kv_heads / model.num_heads / _bandwidth(cluster, tp * cp)
    sent = 6 * (1 - 1 / ep) * tp * hidden_bytes * model.experts_per_token  # experts cut over tp read whole tokens
    ep_s = sent / _bandwidth(cluster, tp * cp * ep)
    launched_s = (_LAUNCHES + _RING * (cp - 1)) * rates.launch_s
    started_s = _WAYS * (rates.layer_s + launched_s + rates.experts_s * (model.num_experts > 0))
    return np.hypot(compute_s + tp_s + cp_s + ep_s, started_s) * np.where(cp > 1, _IN_PARTS, 1.0)


def _weights(model: ModelSpec, rows: Mapping[str, Ints], ep: Ints | int) -> Floats:
    """Return how many weights a rank has, where so many ranks share the experts."""
    of_experts = model.expert_parameters
    return (model.num_parameters - of_experts + of_experts / ep) / (rows["tp"] * rows["pp"])


def _state_bytes(question: Question, zero: int) -> tuple[float, float]:
    """Return the bytes of a weight that every rank holds, and those that ranks with the same weights divide.

    Fewer ranks have the same experts where ep cuts these: ep ranks then hold as much as a rank with all of them would.
    """
    parts = question.workload.precision.state_bytes(UPDATES[question.workload.optimizer].num_moments)
    itself = 0 if zero == 3 else parts["weights"] + parts["gradients"]
    return itself, sum(parts.values()) - itself


def _bandwidth(cluster: Cluster, spans: Floats) -> Floats:
    """Return the bytes a second of a rank whose group spans so many ranks in a row."""
    link_bandwidths = np.array([link.bandwidth_bytes_per_s / link.ranks_per_port for link in cluster.links])
    sizes = np.array([cluster.domain_ranks(link.domain) for link in cluster.links])
    level = np.minimum(np.searchsorted(sizes, spans), len(sizes) - 1)
    return link_bandwidths[level]
