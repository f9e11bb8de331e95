"""Ranks of a plan tried out one after the other in this process, on as few micro-batches as show everything."""

from collections.abc import Callable
from dataclasses import replace

from autoshard.plan.plan import Plan
from autoshard.run.reports import DryRank, Measured


def dry_rank(plan: Plan, rank: int, counts: Callable[[Plan, int], Measured]) -> DryRank:
    """Run a step of a rank on all micro-batches, or on a few from which the bytes of all follow."""
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
            share, rest = divmod(size - few.sent_bytes.get(axis, 0), num_run - fewest)
            assert not rest, f"{axis}: micro-batches send different amounts"
            sent[axis] = size + share * (whole - num_run)
        measured = replace(measured, sent_bytes=sent)
    equal_ranks = next(ranks for ranks in _kinds(plan) if rank in ranks)
    return DryRank(rank=rank, alike=equal_ranks, num_run=num_run, measured=measured)


def enough(plan: Plan, rank: int) -> int:
    """Return how few micro-batches keep as much for backward as all of them; whole rounds, two at least."""
    schedule, place = plan.schedule, plan.mesh.coordinates(rank).get("pp", 0)
    all_micro_batches = schedule.num_micro_batches
    if schedule.actions is not None:
        return all_micro_batches
    in_flight = schedule.in_flight_by_chunk(place)
    for fewer in range(2 * schedule.num_ranks, all_micro_batches, schedule.num_ranks):
        if replace(schedule, num_micro_batches=fewer).in_flight_by_chunk(place) == in_flight:
            return fewer
    return all_micro_batches


def telling_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the first rank of each kind: those of a kind are predicted to hold the same."""
    return tuple(ranks[0] for ranks in _kinds(plan))


def _kinds(plan: Plan) -> list[tuple[int, ...]]:
    """Gather ranks that should hold the same; the first stage and the last are kinds of their own."""
    assert plan.prediction, "a plan is predicted before it runs"
    ends, kinds = {0: "first", plan.mesh.size("pp") - 1: "last"}, list[tuple[object, list[int]]]()
    for place, memory in enumerate(plan.prediction.stage_memory):
        kind, ranks = (dict(memory.parts), ends.get(place)), plan.mesh.ranks_of({"pp": place})
        members_of_kind = next((members for earlier, members in kinds if earlier == kind), None)
        if members_of_kind is None:
            kinds.append((kind, list(ranks)))
        else:
            members_of_kind += ranks
    return [tuple(sorted(ranks)) for _, ranks in kinds]
