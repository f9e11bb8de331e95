"""What people do without a planner, as files that ``autoshard validate --chooser`` and ``--predictor`` take.

``autoshard validate ROWS --chooser benchmarks/choosers.py:node_wide,benchmarks/choosers.py:most_data_parallelism
--predictor benchmarks/choosers.py:roofline`` prints what their choices cost beside those of the planner.
"""

from collections.abc import Callable, Sequence

from autoshard.calibration.measured_run import MeasuredRun
from autoshard.graph.decoder import decoder_graph
from autoshard.spec.kernels import load_kernels

# cited: cli99/llm-analysis 980a812 llm_analysis/constant.py: "achieved by Megatron-LM is ~0.5 for LLM training"
_FLOPS_EFFICIENCY = 0.5
_ALL_REDUCES = 4  # of a layer and micro-batch under tensor parallelism, forward and backward
_TABLE = "torch_cuda"  # of kernels; the products are the same with each


def _least(runs: Sequence[MeasuredRun], key: Callable[[MeasuredRun], tuple[float, ...]]) -> list[int]:
    """Return the places of all runs with the smallest key."""
    keys = [key(run) for run in runs]
    return [place for place, one in enumerate(keys) if one == min(keys)]


def node_wide(runs: Sequence[MeasuredRun]) -> list[int]:
    """Tensor parallelism over a node, as NVIDIA's guides say, then the fewest stages, then the largest micro-batch."""

    def key(run: MeasuredRun) -> tuple[float, ...]:
        node = min(run.cluster.ranks_per_node, run.model.num_kv_heads)
        return (abs(run.candidate.tp - node), run.candidate.pp, -run.candidate.mbs)

    return _least(runs, key)


def most_data_parallelism(runs: Sequence[MeasuredRun]) -> list[int]:
    """The most replicas of those that ran, then the largest micro-batch: who ran out of memory is in no row."""
    return _least(runs, lambda run: (-run.candidate.dp, -run.candidate.mbs))


def at_random(runs: Sequence[MeasuredRun]) -> list[int]:
    """Any layout that ran: the mean of all."""
    return list(range(len(runs)))


def roofline(run: MeasuredRun) -> float:
    """Seconds as in cli99/llm-analysis: products at half of the peak, exposed all-reduces of tp, the bubble.

    Simplified: no time of memory, of data parallelism or of the optimizer; full recompute is another forward pass.
    """
    at, work = run.candidate, run.workload
    graph = decoder_graph(run.model, work, load_kernels(_TABLE), micro_batch=at.mbs)
    passes = 4 / 3 if any(one.kind == "full" for one in at.recompute) else 1.0
    tokens = at.mbs * work.seq_len
    flops = passes * graph.model_flops_per_token() * tokens
    rate = _FLOPS_EFFICIENCY * run.cluster.chip.matrix_flops_per_s["bf16"]
    compute_s = flops / (rate * at.tp * at.pp * at.cp)
    sent_bytes = 2 * tokens * run.model.hidden * 2 * (at.tp - 1) / at.tp / at.cp
    domain = "node" if at.tp <= run.cluster.ranks_per_node else "cluster"
    bandwidth = next(link.bandwidth_bytes_per_s for link in run.cluster.links if link.domain == domain)
    tp_s = _ALL_REDUCES * sent_bytes / bandwidth * run.model.num_layers / at.pp if at.tp > 1 else 0.0
    micro_batches = work.global_batch / (at.mbs * at.dp)
    return (compute_s + tp_s) * (micro_batches + at.pp - 1)
