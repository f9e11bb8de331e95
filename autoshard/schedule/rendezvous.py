"""Run action lists against the flow of data, where a send blocks until its receive is posted: who waits for ever.

Every stage keeps one receive posted each way, the next that its rank's list takes, and posts it again when that action
begins. Sends go out right after the action that made the message, and hold up its rank until they are taken.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise

from autoshard.schedule.action import Action, ActionKind, ActionLists


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """An action that can never start: what it waits for, and the message that its rank cannot get rid of, if any."""

    rank: int
    action: Action
    need: Action
    blocked: Action | None = None  # sends, and its receive is posted only when ``need`` begins


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    action: Action
    blocked: Action | None = None


def stuck(lists: ActionLists) -> tuple[Stuck, ...]:
    """Name the action at which each rank stops for ever; empty when all lists run to their ends."""
    needs = _needs(lists)
    done: set[Action] = set()
    next_steps = [0] * len(lists)
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = deque(range(len(lists)))
    while ready:
        rank = ready.popleft()
        while next_steps[rank] < len(lists[rank]):
            action = lists[rank][next_steps[rank]]
            missing = _first_missing(needs[action], done)
            if missing is not None:
                waiting[missing.action].append(rank)
                break
            done.add(action)
            next_steps[rank] += 1
            ready.extend(waiting.pop(action, ()))
    stops = [(rank, lists[rank][step]) for rank, step in enumerate(next_steps) if step < len(lists[rank])]
    found = [(rank, action, _first_missing(needs[action], done)) for rank, action in stops]
    return tuple(
        Stuck(rank=rank, action=action, need=need.action, blocked=need.blocked)
        for rank, action, need in found
        if need is not None
    )


def _first_missing(needs: list[_Need], done: set[Action]) -> _Need | None:
    return next((need for need in needs if need.action not in done), None)


def _needs(lists: ActionLists) -> dict[Action, list[_Need]]:
    inputs = _inputs(lists)
    rank_of = {action: rank for rank, actions in enumerate(lists) for action in actions}
    reader = {need: action for action, needs in inputs.items() for need in needs if need.stage != action.stage}
    poster = _posters(lists)
    found = {action: [_Need(action=need) for need in needs] for action, needs in inputs.items()}
    for rank, actions in enumerate(lists):
        for sender, action in pairwise(actions):
            taker = reader.get(sender)
            if taker in poster and rank_of[taker] != rank:
                found[action].append(_Need(action=poster[taker], blocked=sender))
    return found


def _posters(lists: ActionLists) -> dict[Action, Action]:
    """Map each action to the one whose beginning posts its receive: the one before of its stage and direction."""
    found: dict[Action, Action] = {}
    for actions in lists:
        last: dict[tuple[int, bool], Action] = {}
        for action in actions:
            if action.kind == "W":
                continue
            way = action.stage, action.kind == "F"
            if way in last:
                found[action] = last[way]
            last[way] = action
    return found


def _inputs(lists: ActionLists) -> dict[Action, list[Action]]:
    actions = [action for actions in lists for action in actions]
    split = {(action.stage, action.micro_batch) for action in actions if action.kind == "I"}
    last_stage = max((action.stage for action in actions), default=0)

    def inputs(action: Action) -> list[Action]:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "F":
            return [Action(kind="F", stage=stage - 1, micro_batch=micro_batch)] if stage else []
        if action.kind == "W":
            return [Action(kind="I", stage=stage, micro_batch=micro_batch)]
        needs = [Action(kind="F", stage=stage, micro_batch=micro_batch)]
        if stage < last_stage:
            kind: ActionKind = "I" if (stage + 1, micro_batch) in split else "B"
            needs.append(Action(kind=kind, stage=stage + 1, micro_batch=micro_batch))
        return needs

    return {action: inputs(action) for action in actions}
