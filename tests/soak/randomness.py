"""Modules that draw random numbers, on ranks of torchrun that are killed and go on: every gradient is one process's."""

import copy
import math
import os
import random
import signal
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoshard.modules.shard import sizes_of
from tests.modules.comparing import cut_on_ranks, devices_of
from tests.modules.test_randomness import MODULES, made, on_one_rank, traced
from tests.ranks.torchrun import on_torchrun
from tests.soak.hunt import HuntResult

Step = dict[str, torch.Tensor]  # the loss, and the gradients by path

_MESHES = ("a=2,b=2", "a=4", "a=3", "a=2,b=1")
_STEPS, _SEED = 4, 11
_BOUND = 1e-6  # of the largest: some modules have constants in FP32


def steps(module: torch.nn.Module, x: torch.Tensor, count: int) -> list[Step]:
    """Take steps of SGD."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.05), list[Step]()
    for _ in range(count):
        optimizer.zero_grad()
        loss = cast(torch.Tensor, module(x)).pow(2).mean()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        made_here = {path: one.grad for path, one in module.named_parameters()} | {"loss": loss.detach()}
        found.append({name: whole(one) for name, one in made_here.items() if one is not None})
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    return found


def whole(one: torch.Tensor) -> torch.Tensor:
    """Return all numbers of a tensor, which this rank may have a part of."""
    return one.full_tensor() if isinstance(one, DTensor) else one.clone()


def on_ranks(name: str, mesh: str, seed: int, folder: str, killed: bool) -> list[Step]:
    """Take half of the steps, from the state that is there; save the state, and be killed if so asked."""
    state = Path(folder, f"state-{dist.get_rank()}.pt")
    module, x = made(name)
    cut_on_ranks(module, traced(name, mesh), seed, devices_of(mesh))
    torch.manual_seed(_SEED + dist.get_rank())  # rank 0 decides
    if state.exists():
        saved = cast(Any, torch.load(state, weights_only=False))
        module.load_state_dict(saved["module"])
        torch.set_rng_state(saved["generator"])
    found = steps(module, x, _STEPS // 2)
    dist.barrier()
    torch.save({"module": module.state_dict(), "generator": torch.get_rng_state(), "steps": found}, state)
    dist.barrier()
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def difference(one: Step, other: Step) -> float:
    """Return the largest difference, as a share of the largest number."""
    most = max(float(each.abs().max()) for each in one.values())
    return max(float((each - other[name]).abs().max()) for name, each in one.items()) / most


def hunt(cases: int, seed: int, folder: Path) -> HuntResult:
    """Run so many modules in random layouts."""
    generator, failures = random.Random(seed), list[str]()
    for number in range(cases):
        name, mesh, cut = generator.choice([*MODULES]), generator.choice(_MESHES), generator.randrange(2**16)
        (place := folder / str(number)).mkdir()
        begun_s, count = time.monotonic(), math.prod(sizes_of(mesh).values())
        try:
            plain, x = made(name)
            plain = on_one_rank(copy.deepcopy(plain), traced(name, mesh))
            torch.manual_seed(_SEED)
            wanted = steps(plain, x, _STEPS)
            with pytest.raises(AssertionError, match="Signal 9"):  # as torchrun tells
                on_torchrun(place, count, on_ranks, name, mesh, cut, str(place), True)
            first = cast(Any, torch.load(place / "state-0.pt", weights_only=False))["steps"]
            second = on_torchrun(place, count, on_ranks, name, mesh, cut, str(place), False)[0]
            worst = max(difference(*pair) for pair in zip(wanted, [*first, *second], strict=True))
            if worst > _BOUND:
                failures.append(f"{name} on {mesh}, cuts {cut}: differs by {worst:.1e}")
        except Exception as error:
            failures.append(f"{name} on {mesh}, cuts {cut}: {str(error).strip()[-400:]}")
        print(f"{number + 1}/{cases} {name} on {mesh}: {time.monotonic() - begun_s:.0f} s", flush=True)
    remark = f"{len(MODULES)} modules in random layouts, killed after step 2 of 4; equal to {_BOUND:.0e} of the largest"
    return HuntResult(held=cases - len(failures), failures=failures, remark=remark)
