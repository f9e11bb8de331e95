"""How long the kernels of a block take on one rank; for numbers or columns alike."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.cost.calibration import Calibration
from autoshard.cost.collective import Number
from autoshard.cost.kernel_run import KernelRun, RankSizes
from autoshard.graph.block import Block
from autoshard.graph.kinds.attention import SCORES, Attend, AttendGradient
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.op import Call, Op
from autoshard.spec.cluster import Cluster
from autoshard.spec.kernels import Kernels
from autoshard.spec.workload import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one rank reaches per second, and what a host takes to start a kernel."""

    matrix_flops_per_s: float
    vector_flops_per_s: float
    memory_bytes_per_s: float
    products_ratio: float = 1.0  # of activations with the weights of layers, over other matrix products
    attention_ratio: float = 1.0  # of attention, over other matrix products
    matrix_tile: int = 1  # rows and columns of a systolic array, which works on whole tiles
    launch_s: float = 0.0
    layer_s: float = 0.0  # of a host for a block, each way, beside the launches
    experts_s: float = 0.0  # of a host for a block that sends tokens to experts, each way
    dp_ratio: float = 1.0  # of what data parallelism sends: how often as long as links say
    host_computes: bool = False  # it starts nothing while a kernel runs
    cast_bytes: float = 0.0  # moved for each number of a factor of a product that has another format
    expert_passes: str = "FIW"  # in which products of experts have the format of other products with weights


