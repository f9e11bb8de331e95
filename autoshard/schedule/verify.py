"""Prove that a schedule's action lists do the whole work, each part once, in an order that can run.

The order is checked against the flow of data, where a send blocks until its receive is posted. Every stage keeps one
receive posted each way, the next that its rank's list takes, and posts it again when that action begins. Sends go out
right after the action that made the message, and hold up its rank until they are taken.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import get_args

from autoshard.errors import Fault, InputError
from autoshard.schedule.builders import Action, ActionKind, ActionLists
from autoshard.schedule.schedule import Schedule

_Need = tuple[Action, Action | None]  # an action that must begin first; the send that it takes, if that is why


def verify_actions(schedule: Schedule) -> tuple[Fault, ...]:
    """List what is wrong with the action lists; empty when every micro-batch passes each stage once each way."""
    lists = schedule.action_lists()
    least = 2 * schedule.num_chunks * schedule.num_micro_batches
    work = f"{schedule.num_chunks} chunks x {schedule.num_micro_batches} micro-batches need"
    short = [
        Fault(where=f"actions[{rank}]", message=f"{work} at least {least} actions, F and B of each, not {len(actions)}")
        for rank, actions in enumerate(lists)
        if len(actions) < least
    ]
    if short:
        return tuple(short)  # the numbers may be far too large to go through one by one
    faults = [
        Fault(where=f"actions[{rank}]", message=message)
        for rank, actions in enumerate(lists)
        for message in _content_faults(schedule, rank, Counter(actions))
    ]
    return tuple(faults or _blocked(lists))


def _content_faults(schedule: Schedule, rank: int, counts: Counter[Action]) -> Iterator[str]:
    """Yield what a rank's list has too much or too little of."""
    stages = sorted(schedule.stages_of(rank).values())
    for action in sorted(counts, key=str):
        if action.stage not in stages:
            yield f"{action} is not work of rank {rank}, which holds stages {stages}"
        if counts[action] > 1:
            yield f"{action} stands {counts[action]} times; keep one"
        if action.micro_batch >= schedule.num_micro_batches:
            yield f"{action}: there are only {schedule.num_micro_batches} micro-batches"
    for stage in stages:
        for number in range(schedule.num_micro_batches):
            name = f"{stage}.{number}"
            kinds = {
                kind for kind in get_args(ActionKind) if Action(kind=kind, stage=stage, micro_batch=number) in counts
            }
            if "F" not in kinds:
                yield f"F{name} is missing"
            if "B" in kinds and kinds & {"I", "W"}:
                yield f"B{name} is the whole backward; remove it or I{name} and W{name}"
            if "B" not in kinds and not kinds >= {"I", "W"}:
                yield f"the backward of {name} is missing: add B{name}, or both I{name} and W{name}"


def _blocked(lists: ActionLists) -> list[Fault]:
    """Run the lists, and name the action at which each rank stops for ever."""
    needs = _needs(lists)
    done: set[Action] = set()
    next_steps, moved = [0] * len(lists), True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while next_steps[rank] < len(actions):
                action = actions[next_steps[rank]]
                if any(need not in done for need, _ in needs[action]):
                    break
                done.add(action)
                next_steps[rank], moved = next_steps[rank] + 1, True
    faults: list[Fault] = []
    for rank, actions in enumerate(lists):
        if next_steps[rank] < len(actions):
            action = actions[next_steps[rank]]
            need, sender = next(pair for pair in needs[action] if pair[0] not in done)
            message = f"{action} waits for {need}, which never ends: move it after {need}"
            if sender is not None:
                message = (
                    f"{action} waits until what {sender} made is sent, and stage {need.stage} takes it only after "
                    f"{need}, which never begins: move {sender} after what leads to {need}"
                )
            faults.append(Fault(where=f"actions[{rank}]", message=message))
    return faults


def _needs(lists: ActionLists) -> dict[Action, list[_Need]]:
    """Return what must have begun before each action: what makes its input, and what takes the send before it."""
    inputs = _inputs(lists)
    rank_of = {action: rank for rank, actions in enumerate(lists) for action in actions}
    reader = {need: action for action, needs in inputs.items() for need in needs if need.stage != action.stage}
    waits: dict[Action, list[_Need]] = {action: [(need, None) for need in needs] for action, needs in inputs.items()}
    poster: dict[Action, Action] = {}  # whose beginning posts a receive: the one before of its stage and direction
    for actions in lists:
        last: dict[tuple[int, bool], Action] = {}
        for action in actions:
            if action.kind != "W":
                way = action.stage, action.kind == "F"
                if way in last:
                    poster[action] = last[way]
                last[way] = action
    for rank, actions in enumerate(lists):
        for sender, action in pairwise(actions):
            taker = reader.get(sender)
            if taker in poster and rank_of[taker] != rank:
                waits[action].append((poster[taker], sender))
    return waits


def _inputs(lists: ActionLists) -> dict[Action, list[Action]]:
    """Return the actions whose results each action reads."""
    all_actions = [action for actions in lists for action in actions]
    split = {(action.stage, action.micro_batch) for action in all_actions if action.kind == "I"}
    last_stage = max((action.stage for action in all_actions), default=0)
    sources_of: dict[Action, list[Action]] = {}
    for action in all_actions:
        stage, number = action.stage, action.micro_batch
        sources: list[tuple[ActionKind, int]] = [("I" if action.kind == "W" else "F", stage)]
        if action.kind == "F":
            sources = [("F", stage - 1)] if stage else []
        elif action.kind != "W" and stage < last_stage:
            sources.append(("I" if (stage + 1, number) in split else "B", stage + 1))
        sources_of[action] = [Action(kind=kind, stage=source, micro_batch=number) for kind, source in sources]
    return sources_of


def refuse_crossing(schedule: Schedule) -> None:
    """Refuse an order in which a rank takes the messages of a channel in another order than they are sent."""
    sent: dict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    received: dict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    for action in (action for actions in schedule.action_lists() for action in actions if action.kind != "W"):
        back = action.kind != "F"
        before, after = (action.stage + 1, action.stage - 1) if back else (action.stage - 1, action.stage + 1)
        for messages, start, stop in ((received, before, action.stage), (sent, action.stage, after)):
            if 0 <= start < schedule.num_stages and 0 <= stop < schedule.num_stages:
                ends = schedule.place_of(start)[0], schedule.place_of(stop)[0]
                messages[*ends, back].append((stop, action.micro_batch))
    for (sender, receiver, back), order in sent.items():
        if sender != receiver and order != received[sender, receiver, back]:
            message = f"pipeline rank {receiver} takes what rank {sender} sends in another order, which devices cannot"
            raise InputError.of("schedule", f"{message}. Order the actions of both alike")
