"""Schedules to test with, faulty versions of them, and what everything takes in them."""

import dataclasses

from hypothesis import strategies as st

from autoshard.schedule.builders import BUILDERS, Action
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import PipelineTimes


def lists_of(*texts):
    return tuple(tuple(Action.parse(word) for word in text.split()) for text in texts)


@st.composite
def schedules(draw, builders=tuple(BUILDERS), most_ranks=6, most_micro_batches=14):
    """Any schedule that a builder makes."""
    name = draw(st.sampled_from(builders))
    builder = BUILDERS[name]
    num_ranks = draw(st.integers(1, most_ranks))
    count = draw(st.integers(1, most_micro_batches))
    return Schedule(
        builder=name,
        num_ranks=num_ranks,
        num_chunks=builder.num_chunks or draw(st.integers(1, 4)),
        num_micro_batches=-(-count // num_ranks) * num_ranks if builder.in_rounds else count,
    )


def with_list(schedule, rank, actions):
    """The same schedule with other actions on one rank."""
    lists = list(schedule.action_lists())
    lists[rank] = tuple(actions)
    return dataclasses.replace(schedule, actions=tuple(lists))


def times_of(schedule, seconds, overlap):
    """Any times of its stages, and of its messages, which may be free."""

    def several(count):
        return st.lists(seconds, min_size=count, max_size=count).map(tuple)

    stages, hops = several(schedule.num_stages), st.just(()) | several(schedule.num_stages - 1)
    passes = dict.fromkeys(("forward_s", "input_s", "weight_s"), stages)
    return st.builds(PipelineTimes, **passes, send_s=hops, receive_s=hops, overlap=overlap)


def equal(schedule, forward=1.0, inputs=1.0, weights=1.0, **times):
    stages = {"forward_s": forward, "input_s": inputs, "weight_s": weights}
    return PipelineTimes(**{name: (time_s,) * schedule.num_stages for name, time_s in stages.items()}, **times)
