"""The trace file: the format that viewers read, slices that they can draw, sums as predicted, at most 20 MB."""

import functools
import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from autoshard.cost.built_in import built_in
from autoshard.cost.timeline import timeline_of
from autoshard.plan.candidate import Candidate
from autoshard.report.traces.nested import NESTED
from autoshard.report.traces.predicted import MOST_BYTES, trace_text
from autoshard.search.bound.request import plan_at
from tests.search.brute_force import ask

TICK = 1 / 1024  # microseconds, to which times are rounded
APART = 2 * TICK  # by which a slice is shorter than what it stands for
WHOLE = (int, round)  # how versions of Perfetto make whole nanoseconds of a begin and of a length
CASES = {
    "alone": (ask("tiny-llama", ranks=1, global_batch=8), "tp=1"),
    "gpipe": (ask("llama3-8b", "h100-80", global_batch=16), "tp=2,pp=4,schedule=gpipe"),
    "1f1b": (ask("llama3-70b", "trn1.32xlarge", 4, global_batch=96), "tp=32,pp=4,recompute=selective[LlamaMLP]"),
    "interleaved": (ask("llama3-8b", "h100-80", 2, global_batch=32), "tp=2,pp=4,dp=2,vp=2,schedule=interleaved"),
    "experts": (ask("mixtral-8x7b", "h100-80", 2, global_batch=32), "tp=2,ep=4,dp=4,pp=2"),
    "zb_v": (ask("llama3-8b", "h100-80", global_batch=24), "tp=2,pp=4,vp=2,schedule=zb_v"),
    "sharded": (ask("llama3-8b", "h100-80", global_batch=8), "tp=2,pp=2,dp=2,zero=3"),
}


@functools.cache
def case(name):
    request, text = CASES[name]
    plan = plan_at(request, Candidate.parse(text, request.cluster.num_ranks))
    return plan, timeline_of(plan)


@functools.cache
def written(name, most_bytes=MOST_BYTES):
    return trace_text(*case(name), most_bytes)


def read(name, most_bytes=MOST_BYTES):
    return json.loads(written(name, most_bytes))


def predicted(plan):
    assert plan.prediction
    return plan.prediction


def lanes_of(events, but="waiting"):
    """The slices of each lane without those that lie inside others."""
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["cat"] not in (but, *NESTED):
            lanes[event["pid"], event["tid"]].append(event)
    return {key: sorted(own, key=lambda event: event["ts"]) for key, own in lanes.items()}


def lane_names(events):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("most_bytes", [MOST_BYTES, 20_000])
def test_every_event_has_what_the_format_asks_for_and_slices_of_a_lane_never_overlap(name, most_bytes):
    data = read(name, most_bytes)
    assert set(data) == {"displayTimeUnit", "otherData", "traceEvents"} and data["displayTimeUnit"] == "ms"
    named = lane_names(data["traceEvents"])
    ends = Counter()
    for event in data["traceEvents"]:
        assert {"ph", "pid", "tid", "ts", "name"} <= set(event)
        assert event["ts"] >= 0 and (event["ts"] / TICK).is_integer()
        assert event["ph"] in "XCMsf" and (event["pid"], event["tid"]) in named
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["args"] and event["cat"]
        if event["ph"] == "C":
            assert set(event["args"]) == {"bytes"}
        if event["ph"] in "sf":
            ends[event["id"], event["ph"]] += 1
    assert set(ends.values()) <= {1} and len({number for number, _ in ends}) * 2 == len(ends)
    for own in lanes_of(data["traceEvents"], but="").values():
        for one, after in pairwise(own):
            assert one["ts"] + one["dur"] <= after["ts"]
            for whole in WHOLE:
                assert whole(one["ts"] * 1000) + whole(one["dur"] * 1000) <= whole(after["ts"] * 1000)


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_action_is_drawn_once_where_and_when_it_runs(name):
    plan, found = case(name)
    lanes = lanes_of(read(name)["traceEvents"])
    for number, (rank, actions) in enumerate(zip(found.ranks, plan.schedule.action_lists(), strict=True)):
        own = lanes[number, 1]
        assert [event["name"] for event in own] == list(map(str, actions))
        for event, action, start_s, end_s in zip(own, actions, rank.start_s, rank.end_s, strict=True):
            assert event["ts"] == pytest.approx(start_s * 1e6, abs=TICK)
            assert event["dur"] == pytest.approx((end_s - start_s) * 1e6 - APART, abs=TICK)
            parts = {name: value for name, value in event["args"].items() if name.endswith("_s")}
            assert sum(parts.values()) == pytest.approx(end_s - start_s, rel=1e-6)
            assert (event["args"]["stage"], event["args"]["micro_batch"]) == (action.stage, action.micro_batch)


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_is_drawn_as_waiting_adds_up_to_what_the_rank_neither_computes_nor_sends(name):
    data = read(name)
    for number, sums in enumerate(data["otherData"]["pipeline_ranks"]):
        own = [event for event in lanes_of(data["traceEvents"], but="")[number, 1] if event["cat"] == "waiting"]
        waits = sum(event["args"]["waiting_s"] for event in own)
        assert waits == pytest.approx(sums["bubble_s"], rel=1e-6, abs=1e-7 * (len(own) + 10))
    categories = {event["cat"] for event in data["traceEvents"] if event["ph"] == "X"} - NESTED.keys()
    assert categories <= {
        "forward", "backward", "input gradients", "weight gradients", "waiting", "send", "receive",
        "after the pipeline",
    }  # fmt: skip