def rank_rates(cluster: Cluster, precision: Precision, calibration: Calibration, kernels: Kernels) -> Rates:
    """Return what a rank reaches in number formats: the share of the chip's peaks that is calibrated."""
    peak = cluster.rank_matrix_flops_per_s(precision.activations)
    products = cluster.rank_matrix_flops_per_s(precision.products or precision.activations)
    return Rates(
        matrix_flops_per_s=peak * calibration.matrix_efficiency,
        vector_flops_per_s=cluster.rank_vector_flops_per_s * calibration.vector_efficiency,
        memory_bytes_per_s=cluster.rank_memory_bandwidth_bytes_per_s * calibration.memory_efficiency,
        products_ratio=products / peak,
        attention_ratio=calibration.attention_efficiency / calibration.matrix_efficiency,
        matrix_tile=cluster.chip.matrix_tile,
        launch_s=calibration.launch_s, layer_s=calibration.layer_s, experts_s=calibration.experts_s,
        dp_ratio=calibration.dp_ratio,
        host_computes=kernels.host_computes,
        cast_bytes=float(kernels.cast_bytes) if precision.products else 0.0,
        expert_passes=kernels.expert_passes(cluster.chip.name),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelWork:
    """What one kernel run does on one rank, whatever the rates."""

    moved_bytes: Number
    launches: int
    matrix_flops: Number = 0.0
    products_flops: Number = 0.0  # of activations with the weights of a layer
    attention_flops: Number = 0.0
    vector_flops: Number = 0.0
    in_turn: bool = False  # products and passes over memory one after the other, not at once
    factors: Number = 0.0  # numbers in the factors of products with the weights of a layer
    of_experts: str = ""  # the pass, where these products are of rows with the weights of their experts

    @classmethod
    def of(
        cls,
        run: KernelRun,
        flops: tuple[Number, Number, Number],
        moved_bytes: Number,
        factors: Number = 0.0,
        turns: int = 1,
    ) -> "KernelWork":
        """Return the work of a kernel: its FLOPs of matrices, of attention and of vectors, and what it moves.

        It is launched so often for each of its ``turns``.
        """
        matrix, attention, vector = flops
        return cls(
            matrix_flops=0.0 if run.products else matrix, products_flops=matrix if run.products else 0.0,
            attention_flops=attention, vector_flops=vector, moved_bytes=moved_bytes, launches=turns * run.launches,
            in_turn=bool(run.score_bytes), factors=factors, of_experts=run.pass_ if run.experts else "",
        )  # fmt: skip


def kernel_work(
    block: Block,
    run: KernelRun,
    op_sizes: Mapping[str, RankSizes],
    matrix_tile: int,
    seq_len: Number,
    stretches: Number,
) -> KernelWork:
    """Count what a kernel run does, its products in whole tiles of a systolic array.

    Sequences are cut into so many stretches in a row; 1 where every rank has as many unmasked pairs as any other.
    """
    matrix: Number = 0.0
    attention: Number = 0.0
    vector: Number = 0.0
    turns = -(-int(op_sizes[run.ops[0].name]["seq"]) // run.chunk) if run.chunk else 1
    factors = {name: op.name for op in run.ops if run.products and isinstance(op.kind, Einsum) for name in op.inputs}
    for op in run.ops:
        call = block.call(op, op_sizes[op.name])
        share: Number = 1.0
        if isinstance(op.kind, Attend | AttendGradient):
            if run.skips_masked:
                share = seen_share(op.kind, seq_len, stretches, run.mask_tile)
            attention = attention + run.flops_ratio * share * op.kind.matrix_flops(call)
        else:
            matrix = matrix + _padding(op, call, matrix_tile) * op.kind.matrix_flops(call)
        vector = vector + share * op.kind.vector_flops(call)
    moved = run.traffic_ratio * sum(op_sizes[op].num_bytes(tensor) for op, tensor in run.touched)
    if run.score_bytes:
        moved = moved + run.score_bytes * math.prod(op_sizes[run.ops[0].name][dim] for dim in SCORES)
    num_factors = sum(block.tensors[name].num_elements(op_sizes[op]) for name, op in factors.items())
    return KernelWork.of(run, (matrix, attention, vector), moved, num_factors, turns)


def kernel_time(work: KernelWork, rates: Rates) -> Number:
    """Return the seconds of a kernel at work.

    Its factors are cast first, where they have another format. Then it takes as long as the slowest of matrix unit,
    vector unit and memory. Attention that writes its scores is products and passes over memory one after the other.
    """
    is_cast = work.of_experts in rates.expert_passes  # as the empty string is
    flops = work.matrix_flops + work.products_flops / (rates.products_ratio if is_cast else 1.0)
    products_s = (flops + work.attention_flops / rates.attention_ratio) / rates.matrix_flops_per_s
    vector_s, memory_s = work.vector_flops / rates.vector_flops_per_s, work.moved_bytes / rates.memory_bytes_per_s
    others_s = np.maximum(vector_s, memory_s)
    casts_s = rates.cast_bytes * work.factors / rates.memory_bytes_per_s if is_cast else 0.0
    return casts_s + (products_s + others_s if work.in_turn else np.maximum(products_s, others_s))


def waiting_time(busy_s: Number, started_s: Number, rates: Rates) -> Number:
    """Return for how long a device waits for hosts to start kernels and messages, beside what keeps it busy.

    Hosts run ahead of the device where it is the slower one, and it waits for each start where it is the faster one. In
    between both happen by turns, so that together they take the root of the sum of their squares. A host that is the
    device starts one kernel after the other has run.
    """
    return started_s + 0.0 * busy_s if rates.host_computes else np.hypot(busy_s, started_s) - busy_s


def _padding(op: Op, call: Call, tile: int) -> Number:
    """Return how many times as much is computed because some tiles are not full.

    A systolic array holds a tile of one factor, summed dims along one side, and streams the other factor through; the
    side whose padding is smaller is held (AWS Neuron docs, nki/guides/architecture/trainium_inferentia2_arch.rst).
    """
    if tile == 1 or not isinstance(op.kind, Einsum):
        return 1.0
    left, right, out = (frozenset(tensor.dims) for tensor in (*call.inputs, *call.outputs))
    summed, rows, columns = (
        call.elements(sorted(dims)) for dims in ((left & right) - out, (left - right) & out, (right - left) & out)
    )
    summed_share, *shares = (np.ceil(size / tile) * tile / size for size in (summed, rows, columns))
    return summed_share * np.minimum(*shares)


def seen_share(kind: Attend | AttendGradient, seq_len: Number, stretches: Number, tile: int) -> Number:
    """Return the share of pairs that is not skipped, on average over the layers that an operation stands for."""
    layers = kind.windows or ((kind.window, 1),)
    if kind.biased or kind.unfused:
        return 1.0
    if kind.sees_all:
        seen = sum(count * _share_both_ways(window, seq_len) for window, count in layers)
    else:
        seen = sum(count * unmasked_share(window, seq_len, stretches, tile) for window, count in layers)
    return seen / sum(count for _, count in layers)


def _share_both_ways(window: int | None, seq_len: Number) -> Number:
    """Return the share of pairs whose distance is less than a window, whichever comes first."""
    reach = np.minimum(window or seq_len, seq_len)
    return (seq_len + (2 * seq_len - reach) * (reach - 1)) / seq_len**2


def unmasked_share(window: int | None, seq_len: Number, stretches: Number, tile: int) -> Number:
    """Return which share of its (query, key) pairs the slowest cp rank does not skip as masked.

    The last of several stretches in a row meets all keys before its own, so without a window it has 2 - 1/stretches
    times the average.

    >>> [float(unmasked_share(None, 4, stretches, 1)) for stretches in (1, 2)]
    [0.625, 0.875]
    """

    def num_pairs(length: Number) -> Number:
        reach = np.minimum(window or length, length)
        return reach * (reach + tile) / 2 + (length - reach) * reach

    seen = num_pairs(seq_len) - num_pairs(seq_len - seq_len / stretches)
    return np.minimum(1.0, seen * stretches / seq_len**2)
