"""One rank of a world that times collectives: ``torchrun -m benchmarks.trainium.ranks FILE``, started by wires.py."""

# pyright: basic
# Neuron's packages are not installed where types are checked.

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.runtime.machine import joined_device

Groups = Sequence[Sequence[int]]
_WARM_UP = 2


def main(file: Path) -> None:
    """Time what a file names, all ranks together, and let rank 0 write the seconds of the slowest."""
    given: Mapping[str, Any] = json.loads(file.read_text("utf-8"))
    device, local_rank = given["device"], int(os.environ["LOCAL_RANK"])
    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    else:
        dist.init_process_group(joined_device(device, local_rank), init_method="env://")
    hosts: Any = None if device == "cpu" else dist.new_group(backend="gloo")
    made = dict[str, Any]()  # groups of torch's, by the text of all
    with Path(given["out"]).open("a", encoding="utf-8") as lines:
        for wire in given["wires"]:
            kind, groups = wire["kind"], wire["groups"]
            call = _xla_call(kind, groups) if device == "xla" else _torch_call(kind, groups, made)
            taken = torch.tensor([_seconds(call, _buffer(wire, device), device, given["times"])], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX, group=hosts)
            if dist.get_rank() == 0:
                lines.write(json.dumps([wire["name"], taken.item()]) + "\n")
                lines.flush()
    dist.destroy_process_group()


def _buffer(wire: Mapping[str, Any], device: str) -> Tensor:
    """Return what a rank gives: of a gather its part, else the whole."""
    whole = wire["bytes"] // 2  # BF16
    count = whole // len(wire["groups"][0]) if wire["kind"] == "all_gather" else whole
    made = torch.ones(count, dtype=torch.bfloat16)
    return made.to(importlib.import_module("torch_xla.core.xla_model").xla_device() if device == "xla" else device)


def _seconds(call: Callable[[Tensor], Any], buffer: Tensor, device: str, times: int) -> float:
    for _ in range(_WARM_UP):
        _end(call(buffer), device)
    _wait(device)
    dist.barrier() if device == "cpu" else None
    start_s = time.perf_counter()
    for _ in range(times):
        _end(call(buffer), device)
    _wait(device)
    return (time.perf_counter() - start_s) / times


def _end(_: Any, device: str) -> None:
    if device == "xla":
        importlib.import_module("torch_xla").sync()


def _wait(device: str) -> None:
    if device == "xla":
        importlib.import_module("torch_xla.core.xla_model").wait_device_ops()
    elif device != "cpu":
        torch.accelerator.synchronize()


def _xla_call(kind: str, groups: Groups) -> Callable[[Tensor], Any]:
    """Return a collective of torch_xla's, of all groups at once."""
    xla: Any = importlib.import_module("torch_xla.core.xla_model")
    lists, size = [list(group) for group in groups], len(groups[0])
    pairs = [[rank, group[(at + 1) % size]] for group in lists for at, rank in enumerate(group)]
    calls: Mapping[str, Callable[[Tensor], Any]] = {
        "all_reduce": lambda one: xla.all_reduce("sum", one, groups=lists, pin_layout=False),
        "all_gather": lambda one: xla.all_gather(one, dim=0, groups=lists, pin_layout=False),
        "reduce_scatter": lambda one: xla.reduce_scatter(
            "sum", one, scale=1.0, scatter_dim=0, shard_count=size, groups=lists, pin_layout=False
        ),
        "all_to_all": lambda one: xla.all_to_all(
            one, split_dimension=0, concat_dimension=0, split_count=size, groups=lists, pin_layout=False
        ),
        "permute": lambda one: xla.collective_permute(one, pairs),
    }
    return calls[kind]


def _torch_call(kind: str, groups: Groups, made: dict[str, Any]) -> Callable[[Tensor], Any]:
    """Return a collective of torch.distributed's, of this rank's group."""
    number, mine = next((at, list(group)) for at, group in enumerate(groups) if dist.get_rank() in group)
    if str(groups) not in made:
        made[str(groups)] = [dist.new_group(list(group)) for group in groups]  # every rank makes all of them
    group, size, at = made[str(groups)][number], len(mine), mine.index(dist.get_rank())
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # since 2.13, and before
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def permute(one: Tensor) -> Tensor:
        found = torch.empty_like(one)
        sends = [
            dist.P2POp(dist.isend, one, mine[(at + 1) % size], group),
            dist.P2POp(dist.irecv, found, mine[at - 1], group),
        ]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        return found

    calls: Mapping[str, Callable[[Tensor], Any]] = {
        "all_reduce": lambda one: dist.all_reduce(one, group=group),
        "all_gather": lambda one: gather(one.new_empty(len(one) * size), one, group=group),
        "reduce_scatter": lambda one: scatter(one.new_empty(len(one) // size), one, group=group),
        "all_to_all": lambda one: dist.all_to_all_single(torch.empty_like(one), one, group=group),
        "permute": permute,
    }
    return calls[kind]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
