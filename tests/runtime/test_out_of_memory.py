"""A device that is full ends a run with one line: which rank and stage, what was predicted, what to change."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.errors import RunFailed
from autoshard.plan.plan import Plan
from autoshard.run.activity import RankActivity
from autoshard.run.protocol import Engine, Run
from autoshard.runtime.machine import builder
from autoshard.runtime.out_of_memory import explained_when_full
from tests.runtime.training_cases import plan_of, trained

SAID = (
    "CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free."
)


class Full(TorchDispatchMode):
    """A device without memory for products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__:
            raise torch.OutOfMemoryError(SAID)
        return func(*args, **(kwargs or {}))


def full_in_a_kernel(plan: Plan, run: Run) -> Engine:
    """Build an engine whose products find no memory on the last rank, in the second step."""
    engine: Any = builder("torch")(plan, run)
    step, taken = engine.step, list[int]()
    last = torch.distributed.get_rank() == plan.mesh.num_ranks - 1

    def stepping(*arguments: Any) -> Any:
        taken.append(1)
        with Full() if len(taken) == 2 and last else nullcontext():
            return step(*arguments)

    engine.step = stepping
    return engine


@pytest.mark.ranks
def test_a_kernel_without_memory_ends_the_run_with_one_line_about_its_stage(tmp_path: Path) -> None:
    plan = plan_of("tp=1,pp=2,dp=1")
    with pytest.raises(RunFailed) as failure:
        trained(plan, tmp_path, 4, build=full_in_a_kernel, to="none")
    (line,) = str(failure.value).splitlines()
    assert re.match(
        r"rank 1, on place 1 of the pipeline, ran out of the memory of its device in step 2 in F1\.0 ", line
    )
    assert "(stage 1, micro-batch 0), when 3.91 GiB more were asked for. The plan predicts " in line
    assert "larger --headroom" in line


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("tp=1,pp=1,dp=2,zero=0", "Plan with --fix zero=1, or"),
        ("tp=1,pp=1,dp=2,zero=1", "Plan with --fix zero=3, or"),
        ("tp=1,pp=1,dp=1", "Plan with a larger tp or pp, for more ranks, or"),
        ("tp=1,pp=1,dp=4,zero=3,weight_group=2", "Plan with a larger weight_group than 2, or without, or"),
    ],
)
def test_what_to_change_is_what_the_plan_has_most_of(text: str, remedy: str) -> None:
    plan = plan_of(text)
    with pytest.raises(RunFailed, match=remedy), explained_when_full(plan, 0, "cpu", RankActivity(), "in step 1"):
        raise torch.OutOfMemoryError(SAID)


def test_other_errors_stay_what_they_are() -> None:
    with (
        pytest.raises(ValueError, match="other"),
        explained_when_full(plan_of("tp=1,pp=1,dp=1"), 0, "cpu", RankActivity(), ""),
    ):
        raise ValueError("other")
