"""What a schedule lets its ranks hold and send, whatever the blocks: counted once, because counting takes long."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from autoshard.cost.memory import num_messages
from autoshard.schedule.schedule import Schedule

Column = Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """Counts by rank, and where each stage is."""

    flight: Column  # (chunk, micro-batch) pairs held at most, but for those that only wait for W
    sends: Column  # messages of one micro-batch
    ranks: Column  # by stage
    chunks: Column  # by stage
    stages: Column  # by rank and chunk
    ends: Column  # whether a rank has the embedding, and the head, added up


@lru_cache(maxsize=1024)
def loads_of(schedule: Schedule) -> Loads:
    """Count for a schedule."""
    every = range(schedule.num_ranks)
    places = [schedule.place_of(stage) for stage in range(schedule.num_stages)]
    stages = np.zeros((schedule.num_ranks, schedule.num_chunks), dtype=np.int64)
    for stage, place in enumerate(places):
        stages[place] = stage
    return Loads(
        flight=np.array([_most_whole(schedule, rank) for rank in every], dtype=np.float64),
        sends=np.array(schedule.num_sends(), dtype=np.float64),
        ranks=np.array([rank for rank, _ in places]),
        chunks=np.array([chunk for _, chunk in places]),
        stages=stages,
        ends=(stages == 0).sum(axis=1) + (stages == schedule.num_stages - 1).sum(axis=1),
    )


def _most_whole(schedule: Schedule, rank: int) -> int:
    if not schedule.splits_backward:
        return schedule.in_flight(rank)
    return max(sum(counts[: schedule.num_chunks]) for counts in schedule.in_flight_by_chunk(rank))


@lru_cache(maxsize=1024)
def held_of(schedule: Schedule) -> tuple[Column, ...]:
    """Count by rank the micro-batches of each chunk that it holds, when no other time exceeds them: [time, chunk].

    As in ``Schedule.in_flight_by_chunk``, with those that wait for W as further chunks.
    """
    return tuple(np.array(schedule.in_flight_by_chunk(rank), dtype=np.float64) for rank in range(schedule.num_ranks))


@lru_cache(maxsize=1024)
def messages_of(schedule: Schedule, *, keeps_outputs: bool) -> Column:
    """Count the messages that each rank holds."""
    every = range(schedule.num_ranks)
    return np.array([num_messages(schedule, rank, keeps_outputs=keeps_outputs) for rank in every], dtype=np.float64)
