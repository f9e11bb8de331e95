"""The peak of a pipeline rank's memory, in named parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost.block import Setting
from autoshard.cost.collective import Number
from autoshard.cost.pipeline import Pipeline, RankCost
from autoshard.cost.setting import Question
from autoshard.cost.update import state_bytes
from autoshard.schedule.schedule import Schedule
from autoshard.spec.kernels import load_kernels
from autoshard.spec.workload import DTYPE_BYTES, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """What a pipeline rank has in memory at its fullest, beside buffers that depend on no block; numbers or arrays."""

    kept_bytes: Number  # of micro-batches in flight, and between I and W; logits included
    logits_bytes: Number
    working_bytes: Number
    num_messages: Number  # hidden states on their way in or out
    placeholder_bytes: Number
    weights: Mapping[tuple[str, ...], Number]
    largest_block: Number


def rank_memory(
    question: Question, setting: Setting, pipeline: Pipeline, rank: int, cost: RankCost
) -> Mapping[str, Number]:
    """Return the parts of a rank's peak: states, what is kept of micro-batches in flight, kernels, buffers, runtime."""
    schedule, keeps_outputs = pipeline.schedule, load_kernels(question.kernels).keeps_outputs
    holds = Holds(
        kept_bytes=most_kept(schedule, rank, cost.saved_bytes, cost.waiting_bytes, alike=cost.alike),
        logits_bytes=most_kept(schedule, rank, cost.head_bytes, cost.head_waiting_bytes, alike=cost.alike),
        working_bytes=cost.working_bytes,
        num_messages=num_messages(schedule, rank, keeps_outputs=keeps_outputs),
        placeholder_bytes=cost.placeholder_bytes,
        weights=cost.weights,
        largest_block=cost.largest_block,
    )
    return memory_parts(question, setting, holds, pipeline.boundary_bytes, pipeline.bucket_bytes)


def memory_parts(
    question: Question, setting: Setting, holds: Holds, boundary_bytes: Number, bucket_bytes: Number
) -> Mapping[str, Number]:
    """Return what a rank has in memory at its fullest, in named parts."""
    precision, kernels = question.workload.precision, load_kernels(question.kernels)
    return {
        **state_bytes(holds.weights, setting, question.workload),
        "activations": holds.kept_bytes - holds.logits_bytes,
        "logits": holds.logits_bytes,
        "working": holds.working_bytes,
        "gathered": _gathered_bytes(setting.zero, precision, holds.largest_block),
        "buckets": _bucket_bytes(setting, bucket_bytes) if kernels.copies_buckets else 0,
        "pipeline": holds.num_messages * boundary_bytes,
        "placeholders": holds.placeholder_bytes,
        "workspace": kernels.workspace_bytes,
        "runtime": kernels.runtime_bytes,
    }


def most_kept(
    schedule: Schedule, rank: int, kept: Sequence[Number], waiting: Sequence[Number], *, alike: bool = False
) -> Number:
    """Return the most that a rank keeps at any time, given what it keeps of one micro-batch by chunk.

    Where backwards are split, what is ``waiting`` for its W is kept instead from I on.

    >>> schedule = Schedule(builder="interleaved", num_ranks=2, num_chunks=2, num_micro_batches=4)
    >>> int(most_kept(schedule, 0, [10, 1], [0, 0])), int(most_kept(schedule, 0, [1, 10], [0, 0]))
    (41, 23)
    """
    if alike and not schedule.splits_backward:
        return schedule.in_flight(rank) * kept[0]
    sizes = (*kept, *waiting) if schedule.splits_backward else kept
    times = schedule.in_flight_by_chunk(rank)
    amounts = [sum(count * size for count, size in zip(counts, sizes, strict=True)) for counts in times]
    return np.max(amounts, axis=0)


def num_messages(schedule: Schedule, rank: int, *, keeps_outputs: bool) -> Number:
    """Count the hidden states and gradients of them that a rank holds between its stages and those of other ranks.

    One is received ahead from either side where a stage of another rank lies there, whatever the number of chunks:
    Megatron-LM and neuronx-distributed receive for the next action only (NVIDIA/Megatron-LM
    core/pipeline_parallel/schedules.py; aws-neuron/neuronx-distributed pipeline/scheduler.py, "Recv is always for the
    next step microbatch/model_chunk"). What was received for an action under way is counted as kept or at work.
    """
    stages, last = schedule.stages_of(rank), schedule.num_stages - 1
    before = any(stage > 0 and schedule.place_of(stage - 1)[0] != rank for stage in stages.values())
    hands_on = {chunk: stage < last and schedule.place_of(stage + 1)[0] != rank for chunk, stage in stages.items()}
    outputs = [int(hands_on[chunk] and keeps_outputs) for chunk in sorted(stages)]
    kept = most_kept(schedule, rank, outputs, [0] * len(outputs), alike=len(set(outputs)) == 1)
    return before + any(hands_on.values()) + kept


def _bucket_bytes(setting: Setting, bucket_bytes: Number) -> Number:
    """Return the copies in buckets: none where gradients are summed in place, or there is nobody to share them with."""
    replicas = setting.atoms["edp"] * setting.atoms["ep"] * setting.atoms["cp"]
    return bucket_bytes * (replicas > 1) if setting.zero else 0


def _gathered_bytes(zero: int, precision: Precision, largest_block: Number) -> Number:
    """Return the whole blocks that ZeRO-3 holds: one at work, one on its way, a gradient."""
    weight, gradient = DTYPE_BYTES[precision.weights], DTYPE_BYTES[precision.gradients]
    return largest_block * (2 * weight + gradient) if zero == 3 else 0
