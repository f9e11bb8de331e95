import dataclasses
import itertools
import operator

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.schedule.builders import BUILDERS
from autoshard.schedule.schedule import Schedule, schedule_meaning, schedule_names
from autoshard.schedule.simulate import PipelineTimes, StageTimes, simulate
from autoshard.schedule.verify import verify_actions
from autoshard.spec.kernels import kernels_names, load_kernels
from tests.schedule.cases import lists_of, schedules


@given(schedules())
def test_every_built_schedule_passes_each_micro_batch_once_each_way(schedule):
    words = [word for own in schedule.action_lists() for word in map(str, own)]
    back = "IW" if schedule.builder.startswith("zb") else "B"
    every = itertools.product("F" + back, range(schedule.num_stages), range(schedule.num_micro_batches))
    assert sorted(words) == sorted(f"{kind}{stage}.{micro_batch}" for kind, stage, micro_batch in every)


def most_in_flight(actions):
    held, peak = set(), 0
    for action in actions:
        unit = (action.stage, action.micro_batch)
        if action.kind != "I":
            held = held | {unit} if action.kind == "F" else held - {unit}
        peak = max(peak, len(held))
    return peak


@given(schedules())
def test_in_flight_equals_what_the_action_lists_hold(schedule):
    for rank, actions in enumerate(schedule.action_lists()):
        assert schedule.in_flight(rank) == most_in_flight(actions)


@given(schedules(), st.lists(st.integers(0, 9), min_size=48, max_size=48))
def test_what_is_held_is_what_the_action_lists_hold_whole_and_for_w(schedule, sizes):
    for rank, actions in enumerate(schedule.action_lists()):
        chunks = {stage: chunk for chunk, stage in schedule.stages_of(rank).items()}
        held, most = {}, 0
        for action in actions:
            unit = (action.stage, action.micro_batch)
            left = {"F": sizes[chunks[action.stage]], "I": sizes[schedule.num_chunks + chunks[action.stage]]}
            held[unit] = left.get(action.kind, 0)
            most = max(most, sum(held.values()))
        for one in (schedule, dataclasses.replace(schedule, actions=schedule.action_lists())):
            assert max(sum(map(operator.mul, counts, sizes)) for counts in one.held(rank)) == most


@given(schedules())
def test_the_bubble_equals_that_of_the_simulated_lists(schedule):
    if schedule.builder == "interleaved" and schedule.num_chunks == 1:
        return  # not a layout that the closed form promises anything about; the Rules refuse it
    unit = StageTimes(forward_s=1.0, input_s=1.0, weight_s=1.0)
    run = simulate(schedule, PipelineTimes(stages=(unit,) * schedule.num_stages))
    assert schedule.bubble_fraction() == pytest.approx(run.bubble_fraction)


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
    assert counts("zb_h1", 1) == [4, 4, 4, 4]
    assert counts("zb_v", 2) == [8, 8, 8, 8]


def test_the_bubbles_of_the_known_schedules_for_four_ranks_and_eight_micro_batches():
    def waiting(builder, chunks):
        share = Schedule(builder=builder, num_ranks=4, num_chunks=chunks, num_micro_batches=8).bubble_fraction()
        return share / (1 - share)

    work = 8 * 3.0  # micro-batches of F, I and W
    assert waiting("gpipe", 1) == waiting("1f1b", 1) == pytest.approx(3 * 3 / work)
    assert waiting("interleaved", 2) == pytest.approx(3 * 3 / 2 / work)
    assert waiting("zb_h1", 1) == pytest.approx(3 * 1 / work)
    assert waiting("zb_v", 2) == pytest.approx(3 * 1 / 2 / work)


def test_zb_h1_puts_off_weight_gradients_by_the_position_of_the_rank():
    schedule = Schedule(builder="zb_h1", num_ranks=2, num_micro_batches=3)
    assert schedule.action_lists() == lists_of(
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    )


def test_zb_v_begins_and_ends_every_forward_on_the_first_rank():
    schedule = Schedule(builder="zb_v", num_ranks=2, num_chunks=2, num_micro_batches=3)
    assert [schedule.stages_of(rank) for rank in range(2)] == [{0: 0, 1: 3}, {0: 1, 1: 2}]
    assert [schedule.place_of(stage) for stage in range(4)] == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert schedule.action_lists() == lists_of(
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2",
    )


@given(schedules())
def test_places_and_stages_are_inverse(schedule):
    for rank in range(schedule.num_ranks):
        for chunk, stage in schedule.stages_of(rank).items():
            assert schedule.place_of(stage) == (rank, chunk)


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
        ({"builder": "zb_h1", "num_chunks": 2}, "num_chunks", "zb_h1 runs one stage per rank, not 2"),
        ({"builder": "zb_v"}, "num_chunks", "zb_v runs 2 stages per rank, not 1"),
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


def test_a_split_backward_releases_its_activations_only_after_w():
    actions = lists_of("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1", "F1.0 I1.0 W1.0 F1.1 B1.1")
    schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=2, actions=actions)
    assert verify_actions(schedule) == ()
    assert (schedule.in_flight(0), schedule.in_flight(1)) == (2, 1)


def test_the_bubble_of_lists_that_never_end_is_the_whole_step():
    schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=1, actions=lists_of("F0.0 B0.0", "F1.0"))
    assert schedule.bubble_fraction() == 1.0


@pytest.mark.parametrize("text", ["F7.0 B7.0", "F0.9 B0.9"])
def test_lists_that_name_what_does_not_exist_have_no_bubble(text):
    schedule = Schedule(builder="1f1b", num_ranks=1, num_micro_batches=1, actions=lists_of(text))
    with pytest.raises(InputError, match="more than 1 stages or 1 micro-batches"):
        schedule.bubble_fraction()


def test_every_name_has_a_meaning():
    assert schedule_names() == ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
    assert all(schedule_meaning(name) for name in schedule_names())


@pytest.mark.parametrize("name", kernels_names())
def test_the_schedules_in_which_a_platform_hides_its_sends_exist(name):
    assert set(load_kernels(name).hides_sends) <= set(schedule_names())


@pytest.mark.parametrize(
    ("builder", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb_h1", 1), ("zb_v", 2)]
)
def test_a_builders_order_given_as_ones_own_is_the_builders_schedule(builder: str, num_chunks: int):
    schedule = Schedule(builder=builder, num_ranks=3, num_chunks=num_chunks, num_micro_batches=6)
    listed = schedule.in_order(BUILDERS[builder].order)
    assert listed.actions == schedule.action_lists()
    assert dataclasses.replace(listed, actions=None) == schedule


def test_an_order_of_ones_own_follows_the_placement():
    placed = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=1, placement=((1, 0), (0, 0)))
    listed = placed.in_order(lambda shape, position: [("F", 0, 0), ("B", 0, 0)])
    assert listed.action_lists() == placed.action_lists()
    assert not verify_actions(listed)
