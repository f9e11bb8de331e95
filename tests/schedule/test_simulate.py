"""One candidate is simulated as by a queue of events, and columns take as long as each of them simulated."""

import heapq
import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.schedule.builders import BUILDERS
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import PipelineTimes, delays_of, makespan_s, simulate
from autoshard.schedule.waves import KINDS, Delays
from tests.schedule.cases import equal, lists_of, schedules, times_of


@st.composite
def timed(draw):
    """A schedule and what everything takes in it, in whole seconds."""
    schedule = draw(schedules(most_ranks=4, most_micro_batches=7))
    return schedule, draw(times_of(schedule, st.integers(0, 9), st.booleans()))


def by_events(schedule, times):
    """Starts of all actions, from a queue of events: a rank becomes free, a message arrives."""
    lists = schedule.action_lists()
    last = schedule.num_stages - 1
    waits = [list(own) for own in lists]
    arrived, sleeping, starts = {}, {}, {}
    events: list[tuple] = [(0, number, "free", number) for number in range(len(lists))]
    numbers = itertools.count(len(lists))

    def hop_between(stage, other):
        """Seconds of sending and receiving."""
        here = schedule.place_of(stage)[0] == schedule.place_of(other)[0]
        return [0 if here or not of else of[min(stage, other)] for of in (times.send_s, times.receive_s)]

    while events:
        now, _, event, subject = heapq.heappop(events)
        if event == "arrived":
            arrived[subject] = now
            if subject in sleeping:
                heapq.heappush(events, (now, next(numbers), "free", sleeping.pop(subject)))
            continue
        if not waits[subject]:
            continue
        action = waits[subject][0]
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        source = {"F": stage - 1, "W": None}.get(kind, stage + 1)
        if source is not None and 0 <= source <= last and (kind == "F", stage, micro_batch) not in arrived:
            sleeping[kind == "F", stage, micro_batch] = subject
            continue
        waits[subject].pop(0)
        if source is not None and 0 <= source <= last and not times.overlap:
            now += hop_between(source, stage)[1]
        forward, inputs, weight = (of[stage] for of in (times.forward_s, times.input_s, times.weight_s))
        began, now = now, now + {"F": forward, "I": inputs, "W": weight, "B": inputs + weight}[kind]
        starts[action] = began, now
        target = {"F": stage + 1, "W": -1}.get(kind, stage - 1)
        if 0 <= target <= last:
            sends, receives = hop_between(stage, target)
            reached = now + sends + (receives if times.overlap else 0)
            heapq.heappush(events, (reached, next(numbers), "arrived", (kind == "F", target, micro_batch)))
            now += 0 if times.overlap else sends
        heapq.heappush(events, (now, next(numbers), "free", subject))
    return starts


@given(timed())
def test_every_start_and_end_is_that_of_a_simulation_by_events(case):
    schedule, times = case
    expected = by_events(schedule, times)
    run = simulate(schedule, times)
    for own, rank in zip(schedule.action_lists(), run.ranks, strict=True):
        assert list(zip(rank.start_s, rank.end_s, strict=True)) == [expected[action] for action in own]
    assert run.makespan_s == max(end for _, end in expected.values())


@given(timed())
def test_a_rank_is_busy_sends_or_waits(case):
    schedule, times = case
    run = simulate(schedule, times)
    for rank in run.ranks:
        assert rank.busy_s == sum(rank.end_s - rank.start_s)
        assert rank.busy_s + rank.exposed_s + rank.idle_s == run.makespan_s
        # the last send of a rank may outlast the last action of all
        assert rank.idle_s >= -max(times.send_s, default=0)
    if times.overlap:
        assert all(rank.exposed_s == 0 and rank.idle_s >= 0 for rank in run.ranks)
        assert run.makespan_s <= simulate(schedule, replace(times, overlap=False)).makespan_s


@given(timed())
def test_what_a_rank_keeps_is_what_began_forward_and_did_not_end_backward(case):
    schedule, times = case
    run = simulate(schedule, times)
    for own, rank in zip(schedule.action_lists(), run.ranks, strict=True):
        ends = dict(zip(own, rank.end_s, strict=True))
        lives = [
            (start, next(ends[replace(action, kind=kind)] for kind in "BW" if replace(action, kind=kind) in ends))
            for action, start in zip(own, rank.start_s, strict=True)
            if action.kind == "F"
        ]
        for moment in {*rank.start_s, *rank.end_s}:
            after = np.searchsorted(rank.kept_from_s, moment, side="right")
            assert rank.kept[after - 1] == sum(start <= moment < end for start, end in lives)
        assert rank.kept[-1] == 0 and rank.peak == max(rank.kept)


POSITIVE = st.integers(1, 50)


@given(st.data(), st.integers(1, 8), st.integers(1, 4), POSITIVE, POSITIVE, POSITIVE)
def test_ranks_wait_as_the_papers_say(data, pp, rounds, forward, inputs, weights):
    """Narayanan et al. 2021; Qi et al. 2023, section 2, whose closed form asks that W takes no longer than F and I."""
    builder, vp, whole = (
        data.draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb_h1"])),
        1,
        forward + inputs + weights,
    )
    if builder == "interleaved":
        pp, vp = max(pp, 2), data.draw(st.integers(2, 4))
    if builder == "zb_h1":
        whole = forward + inputs - (weights := min(forward, inputs, weights))
    schedule = Schedule(builder=builder, num_ranks=pp, num_chunks=vp, num_micro_batches=rounds * pp)
    run = simulate(schedule, equal(schedule, forward, inputs, weights))
    assert [rank.idle_s for rank in run.ranks] == pytest.approx([(pp - 1) * whole] * pp)


