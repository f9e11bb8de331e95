"""The loop of a run on one rank: batches in, steps out, every step timed."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from autoshard.engine.base import Batch, Builds, Engine, Measured, Run
from autoshard.engine.ran import RunReport, TimedStep
from autoshard.plan.plan import Plan
from autoshard.runtime.data.batches import StepShape, batches
from autoshard.runtime.data.synthetic import SyntheticTokens

Say = Callable[[TimedStep], None]


def train(plan: Plan, run: Run, build: Builds, say: Say) -> RunReport:
    """Take the steps of a run on this rank, and say each when it is done; torch's world must be running."""
    engine, source, shape = build(plan, run), SyntheticTokens.of(plan, run.training.seed), StepShape.of(plan)
    # Devices take no Python objects.
    hosts: Any = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    steps: list[TimedStep] = []
    for number in range(run.training.steps):
        given, rate = batches(source, number * shape.num_samples, shape), run.training.rate(number + 1)
        steps.append(_step(engine, number, given, rate, hosts))
        say(steps[-1])
    return RunReport(steps=tuple(steps), ranks=_from_all(engine.measured(), hosts))


def _step(engine: Engine, number: int, micro_batches: Sequence[Batch], rate: float, hosts: Any) -> TimedStep:
    """Take one step; the clock runs from when all ranks are ready until the last is done."""
    dist.barrier(hosts)
    start_s = time.perf_counter()
    report = engine.step(micro_batches, rate)
    dist.barrier(hosts)
    time_s = time.perf_counter() - start_s
    num_tokens = sum(batch["tokens"].size for batch in micro_batches)
    return TimedStep(number=number + 1, loss=report.loss, norm=report.norm, time_s=time_s, num_tokens=num_tokens)


def _from_all(mine: Measured, hosts: Any) -> tuple[Measured, ...]:
    found: list[Measured] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine, hosts)
    return tuple(found)
