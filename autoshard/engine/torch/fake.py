"""A step of one rank of a plan without the other ranks, and without numbers.

One process stands for one rank of many, in a world that is not there; its device holds shapes but no numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.engine.initial import no_memory, no_weights
from autoshard.engine.programs import PlanPrograms, graph_of
from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.formats import NOWHERE, Formats
from autoshard.engine.torch.recording import changed, tensors_in
from autoshard.plan.plan import Plan
from autoshard.run.protocol import HOST, Batch
from autoshard.run.reports import Measured

_BACKEND = "nowhere"
_READ = torch.ops.aten._local_scalar_dense.default
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class NoNumbers(TorchDispatchMode):
    """Numbers read from tensors without memory are 1; an operation on tensors of host and device is an error.

    torch's own FakeTensorMode does the same in eight times the seconds.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = {**kwargs} if kwargs else {}
        if func.namespace == "c10d":  # knows nothing of tensors without memory, and does not look at others here
            sent = changed(args, lambda argument: torch.empty(0) if isinstance(argument, torch.Tensor) else argument)
            counts = [
                isinstance(argument, list) and all(isinstance(size, int) for size in argument) for argument in sent
            ]
            return func(
                *([] if is_counts else argument for argument, is_counts in zip(sent, counts, strict=True)), **options
            )
        tensors = list(tensors_in((*args, *options.values())))
        if func is _READ and tensors[0].is_meta:  # a loss or a norm: any number, but one that may be divided by
            return 1.0 if tensors[0].is_floating_point() else 1
        if func in _COPIES and tensors[0].is_meta and options.get("device") == torch.device(HOST):
            return torch.ones(tensors[0].shape, dtype=tensors[0].dtype)
        if func not in _COPIES and len({argument.device for argument in tensors if argument.dim()}) > 1:
            raise RuntimeError(f"{func} takes tensors of the host and of a device")
        return func(*args, **options)


@contextmanager
def fake_world(rank: int, num_ranks: int) -> Iterator[None]:
    """Make this process one rank of a world of so many, in which every message is lost.

    >>> with fake_world(3, 512):
    ...     total = torch.zeros(10**9, 10**9, device=NOWHERE)
    ...     dist.all_reduce(total)
    ...     dist.get_rank(), dist.get_world_size(), total.shape, float(total.sum())
    (3, 512, torch.Size([1000000000, 1000000000]), 1.0)
    """
    # Groups are those of torch's own backend "fake", which knows no tensors without memory.
    make: Any = FakeProcessGroup._create_internal  # of which the stub leaves an argument out
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(
            _BACKEND, lambda common, options: make(common.group_rank, common.group_size, options),
            extended_api=True, devices=["cpu", NOWHERE.type],
        )  # fmt: skip
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # positions are all that is computed; threads that wait for more would take the seconds
    dist.init_process_group(_BACKEND, rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        with NoNumbers():
            yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(num_threads)


def count_rank(plan: Plan, rank: int, programs: PlanPrograms | None = None) -> Measured:
    """Build a rank of a plan, run a step, check its shapes, and return the bytes that it would have held and sent.

    Routing is taken to be even: all experts get equally many tokens. ``programs`` are those of the plan's table, if no
    others are given.
    """
    graph = programs.graph if programs else graph_of(plan)
    with fake_world(rank, plan.mesh.num_ranks):
        engine = TorchEngine(plan, no_weights(graph), Formats(device=NOWHERE), programs=programs)
        engine.step([batch_without_numbers(plan)] * plan.schedule.num_micro_batches, 0.0, lambda _: True)
        return engine.measured()


def batch_without_numbers(plan: Plan) -> Batch:
    """Return a micro-batch of which only the shapes are known."""
    shape = (plan.micro_batch * plan.mesh.size("dp"), plan.workload.seq_len)
    numbers = {"tokens": np.int64, "labels": np.int64, "token_weight": np.float64, "document_starts": np.int64}
    return {
        "samples": np.arange(shape[0]),
        **{name: no_memory(shape, dtype) for name, dtype in numbers.items()},
    }
