"""When each action of a pipeline starts and ends: one pass over the actions, each as early as its rank and input allow.

A micro-batch passes 2 S places: down the S stages by F and back up by B or I. What a place hands on, the next one
needs; W needs only what its own rank did before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import require
from autoshard.schedule.builders import PipelineShape, Step

KINDS = "BFIW"  # sorted, so that a kind is found by bisection
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Coded = tuple[Ints, Ints, Ints]  # of a rank's actions in order: positions in KINDS, stages, micro-batches
_Timed = tuple[int, int, float, float, float, float]  # needs, gives, and seconds: before, work, after, travel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delays:
    """Seconds by kind and stage, and by place on the way of a micro-batch; a last axis may hold many candidates'."""

    work_s: Floats  # [kind, stage]
    before_s: Floats  # [place]: its rank receives and can do nothing else
    after_s: Floats  # [place]: its rank sends and can do nothing else
    travel_s: Floats  # [place]: until the next place has what this one made

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.work_s.shape[1]

    def only(self, rows: Ints | slice) -> "Delays":
        """Return those of some candidates."""
        return Delays(
            work_s=self.work_s[..., rows],
            before_s=self.before_s[..., rows],
            after_s=self.after_s[..., rows],
            travel_s=self.travel_s[..., rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lane:
    """The actions of one rank in order, up to the first that can never start."""

    kinds: Ints  # positions in KINDS
    stages: Ints
    start_s: Floats
    end_s: Floats
    exposed_s: float  # spent on sending and receiving only
    is_stuck: bool


def timeline(steps: Sequence[Sequence[Step]], num_micro_batches: int, delays: Delays) -> tuple[Lane, ...]:
    """Run the lists of all ranks, refusing stages and micro-batches that do not exist."""
    lanes = [coded(own) for own in steps]
    num_stages = delays.work_s.shape[1]
    known = all((stages < num_stages).all() and (numbers < num_micro_batches).all() for _, stages, numbers in lanes)
    require((known, "actions", f"name more than {num_stages} stages or {num_micro_batches} micro-batches"))
    starts = _starts([_timed(*columns, num_micro_batches, delays) for columns in lanes], delays, num_micro_batches)
    return tuple(_lane(columns, own, delays) for columns, own in zip(lanes, starts, strict=True))


def places(kinds: Ints, stages: Ints, num_stages: int) -> Ints:
    """Say at which place on its way a micro-batch is in each action; 2 S stands for W, which is off the way."""
    back = np.where(kinds == KINDS.index("W"), 2 * num_stages, 2 * num_stages - 1 - stages)
    return np.where(kinds == KINDS.index("F"), stages, back)


def makespan_s(lanes: Sequence[Lane]) -> float:
    """Return the end of the last action."""
    return max((float(lane.end_s[-1]) for lane in lanes if len(lane.end_s)), default=0.0)


def unit_bubble(steps: Sequence[Sequence[Step]], shape: PipelineShape) -> float:
    """Return the share of the step in which a rank waits, if F, I and W take one unit each and B two."""
    num_stages = shape.num_ranks * shape.num_chunks
    nothing = np.zeros(2 * num_stages + 1)
    work = np.ones((len(KINDS), num_stages))
    work[KINDS.index("B")] = 2.0
    delays = Delays(work_s=work, before_s=nothing, after_s=nothing, travel_s=nothing)
    lanes = timeline(steps, shape.num_micro_batches, delays)
    if any(lane.is_stuck for lane in lanes):
        return 1.0
    busy = sum(float((lane.end_s - lane.start_s).sum()) for lane in lanes) / shape.num_ranks
    total = makespan_s(lanes)
    return 1 - busy / total if total else 0.0


def coded(own: Sequence[Step]) -> Coded:
    """Write a rank's actions as numbers."""
    kinds, stages, micro_batches = zip(*own, strict=True) if own else ((), (), ())
    letters = np.frombuffer("".join(kinds).encode(), dtype=np.uint8)
    return (
        np.searchsorted(np.frombuffer(KINDS.encode(), dtype=np.uint8), letters),
        np.array(stages, dtype=np.int64),
        np.array(micro_batches, dtype=np.int64),
    )


def _timed(kinds: Ints, stages: Ints, micro_batches: Ints, num_micro_batches: int, delays: Delays) -> list[_Timed]:
    num_stages = delays.work_s.shape[1]
    place = places(kinds, stages, num_stages)
    is_w = place == 2 * num_stages
    # Place 0 needs nothing, like W; what the last place and W give goes to row 2 S, which nobody reads.
    needs = np.where(is_w, 0, place) * num_micro_batches + micro_batches
    gives = np.where(is_w, place, place + 1) * num_micro_batches + micro_batches
    seconds = (delays.before_s[place], delays.work_s[kinds, stages], delays.after_s[place], delays.travel_s[place])
    columns = (needs.tolist(), gives.tolist(), *(column.tolist() for column in seconds))
    return cast("list[_Timed]", list(zip(*columns, strict=True)))


def _starts(lanes: Sequence[Sequence[_Timed]], delays: Delays, num_micro_batches: int) -> list[list[float]]:
    num_places = len(delays.before_s)
    ready = [0.0] * num_micro_batches + [-1.0] * (num_micro_batches * (num_places - 1))  # -1: not made yet
    starts: list[list[float]] = [[] for _ in lanes]
    clocks = [0.0] * len(lanes)
    waiting: dict[int, int] = {}  # message -> the rank that waits for it
    awake = list(range(len(lanes)))
    while awake:
        rank = awake.pop()
        lane, own, clock = lanes[rank], starts[rank], clocks[rank]
        for step in range(len(own), len(lane)):
            needs, gives, before, work, after, travel = lane[step]
            arrived = ready[needs]
            if arrived < 0.0:
                waiting[needs] = rank
                break
            start = (clock if clock > arrived else arrived) + before
            own.append(start)
            end = start + work
            ready[gives] = end + travel
            clock = end + after
            if gives in waiting:
                awake.append(waiting.pop(gives))
        clocks[rank] = clock
    return starts


def _lane(columns: Coded, starts: list[float], delays: Delays) -> Lane:
    done = len(starts)
    kinds, stages = columns[0][:done], columns[1][:done]
    place = places(kinds, stages, delays.work_s.shape[1])
    start = np.array(starts, dtype=np.float64)
    return Lane(
        kinds=kinds,
        stages=stages,
        start_s=start,
        end_s=start + delays.work_s[kinds, stages],
        exposed_s=float((delays.before_s[place] + delays.after_s[place]).sum()),
        is_stuck=done < len(columns[0]),
    )
