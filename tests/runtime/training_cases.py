"""Short runs of small plans: what they said, and what their curves are."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.engine.programs import graph_of
from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.formats import Formats
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Builds, Engine, Run, whenever_finite
from autoshard.run.reports import Measured, RunReport, SavedStep, Started, TimedStep
from autoshard.runtime.launch import Placing, launch, patience_s
from autoshard.runtime.machine import builder
from autoshard.runtime.train import train
from autoshard.runtime.watchdog import Watch
from autoshard.spec.training import Checkpointing, Training, Watching
from tests.reference_step import random_weights
from tests.runtime.cases import tiny_plan, wait_until

_UNCOMPARED = Watching(collectives="off")  # tests/ranks/test_agreement.py compares; here it is a third of each start


@cache
def plan_of(text: str, **options: Any) -> Plan:
    return tiny_plan(text, seq_len=8, **options)


class Double:
    """An engine that computes in double precision, so that losses can be compared to the last digits."""

    def __init__(self, plan, run):
        weights = random_weights(graph_of(plan), np.random.default_rng(run.training.seed), scale=0.02)
        self.engine = TorchEngine(plan, weights.__getitem__, Formats(exact=True))
        self.pieces, self.restored = self.engine.pieces, self.engine.restored
        self.evaluate = self.engine.evaluate

    def step(self, micro_batches, learning_rate, allows=whenever_finite):
        return self.engine.step(micro_batches, learning_rate, allows)

    def measured(self):
        return Measured(memory_bytes={"weights": 4}, sent_bytes={})


def before_steps(act: Callable[[int], object]) -> Builds:
    """Build engines that do something before each step of a start, counted from 1."""

    def build(plan: Plan, run: Run) -> Engine:
        engine: Any = builder("torch")(plan, run)
        step, taken = engine.step, list[int]()

        def acting(*arguments: Any) -> Any:
            taken.append(1)
            act(len(taken))
            return step(*arguments)

        engine.step = acting
        return engine

    return build


class Trained:
    """What a start of a run said, until it ended or failed."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.report: RunReport | None = None

    @property
    def started(self) -> Started:
        return next(one for one in self.said if isinstance(one, Started))

    @property
    def steps(self) -> list[TimedStep]:
        return [one for one in self.said if isinstance(one, TimedStep)]

    @property
    def curve(self) -> dict[int, float]:
        assert all(step.loss is not None for step in self.steps), "every step has answers"
        return {step.number: step.loss for step in self.steps if step.loss is not None}

    @property
    def notes(self) -> str:
        return "\n".join(str(one) for one in (*self.started.notes, *self.said) if isinstance(one, SavedStep | str))

    @property
    def saved_steps(self) -> list[int]:
        return [one.step for one in self.said if isinstance(one, SavedStep)]


def trained(
    plan: Plan, folder: Path, steps: int, *, build: Any = None, found: Trained | None = None, **options: Any
) -> Trained:
    """Run until a step; options are those of a run, and fields of its training. After a failure ``found`` is known."""
    found = found or Trained()
    watch, resume = options.pop("watch", False), options.pop("resume", "auto")
    keeping = {name: options.pop(name) for name in tuple(options) if name in Checkpointing.__dataclass_fields__}
    asked: dict[str, Any] = {"learning_rate": 1e-2, "watchdog": _UNCOMPARED, **options}
    training = Training(steps=steps, checkpoint=Checkpointing(**keeping), **asked)
    run, made = Run(folder=folder, training=training, resume=resume), build or builder("torch")
    grace_s = patience_s(plan, training.checkpoint, here=True)
    watched = Watch(folder, plan, training.watchdog, here=True) if watch else None
    placing = Placing(folder=folder, watch=watched, grace_s=grace_s)
    found.report = launch(
        None, plan.mesh.num_ranks, lambda say: train(plan, run, made, say, watched), show=found.said.append,
        placing=placing,
    )  # fmt: skip
    return found


@contextmanager
def after_steps(found: Trained, number: int, act: Callable[[], None]) -> Iterator[None]:
    """Act when a run has taken so many steps."""

    def watch() -> None:
        wait_until(lambda: len(found.steps) >= number, f"step {number}")
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()
