"""The predicted step as a trace that ui.perfetto.dev and chrome://tracing draw: one process per pipeline rank.

The format is the Trace Event Format: a list of events, times in microseconds. ``X`` is a slice of a track, ``C`` a
value of a counter, ``s`` and ``f`` the two ends of an arrow, ``M`` a name. Slices have categories for filters and
queries.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from autoshard.blocks.inside import PassContents
from autoshard.cost.timeline import StepTimeline
from autoshard.plan.plan import Plan, rounded
from autoshard.report.rank_row import PASSES, RankRow, rank_words
from autoshard.report.traces.measured import MeasuredSteps, measured_events
from autoshard.report.traces.nested import nested_slices
from autoshard.report.traces.ticks import TICKS_PER_US, slice_times, ticks
from autoshard.spec.record import encode

MOST_BYTES = 20_000_000  # both viewers open such a file at once
_COMPUTE, _AFTER, _SENDS = 1, 2, 3  # lanes; further ones of sends where several are under way at a time
_INSIDE = 4  # ticks from where a slice begins to where an arrow meets it: at its very edge is another slice as well
_SHORT = 1e-3  # of the pipelined part: waiting that is not drawn where space is short
_MARGIN = 0.98  # of the size that is left: what does not shrink with the actions takes some of it

_EVENT_BYTES = 130  # of a slice inside a pass, about
_NESTED_SHARE = 0.4  # of a file that what is inside passes may take

Event = dict[str, Any]
Insides = dict[tuple[str, int], PassContents]
PassStarts = dict[tuple[bool, int, int], float]


def trace_text(
    plan: Plan, trace: StepTimeline, most_bytes: int = MOST_BYTES, measured: MeasuredSteps | None = None
) -> str:
    """Write a trace as JSON, one event a line; with what a run ``measured``, in processes of their own.

    Passes of the first micro-batch show what is inside them, unless that alone takes more than a share of
    ``most_bytes``. If the text is too large, the arrows between ranks are left out. If it still is, only the first and
    last actions of each rank are drawn, with one slice for the sums of those between.
    """
    run_events = [*measured_events(measured)] if measured else []
    write = partial(_text, plan, trace, _insides(plan, trace, most_bytes), run_events)
    whole = keep = -(-max(len(rank.kinds) for rank in trace.ranks) // 2)
    text, no_arrows = write(whole, _pass_starts(trace)), PassStarts(())
    if len(text) > most_bytes:
        text = write(whole, no_arrows)
    while len(text) > most_bytes and keep:
        keep = min(keep - 1, int(_MARGIN * keep * most_bytes / len(text)))
        text = write(keep, no_arrows)
    if keep < whole:  # short waits are left out by now, so that there may be space for more
        larger = write(min(whole, int(_MARGIN * keep * most_bytes / len(text))), no_arrows)
        text = larger if len(text) < len(larger) <= most_bytes else text
    return text


def _insides(plan: Plan, trace: StepTimeline, most_bytes: int) -> Insides:
    """Return what is inside the passes of the first micro-batch, from their beginning; nothing where it is too long."""
    contents, insides, size = PassContents(plan), Insides({}), 0
    for rank in trace.ranks:
        for kind, stage in dict.fromkeys(zip(rank.kinds, rank.stages.tolist(), strict=True)):
            size += _EVENT_BYTES * sum(len(block.pieces) + 2 for block in contents.of(kind, stage))
            if size > _NESTED_SHARE * most_bytes:
                return Insides({})
            insides[kind, stage] = contents
    return insides


def _text(
    plan: Plan, trace: StepTimeline, insides: Insides, run_events: Sequence[Event], keep: int, pass_starts: PassStarts
) -> str:
    """Write the trace as JSON, with the first and the last ``keep`` actions of each rank.

    ``run_events`` are those of a measured run. Arrows need the ``pass_starts`` of the actions that receive.
    """
    ranks = [_RankEvents(RankRow(trace, number, keep), insides) for number in range(len(trace.ranks))]
    arrow_ids, events, ends = count(), list[Event](), list[Event]()
    for rank in ranks:
        slices, arrows = rank.messages(pass_starts, arrow_ids)
        events += _names(plan, rank.row.number, {event["tid"] for event in slices})
        events += [*rank.actions(), *rank.waiting(), *slices, *rank.phases(), *rank.memory()]
        ends += arrows
    about = {**_about(plan, trace, ranks), "draws_arrows": bool(pass_starts), "draws_insides": bool(insides)}
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about}, separators=(",", ":"))
    # the ends of arrows last: a viewer reads events of the same time in the order of the file
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in (*events, *run_events, *ends))
    return f'{head[:-1]},"traceEvents":[\n{lines}\n]}}\n'


def _pass_starts(trace: StepTimeline) -> PassStarts:
    """Return the start of each action that receives a message, by direction (forward or not), stage and micro-batch."""
    return {
        (kind == "F", stage, micro_batch): begin_s
        for rank in trace.ranks
        for kind, stage, micro_batch, begin_s in zip(
            rank.kinds, rank.stages.tolist(), rank.micro_batches.tolist(), rank.start_s.tolist(), strict=True
        )
        if kind != "W"
    }


def _names(plan: Plan, number: int, sends: Collection[int]) -> Iterator[Event]:
    """Name a rank's process, and its lanes from top to bottom."""
    process = {"ph": "M", "pid": number, "tid": _COMPUTE, "ts": 0}
    yield {**process, "name": "process_name", "args": {"name": rank_words(plan, number)}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": number}}
    lanes = {lane: f"sends {lane - _SENDS + 1}" if lane > _SENDS else "sends" for lane in sorted(sends)}
    for lane, name in {_COMPUTE: "compute", _AFTER: "after the pipeline", **lanes}.items():
        yield {**process, "tid": lane, "name": "thread_name", "args": {"name": name}}
        yield {**process, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}}