def parts_of(slices):
    """Add up the arguments of a rank's slices of computing."""
    sums = Counter()
    for key, value in (entry for event in slices for entry in event["args"].items()):
        if key.endswith("_s") and key not in ("busy_s", "sending_s"):
            sums[key] += value
    return sums


@pytest.mark.parametrize("name", sorted(CASES))
def test_sums_and_memory_are_what_the_plan_predicts_however_much_is_drawn(name):
    plan, found = case(name)
    whole, folded = read(name), read(name, 20_000)
    for data in (whole, folded):
        lanes, most = lanes_of(data["traceEvents"]), defaultdict(int)
        last = max(event["ts"] + event["dur"] for own in lanes.values() for event in own)
        assert last / 1e6 == pytest.approx(predicted(plan).step_time_s, rel=1e-6)
        for event in data["traceEvents"]:
            if event["ph"] == "C":
                most[event["pid"]] = max(most[event["pid"]], event["args"]["bytes"])
        for number, sums in enumerate(data["otherData"]["pipeline_ranks"]):
            own = lanes[number, 1]
            busy = sum(event["args"].get("busy_s", event["dur"] / 1e6) for event in own)
            assert busy == pytest.approx(sums["busy_s"], rel=1e-6, abs=len(own) * TICK / 1e6)
            assert sums["busy_s"] + sums["sending_s"] + sums["bubble_s"] == pytest.approx(found.makespan_s, rel=1e-6)
            assert parts_of(own) == pytest.approx(parts_of(lanes_of(whole["traceEvents"])[number, 1]), rel=1e-6)
            assert sums["predicted_bytes"] == predicted(plan).stage_memory[number].total
            assert sums["most_bytes"] == most[number] == found.ranks[number].most_bytes
        counted = [event for event in data["traceEvents"] if event["ph"] == "C" and event["pid"] == 0]
        assert counted == sorted(counted, key=lambda event: event["ts"])
        assert counted[0]["ts"] == 0 and counted[-1]["args"] == counted[0]["args"]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb_v"])
def test_arrows_lead_from_the_send_to_the_action_that_takes_it(name):
    events = read(name)["traceEvents"]
    lanes, ends = lanes_of(events), defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event
    assert ends
    for pair in ends.values():
        send, taking = (slice_at(lanes, pair[end]) for end in "sf")
        kind, _, place = send["name"].removeprefix("send ").partition(".")
        stage = int(kind[1:]) + (1 if kind[0] == "F" else -1)
        assert taking["name"] == f"{kind[0]}{stage}.{place}" and send["args"]["to"] == taking["pid"]


def slice_at(lanes, end):
    own = lanes[end["pid"], end["tid"]]
    return next(event for event in own if event["ts"] < end["ts"] < event["ts"] + event["dur"])


def test_hidden_sends_that_meet_get_lanes_of_their_own():
    plan, found = case("interleaved")
    slow = replace(found, hides_sends=True, receive_s=0.0, send_s=3 * found.passes["F", 0].time_s)
    events = json.loads(trace_text(plan, slow))["traceEvents"]
    assert {"sends", "sends 2", "sends 3"} <= set(lane_names(events).values())
    for own in lanes_of(events).values():
        assert all(one["ts"] + one["dur"] <= after["ts"] for one, after in pairwise(own))


def test_a_process_says_which_ranks_it_stands_for_and_the_file_what_it_rests_on():
    for name, count, words in (("1f1b", 4, "32 ranks"), ("alone", 1, "1 rank"), ("experts", 2, "8 ranks")):
        names = [e["args"]["name"] for e in read(name)["traceEvents"] if e["name"] == "process_name"]
        assert names == [f"pipeline rank {number} ({words} on node {number})" for number in range(count)]
    plan, about = case("1f1b")[0], read("1f1b")["otherData"]
    assert about["basis"] == predicted(plan).basis and "(not measured)" in about["title"]
    assert (about["candidate"], about["cluster"]) == (str(plan.candidate), "4 x trn1.32xlarge")


