"""The bubble of a schedule whose passes all take as long, and whose sends take nothing."""

from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import PipelineTimes, simulate


def ideal_bubble(schedule: Schedule) -> float:
    """Return the share of the step in which ranks wait."""
    equal = (1.0,) * schedule.num_stages
    return simulate(schedule, PipelineTimes(forward_s=equal, input_s=equal, weight_s=equal)).bubble_fraction
