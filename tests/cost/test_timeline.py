"""The step moment by moment: it adds up to what the prediction says, and keeps the order that data needs."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from autoshard.cost import timeline as module
from autoshard.cost.predict import predicted
from autoshard.cost.step import PARTS, step_cost
from autoshard.cost.timeline import step_timeline, timeline_of
from autoshard.errors import InputError
from autoshard.schedule.builders import BUILDERS
from autoshard.schedule.schedule import Schedule
from tests.cost.cases import EVERYONE, ask, block, pipeline, plan_of, setting
from tests.schedule.cases import schedules

SECONDS = st.integers(0, 8).map(float)
SIZES = st.integers(0, 1000)
EXACT = 1e-9
NORMS = (*EVERYONE, "kv", "rep")  # what sums of their gradients await


@st.composite
def blocks(draw):
    """A block that takes, keeps and defers anything."""
    seconds = {
        "F": {"compute": draw(SECONDS), "tp": draw(SECONDS)},
        "I": {"compute": draw(SECONDS), "waiting": draw(SECONDS)},
        "W": {"compute": draw(SECONDS), "ep": draw(SECONDS)},
    }
    weights = {EVERYONE: draw(SIZES), NORMS: draw(SIZES)}
    sizes = {name: draw(SIZES) for name in ("saved_bytes", "waiting_bytes", "working_bytes")}
    return block(seconds=seconds, weights=weights, **sizes)


@st.composite
def steps(draw):
    """A schedule, perhaps as lists of its own, unequal stages, sends of any sort, and any ZeRO."""
    schedule = draw(schedules(most_ranks=4, most_micro_batches=9))
    if draw(st.booleans()):
        schedule = replace(schedule, actions=schedule.action_lists())
    counts = draw(st.lists(st.integers(1, 3), min_size=schedule.num_stages, max_size=schedule.num_stages))
    sends = {"send_s": draw(SECONDS), "hides": draw(st.booleans()), "apart": draw(st.booleans())}
    price = {kind: draw(blocks()) for kind in ("layer", "embed", "head")}
    here = replace(setting(ask(), "tp=8,dp=16"), zero=draw(st.sampled_from([0, 1, 3])))
    return ask(), here, pipeline(schedule, counts, **sends), lambda kind, drop: price[kind]


def traced(schedule, counts, one, **price):
    found = {"layer": one, "embed": one, "head": one, **price}
    return step_timeline(
        ask(), setting(ask(), "tp=8,dp=16"), pipeline(schedule, counts), lambda kind, drop: found[kind]
    )


@given(steps())
def test_it_ends_when_the_prediction_says_and_its_parts_and_peaks_are_the_predictions(case):
    found, cost = step_timeline(*case), step_cost(*case)
    assert found.end_s == pytest.approx(float(cost.time_s), rel=EXACT)
    rank = max(found.ranks, key=lambda one: one.busy_s + one.sending_s)
    work = sorted(set(zip(rank.kinds, rank.stages.tolist(), strict=True)))  # once for each micro-batch
    count = case[2].schedule.num_micro_batches
    seconds = {part: count * sum(found.passes[key].parts[part] for key in work) for part in PARTS}
    assert rank.busy_s == pytest.approx(sum(seconds.values()), rel=EXACT)
    assert rank.sending_s == pytest.approx(float(cost.seconds["pp"]), rel=EXACT)
    assert rank.busy_s + rank.sending_s + float(cost.seconds["bubble"]) == pytest.approx(found.makespan_s, rel=EXACT)
    after: dict[str, float] = defaultdict(float)
    for phase in found.phases:
        after[phase.part] += max(phase.seconds)
    for part in ("dp", "update", "fixed"):
        assert after[part] == pytest.approx(float(cost.seconds[part]), rel=EXACT)
    for part in PARTS:
        pipelined = float(cost.seconds[part]) - (after["tp"] if part == "tp" else 0.0)
        assert seconds[part] == pytest.approx(pipelined, rel=EXACT, abs=1e-12)
    for rank, parts in zip(found.ranks, cost.memory, strict=True):
        assert rank.most_bytes == rank.predicted_bytes == round(float(sum(parts.values())))
        assert rank.held_bytes[-1] == rank.idle_bytes


@given(steps())
def test_a_rank_does_one_thing_at_a_time_and_nothing_before_its_input_is_there(case):
    found, schedule = step_timeline(*case), case[2].schedule
    starts, ends = {}, {}
    for number, rank in enumerate(found.ranks):
        listed = list(zip(rank.kinds, rank.stages.tolist(), rank.micro_batches.tolist(), strict=True))
        assert listed == schedule.steps_of(number)
        starts |= dict(zip(listed, rank.start_s, strict=True))
        ends |= dict(zip(listed, rank.end_s, strict=True))
        assert (rank.start_s <= rank.end_s).all() and (rank.end_s[:-1] <= rank.start_s[1:]).all()
        assert max(rank.end_s) <= found.makespan_s
    for (kind, stage, micro_batch), start in starts.items():
        before = {"F": [("F", stage - 1)], "W": [("I", stage)]}.get(kind, [("B", stage + 1), ("I", stage + 1)])
        sends_s = found.send_s + found.receive_s if found.passes[kind, stage].takes_from is not None else 0.0
        for entry in before:
            assert ends.get((*entry, micro_batch), -sends_s) + sends_s <= start + 1e-9


def test_phases_follow_each_other_and_wait_for_the_slowest_rank():
    schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=4)
    ends = block(weights={EVERYONE: 10**8})
    found = traced(schedule, [1, 1], block(1.0, 2.0, weights={NORMS: 10**6}), embed=ends, head=block())
    assert [phase.part for phase in found.phases][:4] == ["dp", "tp", "update", "dp"]
    assert [phase.start_s for phase in found.phases] == [found.makespan_s, *(one.end_s for one in found.phases[:-1])]
    assert found.phases[0].seconds[0] > found.phases[0].seconds[1] > 0


def test_more_actions_than_anybody_could_draw_are_refused(monkeypatch):
    schedule = Schedule(builder="zb_h1", num_ranks=2, num_micro_batches=4)
    monkeypatch.setattr(module, "MOST_ACTIONS", 23)
    for same in (schedule, replace(schedule, actions=schedule.action_lists())):
        with pytest.raises(InputError, match="has 24 actions, more than the 23"):
            traced(same, [1, 1], block())


@pytest.mark.parametrize("name", BUILDERS)
def test_plans_of_every_schedule_add_up_to_what_they_carry(name):
    text = f"tp=2,pp=2,dp=2,vp={BUILDERS[name].num_chunks or 2},schedule={name}"
    plan = predicted(plan_of(ask("llama3-8b", "h100-80", 1, global_batch=16), text))
    assert plan.prediction
    found, memory = timeline_of(plan), [memory.total for memory in plan.prediction.stage_memory]
    assert found.end_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)
    assert [rank.predicted_bytes for rank in found.ranks] == memory
    assert plan.schedule.splits_backward or [rank.most_bytes for rank in found.ranks] == memory
    lists = replace(plan.schedule, actions=plan.schedule.action_lists())
    assert timeline_of(replace(plan, schedule=lists)).end_s == pytest.approx(found.end_s, rel=EXACT)


def test_the_passes_of_a_stage_take_the_seconds_of_its_blocks_and_meet_the_ranks_beside_it():
    one = block(seconds={"F": {"compute": 1.0, "cp": 0.5}, "I": {"tp": 2.0}, "W": {"compute": 4.0}})
    passes = traced(Schedule(builder="1f1b", num_ranks=2, num_micro_batches=2), [2, 3], one).passes
    assert passes["B", 0].parts == {"compute": 12.0, "waiting": 0.0, "tp": 6.0, "cp": 0.0, "ep": 0.0, "host": 0.0}
    assert (passes["F", 0].sends_to, passes["F", 1].takes_from, passes["W", 0].sends_to) == (1, 0, None)