def _about(plan: Plan, trace: StepTimeline, ranks: Sequence["_RankEvents"]) -> Event:
    """Return the metadata of the trace: plan, prediction, how to read it, and sums per rank."""
    prediction, sends = plan.prediction, "hold the sender, then the receiver" if trace.receive_s else "hold the sender"
    assert prediction, "only predicted plans are traced"
    return {
        "title": "a predicted training step (not measured)",
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
            "waiting": "the rank neither computes nor sends: the pipeline fills or drains, or others are slower",
            "inside passes": "those of micro-batch 0 show their blocks, and in each its kernels and collectives as "
            "priced, those of backward in reverse; what is computed again stands before the backward that needs it. "
            "Their times add up to the pass",
            "sends": "travel while both ranks compute" if trace.hides_sends else sends,
            "after the pipeline": "each part starts when the slowest rank has finished the one before; dp is the "
            "traffic that is not hidden behind compute" + (", of all micro-batches together" if plan.zero == 3 else ""),
            "memory": "states, buffers and the largest workspace are counted all the time; activations from the "
            "start of F to the end of B, or of W. most_bytes is the maximum. Where backward passes are split, "
            "predicted_bytes can be larger, because it adds two maxima: of what is kept, and of what waits for W",
        },
        "left_out_actions": sum(len(rank.left_out) for rank in ranks),
        "pipeline_ranks": [
            {
                "rank": number,
                "busy_s": rounded(rank.busy_s),
                "sending_s": rounded(rank.sending_s),
                "bubble_s": rounded(trace.makespan_s - rank.busy_s - rank.sending_s),
                "most_bytes": rank.most_bytes,
                "predicted_bytes": rank.predicted_bytes,
            }
            for number, rank in enumerate(trace.ranks)
        ],
    }


