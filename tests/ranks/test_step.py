"""A step of a plan on real processes equals the same step on one: loss, norm, every gradient, every weight.

And what the plan promises of bytes is what its ranks hold and send, to the byte.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from autoshard.engine.base import Measured
from autoshard.engine.programs import programs_of
from autoshard.layout.program import Compute
from autoshard.plan.lowering import split_pending
from autoshard.plan.plan import Plan
from autoshard.schedule.builders import Action
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import AdamWConstants, Training
from autoshard.spec.workload import Precision
from tests.ranks.cases import (
    AS_PLANNED,
    COPIED,
    StepShare,
    Task,
    compare,
    engine_of,
    gpt,
    llama,
    plan_of,
    run_counted,
    run_dropping,
    run_most_under_way,
    run_steps,
    torch_adamw,
)
from tests.ranks.spawn import RankFailed, on_ranks

pytestmark = pytest.mark.ranks

MIXTRAL = {"num_experts": 4, "experts_per_token": 2}
STATES = ("weights", "gradients", "masters", "optimizer")
CASES = {
    "tp x pp": ("tp=2,pp=2,dp=1", llama()),
    "tp x dp with ZeRO-3": ("tp=2,pp=1,dp=2,zero=3", llama()),
    "tied embeddings at both ends of a V with ZeRO-3": ("tp=1,pp=2,dp=2,vp=2,schedule=zb_v,zero=3", gpt(num_layers=4)),
    "ring attention in zig-zag with tp": ("tp=2,pp=1,cp=2,dp=1,cp_order=zigzag", llama()),
    "attention cut by heads with pp": ("tp=1,pp=2,cp=2,dp=1,cp_kind=all_to_all,schedule=zb_h1", llama()),
    "interleaved stages": ("tp=1,pp=2,dp=1,vp=2,schedule=interleaved", llama(num_layers=4)),
    "split backward and tp": ("tp=2,pp=2,dp=1,schedule=zb_h1", llama(num_layers=3)),
    "one layer of two recomputed": ("tp=2,pp=1,dp=1,recompute=full:1", llama()),
    "experts": ("tp=2,pp=1,dp=2,ep=2,place=3-0", llama(**MIXTRAL)),
}
MORE = {
    "one rank": ("tp=1,pp=1,dp=1", llama()),
    "tp without sequence parallelism": ("tp=2,pp=1,dp=1,sp=false", llama()),
    "dp without ZeRO": ("tp=1,pp=1,dp=2,zero=0", llama()),
    "keys on half of the ranks": ("tp=4,pp=1,dp=1", llama(num_kv_heads=2, vocab=32)),
    "ring attention within a window": ("tp=1,pp=1,cp=2,dp=1", llama(window=3)),
    "two branches of one residual": ("tp=2,pp=1,dp=1,sp=false", gpt(parallel_residual=True)),
    "dp with ZeRO-1": ("tp=1,pp=1,dp=2", llama()),
    "ranks placed backwards": ("tp=2,pp=1,dp=2,place=3-0", llama()),
    "cp with ZeRO-3": ("tp=1,pp=1,cp=2,dp=1,zero=3", llama()),
    "interleaved stages with ZeRO-3": ("tp=1,pp=2,dp=2,vp=2,schedule=interleaved,zero=3", llama(num_layers=4)),
    "tied embeddings with ZeRO-3": ("tp=1,pp=1,dp=2,zero=3,recompute=full", gpt()),
    "experts with ZeRO-3": ("tp=1,pp=1,dp=4,ep=2,zero=3", llama(**MIXTRAL)),
    "ring attention, all sums everywhere": ("tp=1,pp=1,cp=2,dp=1,zero=0", llama()),
    "ring attention over four ranks": ("tp=1,pp=1,cp=4,dp=1,cp_order=zigzag", llama()),
    "attention cut by heads, all recomputed": ("tp=1,pp=1,cp=2,dp=2,cp_kind=all_to_all,zero=3,recompute=full", gpt()),
    "all forwards first": ("tp=1,pp=2,dp=1,schedule=gpipe", llama()),
    "split backward, computed again": ("tp=1,pp=2,dp=1,schedule=zb_h1,recompute=full", llama()),
    "split backward, attention again": ("tp=2,pp=2,dp=1,schedule=zb_h1,recompute=selective[attend]", llama()),
    "split backward in a V with tied ends on one rank": ("tp=2,pp=2,dp=1,vp=2,schedule=zb_v", gpt(num_layers=4)),
    "split backward of experts": ("tp=1,pp=2,dp=2,ep=2,schedule=zb_h1", llama(**MIXTRAL)),
    "attention recomputed": ("tp=2,pp=1,dp=1,recompute=selective[attend]", llama()),
    "tied embeddings on two stages": ("tp=1,pp=2,dp=2", gpt()),
    "experts spread, tp and copies": ("tp=2,pp=1,dp=2,ep=2,recompute=full:1", llama(**MIXTRAL)),
}


def slowly(more: Mapping[str, Any]) -> list[Any]:
    return [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in more.items()]


def run_and_measure(task: Task) -> tuple[list[StepShare], Measured]:
    """What every rank runs: the step in double; and as it is planned, with what is held and sent."""
    shares = run_steps(task)
    engine = engine_of(task, AS_PLANNED)
    engine.step(task.steps[0], task.learning_rate)
    return shares, engine.measured()


def check(plan: Plan) -> None:
    """Hold a step on ranks against one process, and what they hold and send against the plan's prediction."""
    task = Task.of(plan)
    expected = task.reference()
    assert expected.norm > plan.workload.clip_norm, "nothing would be clipped"
    answers = on_ranks(plan.mesh.num_ranks, run_and_measure, task)
    compare(expected, [share for (share,), _ in answers])
    found, prediction = [measured for _, measured in answers], plan.prediction
    assert prediction, "a plan that was made has its prediction"
    for number, memory in enumerate(prediction.stage_memory):
        promised = {name: memory.parts[name] for name in STATES}
        promised["saved"] = memory.parts["activations"] + memory.parts["logits"]
        alike = [one for rank, one in enumerate(found) if plan.mesh.coordinates(rank)["pp"] == number]
        # A promise is about the fullest rank: what does not divide leaves others with less.
        assert {name: max(one.memory_bytes[name] for one in alike) for name in promised} == promised
    axes = {axis for one in found for axis in one.sent_bytes}
    sent = {axis: max(one.sent_bytes.get(axis, 0) for one in found) for axis in axes}
    if plan.zero != 3 or not plan.model.tied_embeddings:  # a tied table is gathered twice, which is not predicted
        assert sent == prediction.communication_bytes


