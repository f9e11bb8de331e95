"""The makespan of columns is that of each candidate simulated, whatever its stages and messages take."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.schedule.builders import BUILDERS
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import PipelineTimes, delays_of, makespan_s, simulate
from autoshard.schedule.waves import KINDS, Delays
from tests.schedule.cases import lists_of, schedules, times_of

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