def trees_of(events, whole):
    """The slices inside each pass as trees; a slice lies inside another as viewers say, in whole nanoseconds."""
    trees = {}
    for lane in {(e["pid"], e["tid"]) for e in events}:
        stack = []
        own = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == lane]
        for event in sorted(own, key=lambda e: (whole(e["ts"] * 1000), -e["dur"])):
            start = whole(event["ts"] * 1000)
            node = {**event, "start": start, "end": start + whole(event["dur"] * 1000), "inside": []}
            while stack and stack[-1]["end"] <= start:
                stack.pop()
            if stack:
                assert node["end"] <= stack[-1]["end"], "slices of a lane either nest or lie apart"
                stack[-1]["inside"].append(node)
            else:
                trees[(*lane, event["name"])] = node
            stack.append(node)
    return trees


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_is_inside_a_pass_adds_up_to_it_and_nests_by_block_and_kernel(name, whole):
    plan, found = case(name)
    trees = trees_of(read(name)["traceEvents"], whole)
    layers = plan.model.num_layers
    numbers = defaultdict(list)
    for number, rank in enumerate(found.ranks):
        for kind, stage in set(zip(rank.kinds, rank.stages.tolist(), strict=True)):
            tree = trees[number, 1, f"{kind}{stage}.0"]
            blocks = [part for part in tree["inside"] if part["cat"] == "block"]
            sections = [
                part for block in blocks for part in block["inside"] if part["cat"] in ("recompute", "gradients")
            ]
            leaves = [part for part in tree["inside"] if part["cat"] == "start"]
            leaves += [part for whole in (*blocks, *sections) for part in whole["inside"] if part not in sections]
            parts = Counter()
            for leaf in leaves:
                assert not leaf["inside"] and leaf["cat"] in ("kernel", "collective", "start")
                parts[leaf["args"]["part"]] += leaf["args"]["time_s"]
            wanted = {part: time_s for part, time_s in found.passes[kind, stage].parts.items() if time_s}
            assert parts == pytest.approx(wanted, rel=1e-5)
            numbers[kind] += [int(block["name"].split()[1]) for block in blocks if block["name"].startswith("layer")]
            for block in blocks:
                assert block["args"]["table"] in plan.strategies
            assert (kind == "F") == (not sections)
            if kind in "BI" and plan.stages[stage].recompute.kind != "none":
                assert any(part["cat"] == "recompute" for part in sections)
    for kind, drawn in numbers.items():
        assert sorted(drawn) == list(range(layers)), f"{kind} shows each layer once"
    assert not any(part["inside"] for key, part in trees.items() if key[1] == 1 and not key[2].endswith(".0"))


def test_what_is_inside_passes_is_left_out_of_a_file_that_it_would_fill():
    events = read("1f1b", 200_000)
    assert not events["otherData"]["draws_insides"]
    assert not any(event.get("cat") in NESTED for event in events["traceEvents"])
    assert read("1f1b")["otherData"]["draws_insides"]


@settings(max_examples=10)
@given(st.sampled_from(["gpipe", "interleaved", "zb_v"]), st.integers(15_000, 200_000))
def test_it_is_no_larger_than_allowed_and_leaves_nothing_out_without_need(name, most_bytes):
    text = trace_text(*case(name), most_bytes)
    assert len(text.encode()) <= most_bytes
    about = json.loads(text)["otherData"]
    if about["left_out_actions"]:
        assert len(text) > 0.7 * most_bytes  # a micro-batch more may be as large as the rest
    else:
        assert len(text) <= len(written(name))


def test_what_is_left_out_is_one_slice_per_rank():
    events, count = read("1f1b", 60_000)["traceEvents"], case("1f1b")[0].schedule.num_micro_batches
    sums = [event for event in events if "drawn as one" in event["name"]]
    assert [event["pid"] for event in sums] == [0, 1, 2, 3]
    for event in sums:
        own = [one for one in lanes_of(events)[event["pid"], 1] if one is not event]
        counts = [times for name, times in event["args"].items() if not name.endswith("_s")]
        assert len(own) + sum(counts) == 2 * count and event["name"].startswith(f"{max(counts)} micro-batches")
        assert (own[0]["name"], own[-1]["name"]) == (f"F{event['pid']}.0", f"B{event['pid']}.{count - 1}")


@pytest.mark.thorough
def test_a_step_of_131072_actions_takes_at_most_20_megabytes():
    request = ask("llama3.1-405b", "h100-80", 64, global_batch=512)
    request = replace(request, model=replace(request.model, num_layers=128), calibration=built_in("h100-80"))
    plan = plan_at(request, Candidate.parse("tp=8,pp=64,vp=2,schedule=interleaved", 512))
    text = trace_text(plan, timeline_of(plan))
    assert 0.85 * MOST_BYTES < len(text.encode()) <= MOST_BYTES
    events = json.loads(text)["traceEvents"]
    last = max(event["ts"] + event.get("dur", 0.0) for event in events)
    assert last / 1e6 == pytest.approx(predicted(plan).step_time_s, rel=1e-6)
    names = {event["name"] for event in events}
    assert {f"{kind}{stage}.{number}" for kind in "FB" for stage in range(128) for number in (0, 511)} <= names
