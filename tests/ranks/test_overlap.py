"""What is sent while a rank computes: buckets of gradients, the next block's weights, the next action's message."""

from typing import Any

import pytest
import torch.distributed as dist

from autoshard.engine.torch.block import LiteralRun
from tests.ranks.cases import Task, llama, patched, plan_of, run_steps
from tests.ranks.spawn import on_ranks
from tests.ranks.test_step import planned

pytestmark = pytest.mark.ranks

RECORDED = ("all_reduce", "reduce_scatter_single", "all_gather_single", "irecv")


def events(task: Task) -> list[str]:
    """Run a step; return in order which collectives begin beside the computation, and which blocks run."""
    found: list[str] = []

    def recorded(name: str) -> Any:
        call = getattr(dist, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            if options.get("async_op") or name == "irecv":
                found.append(name)
            return call(*args, **options)

        return wrapped

    def ran(name: str) -> Any:
        call = getattr(LiteralRun, name)

        def wrapped(self: LiteralRun, *args: Any) -> Any:
            found.append(f"{name} begins")
            made = call(self, *args)
            found.append(f"{name} ends")
            return made

        return wrapped

    with patched({name: recorded(name) for name in RECORDED}), pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            patch.setattr(LiteralRun, name, ran(name))
        run_steps(task)
    return found


@pytest.mark.parametrize(("zero", "collective"), [(0, "all_reduce"), (1, "reduce_scatter_single")])
def test_buckets_are_reduced_during_the_last_backward_pass(zero, collective):
    plan = planned(f"tp=1,pp=1,dp=2,mbs=1,zero={zero}", llama(num_layers=4), buckets=True)
    for found in on_ranks(2, events, Task.of(plan)):
        backwards = [number for number, event in enumerate(found) if event == "backward begins"]
        begun = [number for number, event in enumerate(found) if event == collective]
        blocks = 6  # embedding, four layers, head
        assert len(backwards) == 2 * blocks, "two micro-batches"
        assert len(begun) > blocks and begun[0] > backwards[blocks], "nothing is complete before the last micro-batch"
        assert sum(number < backwards[-1] for number in begun) > len(begun) // 2, "most begin before the last block"


def test_weights_arrive_and_gradients_leave_while_another_block_runs():
    plan = plan_of("tp=1,pp=1,dp=2,mbs=2,zero=3", llama(num_layers=2))
    for found in on_ranks(2, events, Task.of(plan)):
        starts = [number for number, event in enumerate(found) if event.endswith("begins")]
        ends = zip([0, *starts], starts, strict=False)
        gathers = [found[before:start].count("all_gather_single") for before, start in ends]
        _, layer, head, *_, embed, _ = gathers
        assert min(embed, layer, head) > 0
        assert gathers == [embed + layer, layer, head, head, layer, layer, embed, 0], "each block's, one block ahead"
        leaving = [number for number, event in enumerate(found) if event == "reduce_scatter_single"]
        assert leaving and leaving[0] < starts[-1], "sums leave before the last block"


def test_the_next_message_is_received_while_an_action_runs():
    plan = plan_of("tp=1,pp=2,dp=1,mbs=1", llama(num_layers=2))
    second = on_ranks(2, events, Task.of(plan))[1]
    received = [number for number, event in enumerate(second) if event == "irecv"]
    backwards = [number for number, event in enumerate(second) if event == "backward begins"][::2]  # a layer, the head
    assert len(received) == len(backwards) == plan.schedule.num_micro_batches
    assert all(one < start for one, start in zip(received[1:], backwards, strict=False)), "before the backward pass"