@given(st.integers(1, 8), st.integers(0, 12), POSITIVE)
def test_zb_v_waits_only_before_its_first_and_after_its_last_pass(pp, extra, seconds):
    schedule = Schedule(builder="zb_v", num_ranks=pp, num_chunks=2, num_micro_batches=2 * pp + extra)
    run = simulate(schedule, equal(schedule, seconds, seconds, seconds))
    for number, rank in enumerate(run.ranks):
        assert rank.start_s[0] == number * seconds
        assert rank.end_s[-1] - rank.start_s[0] == rank.busy_s
    assert run.makespan_s == run.ranks[0].busy_s + (pp - 1) * seconds


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"forward_s": (1, -1)}, "forward_s: must be seconds of at least 0, not -1"),
        ({"send_s": (float("nan"),)}, "send_s: must be seconds"),
        ({"receive_s": (-2,)}, "receive_s: must be seconds of at least 0, not -2"),
        ({"send_s": (1, 1)}, "send_s: must be 1 for 2 stages, not 2"),
        ({"weight_s": (1,)}, "weight_s: must be 2 for 2 stages, not 1"),
        ({"forward_s": (1,), "input_s": (1,), "weight_s": (1,)}, "times: are those of 1 stages, not of 2"),
    ],
)
def test_impossible_times_are_refused(changes, says):
    schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=1)
    with pytest.raises(InputError, match=says):
        simulate(schedule, replace(equal(schedule), **changes))
    with pytest.raises(InputError, match="kept: must be 2, one per stage, not 1"):
        simulate(schedule, equal(schedule), [1.0])


def test_lists_that_cannot_run_are_refused_with_the_words_of_verify():
    schedule = Schedule(builder="1f1b", num_ranks=1, num_micro_batches=1, actions=lists_of("B0.0 F0.0"))
    with pytest.raises(InputError, match=r"B0.0 waits for F0.0"):
        simulate(schedule, equal(schedule))


SECONDS = st.one_of(
    st.integers(0, 9).map(float),  # many ties
    st.floats(0, 1),
    st.sampled_from([0.0, 1.0, 1.0 + 1e-9, 1e3]),  # near ties, and stages that dwarf the others
)


def delays_of_times(schedule, several):
    """What ``simulate`` is given for several candidates, as columns."""

    def columns(name, size):
        return np.array([getattr(times, name) or (0.0,) * size for times in several]).T.reshape(size, len(several))

    stages = schedule.num_stages
    forward, inputs, weight = (columns(name, stages) for name in ("forward_s", "input_s", "weight_s"))
    work = {"F": forward, "I": inputs, "W": weight, "B": inputs + weight}
    hops = (columns(name, stages - 1) for name in ("send_s", "receive_s"))
    return delays_of(schedule, np.array([work[kind] for kind in KINDS]), *hops, overlap=several[0].overlap)


@st.composite
def several_timed(draw, builders=tuple(BUILDERS), most_micro_batches=40):
    schedule = draw(schedules(builders, 6, most_micro_batches))
    times = times_of(schedule, SECONDS, st.just(draw(st.booleans())))
    return schedule, draw(st.lists(times, min_size=1, max_size=3))


@pytest.mark.parametrize("builder", BUILDERS)
@given(st.data())
def test_columns_take_as_long_as_each_of_them_simulated(builder, data):
    schedule, several = data.draw(several_timed((builder,)))
    expected = [simulate(schedule, times).makespan_s for times in several]
    found = makespan_s(schedule, delays_of_times(schedule, several))
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@given(several_timed(most_micro_batches=14), st.data())
def test_no_pass_that_takes_longer_makes_the_step_shorter(case, data):
    schedule, several = case
    delays = delays_of_times(schedule, several)
    before = makespan_s(schedule, delays)
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    kind = data.draw(st.sampled_from(range(len(KINDS))))
    work = delays.work_s.copy()
    work[kind, stage] += data.draw(SECONDS)
    assert np.all(makespan_s(schedule, replace(delays, work_s=work)) >= before * (1 - 1e-12))
    slower = Delays(**{field.name: 1.5 * getattr(delays, field.name) for field in fields(delays)})
    np.testing.assert_allclose(makespan_s(schedule, slower), 1.5 * before, rtol=1e-12)


@pytest.mark.parametrize(("builder", "chunks"), [("zb_h1", 1), ("zb_v", 2), ("interleaved", 2)])
def test_what_is_left_out_of_a_steady_state_is_linear(builder, chunks):
    stages = 4 * chunks
    even = PipelineTimes(forward_s=(1.0,) * stages, input_s=(1.25,) * stages, weight_s=(0.75,) * stages)
    several = [even, replace(even, forward_s=(*even.forward_s[:-1], 1.5))]
    few, many = (
        makespan_s(one, delays_of_times(one, several))
        for count in (400, 4_000_000)
        for one in [Schedule(builder=builder, num_ranks=4, num_chunks=chunks, num_micro_batches=count)]
    )
    slowest = np.array([chunks * 3.0, chunks * 3.0 + 0.5])  # of a micro-batch on the busiest rank
    np.testing.assert_allclose(many - few, (4_000_000 - 400) * slowest, rtol=1e-10)


def test_lists_of_ones_own_are_run_as_they_stand():
    schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=2)
    split = replace(schedule, actions=lists_of("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1", "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1"))
    times = PipelineTimes(forward_s=(2, 2), input_s=(3, 3), weight_s=(4, 4), send_s=(0.5,), overlap=False)
    expected = simulate(split, times).makespan_s
    assert makespan_s(split, delays_of_times(split, [times])) == pytest.approx([expected])
    assert makespan_s(schedule, delays_of_times(schedule, [times])) != pytest.approx([expected])
