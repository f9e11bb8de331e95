"""Ranks of a plan tried out one after the other in this process, on as few micro-batches as show everything."""

from collections.abc import Callable
from dataclasses import replace

from autoshard.engine.base import DryRank, Measured
from autoshard.plan.plan import Plan


def dry_rank(plan: Plan, rank: int, counts: Callable[[Plan, int], Measured]) -> DryRank:
    """Run a step of a rank, on all micro-batches or on so few that the rest is known."""
    whole, fewest, num_run = plan.schedule.num_micro_batches, plan.schedule.num_ranks, enough(plan, rank)

    def counted(num_micro_batches: int) -> Measured:
        schedule = replace(plan.schedule, num_micro_batches=num_micro_batches)
        global_batch = plan.micro_batch * plan.mesh.size("dp") * num_micro_batches
        workload = replace(plan.workload, global_batch=global_batch)
        return counts(replace(plan, schedule=schedule, workload=workload), rank)

    measured = counted(num_run)
    if num_run < whole:
        few = counted(fewest)
        sent: dict[str, int] = {}  # by the whole step: each further micro-batch sends its share of the difference
        for axis, size in measured.sent_bytes.items():
            each, rest = divmod(size - few.sent_bytes.get(axis, 0), num_run - fewest)
            assert not rest, f"{axis}: micro-batches send different amounts"
            sent[axis] = size + each * (whole - num_run)
        measured = replace(measured, sent_bytes=sent)
    return DryRank(rank=rank, alike=alike_ranks(plan, rank), num_run=num_run, measured=measured)


def enough(plan: Plan, rank: int) -> int:
    """Return how few micro-batches keep as much for backward as all of them; whole rounds, two at least."""
    schedule, place = plan.schedule, plan.mesh.coordinates(rank).get("pp", 0)
    every = schedule.num_micro_batches
    if schedule.actions is not None:
        return every
    wanted = schedule.in_flight_by_chunk(place)
    for fewer in range(2 * schedule.num_ranks, every, schedule.num_ranks):
        if replace(schedule, num_micro_batches=fewer).in_flight_by_chunk(place) == wanted:
            return fewer
    return every


def telling_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the first rank of each kind: those of a kind are predicted to hold the same."""
    found: list[int] = []
    for place in range(plan.mesh.size("pp")):
        rank = plan.mesh.ranks_of({"pp": place})[0]
        if not any(rank in alike_ranks(plan, other) for other in found):
            found.append(rank)
    return tuple(found)


def alike_ranks(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return all ranks that should hold the same as a rank; the first stage and the last are kinds of their own."""
    assert plan.prediction, "a plan is predicted before it runs"
    ends = {0: "first", plan.mesh.size("pp") - 1: "last"}
    kinds = [(dict(one.parts), ends.get(place)) for place, one in enumerate(plan.prediction.stage_memory)]
    mine = kinds[plan.mesh.coordinates(rank).get("pp", 0)]
    alike = (place for place, kind in enumerate(kinds) if kind == mine)
    return tuple(sorted(one for place in alike for one in plan.mesh.ranks_of({"pp": place})))
