"""What a search is after: the least time or the least memory. Each has a bound, a way to fill stages, and a value."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from autoshard.search.bounds import Ideal
from autoshard.search.chosen import SURE, Chosen
from autoshard.search.exact_ranges import Effort, Exact
from autoshard.search.points import Group
from autoshard.search.ranges import searches_all, smallest_ranges, stages_below
from autoshard.search.splits import listed_ranges, quickest_listed_s, smallest_listed
from autoshard.spec.kernels import load_kernels

Column = Any


class Goal(Protocol):
    """What is minimised."""

    @property
    def capacity(self) -> float:
        """Memory that a plan may fill."""
        ...

    def bound(self, ideal: Ideal, builder: str, rows: Column, chunks: Column, allowed: Column, below: float) -> Column:
        """Return what layouts of a family come to at least, run with a schedule; infinite where nothing fits."""
        ...

    def sharpened(self, group: Group) -> Column:
        """Return better bounds of some points, as far as that takes much less than to solve them."""
        ...

    def solved(self, group: Group, below: float, effort: Effort) -> Chosen:
        """Return the best way to fill the stages of every point, as far as it may come to less."""
        ...

    def value(self, chosen: Chosen) -> Column:
        """Return what ways to fill stages come to."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The least time of what fits."""

    capacity: float

    def bound(self, ideal: Ideal, builder: str, rows: Column, chunks: Column, allowed: Column, below: float) -> Column:
        """Bound the time of a step."""
        return ideal.bound_s(builder, rows, chunks, allowed, below)

    def sharpened(self, group: Group) -> Column:
        """Bound the splits of a list by their slowest rank, with the recompute that may fit."""
        options = group.options()
        if searches_all(options, group.schedule):
            return group.bound
        frame = group.frame()
        least = quickest_listed_s(frame, options, self.capacity) + group.rest_s + frame.fixed_s
        return np.maximum(group.bound, least * (1 - SURE))

    def solved(self, group: Group, below: float, effort: Effort) -> Chosen:
        """Search all ranges of layers, or the near-even ones, as the schedule allows."""
        frame, options = group.frame(), group.options()
        if not searches_all(options, group.schedule):
            return listed_ranges(frame, options, below, self.capacity)
        stages = stages_below(frame, options, np.full(len(group.rows), below), self.capacity, group.rest_s)
        found = stages.chosen(group.rest_s)
        exact = [
            Exact(stages=stages, candidate=number, rest_s=float(group.rest_s[number]), effort=effort)
            for number in range(len(group.rows))
        ]
        return Chosen.side_by_side([one.improved(found, below) for one in exact])

    def value(self, chosen: Chosen) -> Column:
        """Return the time of a step."""
        return chosen.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """The least memory of the fullest rank."""

    capacity: float

    def bound(self, ideal: Ideal, builder: str, rows: Column, chunks: Column, allowed: Column, below: float) -> Column:
        """Bound the memory of the rank with the most layers: their states, and what one micro-batch keeps of them."""
        question = ideal.family.question
        layers, kernels = -(-question.model.num_layers // ideal.num_ranks), load_kernels(question.kernels)
        held = ideal.states_bytes + layers * ideal.saved_bytes + kernels.runtime_bytes + kernels.workspace_bytes
        return held[rows] * (1 - 1e-9)

    def sharpened(self, group: Group) -> Column:
        """Keep what is known."""
        return group.bound

    def solved(self, group: Group, below: float, effort: Effort) -> Chosen:
        """Give every rank what keeps its memory least."""
        frame, options = group.frame(), group.options()
        smallest = smallest_ranges if searches_all(options, group.schedule) else smallest_listed
        return smallest(frame, options, self.capacity)

    def value(self, chosen: Chosen) -> Column:
        """Return the memory of the fullest rank."""
        return chosen.peak_bytes
