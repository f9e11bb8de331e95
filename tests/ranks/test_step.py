"""Steps of plans on real processes that the matrix of features does not hold, and what ranks call, keep and refuse."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autoshard.engine.torch.fake import count_rank
from autoshard.engine.torch.world import World
from autoshard.plan.plan import Buckets, Plan
from autoshard.schedule.builders import Action
from autoshard.spec.model import ModelSpec
from autoshard.spec.training import AdamWConstants, Training
from tests.ranks.cases import (
    AS_PLANNED,
    MIXTRAL,
    StepShare,
    Task,
    compare,
    deepseek,
    engine_of,
    gemma,
    glm,
    gpt,
    gpt_oss,
    hold,
    llama,
    olmo2,
    plan_of,
    qwen3_next,
    run_dropping,
    run_steps,
    share_of,
)
from tests.ranks.spawn import on_ranks
from tests.ranks.test_experts import OWN_TOKENS
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks

# What cases have beside a layout and a model: pins, small buckets, the number of steps, whether products are joined as
# well, sizes of the workload.
TWICE: Mapping[str, Any] = {"global_batch": 8, "num_steps": 2}
BALANCED: Mapping[str, Any] = {**TWICE, "router_balance_loss": 2.0}
BUCKETS: Mapping[str, Any] = {"num_steps": 2, "buckets": True}
BARE: Mapping[str, Any] = {**TWICE, "joins": True}
CASES: Mapping[str, tuple[str, ModelSpec, Mapping[str, Any]]] = {
    "experts placed backwards": ("tp=2,pp=1,dp=2,ep=2,place=3-0", llama(vocab=32, **MIXTRAL), {}),
    "keys on half of the ranks": ("tp=4,pp=1,dp=1", llama(num_kv_heads=2, vocab=32), {}),
    "one rank": ("tp=1,pp=1,dp=1", llama(), {}),
    "ring attention within a window": ("tp=1,pp=1,cp=2,dp=1", llama(window=3), {}),
    "two branches of one residual": ("tp=2,pp=1,dp=1,sp=false", gpt(parallel_residual=True), {}),
    "ring attention over four ranks": ("tp=1,pp=1,cp=4,dp=1,cp_order=zigzag", llama(vocab=32), {}),
    "norms behind, of all heads on several ranks": ("tp=2,pp=2,dp=1,recompute=full", olmo2(), {}),
    "norms of all heads around a ring": ("tp=2,pp=1,cp=2,dp=1,zero=3", olmo2(), {}),
    "keys of norms of all heads on half of the ranks": ("tp=4,pp=1,dp=1", olmo2(num_kv_heads=2, vocab=32), {}),
    "two kinds of layers on two stages": ("tp=2,pp=2,dp=1,sp=true,stages=1/2", gemma(), {}),
    "two kinds of layers around a ring": ("tp=1,pp=1,cp=2,dp=2,zero=3,cp_order=zigzag", gemma(vocab=32), {}),
    "capped scores around a ring, and capped parts of logits": (
        "tp=2,pp=1,cp=2,dp=1,cp_order=zigzag", gemma(score_cap=0.3, logit_cap=0.4, vocab=32), {},
    ),
    "narrow states on two stages": ("tp=2,pp=2,dp=1,sp=true,recompute=full", deepseek(qkv_bias=True), {}),
    "narrow states around a ring": ("tp=2,pp=1,cp=2,dp=1,zero=3", deepseek(window=3), {}),
    "values wider than keys around a ring": (
        "tp=1,pp=1,cp=2,dp=2,zero=1,cp_order=zigzag", deepseek(query_rank=None, value_dim=7, vocab=32), {},
    ),
    "what no search recomputes": (
        "tp=2,pp=1,dp=2,ep=2,recompute=selective[up_projections,experts,shared_experts]",
        deepseek(vocab=32, shared_ffn=8, **MIXTRAL), {},
    ),
    "an MLP beside experts, by a share of each token": (
        "tp=2,pp=1,dp=2,ep=2", llama(vocab=32, shared_ffn=8, shared_gated=True, **MIXTRAL), {},
    ),
    "narrow states of whole sequences": ("tp=4,pp=1,dp=1,sp=false", deepseek(vocab=32), {}),
    "four stages": ("tp=1,pp=4,dp=1,schedule=zb_h1", gpt(num_layers=4), {}),
    "sinks around a ring, states in pieces": ("tp=1,pp=1,cp=2,dp=1,zero=3,cp_order=zigzag", gpt_oss(), {}),
    "linear attention, heads cut": ("tp=2,pp=1,dp=2,zero=3", qwen3_next(), {}),
    "linear attention, heads cut over copies of keys": ("tp=4,pp=1,dp=1,recompute=full", qwen3_next(), {}),
    "linear attention on two stages": ("tp=1,pp=2,dp=2,ep=2,schedule=zb_h1", qwen3_next(), {}),
    "sinks around a ring, heads cut": ("tp=2,pp=1,cp=2,dp=1", gpt_oss(), {}),
    "experts over dp and tp, all computed again": ("tp=2,pp=1,dp=2,ep=2,fold=tp,recompute=full", gpt_oss(), {}),
    "own tokens on each rank of tp, that may be dropped": (
        "tp=2,pp=1,dp=2,ep=2", gpt_oss(), {"pins": OWN_TOKENS, "expert_capacity": 1.0},
    ),
    "stages of experts, halves of a backward": (
        "tp=1,pp=2,dp=2,ep=2,schedule=zb_h1", gpt_oss(), {"router_balance_loss": 0.5},
    ),
    "sinks, the same tokens on both ranks of tp": (
        "tp=2,pp=1,dp=1,sp=false,recompute=selective[attention]", gpt_oss(), {},
    ),
    "small buckets, ZeRO-1": ("tp=2,pp=1,dp=2", llama(num_layers=4), BUCKETS),
    "small buckets, ZeRO-3, stages": ("tp=1,pp=2,dp=2,zero=3", gpt(num_layers=4), BUCKETS),
    "small buckets, stages that share a table": ("tp=1,pp=2,dp=2", gpt(num_layers=4), BUCKETS),
    "small buckets, ZeRO-0": ("tp=1,pp=1,dp=2,zero=0", gpt(num_layers=4), BUCKETS),
    "small buckets, a pipeline that is folded": ("tp=1,pp=2,dp=2,vp=2,schedule=zb_v", llama(num_layers=4), BUCKETS),
    "small buckets, a ring": ("tp=2,pp=1,cp=2,dp=1", llama(num_layers=4), BUCKETS),
    # ZeRO over a part of the ranks, which holds a copy of the states or weights
    "states in pieces, two micro-batches": ("tp=1,pp=1,dp=4,zero=3,zero_group=2", llama(), TWICE),
    "optimizer in pieces, sequences cut": ("tp=1,pp=1,cp=2,dp=4,zero=1,zero_group=4,cp_order=zigzag", gpt(), TWICE),
    "every rank has a copy": ("tp=2,pp=1,dp=2,zero=1,zero_group=1", llama(), TWICE),
    "experts without another of their kind in a copy": ("tp=1,pp=1,dp=4,ep=2,zero=3,zero_group=2", glm(), BALANCED),
    "experts in pieces": ("tp=1,pp=1,dp=8,ep=2,zero=1,zero_group=4", llama(**MIXTRAL), BALANCED),
    "stages that share a table": ("tp=1,pp=2,dp=4,zero=1,zero_group=2,schedule=zb_h1", gpt(), TWICE),
    "stages in turns, recompute": (
        "tp=1,pp=2,dp=4,vp=2,schedule=interleaved,zero=3,zero_group=2,recompute=full", llama(num_layers=4), TWICE,
    ),
    "weights over fewer ranks": ("tp=1,pp=1,dp=4,zero=3,weight_group=2", llama(), TWICE),
    "weights over fewer ranks of a copy": ("tp=1,pp=1,dp=8,zero=3,zero_group=4,weight_group=2", llama(), TWICE),
    "whole weights": ("tp=1,pp=1,dp=4,zero=3,weight_group=1", gpt(), TWICE),
    "experts whole on each of their ranks": ("tp=1,pp=1,dp=4,ep=2,zero=3,weight_group=2", glm(), BALANCED),
    "experts over fewer ranks": ("tp=1,pp=1,dp=8,ep=2,zero=3,weight_group=4", llama(**MIXTRAL), BALANCED),
    "weights over fewer ranks, halves of a backward": (
        "tp=1,pp=2,dp=4,zero=3,weight_group=2,schedule=zb_h1", gpt(num_layers=4), TWICE,
    ),
    "weights over cp": ("tp=1,pp=1,cp=2,dp=4,zero=3,weight_group=4,cp_order=zigzag", gpt(), TWICE),
    "weights over fewer ranks, stages in turns": (
        "tp=1,pp=2,dp=4,vp=2,schedule=interleaved,zero=3,weight_group=2,recompute=full", llama(num_layers=4), TWICE,
    ),
    "weights over fewer ranks, tied": ("tp=2,pp=1,dp=4,zero=3,weight_group=2", llama(tied_embeddings=True), TWICE),
    # stages without layers: the embedding alone at the start of a pipeline, or the head alone at its end
    **{
        f"bare ends, {'tied' if tied else 'apart'}: {text}": (text, llama(num_layers=3, tied_embeddings=tied), BARE)
        for tied in (True, False)
        for text in (
            "tp=1,pp=2,dp=1,vp=2,schedule=zb_v,stages=0/2/1/0", "tp=1,pp=2,dp=1,stages=0/3",
            "tp=2,pp=2,dp=1,vp=2,schedule=interleaved,stages=0/2/1/0", "tp=1,pp=2,dp=1,schedule=zb_h1,stages=3/0",
            "tp=1,pp=4,dp=2,stages=0/1/2/0,recompute=full,zero=3",
        )
    },
}  # fmt: skip


def planned(text: str, model: ModelSpec, *, buckets: bool = False, **more: Any) -> Plan:
    """The plan of a case; of small buckets each has a few weights."""
    plan = plan_of(text, model, **more)
    return replace(plan, buckets=Buckets(reduce_scatter_bytes=2048, all_gather_bytes=2048)) if buckets else plan


@pytest.mark.parametrize("case", rest_is_slow(CASES, 0, 7))
def test_steps_on_ranks_are_those_of_one_process_and_hold_and_send_what_was_promised(case: str):
    text, model, more = CASES[case]
    own = {"num_steps": 1, "joins": False, **more}
    joins, num_steps = own.pop("joins"), own.pop("num_steps")
    hold(Task.of(planned(text, model, **own), num_steps), joins=joins)


OWN = AdamWConstants(beta1=0.5, beta2=0.8, eps=1e-4, weight_decay=3.0)  # a decay beside which no update is large


@pytest.mark.parametrize(
    ("text", "model"),
    rest_is_slow([("tp=1,pp=1,dp=2,zero=3", llama(qk_norm=True, qkv_bias=True)), ("tp=1,pp=2,dp=1", gpt())]),
)
def test_three_steps_follow_the_adamw_of_pytorch_on_clipped_gradients(text, model):
    """The first step of AdamW does not see the scale of a gradient; later ones do, and they need the moments."""
    hold(replace(Task.of(plan_of(text, model, global_batch=2), num_steps=3), training=Training(adamw=OWN)))


class Calls(TorchDispatchMode):
    """Counts how often torch is asked to send, by the names of its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "recv" not in func.__name__:
            self.counted[func.__name__.removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


INSTEAD = {
    "tp=2,pp=1,dp=1,recompute=full:1": {
        "reduce_scatter seq/tp": "all_reduce /tp, slice seq/tp",
        "all_gather seq/tp": "all_to_all seq>hidden/tp, all_gather hidden/tp",
    },
    "tp=1,pp=1,dp=2,ep=2": {
        "all_to_all slots>experts/dp": "all_gather slots/dp, slice experts/dp",
        "all_to_all experts>slots/dp": "all_to_all experts>hidden/dp, all_to_all hidden>slots/dp",
    },
}


def run_counting(task: Task) -> tuple[StepShare, Counter[str]]:
    engine = engine_of(task)
    with Calls() as calls:
        share = share_of(engine, task)
    return share, calls.counted + Counter(engine.measured().sent_bytes)


@pytest.mark.parametrize("text", rest_is_slow(INSTEAD, 0, 2))
def test_edited_lines_change_what_is_sent_and_no_result(text):
    task = Task.of(plan_of(text, llama(**MIXTRAL if "ep" in text else {})))
    expected, (_, usual) = task.reference(), on_ranks(2, run_counting, task)[0]
    for old, new in INSTEAD[text].items():
        for pass_ in "FI":
            edited = {
                name: {entry: line.replace(f"{pass_} {old}", f"{pass_} {new}") for entry, line in table.items()}
                for name, table in task.plan.strategies.items()
            }
            answers = on_ranks(2, run_counting, replace(task, plan=replace(task.plan, strategies=edited)))
            compare(expected, [share for share, _ in answers])
            assert answers[0][1] != usual


PINNED = {
    "a product that leaves a sum": {"q": "[batch/dp, seq, kv_heads, q_group, head_dim] +tp"},
    "a result that one of three readers takes as it is": {"q": "[batch/dp, seq/tp, kv_heads, q_group, head_dim]"},
    "dp that cuts the sequence": {"act": "[batch, seq/dp, ffn/tp]"},
    "a norm and a table cut otherwise": {"attn_norm": "[batch, seq/dp.tp, hidden]", "embed": "[batch, seq, hidden/tp]"},
}


@pytest.mark.parametrize("case", rest_is_slow(PINNED, 2))
def test_layouts_that_no_search_would_choose_give_the_same(case):
    task = Task.of(plan_of("tp=2,pp=1,dp=2,mbs=2", llama(), PINNED[case]))
    compare(task.reference(), [share for (share,) in on_ranks(4, run_steps, task)])


def test_a_gradient_that_several_additions_pass_on_arrives_as_it_lies_between_blocks():
    """The sum of a mixture with biases passes the gradient of the residual on, which the last addition cuts itself."""
    task = Task.of(plan_of("tp=1,pp=1,dp=2,sp=false,mbs=2", gpt_oss(), {"mlp_add": "[batch, seq/dp, hidden]"}))
    compare(task.reference(), [share for (share,) in on_ranks(2, run_steps, task)])


TIED = {"embed": "[batch, seq/tp, hidden]", "unembed": "[batch, seq, vocab]"}  # parts of a gradient, and all of it


@pytest.mark.parametrize("text", rest_is_slow(["tp=2,pp=1,dp=2,zero=1", "tp=2,pp=2,dp=1", "tp=2,pp=1,dp=2,zero=3"], 1))
def test_gradients_of_shared_weights_are_added_once_where_they_await_other_ranks(text):
    task = Task.of(plan_of(text, gemma(), TIED))
    answers = on_ranks(4, run_steps, task)
    compare(task.reference(), [share for (share,) in answers])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_is_listed_for_units_is_what_zero_3_sends(schedule):
    """Each rank gathers and reduces half of every unit once for every micro-batch where the line says so."""
    plan = plan_of(f"tp=1,pp=2,dp=2,zero=3,schedule={schedule}", llama(num_layers=4))
    unit = {name: sum(map(int, re.findall(r"(\d+) B", line))) for name, line in plan.units.items()}
    for rank, end in ((0, "embed"), (3, "head")):
        sent = plan.schedule.num_micro_batches * (2 * unit["layer"] + unit[end]) / 2
        assert count_rank(plan, rank).sent_bytes["dp"] == sent


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


@pytest.mark.parametrize("text", rest_is_slow(["tp=1,pp=1,cp=3,dp=1", "tp=2,pp=1,dp=1", "tp=1,pp=1,dp=3,zero=3"]))
def test_sizes_that_nothing_divides_travel_padded(text):
    task = Task.of(plan_of(text, llama(hidden=13, vocab=31), seq_len=7, global_batch=3))
    answers = on_ranks(task.plan.mesh.num_ranks, run_steps, task)
    compare(task.reference(), [share for (share,) in answers])


@pytest.mark.parametrize(("schedule", "most"), rest_is_slow([("1f1b", 2), ("gpipe", 8), ("zb_h1", 2)]))
def test_messages_that_were_taken_are_kept_no_longer(schedule, most, monkeypatch: pytest.MonkeyPatch):
    kept, send = list[int](), World.send

    def sending(world: World, *args: Any) -> None:
        send(world, *args)
        kept.append(len(world.under_way))

    monkeypatch.setattr(World, "send", sending)
    plan = plan_of(f"tp=1,pp=2,dp=1,schedule={schedule}", llama(), global_batch=8)
    for rank in (0, 1):
        kept.clear()
        assert count_rank(plan, rank) and max(kept) == most


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
    answers: Sequence[Any] = on_ranks(2, run_dropping, task, name)
    expected = task.reference()
    assert answers[0]
    for shares in zip(*answers, strict=True):
        with pytest.raises(AssertionError):
            compare(expected, shares)


@pytest.mark.parametrize("text", rest_is_slow(["tp=1,pp=1,dp=2,ep=2", "tp=1,pp=1,dp=1", "tp=2,pp=1,dp=2"], 2))
def test_experts_that_drop_nothing_compute_what_was_routed_to_them(text):
    """Two of eight experts are chosen."""
    sizes = {"hidden": 32, "ffn": 48, "num_experts": 8, "experts_per_token": 2, "num_layers": 1}
    task = Task.of(plan_of(text, llama(**sizes), seq_len=16))
    needed = 9 * 2 * task.plan.workload.tokens_per_step * 2 * sizes["hidden"] * sizes["ffn"]
    assert sum(on_ranks(task.plan.mesh.num_ranks, flops_of_experts, task)) == needed


def flops_of_experts(task: Task) -> int:
    """What products of experts compute in a step on a rank."""

    def grouped(left: torch.Size, right: torch.Size, *_: object, out_shape: object, **__: object) -> int:
        return 2 * left[0] * left[1] * right[-1]

    engine = engine_of(task, AS_PLANNED, "literal")
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped}) as counter:
        engine.step(task.steps[0], 0.0)
    found = counter.get_flop_counts()["Global"]
    return sum(found.get(getattr(torch.ops.aten, name), 0) for name in ("_grouped_mm", "bmm"))


