"""Schedules to test with, and faulty versions of them."""

import dataclasses

from hypothesis import strategies as st

from autoshard.schedule.action import Action
from autoshard.schedule.schedule import Schedule, schedule_names

BUILDERS = schedule_names()
CHUNKS = {"interleaved": st.integers(1, 4), "zb_v": st.just(2)}


def lists_of(*texts):
    return tuple(tuple(Action.parse(word) for word in text.split()) for text in texts)


@st.composite
def schedules(draw, builders=BUILDERS, most_ranks=6, most_micro_batches=14):
    """Any schedule that a builder makes."""
    builder = draw(st.sampled_from(builders))
    num_ranks = draw(st.integers(1, most_ranks))
    count = draw(st.integers(1, most_micro_batches))
    return Schedule(
        builder=builder,
        num_ranks=num_ranks,
        num_chunks=draw(CHUNKS.get(builder, st.just(1))),
        num_micro_batches=-(-count // num_ranks) * num_ranks if builder == "interleaved" else count,
    )


def with_list(schedule, rank, actions):
    """The same schedule with other actions on one rank."""
    lists = list(schedule.action_lists())
    lists[rank] = tuple(actions)
    return dataclasses.replace(schedule, actions=tuple(lists))
