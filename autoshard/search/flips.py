"""The smallest change of one circumstance after which another outer point is faster than a plan's: by bisection."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import Flip
from autoshard.plan.rules.nxd_engine import FLASH_TILE
from autoshard.search.contest import best_time_s, pinned
from autoshard.search.planner import Request
from autoshard.spec.workload import MOST

_FURTHEST = 16  # times as much, or as little, at most
_FINE = 100  # steps of a doubling or a half, where anything goes

Changed = Callable[[int], Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstance:
    """One number of a question, counted in units: how much it is, and the question when it is another."""

    name: str
    unit: float  # of what is shown
    now: int  # units
    changed: Changed
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Two outer points of one question: a plan's, and another."""

    request: Request
    own: Mapping[str, Any]
    other: Mapping[str, Any]

    def turned(self, request: Request) -> bool:
        """Whether the other is faster; also where only the other fits."""
        return best_time_s(pinned(request, self.other)) < best_time_s(pinned(request, self.own))

    def flips(self, own: Candidate, other: Candidate) -> Iterator[Flip | str]:
        """Yield for each circumstance the smaller change that turns the order, or its name where none does."""
        for circumstance in circumstances(self.request, own, other):
            found = [flip for flip in (self._upwards(circumstance), self._downwards(circumstance)) if flip]
            yield min(found, key=lambda flip: abs(math.log(flip.factor)), default=circumstance.name)

    def _upwards(self, one: Circumstance) -> Flip | None:
        before, after = one.now, min(one.most, one.now * 2)
        while after > before:
            if self.turned(one.changed(after)):
                return self._between(one, before, after)
            before, after = after, min(one.most, one.now * _FURTHEST, after * 2)
        return None

    def _downwards(self, one: Circumstance) -> Flip | None:
        before, after = one.now, one.now // 2
        while after >= max(1, one.now // _FURTHEST) and after < before:
            if self.turned(one.changed(after)):
                return self._between(one, before, after)
            before, after = after, after // 2
        return None

    def _between(self, one: Circumstance, before: int, after: int) -> Flip:
        """Halve what lies between a number that does not turn the order and one that does."""
        while abs(after - before) > 1:
            middle = (before + after) // 2
            if self.turned(one.changed(middle)):
                after = middle
            else:
                before = middle
        return Flip(name=one.name, now=one.now * one.unit, then=after * one.unit)


def circumstances(request: Request, own: Candidate, other: Candidate) -> Iterator[Circumstance]:
    """Yield what may be changed: batch, sequence, memory and bandwidth, in units that both candidates can take."""
    workload, cluster = request.workload, request.cluster
    batch = math.lcm(*(one.dp * one.mbs * one.pp for one in (own, other)))
    if workload.global_batch % batch:
        batch = math.lcm(*(one.dp * one.mbs for one in (own, other)))

    def with_batch(units: int) -> Request:
        return replace(request, workload=replace(workload, global_batch=units * batch))

    if workload.global_batch % batch == 0:
        yield Circumstance(
            name="global batch", unit=batch, now=workload.global_batch // batch, changed=with_batch, most=MOST // batch
        )
    tokens = math.lcm(*(2 * one.cp * one.tp for one in (own, other)))
    tokens = math.lcm(tokens, FLASH_TILE) if "nxd" in request.engines else tokens

    def with_length(units: int) -> Request:
        return replace(request, workload=replace(workload, seq_len=units * tokens))

    if workload.seq_len % tokens == 0:
        yield Circumstance(
            name="sequence length",
            unit=tokens,
            now=workload.seq_len // tokens,
            changed=with_length,
            most=MOST // tokens,
        )
    capacity = request.memory_bytes or cluster.rank_memory_bytes

    def with_memory(units: int) -> Request:
        return replace(request, memory_bytes=capacity * units / _FINE)

    yield Circumstance(name="memory of a rank", unit=capacity / _FINE, now=_FINE, changed=with_memory, most=_FINE**2)

    def with_bandwidth(units: int) -> Request:
        links = tuple(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * units / _FINE) for link in cluster.links
        )
        return replace(request, cluster=replace(cluster, links=links))

    yield Circumstance(name="bandwidth of all links", unit=1 / _FINE, now=_FINE, changed=with_bandwidth, most=_FINE**2)