@pytest.mark.slow
def test_pieces_that_copies_do_not_add_up_are_caught() -> None:
    """Each all-reduce, left out once: that of a piece between copies is among them, without which copies differ."""
    task = Task.of(plan_of("tp=1,pp=1,dp=4,zero=3,zero_group=2", llama()))
    answers = on_ranks(4, run_dropping, task, "all_reduce")
    assert len(answers[0]) > 1
    for shares in zip(*answers, strict=True):
        with pytest.raises(AssertionError):
            compare(task.reference(), shares)


def saved(task: Task) -> list[tuple[str, tuple[int, ...], int]]:
    return [(piece.name, piece.offsets, piece.memory.numel()) for piece in engine_of(task).pieces() if piece.saves]


@pytest.mark.parametrize("keys", ["zero=1,zero_group=2", "zero=3,zero_group=2", "zero=3,weight_group=2"])
def test_one_copy_of_each_number_is_saved(keys: str) -> None:
    task = Task.of(plan_of(f"tp=1,pp=1,dp=4,{keys}", llama()))
    boxes = [box for of_rank in on_ranks(4, saved, task) for box in of_rank]
    assert len({box[:2] for box in boxes}) == len(boxes)
    counts = Counter[str]()
    for name, _, count in boxes:
        counts[name] += count
    parts = ("weight", "moment1", "moment2")
    assert counts == {f"{part}/{name}": array.size for part in parts for name, array in task.weights.items()}
