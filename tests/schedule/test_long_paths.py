"""Flows through schedules are lower bounds whatever the times are, and nearly as long as the makespan where found."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, strategies as st

from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import delays_of, long_paths, makespan_s
from autoshard.schedule.waves import Delays

CHUNKS = {"gpipe": (1,), "1f1b": (1,), "zb_h1": (1,), "zb_v": (2,), "interleaved": (2, 3)}


def delays(schedule: Schedule, passes: Any, send_s: Any, receives: bool, overlap: bool) -> Delays:
    """Delays of columns of stages, [pass, stage, column], with the same send everywhere."""
    forward, inputs, weight = passes
    send = np.broadcast_to(send_s, (schedule.num_stages - 1, passes.shape[2]))
    work = np.array([inputs + weight, forward, inputs, weight])
    return delays_of(schedule, work, send, send * receives, overlap=overlap)


@st.composite
def cases(draw: Any) -> tuple[Schedule, Any, Any, bool, bool]:
    """A schedule of a few or of many micro-batches, with times that are alike or not."""
    builder = draw(st.sampled_from(list(CHUNKS)))
    ranks, chunks = draw(st.integers(2, 5)), draw(st.sampled_from(CHUNKS[builder]))
    count = draw(st.integers(1, 60))
    count = count * ranks if builder == "interleaved" else count
    schedule = Schedule(builder=builder, num_ranks=ranks, num_chunks=chunks, num_micro_batches=count)
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    columns, power = 12, draw(st.sampled_from([0.05, 1.0, 4.0]))
    passes = random.random((3, schedule.num_stages, columns)) ** power
    send_s = random.random(columns) * draw(st.sampled_from([0.0, 0.1, 2.0]))
    receives, overlap = draw(st.booleans()), draw(st.booleans())
    note(f"{schedule}, receives {receives}, overlap {overlap}")
    return schedule, passes, send_s, receives and not overlap, overlap


def values(case: tuple[Schedule, Any, Any, bool, bool], softness_s: float) -> tuple[Any, Any, Any]:
    """What each flow takes with the times of each column, [flow, column], the steps, and how often stages run."""
    schedule, passes, send_s, receives, overlap = case
    sent = delays(schedule, np.zeros((3, schedule.num_stages, 1)), np.ones(1), receives, overlap)
    own = delays(schedule, passes, send_s, receives, overlap)
    counts, sends = long_paths(schedule, own, sent, softness_s)
    return np.einsum("jps,psc->jc", counts, passes) + sends[:, None] * send_s, makespan_s(schedule, own), counts


@given(cases(), st.sampled_from([1e-9, 0.1, 1.0, 10.0]))
def test_no_step_is_shorter_than_any_mixture(case: tuple[Schedule, Any, Any, bool, bool], softness_s: float):
    mixtures_s, step_s, counts = values(case, softness_s)
    assert np.all(mixtures_s <= step_s * (1 + 1e-11)), (mixtures_s / step_s).max()
    assert np.all(counts >= 0) and np.all(counts <= case[0].num_micro_batches * (1 + 1e-11))


@given(cases())
def test_a_hard_mixture_is_as_long_as_the_step_where_no_unit_is_left_out(case: tuple[Schedule, Any, Any, bool, bool]):
    hard_s, step_s, _ = values(case, 1e-9)
    if case[0].num_micro_batches <= 3 * case[0].num_ranks:
        assert np.diag(hard_s) == pytest.approx(step_s, rel=1e-7)


@pytest.mark.parametrize("builder", CHUNKS)
def test_of_many_equal_units_a_mixture_leaves_little_out(builder: str):
    schedule = Schedule(builder=builder, num_ranks=4, num_chunks=CHUNKS[builder][0], num_micro_batches=96)
    mixtures_s, step_s, counts = values((schedule, np.ones((3, schedule.num_stages, 1)), np.zeros(1), False, True), 0.3)
    assert mixtures_s[0, 0] >= 0.99 * step_s[0]
    assert np.all(counts[0].sum(axis=0) > 0.3)  # no stage is left out


def test_one_pass_too_many_is_seen():
    """The first test would fail if a flow ran one stage once more than it may."""
    schedule = Schedule(builder="interleaved", num_ranks=2, num_chunks=2, num_micro_batches=64)
    passes = np.random.default_rng(0).random((3, 4, 12)) + 0.5
    mixtures_s, step_s, counts = values((schedule, passes, np.zeros(12), False, True), 1e-3)
    assert np.all(mixtures_s <= step_s * (1 + 1e-11))
    stage = int(counts[0, 0].argmax())
    assert np.any(mixtures_s[0] + passes[0, stage] > step_s * (1 + 1e-11))
