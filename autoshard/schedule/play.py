"""Run action lists against the flow of data: when can each action start, and does any rank wait for ever.

Point-to-point sends are free and never block here; what a transfer costs belongs to the cost floor.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.schedule.action import Action, ActionKind, ActionLists


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """When each action ends, and which action each stuck rank could not start, with what it waits for."""

    ends: Mapping[Action, float]
    stuck: tuple[tuple[int, Action, Action], ...]  # (pipeline rank, its next action, the action it waits for)

    @property
    def makespan(self) -> float:
        """The end of the last action."""
        return max(self.ends.values(), default=0.0)


@dataclass(slots=True)
class _State:
    lists: ActionLists
    times: Mapping[ActionKind, float]
    split: frozenset[tuple[int, int]]  # (stage, micro-batch) whose backward comes in halves
    last_stage: int
    ends: dict[Action, float] = field(default_factory=dict[Action, float])
    waiting: dict[Action, list[int]] = field(default_factory=dict[Action, list[int]])


def play(lists: ActionLists, times: Mapping[ActionKind, float]) -> Played:
    """Run every rank's list in order; each kind of action takes the time given."""
    actions = [action for actions in lists for action in actions]
    state = _State(
        lists=lists,
        times=times,
        split=frozenset((action.stage, action.micro_batch) for action in actions if action.kind == "I"),
        last_stage=max((action.stage for action in actions), default=0),
    )
    next_steps = _run_ranks(state)
    stuck = [
        (rank, lists[rank][step], _first_missing(state, lists[rank][step]))
        for rank, step in enumerate(next_steps)
        if step < len(lists[rank])
    ]
    return Played(
        ends=state.ends,
        stuck=tuple((rank, action, need) for rank, action, need in stuck if need is not None),
    )


def _run_ranks(state: _State) -> list[int]:
    next_steps, clocks = [0] * len(state.lists), [0.0] * len(state.lists)
    ready = deque(range(len(state.lists)))
    while ready:
        rank = ready.popleft()
        while next_steps[rank] < len(state.lists[rank]):
            action = state.lists[rank][next_steps[rank]]
            missing = _first_missing(state, action)
            if missing is not None:
                state.waiting.setdefault(missing, []).append(rank)
                break
            start = max([clocks[rank], *(state.ends[need] for need in _needs(state, action))])
            clocks[rank] = state.ends[action] = start + state.times[action.kind]
            next_steps[rank] += 1
            ready.extend(state.waiting.pop(action, ()))
    return next_steps


def _first_missing(state: _State, action: Action) -> Action | None:
    return next((need for need in _needs(state, action) if need not in state.ends), None)


def _needs(state: _State, action: Action) -> list[Action]:
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return [Action(kind="F", stage=stage - 1, micro_batch=micro_batch)] if stage else []
    if action.kind == "W":
        return [Action(kind="I", stage=stage, micro_batch=micro_batch)]
    needs = [Action(kind="F", stage=stage, micro_batch=micro_batch)]
    if stage < state.last_stage:
        kind: ActionKind = "I" if (stage + 1, micro_batch) in state.split else "B"
        needs.append(Action(kind=kind, stage=stage + 1, micro_batch=micro_batch))
    return needs
