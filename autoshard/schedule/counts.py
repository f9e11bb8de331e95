"""What follows from a schedule alone: where stages lie, what ranks send, how many micro-batches they keep."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleCounts:
    """Where the stages of a schedule lie, and what its ranks send."""

    ranks: Ints  # by stage
    chunks: Ints  # by stage
    stages: Ints  # by rank and chunk
    ends: Ints  # by rank: whether it has the embedding, and the head, added up
    sends: Floats  # by rank: messages of one micro-batch


@lru_cache(maxsize=1024)
def counts_of(schedule: Schedule) -> ScheduleCounts:
    """Look at every schedule once."""
    ranks, chunks = np.array([schedule.place_of(stage) for stage in range(schedule.num_stages)]).T
    stages = np.zeros((schedule.num_ranks, schedule.num_chunks), dtype=np.int64)
    stages[ranks, chunks] = np.arange(schedule.num_stages)
    sent = np.flatnonzero(np.diff(ranks))  # the stages whose message goes to another rank, forward and back
    return ScheduleCounts(
        ranks=ranks,
        chunks=chunks,
        stages=stages,
        ends=(stages == 0).sum(axis=1) + (stages == schedule.num_stages - 1).sum(axis=1),
        sends=np.bincount(ranks[[*sent, *(sent + 1)]], minlength=schedule.num_ranks).astype(np.float64),
    )


@lru_cache(maxsize=1024)
def in_flight_of(schedule: Schedule) -> Floats:
    """Return ``Schedule.in_flight_by_chunk`` of every rank, [rank, time, chunk], because counting takes long.

    Ranks that have fewer times keep nothing at the others.
    """
    by_rank = [schedule.in_flight_by_chunk(rank) for rank in range(schedule.num_ranks)]
    padded = np.zeros((len(by_rank), max(map(len, by_rank)), len(by_rank[0][0])))
    for rank, counts in enumerate(by_rank):
        padded[rank, : len(counts)] = counts
    return padded


@lru_cache(maxsize=1024)
def fullest_times(schedule: Schedule) -> Floats:
    """Return what a rank keeps at the times that may be its fullest: not midway between two other times."""
    by_rank: list[Floats] = []
    for counts in in_flight_of(schedule):
        midway = np.zeros(len(counts), dtype=bool)
        for step in (1, 2):
            midway[step:-step] |= np.all(counts[: -2 * step] + counts[2 * step :] == 2 * counts[step:-step], axis=1)
        by_rank.append(counts[~midway])
    padded = np.zeros((len(by_rank), max(map(len, by_rank)), by_rank[0].shape[1]))
    for rank, counts in enumerate(by_rank):
        padded[rank, : len(counts)] = counts
    return padded


def boundary_states(schedule: Schedule, *, keeps_outputs: bool) -> Floats:
    """Count the hidden states and gradients of them that each rank holds between its stages and those of other ranks.

    One is received ahead from either side where a stage of another rank lies there, whatever the number of chunks:
    Megatron-LM and neuronx-distributed receive for the next action only (NVIDIA/Megatron-LM
    core/pipeline_parallel/schedules.py; aws-neuron/neuronx-distributed pipeline/scheduler.py, "Recv is always for the
    next step microbatch/model_chunk"). What was received for an action under way is counted as kept or at work.
    """
    ranks, stages = counts_of(schedule).ranks, counts_of(schedule).stages
    sent = np.append(ranks[1:] != ranks[:-1], False)
    after, before = sent[stages], np.roll(sent, 1)[stages]  # [rank, chunk]
    states = np.zeros(len(stages))
    if keeps_outputs:
        states += (in_flight_of(schedule)[:, :, : stages.shape[1]] * after[:, None]).sum(axis=2).max(axis=1)
    for beside in (before, after):
        states += np.any(beside, axis=1)
    return states


def most_kept(schedule: Schedule, saved: Floats, waiting: Floats) -> Floats:
    """Return the most that each rank keeps of micro-batches in flight, and between the halves of their backward.

    Both arguments, of one micro-batch, have the axes rank, option, chunk, candidate.
    """
    sizes = np.concatenate([saved, waiting], axis=2) if schedule.splits_backward else saved
    return np.matmul(fullest_times(schedule)[:, None], sizes).max(axis=2)
