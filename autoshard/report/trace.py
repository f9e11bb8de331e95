"""The predicted step as a trace that ui.perfetto.dev and chrome://tracing draw: one process per pipeline rank.

The format is the Trace Event Format: a list of events, times in microseconds. ``X`` is a slice of a lane, ``C`` a value
of a counter, ``s`` and ``f`` the two ends of an arrow, ``M`` a name.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

from autoshard.plan.plan import Plan
from autoshard.plan.prediction import rounded
from autoshard.plan.trace import Pass, RankTrace, Trace
from autoshard.report.terminal import nodes_of
from autoshard.spec.record import encode

MOST_BYTES = 20_000_000  # both viewers open that without a pause
_COMPUTE, _AFTER, _SENDS = 1, 2, 3  # lanes; further ones of sends where several are under way at a time
_TICKS_PER_US = 1024  # binary fractions: Perfetto cuts times to nanoseconds, and drops slices that overlap after that
_INSIDE = 4  # ticks from where a slice begins to where an arrow meets it: at its very edge is another slice as well
_SAMPLE = 16  # actions at each end of each rank, from which the size of all of them is estimated
_MARGIN = 0.97  # of the room, because later times have more digits

Event = dict[str, Any]


def trace_text(plan: Plan, trace: Trace, most_bytes: int = MOST_BYTES) -> str:
    """Write a trace as JSON, one event a line.

    Where that would be too large, the arrows between ranks are left out; where that is not enough, each rank's first
    and last actions are drawn, and one slice with sums between them.
    """
    whole = -(-max(len(rank.kinds) for rank in trace.ranks) // 2)
    if _affordable(plan, trace, most_bytes, arrows=True) >= whole:
        text = _text(plan, trace, whole, arrows=True)
        if len(text) <= most_bytes:
            return text
    keep = min(whole, _affordable(plan, trace, most_bytes, arrows=False))
    while len(text := _text(plan, trace, keep, arrows=False)) > most_bytes and keep:
        keep = keep * 9 // 10
    return text


def _affordable(plan: Plan, trace: Trace, most_bytes: int, *, arrows: bool) -> int:
    """Estimate how many actions can be drawn at each end of each rank, from the size of a few and of twice as many."""
    few, more = (len(_text(plan, trace, keep, arrows=arrows)) for keep in (_SAMPLE, 2 * _SAMPLE))
    each = (more - few) / _SAMPLE
    return max(0, int((_MARGIN * most_bytes - few) / each) + _SAMPLE) if each else 2 * _SAMPLE


def _text(plan: Plan, trace: Trace, keep: int, *, arrows: bool) -> str:
    """Write it with so many actions at each end of each rank."""
    drawings = [_Drawing(trace=trace, number=number, keep=keep) for number in range(len(trace.ranks))]
    numbers = count()
    events: list[Event] = []
    ends: list[Event] = []
    for drawing in drawings:
        messages = drawing.messages()
        events += _names(plan, drawing.number, num_sends=max((one.lane + 1 for one in messages), default=0))
        events += [*drawing.actions(), *(one.slice(drawing.number) for one in messages), *drawing.phases()]
        events += drawing.memory()
        ends += [end for one in messages for end in one.arrow(drawing.number, numbers) if arrows]
    head = json.dumps(
        {"displayTimeUnit": "ms", "otherData": {**_about(plan, drawings), "draws_arrows": arrows}},
        separators=(",", ":"),
    )
    # the ends of arrows last: of what happens at one time, a viewer takes first what stands first
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in (*events, *ends))
    return f'{head[:-1]},"traceEvents":[\n{lines}\n]}}\n'


def _names(plan: Plan, number: int, *, num_sends: int) -> Iterator[Event]:
    """Name a rank's process, and its lanes from top to bottom."""
    alike = len(plan.mesh.ranks_of({"pp": number}))
    nodes = nodes_of(plan, range(number, number + 1))
    where = nodes if nodes.endswith("nodes") else f"node{'s' if '-' in nodes else ''} {nodes}"
    ranks = f"{alike} ranks alike" if alike > 1 else "1 rank"
    process = {"ph": "M", "pid": number, "tid": _COMPUTE, "ts": 0}
    yield {**process, "name": "process_name", "args": {"name": f"pipeline rank {number} ({ranks}: {where})"}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": number}}
    sends = {_SENDS + lane: f"sends {lane + 1}" if lane else "sends" for lane in range(num_sends)}
    for lane, name in {_COMPUTE: "compute", _AFTER: "after the pipeline", **sends}.items():
        yield {**process, "tid": lane, "name": "thread_name", "args": {"name": name}}
        yield {**process, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}}


