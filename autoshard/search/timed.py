"""Ways to fill the stages of many candidates, timed in full: the numbers that their plans would predict."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard.cost.step import rank_update
from autoshard.cost.update import Turns
from autoshard.schedule.makespan import makespan_columns
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import delays_of
from autoshard.schedule.timeline import KINDS
from autoshard.search.chosen import Chosen
from autoshard.search.fillings import Filled, Fillings, Frame, Weights
from autoshard.search.loads import loads_of

Column = Any


def timed(
    frame: Frame, fillings: Fillings, found: Filled, option: Column, ok: Column, candidates: Column | None = None
) -> Chosen:
    """Time ways in full, an option per rank each: of every candidate one, or of those that are named, in this order."""
    ranks = np.arange(frame.schedule.num_ranks)[:, None]
    shape, count = (frame.schedule.num_ranks, *fillings.dropped.shape[1:]), frame.num_candidates
    columns = np.arange(count) if candidates is None else candidates

    def picked(column: Column) -> Column:
        """Return [rank, way, chunk] of a column that candidates share."""
        return np.broadcast_to(column, shape)[ranks, option]

    def own(column: Column) -> Column:
        """Return [rank, way] of a column by rank, option and candidate."""
        return np.broadcast_to(column, (*shape[:2], count))[ranks, option, columns]

    seconds = [
        _by_stage(frame.schedule, column[ranks, option, :, columns])
        for column in (found.forward_s, found.input_s, found.weight_s)
    ]
    weights = {pending: own(number) for pending, number in found.weights.items()}
    layers = np.broadcast_to(fillings.num_layers, shape[:2])[ranks, option]
    turns = Turns(
        num_micro_batches=frame.schedule.num_micro_batches,
        num_blocks=layers + loads_of(frame.schedule).ends[:, None],
    )
    whole = step_s(frame if candidates is None else frame.only(candidates), seconds, weights, turns)
    return Chosen(
        time_s=np.where(ok, whole, np.inf),
        bound_s=np.where(ok, whole, np.inf),
        peak_bytes=np.where(ok, own(found.peak_bytes).max(axis=0), np.inf),
        kind=_by_stage(frame.schedule, picked(fillings.kind)),
        dropped=_by_stage(frame.schedule, picked(fillings.dropped)),
        plain=_by_stage(frame.schedule, picked(fillings.plain)),
    )


def _by_stage(schedule: Schedule, column: Column) -> Column:
    """Turn [rank, candidate, chunk] into [stage, candidate]."""
    loads = loads_of(schedule)
    return column[loads.ranks, :, loads.chunks]


def step_s(frame: Frame, seconds: Sequence[Column], weights: Weights, turns: Turns) -> Column:
    """Return what a step takes, given F, I and W by stage and weights by rank."""
    schedule, question = frame.schedule, frame.question
    forward, inputs, weight = seconds
    busy = np.zeros((schedule.num_ranks, frame.num_candidates))
    np.add.at(busy, loads_of(schedule).ranks, forward + inputs + weight)
    update = rank_update(question, frame.setting, weights, busy, turns)
    rest = sum(np.broadcast_to(part, busy.shape).max(axis=0) for part in update.seconds.values())
    return makespan_s(frame, forward, inputs, weight) + rest + frame.fixed_s


def makespan_s(frame: Frame, forward: Column, inputs: Column, weight: Column) -> Column:
    """Return how long the micro-batches take, given F, I and W by stage."""
    schedule = frame.schedule
    if schedule.num_ranks == 1:
        return schedule.num_micro_batches * (forward + inputs + weight).sum(axis=0)
    by_kind = {"F": forward, "I": inputs, "W": weight, "B": inputs + weight}
    hops = (schedule.num_stages - 1, frame.num_candidates)
    send, receive = (np.broadcast_to(one, hops) for one in (frame.sends.time_s, frame.sends.receive_s))
    work = np.array([by_kind[kind] for kind in KINDS])
    return makespan_columns(schedule, delays_of(schedule, work, send, receive, overlap=frame.sends.hidden))
