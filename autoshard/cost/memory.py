"""The peak of a pipeline rank's memory, in named parts."""

from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.cost.block import Setting
from autoshard.cost.pipeline import Pipeline, RankCost
from autoshard.cost.rings import Number
from autoshard.cost.setting import Question
from autoshard.cost.update import state_bytes
from autoshard.schedule.schedule import Schedule
from autoshard.spec.kernels import load_kernels
from autoshard.spec.workload import DTYPE_BYTES, Precision


def rank_memory(
    question: Question, setting: Setting, pipeline: Pipeline, rank: int, cost: RankCost
) -> Mapping[str, Number]:
    """Return the parts of a rank's peak: states, what is kept of micro-batches in flight, kernels, buffers, runtime."""
    precision, kernels = question.workload.precision, load_kernels(question.kernels)
    schedule = pipeline.schedule
    kept = most_kept(schedule, rank, cost.saved_bytes, alike=cost.alike)
    logits = most_kept(schedule, rank, cost.head_bytes, alike=cost.alike)
    return {
        **state_bytes(cost.weights, setting, precision),
        "activations": kept - logits + schedule.deferred(rank) * cost.deferred_bytes,
        "logits": logits,
        "working": cost.working_bytes,
        "gathered": _gathered_bytes(setting.zero, precision, cost),
        "buckets": pipeline.bucket_bytes if setting.zero and kernels.copies_buckets else 0,
        "pipeline": _messages(schedule, rank, cost, keeps_outputs=kernels.keeps_outputs) * pipeline.boundary_bytes,
        "placeholders": cost.placeholder_bytes,
        "workspace": kernels.workspace_bytes,
        "runtime": kernels.runtime_bytes,
    }


def most_kept(schedule: Schedule, rank: int, kept: Sequence[Number], *, alike: bool = False) -> Number:
    """Return the most that a rank keeps at any time, given what it keeps of one micro-batch by chunk.

    >>> schedule = Schedule(builder="interleaved", num_ranks=2, num_chunks=2, num_micro_batches=4)
    >>> int(most_kept(schedule, 0, [10, 1])), int(most_kept(schedule, 0, [1, 10]))
    (41, 23)
    """
    if alike:
        return schedule.in_flight(rank) * kept[0]
    amounts = [sum(count * size for count, size in zip(counts, kept, strict=True)) for counts in schedule.held(rank)]
    return np.max(amounts, axis=0)


def _messages(schedule: Schedule, rank: int, cost: RankCost, *, keeps_outputs: bool) -> Number:
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
    return before + any(hands_on.values()) + most_kept(schedule, rank, outputs, alike=len(set(outputs)) == 1)


def _gathered_bytes(zero: int, precision: Precision, cost: RankCost) -> Number:
    """Return the whole blocks that ZeRO-3 holds: one at work, one on its way, a gradient."""
    weight, gradient = DTYPE_BYTES[precision.weights], DTYPE_BYTES[precision.gradients]
    return cost.largest_block * (2 * weight + gradient) if zero == 3 else 0
