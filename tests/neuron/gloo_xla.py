"""What NxD and ZeRO-1 call of torch_xla, on CPU tensors and gloo groups.

Each collective does what XLA's of the same name does. Lists are handled tensor by tensor: buckets are not tested here.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Ranks = Any  # lists of ranks, one list of them, or a group
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_GROUPS: dict[tuple[int, ...], Any] = {}  # of this process, which is one rank of one world
_NAMES_TAKING_LISTS = ("all_reduce", "get_world_size")


def group_of(ranks: Ranks) -> Any:
    """Return this rank's group of lists of ranks."""
    if not isinstance(ranks, list | tuple):
        return ranks
    lists = ranks if isinstance(ranks[0], list | tuple) else [ranks]
    mine: tuple[int, ...] = next(tuple(one) for one in lists if dist.get_rank() in one)
    assert mine == tuple(sorted(mine)), f"gloo would order {mine} anew"
    if mine not in _GROUPS:
        _GROUPS[mine] = dist.new_group(list(mine), backend="gloo", use_local_synchronization=True)
    return _GROUPS[mine]


def all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, groups: Ranks = None, **_: Any) -> Any:
    """A list is reduced in place; of a tensor the sum is returned."""
    if isinstance(inputs, Tensor):
        return all_reduce(reduce_type, [inputs.clone()], scale, groups)[0]
    for tensor in inputs:
        whole = tensor.detach().contiguous()
        dist.all_reduce(whole, op=_OPERATIONS[reduce_type], group=group_of(groups))
        tensor.data.copy_(whole * scale)
    return inputs


def all_gather(value: Any, dim: int = 0, groups: Ranks = None, output: Any = None, **_: Any) -> Any:
    """Put the blocks of all ranks behind each other along a dim."""
    return _each(value, output, lambda one: _gathered(one, dim, group_of(groups)))


def reduce_scatter(reduce_type: str, input: Any, scale: float, *, groups: Ranks, output: Any = None, **how: Any) -> Any:
    """Sum, and keep this rank's block along a dim."""
    scatter_dim, shard_count = how["scatter_dim"], how["shard_count"]

    def reduced(one: Tensor) -> Tensor:
        group, whole = group_of(groups), one.detach().clone().contiguous()
        assert dist.get_world_size(group) == shard_count and whole.shape[scatter_dim] % shard_count == 0
        dist.all_reduce(whole, op=_OPERATIONS[reduce_type], group=group)
        return whole.chunk(shard_count, dim=scatter_dim)[dist.get_rank(group)].contiguous() * scale

    return _each(input, output, reduced)


def _gathered(one: Tensor, dim: int, group: Any) -> Tensor:
    mine = one.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, dim=dim)


def _each(value: Any, output: Any, call: Callable[[Tensor], Tensor]) -> Any:
    """Do one tensor or a list of them; where there is an ``output``, put the results there."""
    if isinstance(value, Tensor):
        result = call(value)
        return result if output is None else output.data.copy_(result)
    return [_each(one, output[number] if output else None, call) for number, one in enumerate(value)]


def _rank(*_: Any) -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _ranks_of_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", _world_size()))


def _rendezvous(*_: Any, **__: Any) -> list[bytes]:
    if _world_size() > 1:
        dist.barrier()
    return []


def _nothing(*_: Any, **__: Any) -> None:
    """Graphs are cut here on a device; a CPU has none."""


class Arena:
    """``ToXlaTensorArena``: the tensors that are asked for, anywhere in lists and dicts, converted together."""

    def __init__(self, convert: Callable[[list[Any]], list[Any]], select: Callable[[Any], bool]) -> None:
        self._convert, self._select = convert, select

    def transform(self, value: Any) -> Any:
        """Collect, convert, and put in place what was made."""
        found: list[Any] = []
        self._walk(value, lambda one: found.append(one) or one)
        made = iter(self._convert(found))
        return self._walk(value, lambda _: next(made))

    def _walk(self, value: Any, put: Callable[[Any], Any]) -> Any:
        if self._select(value):
            return put(value)
        if isinstance(value, Mapping):
            return type(value)((key, self._walk(one, put)) for key, one in value.items())  # pyright: ignore
        if isinstance(value, list | tuple):
            return type(value)(self._walk(one, put) for one in value)
        return value


MODEL: Mapping[str, Any] = {
    "REDUCE_SUM": "sum",
    "REDUCE_MAX": "max",
    "REDUCE_MIN": "min",
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "all_gather_bucketized": lambda input_list, **options: all_gather(list(input_list), **options),
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_bucketized": lambda kind, tensors, **options: reduce_scatter(kind, list(tensors), **options),
    "rendezvous": _rendezvous,
    "xla_device": lambda *_: torch.device("cpu"),
    "is_xla_tensor": lambda _: False,
    "get_ordinal": _rank,
    "is_master_ordinal": lambda *_: _rank() == 0,
    "mark_step": _nothing,
    "unlazy": _nothing,
    "optimization_barrier_": _nothing,
    "add_step_closure": lambda call, args=(), **_: call(*args),
    "fork_rng": nullcontext,  # nothing here draws at random
    "get_rng_state": lambda *_: 0,
    "set_rng_state": _nothing,
    "master_print": _nothing,
    "ToXlaTensorArena": Arena,
}
RUNTIME: Mapping[str, Any] = {
    "global_ordinal": _rank,
    "local_ordinal": lambda: _rank() % _ranks_of_node(),
    "world_size": _world_size,
    "global_device_count": _world_size,
    "local_process_count": _ranks_of_node,
}


def take_lists() -> None:
    """Let torch.distributed take lists of ranks, which NxD hands it for ZeRO-1 even where it computes on a CPU."""
    for name in _NAMES_TAKING_LISTS:
        setattr(dist, name, _taking_lists(getattr(dist, name)))


def _taking_lists(call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*given: Any, **named: Any) -> Any:
        return call(*given, **{**named, "group": group_of(named["group"])} if "group" in named else named)

    return wrapped