@pytest.mark.parametrize(
    ("text", "model"), [*(pytest.param(*case, id=name) for name, case in CASES.items()), *slowly(MORE)]
)
def test_a_step_on_ranks_is_that_of_one_process_and_holds_and_sends_what_was_promised(text, model):
    check(plan_of(text, replace(model, vocab=32)))


@pytest.mark.parametrize("sp", ["true", "false"])
@pytest.mark.slow
def test_copies_of_keys_are_promised_too(sp):
    plan = plan_of(f"tp=4,pp=1,dp=1,sp={sp}", llama(num_kv_heads=2, vocab=32), pins=COPIED)
    assert "kv_heads/kv, head_dim, hidden]" in plan.strategies["layer"]["k"]
    check(plan)


def test_sgd_and_bf16_without_masters_hold_less():
    sgd = plan_of("tp=1,pp=1,dp=2", llama(), optimizer="sgd")
    assert sgd.prediction and {memory.parts["optimizer"] for memory in sgd.prediction.stage_memory} == {0}
    check(sgd)
    rounded = plan_of("tp=1,pp=1,dp=2,zero=3", llama(), precision=Precision.named("bf16-sr"))
    assert rounded.prediction and {memory.parts["masters"] for memory in rounded.prediction.stage_memory} == {0}
    found = on_ranks(2, run_and_measure, Task.of(rounded))
    assert {measured.memory_bytes["masters"] for _, measured in found} == {0}


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zb_h1"])
def test_what_is_listed_for_units_is_what_zero_3_sends(schedule):
    """Each rank gathers and reduces half of every unit once for every micro-batch where the line says so."""
    plan = plan_of(f"tp=1,pp=2,dp=2,zero=3,schedule={schedule}", llama(num_layers=4))
    found = on_ranks(4, run_and_measure, Task.of(plan))
    unit = {name: sum(map(int, re.findall(r"(\d+) B", line))) for name, line in plan.units.items()}
    for rank, (_, measured) in enumerate(found):
        ends = unit["embed" if plan.mesh.coordinates(rank)["pp"] == 0 else "head"]
        assert measured.sent_bytes["dp"] == plan.schedule.num_micro_batches * (2 * unit["layer"] + ends) / 2


