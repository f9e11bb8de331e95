"""What a plan promises of bytes is what its ranks hold and send, to the byte."""

import re

import pytest

from autoshard.engine.base import Measured
from autoshard.engine.torch.engine import TorchEngine
from autoshard.spec.workload import Precision
from tests.ranks.cases import COPIED, Task, gpt, llama, plan_of
from tests.ranks.spawn import on_ranks

pytestmark = pytest.mark.ranks

MIXTRAL = {"num_experts": 4, "experts_per_token": 2}
STATES = ("weights", "gradients", "masters", "optimizer")
CASES = {
    "one rank": ("tp=1,pp=1,dp=1", llama()),
    "tp with sequence parallelism": ("tp=2,pp=1,dp=1", llama()),
    "tp without": ("tp=2,pp=1,dp=1,sp=false", llama()),
    "dp with ZeRO-1": ("tp=1,pp=1,dp=2", llama()),
    "dp without ZeRO": ("tp=1,pp=1,dp=2,zero=0", llama()),
    "dp with ZeRO-3": ("tp=1,pp=1,dp=2,zero=3", llama()),
    "cp with ZeRO-3": ("tp=1,pp=1,cp=2,dp=1,zero=3", llama()),
    "tp x dp with ZeRO-3": ("tp=2,pp=1,dp=2,zero=3", llama()),
    "attention cut by heads": ("tp=1,pp=1,cp=2,dp=1,cp_kind=all_to_all", llama()),
    "pp x dp with ZeRO-3": ("tp=1,pp=2,dp=2,zero=3", llama()),
    "pp x dp": ("tp=1,pp=2,dp=2", llama()),
    "all forwards first": ("tp=1,pp=2,dp=1,schedule=gpipe", llama()),
    "interleaved stages": ("tp=1,pp=2,dp=1,vp=2,schedule=interleaved", llama(num_layers=4)),
    "ring attention": ("tp=1,pp=1,cp=2,dp=1", llama()),
    "ring attention, all sums everywhere": ("tp=1,pp=1,cp=2,dp=1,zero=0", llama()),
    "zig-zag on four ranks": ("tp=1,pp=1,cp=4,dp=1,cp_order=zigzag", llama()),
    "keys on half of the ranks": ("tp=4,pp=1,dp=1", llama(num_kv_heads=2, vocab=32)),
    "all recomputed": ("tp=2,pp=1,dp=1,recompute=full", llama()),
    "one layer of two recomputed": ("tp=2,pp=1,dp=1,recompute=full:1", llama()),
    "attention recomputed": ("tp=2,pp=1,dp=1,recompute=selective[attend]", llama()),
    "split backward": ("tp=1,pp=2,dp=1,schedule=zb_h1", llama()),
    "split backward and tp": ("tp=2,pp=2,dp=1,schedule=zb_h1", llama(num_layers=3)),
    "split backward, computed again": ("tp=1,pp=2,dp=1,schedule=zb_h1,recompute=full", llama()),
    "split backward, attention again": ("tp=2,pp=2,dp=1,schedule=zb_h1,recompute=selective[attend]", llama()),
    "split backward, ZeRO-3": ("tp=1,pp=2,dp=2,schedule=zb_h1,zero=3", llama()),
    "split backward in a V": ("tp=1,pp=2,dp=1,vp=2,schedule=zb_v", llama(num_layers=4)),
    "experts": ("tp=2,pp=1,dp=1", llama(**MIXTRAL)),
    "experts spread": ("tp=1,pp=1,dp=2,ep=2", llama(**MIXTRAL)),
    "experts spread, tp and copies": ("tp=2,pp=1,dp=2,ep=2,recompute=full:1", llama(**MIXTRAL)),
    "experts spread, split backward": ("tp=1,pp=2,dp=2,ep=2,schedule=zb_h1", llama(**MIXTRAL)),
    "tied embeddings on two stages": ("tp=1,pp=2,dp=2", gpt(vocab=32)),
    "tied embeddings on two stages with ZeRO-3": ("tp=1,pp=2,dp=2,zero=3", gpt(vocab=32)),
    "tied embeddings, biases and learned positions": ("tp=2,pp=1,dp=1", gpt(vocab=32)),
}


