from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from autoshard.schedule.schedule import Schedule
from autoshard.schedule.verify import verify_actions
from tests.schedule.cases import lists_of, schedules, with_list


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("F0.0 B0.0 B0.0", "F1.0 B1.0", "actions[0]: B0.0 stands 2 times"),
        ("B0.0", "F1.0 B1.0", "actions[0]: 1 chunks x 1 micro-batches need at least 2 actions"),
        ("B0.0 B0.0", "F1.0 B1.0", "F0.0 is missing"),
        ("F0.0 F0.0", "F1.0 B1.0", "the backward of 0.0 is missing"),
        ("F0.0 I0.0", "F1.0 B1.0", "add B0.0, or both I0.0 and W0.0"),
        ("F0.0 B0.0 I0.0 W0.0", "F1.0 B1.0", "B0.0 is the whole backward"),
        ("F0.0 B0.0 F1.0", "F1.0 B1.0", "F1.0 is not work of rank 0"),
        ("F0.0 B0.0 F0.7", "F1.0 B1.0", "F0.7: there are only 1 micro-batches"),
        ("F0.0 B0.0", "B1.0 F1.0", "actions[1]: B1.0 waits for F1.0"),
        ("F0.0 W0.0 I0.0", "F1.0 B1.0", "W0.0 waits for I0.0"),
    ],
)
def test_wrong_action_lists_are_named(first, second, says):
    schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=1, actions=lists_of(first, second))
    assert says in "\n".join(map(str, verify_actions(schedule)))


@given(schedules(most_ranks=3, most_micro_batches=1), st.integers(5, 9), st.randoms(use_true_random=False))
def test_four_rounds_stand_for_all_wherever_stages_are_placed(schedule, rounds, random):
    """What verify of plans relies on for a builder's lists on a placement of their user."""
    places = [divmod(number, schedule.num_chunks) for number in range(schedule.num_stages)]
    random.shuffle(places)
    few, many = (
        replace(schedule, placement=tuple(places), num_micro_batches=count * schedule.num_ranks)
        for count in (4, rounds)
    )
    assert (verify_actions(few) == ()) == (verify_actions(many) == ())


def said(schedule):
    return "\n".join(map(str, verify_actions(schedule)))


@st.composite
def picked(draw, kinds="FBIW"):
    """A schedule, one of its ranks, that rank's list, and the position of an action of some kind in it."""
    schedule = draw(schedules())
    rank = draw(st.integers(0, schedule.num_ranks - 1))
    actions = schedule.action_lists()[rank]
    positions = [position for position, action in enumerate(actions) if action.kind in kinds]
    return schedule, rank, list(actions), draw(st.sampled_from(positions))


@given(picked(), st.data())
def test_dropped_and_doubled_actions_are_named(case, data):
    schedule, rank, actions, position = case
    one = actions[position]
    others = actions[:position] + actions[position + 1 :]
    assert f"actions[{rank}]" in said(with_list(schedule, rank, others))
    others.append(replace(one, micro_batch=schedule.num_micro_batches))
    assert "missing" in said(with_list(schedule, rank, others))
    actions.insert(data.draw(st.integers(0, len(actions))), one)
    assert f"{one} stands 2 times; keep one" in said(with_list(schedule, rank, actions))


@given(picked("BIW"))
def test_an_action_before_what_it_reads_is_named(case):
    schedule, rank, actions, position = case
    early = actions.pop(position)
    source = replace(early, kind="I" if early.kind == "W" else "F")
    actions.insert(actions.index(source), early)
    assert f"{early} waits for {source}, which never ends" in said(with_list(schedule, rank, actions))


def test_sends_that_wait_for_each_other_are_a_deadlock_though_the_data_could_flow():
    # rank 0 makes all forwards before it takes a gradient, rank 1 takes turns: with buffers for all, both would end
    actions = lists_of("F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3")
    schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=4, actions=actions)
    assert said(schedule) == (
        "actions[0]: B0.0 waits until what F0.3 made is sent, and stage 1 takes it only after F1.2, which never "
        "begins: move F0.3 after what leads to F1.2\n"
        "actions[1]: F1.2 waits until what B1.1 made is sent, and stage 0 takes it only after B0.0, which never "
        "begins: move B1.1 after what leads to B0.0"
    )
    gpipe = Schedule(builder="gpipe", num_ranks=2, num_micro_batches=4).action_lists()
    assert verify_actions(replace(schedule, actions=(actions[0], gpipe[1]))) == ()


class Walk:
    """Goes rank by rank through explicit sends and posted receives; written apart from the package."""

    def __init__(self, lists):
        self.last = max(action.stage for own in lists for action in own)
        self.rank_of = {action.stage: rank for rank, own in enumerate(lists) for action in own}
        self.takes = defaultdict(list)  # what a stage still takes each way; its first receive stands posted
        for own in lists:
            for action in own:
                self.takes[action.stage, action.kind].append(action.micro_batch)
        self.programs = [
            [word for action in own for word in ((self.run, action), (self.send, action))] for own in lists
        ]
        self.arrived, self.finished = set(), set()

    def run(self, action):
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        needs = {"F": "", "W": "I"}.get(kind, "F")
        own_done = not needs or (needs, stage, micro_batch) in self.finished
        starts_here = kind == "W" or stage == (0 if kind == "F" else self.last)
        if not own_done or not (starts_here or (kind, stage, micro_batch) in self.arrived):
            return False
        self.finished.add((kind, stage, micro_batch))
        self.takes[stage, kind].remove(micro_batch)
        return True

    def send(self, action):
        kind, micro_batch = action.kind, action.micro_batch
        target = action.stage + (1 if kind == "F" else -1)
        if kind == "W" or not 0 <= target <= self.last:
            return True
        local = self.rank_of[target] == self.rank_of[action.stage]
        if not local and self.takes[target, kind][:1] != [micro_batch]:
            return False
        self.arrived.add((kind, target, micro_batch))
        return True

    def ends(self):
        moved = True
        while moved:
            moved = False
            for program in self.programs:
                while program and program[0][0](program[0][1]):
                    program.pop(0)
                    moved = True
        return not any(self.programs)


@given(schedules(most_ranks=4, most_micro_batches=5), st.data())
def test_swapped_actions_are_refused_exactly_if_a_walk_with_blocking_sends_gets_stuck(schedule, data):
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, schedule.num_ranks - 1))
        actions = list(schedule.action_lists()[rank])
        first = data.draw(st.integers(0, len(actions) - 2))
        second = data.draw(st.integers(first + 1, min(first + 3, len(actions) - 1)))
        actions[first], actions[second] = actions[second], actions[first]
        schedule = with_list(schedule, rank, actions)
    assert (verify_actions(schedule) == ()) == Walk(schedule.action_lists()).ends()