LISTS = {
    "micro-batches in another order than they are sent": ("F0.0 F0.1 B0.0 B0.1", "F1.1 F1.0 B1.1 B1.0"),
    "halves of a backward far apart, and beside whole ones": (
        "F0.0 F0.1 F0.2 I0.0 B0.1 I0.2 W0.2 W0.0",
        "F1.0 I1.0 F1.1 I1.1 W1.1 W1.0 F1.2 B1.2",
    ),
}


@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS)
def test_stages_may_follow_lists_that_no_builder_makes(lists):
    actions = tuple(tuple(map(Action.parse, text.split())) for text in lists)
    plan = plan_of("tp=1,pp=2,dp=1", llama(), global_batch=sum(action.kind == "F" for action in actions[0]))
    task = Task.of(replace(plan, schedule=replace(plan.schedule, actions=actions)))
    compare(task.reference(), [share for (share,) in on_ranks(2, run_steps, task)])


@pytest.mark.parametrize("text", ["tp=2,pp=1,dp=1", "tp=1,pp=1,cp=3,dp=1", "tp=1,pp=1,dp=3,zero=3"])
def test_sizes_that_nothing_divides_travel_padded(text):
    task = Task.of(plan_of(text, llama(hidden=13, vocab=31), seq_len=7, global_batch=3))
    answers = on_ranks(task.plan.mesh.num_ranks, run_steps, task)
    compare(task.reference(), [share for (share,) in answers])


@pytest.mark.slow
def test_tiny_llama_itself():
    task = Task.of(plan_of("tp=2,pp=1,dp=1", load_model("tiny-llama"), global_batch=2))
    compare(task.reference(), [share for (share,) in on_ranks(2, run_steps, task)])


OWN = AdamWConstants(beta1=0.5, beta2=0.8, eps=1e-4, weight_decay=3.0)  # a decay beside which no update is large


@pytest.mark.parametrize(
    ("text", "model", "constants"),
    [
        pytest.param("tp=2,pp=1,dp=1", gpt(), AdamWConstants(weight_decay=0.0), marks=pytest.mark.slow),
        pytest.param("tp=1,pp=2,dp=1", gpt(), OWN, marks=pytest.mark.slow),
        ("tp=1,pp=1,dp=2,zero=3", llama(qk_norm=True, qkv_bias=True), OWN),
    ],
    ids=["tp, tied, no decay", "pp, tied, own constants", "ZeRO-3, own constants"],
)
def test_three_steps_follow_the_adamw_of_pytorch_on_clipped_gradients(text, model, constants):
    """The first step of AdamW does not see the scale of a gradient; later ones do, and they need the moments."""
    plan = plan_of(text, model, global_batch=2)
    task = replace(Task.of(plan, num_steps=3), training=Training(adamw=constants))
    answers = on_ranks(task.plan.mesh.num_ranks, run_steps, task)
    tensors, optimizer = torch_adamw(task.weights, constants)
    for step in range(3):
        expected = task.reference({name: tensor.numpy() for name, tensor in tensors.items()}, step)
        for name, gradient in expected.gradients.items():
            tensors[name].grad = torch.from_numpy(gradient.copy())
        torch.nn.utils.clip_grad_norm_([tensors[name] for name in expected.gradients], task.plan.workload.clip_norm)
        optimizer.step()
        weights = {name: tensor.numpy() for name, tensor in tensors.items()}
        compare(expected, [shares[step] for shares in answers], weights=weights)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("tp=1,pp=1,dp=2,zero=0", llama()),
        ("tp=2,pp=2,dp=1", llama()),
        ("tp=1,pp=1,cp=2,dp=1", llama()),
        ("tp=1,pp=1,dp=2,ep=2", llama(**MIXTRAL)),
    ],
)
def test_every_rank_makes_exactly_the_calls_of_its_programs(text, model):
    task = Task.of(plan_of(text, model))
    plan = task.plan
    answers = on_ranks(plan.mesh.num_ranks, run_counted, task)
    for rank, calls in enumerate(answers):
        assert calls == expected_calls(plan, plan.mesh.coordinates(rank)["pp"]), f"rank {rank}"


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", (2, 2)), ("zb_h1", (2, 2)), ("gpipe", (8, 8))])
def test_messages_that_were_taken_are_kept_no_longer(schedule, most):
    plan = plan_of(f"tp=1,pp=2,dp=1,schedule={schedule}", llama(), global_batch=8)
    assert tuple(on_ranks(2, run_most_under_way, Task.of(plan))) == most


