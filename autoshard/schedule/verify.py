"""Prove that a schedule's action lists do the whole work, each part once, in an order that can run."""

from collections import Counter

from autoshard.errors import Fault
from autoshard.schedule.action import Action, ActionLists
from autoshard.schedule.rendezvous import Stuck, stuck
from autoshard.schedule.schedule import Schedule


def verify_actions(schedule: Schedule) -> tuple[Fault, ...]:
    """List what is wrong with the action lists; empty when every micro-batch passes each stage once each way.

    The order is checked against the flow of data, with sends that block until their receives are posted.
    """
    lists = schedule.action_lists()
    short = _too_short(schedule, lists)
    if short:
        return tuple(short)  # the numbers may be far too large to go through one by one
    faults = [*_misplaced(schedule, lists), *_miscounted(schedule, lists)]
    return tuple(faults or _blocked(lists))


def _where(rank: int) -> str:
    return f"actions[{rank}]"


def _too_short(schedule: Schedule, lists: ActionLists) -> list[Fault]:
    least = 2 * schedule.num_chunks * schedule.num_micro_batches
    work = f"{schedule.num_chunks} chunks x {schedule.num_micro_batches} micro-batches need"
    return [
        Fault(
            where=_where(rank),
            message=f"{work} at least {least} actions, F and B of each, not {len(actions)}",
        )
        for rank, actions in enumerate(lists)
        if len(actions) < least
    ]


def _misplaced(schedule: Schedule, lists: ActionLists) -> list[Fault]:
    faults: list[Fault] = []
    for rank, actions in enumerate(lists):
        own = set(schedule.stages_of(rank).values())
        for action in actions:
            if action.stage not in own:
                message = f"{action} is not work of rank {rank}, which holds stages {sorted(own)}"
                faults.append(Fault(where=_where(rank), message=message))
    return faults


def _miscounted(schedule: Schedule, lists: ActionLists) -> list[Fault]:
    counts = [Counter(actions) for actions in lists]
    faults = [
        Fault(where=_where(rank), message=f"{action} stands {count} times; keep one")
        for rank, counter in enumerate(counts)
        for action, count in counter.items()
        if count > 1
    ]
    for rank, counter in enumerate(counts):
        faults += _unmatched(schedule, rank, set(counter))
    return faults


def _unmatched(schedule: Schedule, rank: int, present: set[Action]) -> list[Fault]:
    messages: list[str] = []
    messages += [
        f"{action}: there are only {schedule.num_micro_batches} micro-batches"
        for action in sorted(present, key=str)
        if action.micro_batch >= schedule.num_micro_batches
    ]
    for stage in sorted(schedule.stages_of(rank).values()):
        for micro_batch in range(schedule.num_micro_batches):
            messages += _faults_of_unit(stage, micro_batch, present)
    return [Fault(where=_where(rank), message=message) for message in messages]


def _faults_of_unit(stage: int, micro_batch: int, present: set[Action]) -> list[str]:
    unit = {kind: Action(kind=kind, stage=stage, micro_batch=micro_batch) in present for kind in ("F", "B", "I", "W")}
    name = f"{stage}.{micro_batch}"
    faults = [] if unit["F"] else [f"F{name} is missing"]
    if unit["B"] and (unit["I"] or unit["W"]):
        faults.append(f"B{name} is the whole backward; remove it or I{name} and W{name}")
    if not unit["B"] and not (unit["I"] and unit["W"]):
        faults.append(f"the backward of {name} is missing: add B{name}, or both I{name} and W{name}")
    return faults


def _blocked(lists: ActionLists) -> list[Fault]:
    return [Fault(where=_where(stop.rank), message=_why(stop)) for stop in stuck(lists)]


def _why(stop: Stuck) -> str:
    if stop.blocked is None:
        return f"{stop.action} waits for {stop.need}, which never ends: move it after {stop.need}"
    return (
        f"{stop.action} waits until what {stop.blocked} made is sent, and stage {stop.need.stage} takes it only after "
        f"{stop.need}, which never begins: move {stop.blocked} after what leads to {stop.need}"
    )
