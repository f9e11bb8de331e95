"""A world that is not there: one process stands for one rank of many, and tensors have shapes but no numbers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it makes the backend "fake" known
from torch.utils._python_dispatch import TorchDispatchMode

_READ, _FRESH = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default


class _Shapes(TorchDispatchMode):
    """Tensors that are made have no memory (meta), but whole numbers that come from outside: positions stay real.

    torch's own FakeTensorMode does the same in eight times the seconds.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {**kwargs} if kwargs else {}
        if func.namespace == "c10d":  # knows nothing of tensors without memory, and does not look at others here
            return func(*_of_nothing(args), **given)
        tensors = list(_tensors((args, *given.values())))
        real = func is _FRESH or not any(tensor.is_meta or tensor.is_floating_point() for tensor in tensors)
        if func is _READ and tensors[0].is_meta:  # a loss or a norm: any number, but one that may be divided by
            return 1.0 if tensors[0].is_floating_point() else 1
        if "device" in given and not (real and tensors):
            given["device"] = torch.device("meta")
        return func(*args, **given) if real else func(*_changed(args, _meta), **given)


def _tensors(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in given:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _changed(given: Sequence[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Change all tensors; torch's own tree_map leaves cycles behind, which keep large tensors alive for long."""
    return [
        change(one) if isinstance(one, torch.Tensor)
        else _changed(one, change) if isinstance(one, list | tuple)
        else one
        for one in given
    ]  # fmt: skip


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def _of_nothing(given: Sequence[Any]) -> list[Any]:
    """Let a collective send empty tensors, and no number of elements to each rank of an all-to-all."""
    empty = _changed(given, lambda _: torch.empty(0))
    return [[] if isinstance(one, list) and all(isinstance(size, int) for size in one) else one for one in empty]


@contextmanager
def faked(rank: int, num_ranks: int) -> Iterator[None]:
    """Be one rank of a world of so many, in which nothing takes memory and everything sent is lost.

    >>> with faked(3, 512):
    ...     total = torch.zeros(10**9, 10**9)
    ...     dist.all_reduce(total)
    ...     dist.get_rank(), dist.get_world_size(), total.shape, float(total.sum())
    (3, 512, torch.Size([1000000000, 1000000000]), 1.0)
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # positions are all that is computed; threads that wait for more would take the seconds
    dist.init_process_group("cpu:fake,meta:fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        with _Shapes():
            yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(num_threads)
