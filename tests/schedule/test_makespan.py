"""The makespan of columns is that of each candidate simulated, whatever its stages and hops take."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.schedule.builders import BUILDERS
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import Hop, PipelineTimes, StageTimes, delays_of, makespan_s, simulate
from autoshard.schedule.waves import KINDS, Delays
from tests.schedule.cases import lists_of, schedules

SECONDS = st.one_of(
    st.integers(0, 9).map(float),  # many ties
    st.floats(0, 1),
    st.sampled_from([0.0, 1.0, 1.0 + 1e-9, 1e3]),  # near ties, and stages that dwarf the others
)


def delays_of_times(schedule, several):
    """What ``simulate`` is given for several candidates, as columns."""
    count = schedule.num_stages
    hops = [times.hops or (Hop(),) * (count - 1) for times in several]
    by_kind = {"F": "forward_s", "I": "input_s", "W": "weight_s", "B": "whole_backward_s"}
    work = [
        [[getattr(times.stages[stage], by_kind[kind]) for times in several] for stage in range(count)] for kind in KINDS
    ]
    shape = (count - 1, len(several))
    send, receive = (
        np.array([[getattr(own[stage], name) for own in hops] for stage in range(count - 1)]).reshape(shape)
        for name in ("send_s", "receive_s")
    )
    return delays_of(schedule, np.array(work), send, receive, overlap=several[0].overlap)


@st.composite
def several_timed(draw, builders=tuple(BUILDERS), most_ranks=6, most_micro_batches=40):
    schedule = draw(schedules(builders, most_ranks, most_micro_batches))
    count, overlap = schedule.num_stages, draw(st.booleans())
    stage = st.builds(StageTimes, forward_s=SECONDS, input_s=SECONDS, weight_s=SECONDS)
    hop = st.builds(Hop, send_s=SECONDS, receive_s=SECONDS)
    several = [
        PipelineTimes(
            stages=tuple(draw(st.lists(stage, min_size=count, max_size=count))),
            hops=draw(st.just(()) | st.lists(hop, min_size=count - 1, max_size=count - 1).map(tuple)),
            overlap=overlap,
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    return schedule, several


@pytest.mark.parametrize("builder", BUILDERS)
@given(st.data())
def test_columns_take_as_long_as_each_of_them_simulated(builder, data):
    schedule, several = data.draw(several_timed((builder,)))
    expected = [simulate(schedule, times).makespan_s for times in several]
    found = makespan_s(schedule, delays_of_times(schedule, several))
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@given(several_timed(most_micro_batches=14), st.data())
def test_no_pass_and_no_hop_that_takes_longer_makes_the_step_shorter(case, data):
    schedule, several = case
    delays = delays_of_times(schedule, several)
    before = makespan_s(schedule, delays)
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    kind = data.draw(st.sampled_from(range(len(KINDS))))
    work = delays.work_s.copy()
    work[kind, stage] += data.draw(SECONDS)
    after = makespan_s(schedule, replace(delays, work_s=work))
    assert np.all(after >= before * (1 - 1e-12))
    slower = Delays(**{field.name: 1.5 * getattr(delays, field.name) for field in fields(delays)})
    np.testing.assert_allclose(makespan_s(schedule, slower), 1.5 * before, rtol=1e-12)


@given(several_timed(most_micro_batches=14), st.randoms())
def test_candidates_do_not_see_each_other(case, random):
    schedule, several = case
    order = random.sample(range(len(several)), len(several))
    together = makespan_s(schedule, delays_of_times(schedule, several))
    shuffled = makespan_s(schedule, delays_of_times(schedule, [several[number] for number in order]))
    np.testing.assert_allclose(shuffled, together[order], rtol=1e-13)


@pytest.mark.parametrize(("builder", "chunks"), [("zb_h1", 1), ("zb_v", 2), ("interleaved", 2)])
def test_what_is_left_out_of_a_steady_state_is_linear(builder, chunks):
    stage = StageTimes(forward_s=1.0, input_s=1.25, weight_s=0.75)
    several = [
        PipelineTimes(stages=(stage,) * (4 * chunks - 1) + (replace(stage, forward_s=last),)) for last in (1.0, 1.5)
    ]
    found = []
    for count in (400, 4_000_000):
        schedule = Schedule(builder=builder, num_ranks=4, num_chunks=chunks, num_micro_batches=count)
        found.append(makespan_s(schedule, delays_of_times(schedule, several)))
    slowest = np.array([chunks * 3.0, chunks * 3.0 + 0.5])  # of a micro-batch on the busiest rank
    np.testing.assert_allclose(found[1] - found[0], (4_000_000 - 400) * slowest, rtol=1e-10)


def test_lists_of_ones_own_are_run_as_they_stand():
    schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=2)
    split = replace(schedule, actions=lists_of("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1", "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1"))
    stage = StageTimes(forward_s=2.0, input_s=3.0, weight_s=4.0)
    times = PipelineTimes(stages=(stage, stage), hops=(Hop(send_s=0.5),), overlap=False)
    expected = simulate(split, times).makespan_s
    assert makespan_s(split, delays_of_times(split, [times])) == pytest.approx([expected])
    assert makespan_s(schedule, delays_of_times(schedule, [times])) != pytest.approx([expected])
