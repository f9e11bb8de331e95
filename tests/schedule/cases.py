"""Schedules to test with, and faulty versions of them."""

import dataclasses

from hypothesis import strategies as st

from autoshard.schedule.action import Action
from autoshard.schedule.builders import BUILDERS
from autoshard.schedule.schedule import Schedule


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