def measure(task: Task) -> Measured:
    engine = TorchEngine(task.plan, task.weights.__getitem__)
    engine.step(task.steps[0], task.learning_rate)
    return engine.measured()


@pytest.mark.parametrize(("text", "model"), CASES.values(), ids=CASES)
def test_what_is_held_and_sent_is_what_was_promised(text, model):
    hold(Task.of(plan_of(text, model)))


@pytest.mark.parametrize(
    ("text", "model"),
    [("tp=1,pp=1,cp=2,dp=1,cp_kind=all_to_all", llama()), ("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag", gpt(vocab=32))],
    ids=["attention cut by heads", "learned positions in zig-zag"],
)
def test_separate_documents_hold_and_send_what_was_promised(text, model):
    hold(Task.of(plan_of(text, model, documents="separate")))


def test_sgd_holds_no_state():
    plan = plan_of("tp=1,pp=1,dp=2", llama(), optimizer="sgd")
    assert plan.prediction and {memory.parts["optimizer"] for memory in plan.prediction.stage_memory} == {0}
    hold(Task.of(plan))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_bf16_without_masters_holds_none(zero):
    plan = plan_of(f"tp=1,pp=1,dp=2,zero={zero}", llama(), precision=Precision.named("bf16-sr"))
    assert plan.prediction
    (memory,) = plan.prediction.stage_memory
    assert memory.parts["masters"] == 0 and memory.parts["gradients"] == 2 * memory.parts["weights"] > 0
    hold(Task.of(plan))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_is_listed_for_units_is_what_zero_3_sends(schedule):
    """Each rank gathers and reduces half of every unit once for every micro-batch where the line says so."""
    task = Task.of(plan_of(f"tp=1,pp=2,dp=2,zero=3,schedule={schedule}", llama(num_layers=4)))
    found = on_ranks(task.plan.mesh.num_ranks, measure, task)
    unit = {name: sum(map(int, re.findall(r"(\d+) B", line))) for name, line in task.plan.units.items()}
    num_micro_batches, layers = task.plan.schedule.num_micro_batches, 2 * unit["layer"]
    for rank, one in enumerate(found):
        ends = unit["embed" if task.plan.mesh.coordinates(rank)["pp"] == 0 else "head"]
        assert one.sent_bytes["dp"] == num_micro_batches * (layers + ends) / 2


@pytest.mark.parametrize("sp", ["true", "false"])
def test_copies_of_keys_are_promised_too(sp):
    plan = plan_of(f"tp=4,pp=1,dp=1,sp={sp}", llama(num_kv_heads=2, vocab=32), pins=COPIED)
    assert "kv_heads/kv, head_dim, hidden]" in plan.strategies["layer"]["k"]
    hold(Task.of(plan))


def hold(task: Task) -> None:
    """Run a step, and hold what every rank counted against the plan's prediction."""
    plan, prediction = task.plan, task.plan.prediction
    assert prediction, "a plan that was made has its prediction"
    found = on_ranks(plan.mesh.num_ranks, measure, task)
    for number, memory in enumerate(prediction.stage_memory):
        promised = {name: memory.parts[name] for name in STATES}
        promised["saved"] = memory.parts["activations"] + memory.parts["logits"]
        alike = [one for rank, one in enumerate(found) if plan.mesh.coordinates(rank)["pp"] == number]
        assert most({name: [one.memory_bytes[name] for one in alike] for name in promised}) == promised
    axes = {axis for one in found for axis in one.sent_bytes}
    assert most({axis: [one.sent_bytes.get(axis, 0) for one in found] for axis in axes}) == (
        prediction.communication_bytes
    )


def most(counted: dict[str, list[int]]) -> dict[str, int]:
    """A promise is about the fullest rank: what does not divide leaves others with less."""
    return {name: max(sizes) for name, sizes in counted.items()}
