"""Several ranks on one GPU: what they send goes through the host, by gloo, because NCCL takes one rank a device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as original

import autoshard.engine.torch.engine as engine_module
from autoshard.engine.torch.formats import Formats
from tests.ranks.cases import StepShare, Task, patched, run_steps
from tests.ranks.spawn import on_ranks


@dataclass(frozen=True, kw_only=True)
class HostWork:
    """Something under way between copies on the host; at its end what has arrived is copied to the device."""

    work: dist.Work
    arriving: Sequence[tuple[torch.Tensor, torch.Tensor]]  # on the device, on the host
    sent: Sequence[torch.Tensor]  # on the host, kept until then

    def wait(self) -> None:
        self.work.wait()
        for there, here in self.arriving:
            there.copy_(here)


def _here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    here = _here(tensor)
    return _ended(original.all_reduce(here, op=op, group=group, async_op=True), [(tensor, here)], async_op)


def broadcast(tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
    here = _here(tensor)
    return _ended(original.broadcast(here, src, group=group, async_op=True), [(tensor, here)], async_op)


def all_gather_single(into: torch.Tensor, given: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    here = _here(into)
    return _ended(original.all_gather_single(here, _here(given), group=group, async_op=True), [(into, here)], async_op)


def reduce_scatter_single(into: torch.Tensor, given: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    here = _here(into)
    work = original.reduce_scatter_single(here, _here(given), group=group, async_op=True)
    return _ended(work, [(into, here)], async_op)


def all_to_all_single(
    into: torch.Tensor, given: torch.Tensor, counts: Any = None, sent: Any = None, group: Any = None
) -> None:
    here = _here(into)
    original.all_to_all_single(here, _here(given), counts, sent, group=group)
    into.copy_(here)


def isend(tensor: torch.Tensor, rank: int, group: Any = None, tag: int = 0) -> HostWork:
    here = _here(tensor)
    work = original.isend(here, rank, group=group, tag=tag)
    assert work
    return HostWork(work=work, arriving=(), sent=(here,))


def irecv(tensor: torch.Tensor, rank: int, group: Any = None, tag: int = 0) -> HostWork:
    here = _here(tensor)
    work = original.irecv(here, rank, group=group, tag=tag)
    assert work
    return HostWork(work=work, arriving=[(tensor, here)], sent=())


@dataclass(frozen=True)
class P2POp:
    """A message that is to be sent or received."""

    op: Callable[..., HostWork]
    tensor: torch.Tensor
    peer: int
    group: Any = None


def batch_isend_irecv(messages: Sequence[P2POp]) -> list[HostWork]:
    return [one.op(one.tensor, one.peer, group=one.group) for one in messages]


def _ended(work: Any, arriving: Sequence[tuple[torch.Tensor, torch.Tensor]], async_op: bool) -> HostWork | None:
    found = HostWork(work=work, arriving=arriving, sent=())
    if async_op:
        return found
    found.wait()
    return None


CALLS: Mapping[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (
        all_reduce, broadcast, all_gather_single, reduce_scatter_single, all_to_all_single, isend, irecv, P2POp,
        batch_isend_irecv,
    )
}  # fmt: skip


def run_through_host(task: Task, device: str, exact: bool) -> list[StepShare]:
    """Run the steps of a task on this rank, on a device that all ranks share."""
    with patched(CALLS):
        return run_steps(task, Formats(exact=exact, device=torch.device(device)), "generated")


def shares_on(device: str, task: Task, *, exact: bool) -> list[StepShare]:
    """Return the first step of every rank of a task; messages between two ranks are selected by tags."""
    untagged = [(engine_module, "channel_backend", lambda _: None)]
    answers = on_ranks(
        task.plan.mesh.num_ranks, run_through_host, task, device, exact, replaced=untagged, timeout_s=180.0
    )
    return [share for (share,) in answers]
