import dataclasses
import itertools
import operator

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.schedule.builders import BUILDERS, Action
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.verify import verify_actions
from tests.schedule.bubbles import ideal_bubble
from tests.schedule.cases import lists_of, schedules


@given(st.sampled_from("FBIW"), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_text_form_of_an_action_round_trips(kind, stage, micro_batch):
    action = Action(kind=kind, stage=stage, micro_batch=micro_batch)
    assert Action.parse(str(action)) == action
    for text in ("", "F", "F1", "F1.", "f1.2", "X1.2", "F-1.2", "F1.2 ", "F1.2.3"):
        with pytest.raises(InputError, match="is not an action"):
            Action.parse(text)


@given(schedules())
def test_every_built_schedule_passes_each_micro_batch_once_each_way(schedule):
    words = [word for own in schedule.action_lists() for word in map(str, own)]
    back = "IW" if schedule.splits_backward else "B"
    every = itertools.product("F" + back, range(schedule.num_stages), range(schedule.num_micro_batches))
    assert sorted(words) == sorted(f"{kind}{stage}.{micro_batch}" for kind, stage, micro_batch in every)
    assert verify_actions(schedule) == ()
    for rank in range(schedule.num_ranks):
        assert all(schedule.place_of(stage) == (rank, chunk) for chunk, stage in schedule.stages_of(rank).items())


@given(schedules(most_ranks=4, most_micro_batches=40), st.lists(st.integers(0, 9), min_size=32, max_size=32))
def test_in_flight_is_what_the_action_lists_hold_whole_and_for_w(schedule, sizes):
    for rank, actions in enumerate(schedule.action_lists()):
        chunks = {stage: chunk for chunk, stage in schedule.stages_of(rank).items()}
        held, most = {}, 0
        for action in actions:
            unit = action.stage, action.micro_batch
            left = {"F": sizes[chunks[action.stage]], "I": sizes[schedule.num_chunks + chunks[action.stage]]}
            held[unit] = left.get(action.kind, 0)
            if action.kind not in left:
                del held[unit]
            most = max(most, sum(held.values()))
        for one in (schedule, dataclasses.replace(schedule, actions=schedule.action_lists())):
            assert max(sum(map(operator.mul, counts, sizes)) for counts in one.in_flight_by_chunk(rank)) == most


def test_what_is_in_flight_is_counted_for_any_number_of_micro_batches():
    for name, builder in BUILDERS.items():
        many = Schedule(builder=name, num_ranks=4, num_chunks=builder.num_chunks or 2, num_micro_batches=4_000_000)
        few = dataclasses.replace(many, num_micro_batches=24)
        if name == "gpipe":
            assert many.in_flight_by_chunk(1) == ((4_000_000,),)
        else:
            assert many.in_flight_by_chunk(1) == few.in_flight_by_chunk(1)


@pytest.mark.parametrize(
    ("builder", "num_chunks", "in_flight", "waiting"),  # of 4 ranks and 8 micro-batches; in thirds of a micro-batch
    [
        ("gpipe", 1, [8, 8, 8, 8], 9),
        ("1f1b", 1, [4, 3, 2, 1], 9),
        ("interleaved", 2, [11, 9, 7, 5], 9 / 2),
        ("zb_h1", 1, [4, 4, 4, 4], 3),
        ("zb_v", 2, [8, 8, 8, 8], 3 / 2),
    ],
)
def test_the_known_schedules_hold_and_wait_as_published(builder, num_chunks, in_flight, waiting):
    schedule = Schedule(builder=builder, num_ranks=4, num_chunks=num_chunks, num_micro_batches=8)
    assert [max(map(sum, schedule.in_flight_by_chunk(rank))) for rank in range(4)] == in_flight
    assert ideal_bubble(schedule) == pytest.approx(waiting / (24 + waiting))


@pytest.mark.parametrize(
    ("builder", "num_chunks", "num_micro_batches", "lists"),
    [
        ("interleaved", 2, 2, ("F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1", "F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1")),
        (
            *("zb_h1", 1, 3),
            ("F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2", "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2"),
        ),
        (
            *("zb_v", 2, 3),
            (
                "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2",
                "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2",
            ),
        ),
    ],
)
def test_the_orders_are_those_of_their_papers_and_frameworks(builder, num_chunks, num_micro_batches, lists):
    schedule = Schedule(builder=builder, num_ranks=2, num_chunks=num_chunks, num_micro_batches=num_micro_batches)
    assert schedule.action_lists() == lists_of(*lists)


def test_a_placement_moves_the_work_to_its_ranks():
    schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=2, placement=((1, 0), (0, 0)))
    assert schedule.action_lists() == lists_of("F1.0 B1.0 F1.1 B1.1", "F0.0 F0.1 B0.0 B0.1")
    assert verify_actions(schedule) == ()
    assert [schedule.in_flight_by_chunk(rank) for rank in range(2)] == [((1,),), ((2,),)]
    assert schedule.in_order(BUILDERS["1f1b"].order).actions == schedule.action_lists()


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"builder": "1f1d"}, "builder", "Did you mean 1f1b"),
        ({"num_ranks": 0}, "num_ranks", "at least 1"),
        ({"num_micro_batches": 0}, "num_micro_batches", "at least 1"),
        ({"num_chunks": 2}, "num_chunks", "Use interleaved"),
        ({"builder": "zb_h1", "num_chunks": 2}, "num_chunks", "zb_h1 runs one stage per rank, not 2"),
        ({"builder": "zb_v"}, "num_chunks", "zb_v runs 2 stages per rank, not 1"),
        ({"builder": "interleaved", "num_chunks": 2, "num_micro_batches": 3}, "num_micro_batches", "multiple of 2 r"),
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


def test_lists_without_a_backward_give_nothing_back_and_are_refused() -> None:
    lists = ((Action.parse("F0.0"), Action.parse("F0.1")),)
    schedule = Schedule(builder="1f1b", num_ranks=1, num_micro_batches=2, actions=lists)
    assert schedule.in_flight_by_chunk(0) == ((2,),)
    assert "need at least 4 actions" in str(verify_actions(schedule)[0])