def _about(plan: Plan, drawings: Sequence["_Drawing"]) -> Event:
    """Say what is drawn, what it rests on, and what it adds up to."""
    prediction, trace = plan.prediction, drawings[0].trace
    assert prediction, "only predicted plans are traced"
    return {
        "title": "a predicted training step; nothing in it was measured",
        "candidate": str(plan.candidate),
        "model": plan.model.name,
        "cluster": f"{plan.cluster.num_nodes} x {plan.cluster.name}",
        "schedule": f"{plan.schedule.builder}, {plan.schedule.num_micro_batches} micro-batches",
        "basis": prediction.basis,
        "step_time_s": prediction.step_time_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "time_parts": encode(prediction.time_parts),
        "reading": {
            "lanes": "ranks that differ only in dp, cp, ep or tp do the same at the same time and share one process",
            "sends": _sends_text(trace),
            "after the pipeline": "each part begins when the slowest rank has ended the one before; dp is what does "
            "not hide behind computing" + (", of all micro-batches together" if plan.zero == 3 else ""),
            "memory": "states, buffers and the most that kernels work with are held all the time; activations from the "
            "beginning of F to the end of B, or of W. most_bytes is its maximum; predicted_bytes may be more where "
            "backwards are split, because it adds the most that is kept and the most that waits from I to W",
        },
        "left_out_actions": sum(len(drawing.left_out) for drawing in drawings),
        "pipeline_ranks": [_sums(drawing) for drawing in drawings],
    }


def _sends_text(trace: Trace) -> str:
    """Say what happens while messages travel."""
    if trace.hides_sends:
        return "travel while both ranks compute"
    return "hold the sender, then the receiver" if trace.receive_s else "hold the sender"


def _sums(drawing: "_Drawing") -> Event:
    rank, trace = drawing.rank, drawing.trace
    return {
        "rank": drawing.number,
        "busy_s": rounded(rank.busy_s),
        "sending_s": rounded(rank.sending_s),
        "bubble_s": rounded(trace.makespan_s - rank.busy_s - rank.sending_s),
        "most_bytes": rank.most_bytes,
        "predicted_bytes": rank.predicted_bytes,
    }


def _ticks(time_s: float) -> int:
    return round(float(time_s) * 1e6 * _TICKS_PER_US)


def _us(ticks: int) -> float:
    return ticks / _TICKS_PER_US


