"""Messages between devices, which know no tags: in order on channels of their own, or refused."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import autoshard.engine.torch.engine as engine_module
from autoshard.errors import InputError
from autoshard.schedule.builders import BUILDERS
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.verify import refuse_crossing
from tests.ranks.cases import Task, compare, gpt, llama, patched, plan_of, run_steps
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

TAGGED = ("isend", "irecv")
CONNECTS = timedelta(seconds=20)


def run_without_tags(task: Task) -> Any:
    """Run on channels, where whatever comes first is taken; gloo's stand in for those of devices.

    As with NCCL, two ranks connect when both first use a channel, and whoever comes first waits.
    """
    connected: set[tuple[str, int]] = set()

    def connect(name: str, rank: int) -> None:
        if (name, rank) not in connected:
            connected.add((name, rank))
            store = distributed_c10d._get_default_store()
            store.set(f"{name} {dist.get_rank()} {rank}", "here")
            store.wait([f"{name} {rank} {dist.get_rank()}"], CONNECTS)

    def untagged(call: Any) -> Any:
        def wrapped(tensor: Any, rank: int, *, tag: int, group: Any) -> Any:
            assert group is not None and tag >= 0
            connect(group.group_name, rank)
            return call(tensor, rank, group=group)

        return wrapped

    with pytest.MonkeyPatch.context() as patch, patched({name: untagged(getattr(dist, name)) for name in TAGGED}):
        patch.setattr(engine_module, "channel_backend", lambda _: "gloo")
        return run_steps(task)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("text", "model"),
    rest_is_slow(
        [
            ("tp=1,pp=2,dp=1,mbs=4", gpt(num_layers=4)),  # what is received ahead follows from what is sent next
            ("tp=1,pp=2,dp=1,vp=2,schedule=zb_v", gpt(num_layers=4)),
            ("tp=2,pp=2,dp=1,vp=2,schedule=interleaved", llama(num_layers=4)),
            ("tp=1,pp=4,dp=1,schedule=zb_h1", gpt(num_layers=4)),
        ]
    ),
)
def test_what_comes_first_on_a_channel_is_what_is_wanted(text, model):
    task = Task.of(plan_of(text, model))
    compare(task.reference(), [steps[0] for steps in on_ranks(task.plan.mesh.num_ranks, run_without_tags, task)])


@pytest.mark.parametrize("builder", BUILDERS)
def test_no_built_in_schedule_crosses_messages(builder):
    own = BUILDERS[builder].num_chunks
    chunks = (own,) if own else (1, 2, 3)
    for num_ranks in (2, 3, 4):
        for num_chunks in chunks:
            schedule = Schedule(builder=builder, num_ranks=num_ranks, num_chunks=num_chunks, num_micro_batches=12)
            refuse_crossing(schedule)


def test_messages_that_cross_are_refused():
    schedule = Schedule(builder="gpipe", num_ranks=2, num_micro_batches=2)
    first, second = schedule.action_lists()
    turned = (second[1], second[0], *second[2:])
    with pytest.raises(InputError, match="rank 1 takes what rank 0 sends in another order"):
        refuse_crossing(replace(schedule, actions=(first, turned)))