def _seconds(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts that are not zero, with the unit in their names."""
    return {f"{part}_s": rounded(time_s) for part, time_s in parts.items() if time_s}


class _RankEvents:
    """The events of one pipeline rank."""

    def __init__(self, row: RankRow, insides: Insides) -> None:
        self.row, self.step, self.rank, self.insides = row, row.step, row.rank, insides
        self.left_out, self.drawn = row.left_out, row.positions

    def _event(self, phase: str, lane: int, at: int, **fields: Any) -> Event:
        return {"ph": phase, "pid": self.row.number, "tid": lane, "ts": at / TICKS_PER_US, **fields}

    def _slice(self, lane: int, begin: int, end: int, category: str, **fields: Any) -> Event:
        times = slice_times(begin, end)
        return {"ph": "X", "pid": self.row.number, "tid": lane, **times, "cat": category, **fields}

    def actions(self) -> Iterator[Event]:
        """Yield one slice per drawn action, and one slice with the sums of those that are left out."""
        rank, step = self.rank, self.step
        for position in self.drawn:
            kind, stage, micro_batch = self.row.action(position)
            begin, end = ticks(rank.start_s[position]), ticks(rank.end_s[position])
            args = {"stage": stage, "micro_batch": micro_batch, **_seconds(step.passes[kind, stage].parts)}
            yield self._slice(_COMPUTE, begin, end, PASSES[kind], name=f"{kind}{stage}.{micro_batch}", args=args)
            if micro_batch == 0 and (kind, stage) in self.insides:
                for part in nested_slices(self.insides[kind, stage], kind, stage, begin, end):
                    yield self._slice(_COMPUTE, part.begin, part.end, part.category, name=part.name, args=part.args)
        if not self.left_out:
            return
        first, last = self.left_out[0], self.left_out[-1]
        counts = Counter(self.row.action(position)[:2] for position in self.left_out)
        sums: Counter[str] = Counter()
        send_s = 0.0 if step.hides_sends else step.send_s
        for key, times in counts.items():
            its = step.passes[key]
            sends_s = send_s * (its.sends_to is not None) + step.receive_s * (its.takes_from is not None)
            values = {"busy": its.time_s, "sending": sends_s, **its.parts}
            sums.update({part: times * time_s for part, time_s in values.items()})
        args = {f"{kind}{stage}": times for (kind, stage), times in sorted(counts.items())}
        name = f"{max(counts.values())} micro-batches, drawn as one"
        begin, end = ticks(rank.start_s[first]), ticks(rank.end_s[last])
        yield self._slice(_COMPUTE, begin, end, "not drawn one by one", name=name, args={**args, **_seconds(sums)})

    def waiting(self) -> Iterator[Event]:
        """Yield a slice wherever the rank neither computes nor sends, between drawn actions and at both ends.

        Where actions are left out for want of space, short ones are too.
        """
        rank, step, before_s = self.rank, self.step, 0.0
        for position in self.drawn:
            its = self.row.pass_of(position)
            takes_s = step.receive_s if its.takes_from is not None else 0.0
            if not self.left_out or position != self.left_out[-1] + 1:
                yield from self._wait(before_s, float(rank.start_s[position]) - takes_s)
            sends_s = step.send_s if its.sends_to is not None and not step.hides_sends else 0.0
            before_s = float(rank.end_s[position]) + sends_s
        yield from self._wait(before_s, step.makespan_s)

    def _wait(self, begin_s: float, end_s: float) -> Iterator[Event]:
        begin, end = ticks(begin_s), ticks(end_s)
        least = ticks(self.step.makespan_s * _SHORT) if self.left_out else 1  # one: sums of the same times may differ
        if end > begin + least:
            args = {"waiting_s": rounded(end_s - begin_s)}
            yield self._slice(_COMPUTE, begin, end, "waiting", name="waiting", args=args)

    def messages(self, pass_starts: PassStarts, arrow_ids: Iterator[int]) -> tuple[list[Event], list[Event]]:
        """Return messages of the drawn actions as slices, and the ends of arrows to the receiving actions.

        The slices use as few tracks as possible without overlap.
        """
        free, slices, ends = list[int](), list[Event](), list[Event]()  # free: when each lane ends
        for begin, end, name, args, receiver in self._messages():
            lane = next((lane for lane, ended in enumerate(free) if begin >= ended - 1), len(free))
            # the last tick of two sums of the same times may differ
            start = max([begin, *free[lane : lane + 1]])
            free[lane : lane + 1] = [max(end, start)]
            category = name.partition(" ")[0]
            slices.append(self._slice(_SENDS + lane, start, free[lane], category, name=name, args=args))
            if receiver is not None and receiver in pass_starts:
                arrow = {"cat": "sends", "name": "sends", "id": next(arrow_ids)}
                ends.append(self._event("s", _SENDS + lane, start + _INSIDE, **arrow))
                taken_from = self._event("f", _COMPUTE, ticks(pass_starts[receiver]) + _INSIDE, bp="e", **arrow)
                ends.append({**taken_from, "pid": args["to"]})
        return slices, ends

    def _messages(self) -> Iterator[tuple[int, int, str, Event, tuple[bool, int, int] | None]]:
        """Yield begin, end, name and arguments of each message, and the action that receives it."""
        for position in self.drawn:
            kind, stage, micro_batch = self.row.action(position)
            its, name = self.row.pass_of(position), f"{kind}{stage}.{micro_batch}"
            start_s, end_s = self.rank.start_s[position], self.rank.end_s[position]
            if its.takes_from is not None and self.step.receive_s:
                begin = ticks(start_s - self.step.receive_s)
                yield begin, ticks(start_s), f"receive {name}", {"from": its.takes_from}, None
            if its.sends_to is not None and self.step.send_s:
                receiver = kind == "F", stage + (1 if kind == "F" else -1), micro_batch
                yield ticks(end_s), ticks(end_s + self.step.send_s), f"send {name}", {"to": its.sends_to}, receiver

    def phases(self) -> Iterator[Event]:
        """Yield the slices after the pipeline."""
        for phase in self.step.phases:
            time_s = phase.seconds[self.row.number]
            begin, end = ticks(phase.start_s), ticks(phase.start_s + time_s)
            args = {"part": phase.part, "time_s": rounded(time_s)}
            yield self._slice(_AFTER, begin, end, "after the pipeline", name=phase.name, args=args)

    def memory(self) -> Iterator[Event]:
        """Yield the memory of the rank at every drawn change, and at the peak of the part that is not drawn."""
        rank, positions = self.rank, set(self.drawn)
        if self.left_out:
            positions.add(self.left_out[0] + int(rank.held_bytes[self.left_out[0] : self.left_out[-1] + 1].argmax()))
        moments = [(0, rank.idle_bytes)]
        for position in sorted(positions):
            size = int(rank.held_bytes[position])
            if size != moments[-1][1]:
                moments.append((ticks(rank.held_from_s[position]), size))
        moments.append((ticks(self.step.end_s), moments[-1][1]))
        for at, size in moments:
            yield self._event("C", _COMPUTE, at, name="memory", args={"bytes": size})