def _slice(number: int, lane: int, span: tuple[int, int], name: str, args: Event) -> Event:
    times = {"ts": _us(span[0]), "dur": _us(span[1] - span[0])}
    return {"ph": "X", "pid": number, "tid": lane, **times, "name": name, "args": args}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """What a rank sends or receives; in ticks."""

    begin: int
    end: int
    name: str
    args: Event
    lane: int = 0  # of its rank's lanes of sends
    taken: tuple[int, int] | None = None  # which rank's action takes it, and when that begins

    def slice(self, number: int) -> Event:
        """Draw it on a lane of its rank."""
        return _slice(number, _SENDS + self.lane, (self.begin, self.end), self.name, self.args)

    def arrow(self, number: int, numbers: Iterator[int]) -> list[Event]:
        """Draw an arrow from it to the action that takes it."""
        if self.taken is None:
            return []
        both = {"cat": "sends", "name": "sends", "id": next(numbers)}
        rank, taken = self.taken
        return [
            {"ph": "s", "pid": number, "tid": _SENDS + self.lane, "ts": _us(self.begin + _INSIDE), **both},
            {"ph": "f", "bp": "e", "pid": rank, "tid": _COMPUTE, "ts": _us(taken + _INSIDE), **both},
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """A pipeline rank of which so many actions at each end are drawn."""

    trace: Trace
    number: int
    keep: int

    @property
    def rank(self) -> RankTrace:
        """What it does."""
        return self.trace.ranks[self.number]

    @property
    def left_out(self) -> range:
        """Positions of the actions that are not drawn; one by itself is."""
        total = len(self.rank.kinds)
        return range(self.keep, total - self.keep) if total - 2 * self.keep > 1 else range(0)

    @property
    def drawn(self) -> Iterator[int]:
        """Positions of the others."""
        total, left_out = len(self.rank.kinds), self.left_out
        return chain(range(self.keep), range(total - self.keep, total)) if left_out else iter(range(total))

    def action(self, position: int) -> tuple[str, int, int]:
        """Return kind, stage and micro-batch."""
        rank = self.rank
        return rank.kinds[position], int(rank.stages[position]), int(rank.micro_batches[position])

    def actions(self) -> Iterator[Event]:
        """Draw its actions."""
        rank = self.rank
        if self.left_out:
            yield self._sum()
        for position in self.drawn:
            kind, stage, micro_batch = self.action(position)
            parts = _seconds(self.trace.passes[kind, stage].parts)
            args = {"stage": stage, "micro_batch": micro_batch, **parts}
            span = _ticks(rank.start_s[position]), _ticks(rank.end_s[position])
            yield _slice(self.number, _COMPUTE, span, f"{kind}{stage}.{micro_batch}", args)

    def _sum(self) -> Event:
        """Draw what is left out as one slice; its arguments add up to what slices of their own would."""
        rank, first, last = self.rank, self.left_out[0], self.left_out[-1]
        counts = Counter(zip(rank.kinds[first : last + 1], rank.stages[first : last + 1].tolist(), strict=True))
        passes = [(self.trace.passes[key], times) for key, times in counts.items()]
        parts = {part: sum(times * one.parts[part] for one, times in passes) for part in passes[0][0].parts}
        args: Event = {
            **{f"{kind}{stage}": times for (kind, stage), times in sorted(counts.items())},
            "busy_s": rounded(sum(times * one.time_s for one, times in passes)),
            "sending_s": rounded(sum(times * self._held_s(one) for one, times in passes)),
            **_seconds(parts),
        }
        name = f"{max(counts.values())} micro-batches, not drawn one by one"
        return _slice(self.number, _COMPUTE, (_ticks(rank.start_s[first]), _ticks(rank.end_s[last])), name, args)

    def _held_s(self, one: Pass) -> float:
        """Return for how long the messages of an action hold its rank."""
        sends = self.trace.send_s * (one.sends_to is not None and not self.trace.hides_sends)
        return sends + self.trace.receive_s * (one.takes_from is not None)

    def messages(self) -> list[_Message]:
        """Lay what the drawn actions send and receive on as few lanes as hold it without overlap."""
        free: list[int] = []  # when each lane ends
        found: list[_Message] = []
        for one in self._in_order():
            lane = next((lane for lane, end in enumerate(free) if one.begin >= end - 1), len(free))
            begin = max([one.begin, *free[lane : lane + 1]])  # the last tick of two sums of the same times may differ
            free[lane : lane + 1] = [max(one.end, begin)]
            found.append(replace(one, begin=begin, end=free[lane], lane=lane))
        return found

    def _in_order(self) -> Iterator[_Message]:
        rank, trace = self.rank, self.trace
        for position in self.drawn:
            kind, stage, micro_batch = self.action(position)
            one, name = trace.passes[kind, stage], f"{kind}{stage}.{micro_batch}"
            start_s, end_s = rank.start_s[position], rank.end_s[position]
            if one.takes_from is not None and trace.receive_s:
                begin, end = _ticks(start_s - trace.receive_s), _ticks(start_s)
                yield _Message(begin=begin, end=end, name=f"receive {name}", args={"from": one.takes_from})
            if one.sends_to is not None and trace.send_s:
                begin, end = _ticks(end_s), _ticks(end_s + trace.send_s)
                taken = one.sends_to, _ticks(rank.taken_s[position])
                yield _Message(begin=begin, end=end, name=f"send {name}", args={"to": one.sends_to}, taken=taken)

    def phases(self) -> Iterator[Event]:
        """Draw what it does after the pipeline."""
        for phase in self.trace.phases:
            time_s = phase.seconds[self.number]
            span = _ticks(phase.start_s), _ticks(phase.start_s + time_s)
            yield _slice(self.number, _AFTER, span, phase.name, {"part": phase.part, "time_s": rounded(time_s)})

    def memory(self) -> Iterator[Event]:
        """Count what it holds: at every change that is drawn, and at the fullest moment of what is not."""
        rank, left_out = self.rank, self.left_out
        changes = {position: int(rank.held_bytes[position]) for position in self.drawn}
        if left_out:
            fullest = left_out[0] + int(rank.held_bytes[left_out[0] : left_out[-1] + 1].argmax())
            changes[fullest] = int(rank.held_bytes[fullest])
        held = [(0, rank.idle_bytes)]
        for position, size in sorted(changes.items()):
            if size != held[-1][1]:
                held.append((_ticks(rank.held_from_s[position]), size))
        held.append((_ticks(self.trace.end_s), held[-1][1]))
        for ticks, size in held:
            counter = {"ph": "C", "pid": self.number, "tid": _COMPUTE, "ts": _us(ticks), "name": "memory"}
            yield {**counter, "args": {"bytes": size}}


def _seconds(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts that take time, named with their unit."""
    return {f"{part}_s": rounded(time_s) for part, time_s in parts.items() if time_s}
