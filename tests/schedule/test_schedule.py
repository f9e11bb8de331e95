import dataclasses

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.schedule.action import Action
from autoshard.schedule.play import play
from autoshard.schedule.schedule import UNIT_TIMES, Schedule, schedule_meaning, schedule_names
from autoshard.schedule.verify import verify_actions


def lists_of(*texts):
    return tuple(tuple(Action.parse(word) for word in text.split()) for text in texts)


@st.composite
def schedules(draw):
    builder = draw(st.sampled_from(schedule_names()))
    num_ranks = draw(st.integers(1, 6))
    if builder != "interleaved":
        return Schedule(builder=builder, num_ranks=num_ranks, num_micro_batches=draw(st.integers(1, 12)))
    rounds = draw(st.integers(1, 4))
    return Schedule(
        builder=builder,
        num_ranks=num_ranks,
        num_chunks=draw(st.integers(1, 4)),
        num_micro_batches=rounds * num_ranks,
    )


@given(schedules())
def test_every_built_schedule_does_all_work_once_in_an_order_that_runs(schedule):
    assert verify_actions(schedule) == ()
    lists = schedule.action_lists()
    assert sum(map(len, lists)) == 2 * schedule.num_stages * schedule.num_micro_batches


def most_in_flight(actions):
    held, peak = set(), 0
    for action in actions:
        unit = (action.stage, action.micro_batch)
        held = held | {unit} if action.kind == "F" else held - {unit}
        peak = max(peak, len(held))
    return peak


@given(schedules())
def test_in_flight_equals_what_the_action_lists_hold(schedule):
    for rank, actions in enumerate(schedule.action_lists()):
        assert schedule.in_flight(rank) == most_in_flight(actions)


@given(schedules())
def test_the_closed_form_of_the_bubble_equals_the_played_lists(schedule):
    if schedule.builder == "interleaved" and schedule.num_chunks == 1:
        return  # not a layout that the closed form promises anything about; the Rules refuse it
    lists = schedule.action_lists()
    makespan = play(lists, UNIT_TIMES).makespan
    busy = 3.0 * schedule.num_micro_batches * schedule.num_chunks
    assert schedule.bubble_fraction() == pytest.approx(1 - busy / makespan)


def test_explicit_lists_equal_to_the_builders_give_the_same_numbers():
    built = Schedule(builder="interleaved", num_ranks=4, num_chunks=2, num_micro_batches=8)
    explicit = dataclasses.replace(built, actions=built.action_lists())
    assert explicit.bubble_fraction() == pytest.approx(built.bubble_fraction())
    assert [explicit.in_flight(rank) for rank in range(4)] == [built.in_flight(rank) for rank in range(4)]


def test_in_flight_of_the_known_schedules_for_four_ranks_and_eight_micro_batches():
    def counts(builder, chunks):
        schedule = Schedule(builder=builder, num_ranks=4, num_chunks=chunks, num_micro_batches=8)
        return [schedule.in_flight(rank) for rank in range(4)]

    assert counts("gpipe", 1) == [8, 8, 8, 8]
    assert counts("1f1b", 1) == [4, 3, 2, 1]
    assert counts("interleaved", 2) == [11, 9, 7, 5]


def test_interleaved_with_one_round_runs_all_forwards_first_as_nxd_and_apex_do():
    schedule = Schedule(builder="interleaved", num_ranks=2, num_chunks=2, num_micro_batches=2)
    assert " ".join(map(str, schedule.action_lists()[1])) == "F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1"


def test_stages_lie_round_the_ranks_unless_placed():
    schedule = Schedule(builder="interleaved", num_ranks=2, num_chunks=2, num_micro_batches=2)
    assert [schedule.place_of(stage) for stage in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert schedule.stages_of(1) == {0: 1, 1: 3}


def test_a_placement_moves_the_work_to_its_ranks():
    schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=2, placement=((1, 0), (0, 0)))
    assert schedule.action_lists() == lists_of("F1.0 B1.0 F1.1 B1.1", "F0.0 F0.1 B0.0 B0.1")
    assert verify_actions(schedule) == ()
    assert (schedule.in_flight(0), schedule.in_flight(1)) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"builder": "1f1d"}, "builder", "Did you mean 1f1b"),
        ({"num_ranks": 0}, "num_ranks", "at least 1"),
        ({"num_micro_batches": 0}, "num_micro_batches", "at least 1"),
        ({"num_chunks": 2}, "num_chunks", "Use interleaved"),
        (
            {"builder": "interleaved", "num_chunks": 2, "num_micro_batches": 3},
            "num_micro_batches",
            "needs a multiple of 2 ranks",
        ),
        ({"placement": ((0, 0), (0, 0))}, "placement", "once"),
        ({"placement": ((0, 0),)}, "placement", "once"),
        ({"actions": ((),)}, "actions", "one per pipeline rank"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes, where, says):
    values = {"builder": "1f1b", "num_ranks": 2, "num_micro_batches": 2, **changes}
    with pytest.raises(InputError, match=says) as caught:
        Schedule(**values)
    assert caught.value.faults[0].where == where


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


def test_a_split_backward_releases_its_activations_only_after_w():
    actions = lists_of("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1", "F1.0 I1.0 W1.0 F1.1 B1.1")
    schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=2, actions=actions)
    assert verify_actions(schedule) == ()
    assert (schedule.in_flight(0), schedule.in_flight(1)) == (2, 1)


def test_every_name_has_a_meaning():
    assert schedule_names() == ("gpipe", "1f1b", "interleaved")
    assert all(schedule_meaning(name) for name in schedule_names())