def expected_calls(plan, pipeline_rank):
    """Count what the programs list, per micro-batch; then the step phase, weights that meet alike at once; the norm."""
    calls: Counter[str] = Counter()
    names = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}
    names |= {"all_to_all": "all_to_all_single"}
    meetings = set()
    programs, count = programs_of(plan), plan.schedule.num_micro_batches
    for stage in plan.schedule.stages_of(pipeline_rank).values():
        for parts in programs.stages[stage].values():
            for change in parts.program.collectives():
                kind = change.collective.kind
                if kind != "slice":
                    calls[names.get(kind) or str(kind)] += count
            for entry in parts.program.instructions:
                hops = len(entry.ring) if isinstance(entry, Compute) else 0
                for call in ("isend", "irecv") if isinstance(entry, Compute) and hops else ():
                    # Keys and values; backward their gradients follow them a hop later.
                    both = 2 * hops if entry.op.kind.label == "attend" else 4 * (hops - 1)
                    calls[call] += count * both
            for tensor in parts.block.parameters:
                layout = parts.program.results[f"{tensor.name}.sum"].layout
                pending = tuple(sorted(atom for atom in layout.sums if plan.mesh.size(atom) > 1))
                cutting = tuple(sorted(atom for _, atoms in layout.dims for atom in atoms if plan.mesh.size(atom) > 1))
                meetings.add((pending, cutting))
        calls["isend"] += count * ((stage < len(plan.stages) - 1) + (stage > 0))
        calls["recv"] += count * ((stage < len(plan.stages) - 1) + (stage > 0))
    for pending, _ in meetings:
        calls += step_calls(plan, pending)
    return calls + Counter({"all_reduce": 1})


def step_calls(plan, pending):
    spread, summed = split_pending(pending)
    scattered = int(bool(spread) and plan.zero == 1)
    reduced = int(bool(summed)) + int(bool(spread) and plan.zero == 0)
    return Counter({"all_reduce": reduced, "reduce_scatter_single": scattered, "all_gather_single": scattered})


def test_a_step_with_another_number_of_micro_batches_is_refused():
    task = Task.of(plan_of("tp=1,pp=1,dp=1", llama()))
    with pytest.raises(RankFailed, match="micro_batches: the plan takes 4 a step, not 3"):
        on_ranks(1, run_steps, replace(task, steps=(task.steps[0][:3],)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("tp=2,pp=1,dp=1,sp=false", "all_reduce"),
        ("tp=2,pp=1,dp=1", "reduce_scatter_single"),
        ("tp=1,pp=1,dp=2", "reduce_scatter_single"),
    ],
)
def test_whichever_collective_does_nothing_is_caught(text, name):
    task = Task.of(plan_of(text, llama(num_layers=1), global_batch=2))
    calls = expected_calls(task.plan, 0)
    num_calls = calls[name] + (calls["all_reduce_max"] if name == "all_reduce" else 0)
    assert num_calls > 0
    answers = on_ranks(2, run_dropping, task, name, num_calls)
    expected = task.reference()
    missed = []
    for number, shares in enumerate(zip(*answers, strict=True)):
        try:
            compare(expected, shares)
        except AssertionError:
            continue
        missed.append(number)
    assert not missed
