"""Activations in host memory: the same step to the last bit, in every mode and schedule, and the promised bytes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import autoshard.engine.torch.offloading as offloading
from autoshard.engine.torch.fake import count_rank
from autoshard.engine.torch.formats import Formats, memory_of
from autoshard.engine.torch.offloading import HostMemory
from autoshard.plan.plan import Plan
from autoshard.run.protocol import EngineMode
from autoshard.run.reports import Measured
from autoshard.schedule.builders import Action
from autoshard.spec.model import ModelSpec
from tests.kit import NOTHING
from tests.ranks.cases import (
    AS_PLANNED,
    EXACT,
    MIXTRAL,
    StepShare,
    Task,
    deepseek,
    engine_of,
    gemma,
    glm,
    gpt,
    hold,
    llama,
    plan_of,
    same,
    share_of,
)
from tests.ranks.spawn import on_ranks
from tests.slower import covering, rest_is_slow

pytestmark = pytest.mark.ranks

DEEP = {"num_layers": 4}
MODES: tuple[EngineMode, ...] = ("literal", "generated")
CASES: Mapping[str, tuple[str, ModelSpec]] = {
    "one rank": ("tp=1,pp=1,dp=1,recompute=none", llama(num_layers=3)),
    "1f1b, all of a layer": ("tp=1,pp=2,dp=1,recompute=full", gpt(**DEEP)),
    "a stage without": ("tp=2,pp=2,dp=1,recompute=none/selective[attention]", llama(vocab=32, **DEEP)),
    "zb_h1, I and W apart": ("tp=2,pp=2,dp=1,schedule=zb_h1,recompute=none", gpt(vocab=32, **DEEP)),
    "narrow states": ("tp=2,pp=2,dp=1,recompute=none", deepseek(vocab=32)),
    "zb_v, with ZeRO-3": ("tp=1,pp=2,dp=2,vp=2,schedule=zb_v,zero=3,recompute=selective[norms]", gpt(**DEEP)),
    "interleaved": ("tp=1,pp=2,dp=1,vp=2,schedule=interleaved,recompute=none", llama(vocab=32, **DEEP)),
    "gpipe, two kinds of layers": ("tp=2,pp=2,dp=1,schedule=gpipe,stages=1/2,recompute=full", gemma()),
    "experts": ("tp=1,pp=1,dp=2,ep=2,recompute=none", llama(vocab=32, **MIXTRAL)),
    "experts in groups, on two stages": ("tp=1,pp=2,dp=2,ep=2,stages=1/2,recompute=none", glm(vocab=32)),
    "a ring": ("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag,recompute=selective[activation,norms]", llama(vocab=32)),
}


def with_offload(text: str) -> str:
    """The same candidate, whose layers keep in host memory whatever they keep."""
    head, stages = text.split("recompute=")
    return f"{head}recompute={'/'.join(f'{stage}+offload' for stage in stages.split('/'))}"


def tasks(text: str, model: ModelSpec, **changes: Any) -> tuple[Task, Task]:
    return Task.of(plan_of(text, model, **changes)), Task.of(plan_of(with_offload(text), model, **changes))


def both(pair: tuple[Task, Task], formats: Formats, mode: EngineMode) -> list[tuple[StepShare, Measured]]:
    """A step on the device alone, and one with host memory; the second step of it, whose buffers are used again."""
    engines = [engine_of(task, formats, mode) for task in pair]
    answers = [(share_of(engine, task), engine.measured()) for engine, task in zip(engines, pair, strict=True)]
    twice = [share_of(engine, task) for engine, task in zip(engines, pair, strict=True)]
    same(*twice)
    return answers


def hold_alike(pair: tuple[Task, Task], formats: Formats, mode: EngineMode) -> None:
    offloads = [stage.recompute.offload for stage in pair[1].plan.stages]
    for (alone, held), (beside, held_too) in on_ranks(pair[0].plan.mesh.num_ranks, both, pair, formats, mode):
        same(alone, beside)
        assert held.sent_bytes == held_too.sent_bytes
        assert all(offloads) and "host" not in held.memory_bytes
        assert held_too.memory_bytes["host"] > 0 and held_too.memory_bytes["saved"] < held.memory_bytes["saved"]


@pytest.mark.parametrize(("case", "mode"), covering(CASES, MODES, fast=2))
def test_a_step_with_host_memory_is_the_same_to_the_last_bit(case: str, mode: EngineMode) -> None:
    hold_alike(tasks(*CASES[case]), AS_PLANNED if mode == "generated" else EXACT, mode)


@pytest.mark.parametrize("case", rest_is_slow(["one rank", "zb_h1, I and W apart"], 0, 1))
def test_compiled_functions_read_what_comes_back_from_host_memory(case: str) -> None:
    text, model = CASES[case]
    hold_alike(tasks(text, replace(model, num_layers=2)), AS_PLANNED, "compiled")


@pytest.mark.parametrize("case", rest_is_slow([case for case in CASES if "experts" not in case], 2, 3))
def test_ranks_hold_on_both_sides_what_was_promised(case: str) -> None:
    text, model = CASES[case]
    hold(Task.of(plan_of(with_offload(text), model)))


LISTS = ("F0.0 F0.1 F0.2 I0.0 B0.1 I0.2 W0.2 W0.0", "F1.0 I1.0 F1.1 I1.1 W1.1 W1.0 F1.2 B1.2")


def test_stages_may_follow_lists_that_no_builder_makes() -> None:
    actions = tuple(tuple(map(Action.parse, text.split())) for text in LISTS)

    def listed(plan: Plan) -> Plan:
        return replace(plan, schedule=replace(plan.schedule, actions=actions))

    alone, beside = tasks("tp=1,pp=2,dp=1,recompute=none", llama(num_layers=4), global_batch=3)
    pair = (replace(alone, plan=listed(alone.plan)), replace(beside, plan=listed(beside.plan)))
    hold_alike(pair, EXACT, "literal")


def test_an_evaluation_keeps_nothing_anywhere() -> None:
    _, task = tasks("tp=1,pp=2,dp=1,recompute=none", llama(num_layers=4))
    for losses in on_ranks(2, evaluated, task):
        assert losses[0] == losses[1] and losses[2] == 0


def evaluated(task: Task) -> tuple[float, float, int]:
    engine, alone = engine_of(task), engine_of(replace(task, plan=task.plan))
    loss = engine.evaluate(task.steps[0])
    return loss, alone.step(task.steps[0], 0.0).loss, engine.measured().memory_bytes.get("host", 0)


@pytest.mark.parametrize("text", ["tp=2,pp=2,dp=1,recompute=none+offload", "tp=1,pp=2,dp=1,recompute=full+offload"])
def test_a_dry_run_counts_the_bytes_of_both_memories(text: str) -> None:
    plan = plan_of(text, llama(vocab=32, **DEEP))
    assert plan.prediction
    for rank in (0, plan.mesh.num_ranks - 1):
        memory = plan.prediction.stage_memory[plan.mesh.coordinates(rank)["pp"]]
        assert count_rank(plan, rank).memory_bytes["host"] == memory.host_bytes


def test_views_of_one_memory_come_back_as_views_of_one_memory_and_buffers_are_used_again() -> None:
    host, whole, weight = HostMemory(torch.device("cpu"), torch.device("cpu")), torch.arange(12.0), torch.ones(3)
    kept = {"a": whole[2:8].view(2, 3).t(), "b.ends": [1, 2], "c": weight[1:], "d": whole[::2], "e": torch.empty(0)}
    expected = {name: value.clone() for name, value in kept.items() if isinstance(value, torch.Tensor)}
    memories: set[int] = set()
    for number in range(3):
        host.put(("layer.0", number), dict(kept), {memory_of(weight)})
        host.fetch(("layer.1", number))
        taken = host.take(("layer.0", number))
        memories |= {part.data_ptr() for parts in host._spare.values() for part, _ in parts}
        assert list(taken) == list(kept) and taken["b.ends"] is kept["b.ends"] and taken["c"] is kept["c"]
        assert memory_of(taken["a"]) == memory_of(taken["d"]) != memory_of(whole)
        for name, value in expected.items():
            assert taken[name].equal(value) and taken[name].stride() == kept[name].stride()
    assert host.most_bytes == whole.nbytes and len(memories) == 1


def test_a_plan_without_offload_puts_nothing_into_host_memory() -> None:
    plan = plan_of("tp=1,pp=1,dp=1", llama(), NOTHING)
    assert "host" not in count_rank(plan, 0).memory_bytes


class Event:
    """What a stream has done up to here: ``needs`` are the events that come before it."""

    def __init__(self, needs: set["Event"]) -> None:
        self.needs = set(needs)

    def query(self) -> bool:
        return False


class Stream:
    """A stream that only notes after what its copies come."""

    def __init__(self, *_: Any) -> None:
        self.after: set[Event] = set()

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        self.after |= {event, *event.needs}

    def record_event(self) -> Event:
        event = Event(self.after)
        self.after |= {event}
        return event


def test_a_gpu_copies_beside_its_kernels_and_waits_before_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    main = Stream()
    current = [main]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(offloading, "_GPU", "cpu")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(HostMemory, "_new", lambda self, size: torch.empty(size, dtype=torch.uint8).split(size))
    host = HostMemory(torch.device("cpu"), torch.device("cpu"))
    tensors = [torch.full((4,), float(number)) for number in range(3)]
    copied = list[Event]()
    for number, tensor in enumerate(tensors):
        computed = main.record_event()
        host.put(("layer", number), {"kept": tensor}, ())
        copied.append(host._resting["layer", number].copied)
        assert computed in copied[-1].needs, "a copy comes after what it copies"
        assert copied[-1] not in main.after, "kernels do not wait for it"
        assert all(event in main.after for event in copied[:-1]), "but for the copies before, whose memory is free then"
        assert host._leaving and host._leaving[0] is host._resting["layer", number]
    assert memory_of(host.take(("layer", 2))["kept"]) == memory_of(tensors[2]), "it was still on the device"
    host.fetch(("layer", 1))
    arrived = host._resting["layer", 1].arrived
    assert copied[1] in arrived.needs and arrived not in main.after, (
        "it is fetched once the host has it, beside kernels"
    )
    assert host.take(("layer", 1))["kept"].tolist() == [1.0] * 4 and arrived in main.after
    host.put(("layer", 3), {"kept": tensors[0]}, ())
    assert arrived in host._resting["layer", 3].copied.needs, "its buffer is used again once it was read"
    assert host.take(("layer", 0))["kept"].tolist() == [0.0] * 4 and current == [main]
    assert [*host._resting] == [("layer", 3)]
    host.settle()
    assert host._leaving is None and host._resting["layer", 3].copied in main.after
