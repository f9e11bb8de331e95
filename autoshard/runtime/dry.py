"""Ranks of a plan tried out one after the other in this process, on as few micro-batches as show everything."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from autoshard.engine.base import Measured
from autoshard.engine.results import DryRank
from autoshard.plan.plan import Plan

Counts = Callable[[Plan, int], Measured]
_Key = TypeVar("_Key")


def dry_rank(plan: Plan, rank: int, counts: Counts) -> DryRank:
    """Run a step of a rank, or so much of it that the rest is known."""
    whole, num_run = plan.schedule.num_micro_batches, enough(plan, rank)
    measured = counts(_of_fewer(plan, num_run), rank)
    if num_run < whole:
        fewest = plan.schedule.num_ranks
        measured = _extended(counts(_of_fewer(plan, fewest), rank), measured, (fewest, num_run, whole))
    return DryRank(rank=rank, alike=alike_ranks(plan, rank), num_run=num_run, measured=measured)


def enough(plan: Plan, rank: int) -> int:
    """Return how few micro-batches keep as much for backward as all of them; whole rounds, two at least."""
    schedule, place = plan.schedule, plan.mesh.coordinates(rank).get("pp", 0)
    every = schedule.num_micro_batches
    if schedule.actions is not None:
        return every
    wanted = schedule.in_flight_by_chunk(place)
    for fewer in range(2 * schedule.num_ranks, every, schedule.num_ranks):
        short = replace(schedule, num_micro_batches=fewer)
        if short.in_flight_by_chunk(place) == wanted:
            return fewer
    return every


def telling_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the first rank of all that are predicted to hold the same; of the first stage and the last, their own."""
    found: list[int] = []
    for place in range(plan.mesh.size("pp")):
        rank = _ranks_at(plan, place)[0]
        if not any(rank in alike_ranks(plan, other) for other in found):
            found.append(rank)
    return tuple(found)


def alike_ranks(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return all ranks that should hold the same, as far as the prediction knows."""
    mine = _kind(plan, plan.mesh.coordinates(rank).get("pp", 0))
    places = (place for place in range(plan.mesh.size("pp")) if _kind(plan, place) == mine)
    return tuple(sorted(rank for place in places for rank in _ranks_at(plan, place)))


def _kind(plan: Plan, place: int) -> object:
    assert plan.prediction, "a plan is predicted before it runs"
    ends = {0: "first", plan.mesh.size("pp") - 1: "last"}
    return dict(plan.prediction.stage_memory[place].parts), ends.get(place)


def _ranks_at(plan: Plan, place: int) -> tuple[int, ...]:
    return plan.mesh.ranks_of({"pp": place})


def _of_fewer(plan: Plan, num_micro_batches: int) -> Plan:
    schedule = replace(plan.schedule, num_micro_batches=num_micro_batches)
    global_batch = plan.micro_batch * plan.mesh.size("dp") * num_micro_batches
    return replace(plan, schedule=schedule, workload=replace(plan.workload, global_batch=global_batch))


def _extended(few: Measured, more: Measured, numbers: tuple[int, int, int]) -> Measured:
    """Return what the whole step sends: every further micro-batch sends what those did by which the two differ."""
    return Measured(
        memory_bytes=more.memory_bytes,
        calls=_line(few.calls, more.calls, numbers),
        sent_bytes=_line(few.sent_bytes, more.sent_bytes, numbers),
    )


def _line(few: Mapping[_Key, int], more: Mapping[_Key, int], numbers: tuple[int, int, int]) -> dict[_Key, int]:
    fewest, num_run, whole = numbers
    found: dict[_Key, int] = {}
    for name, size in more.items():
        each, rest = divmod(size - few.get(name, 0), num_run - fewest)
        assert not rest, f"{name}: micro-batches send different amounts"
        found[name] = size + each * (whole - num_run)
    return found
