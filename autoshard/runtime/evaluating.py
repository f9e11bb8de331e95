"""Judging the state of a run by samples that it does not train on: always the same ones, in the order of their set."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from autoshard.errors import RunFailed, require
from autoshard.plan.plan import Plan
from autoshard.run.activity import RankActivity
from autoshard.run.protocol import Batch, Evaluates
from autoshard.run.reports import EvaluatedStep
from autoshard.runtime.data.batches import SampleSource, StepShape, batches
from autoshard.runtime.data.contents import SetContents
from autoshard.runtime.data.opened import source_of
from autoshard.spec.training import Training

if TYPE_CHECKING:  # which imports torch, and the help of a command does without
    from autoshard.runtime.checkpoint.files import RunState

Reads = Callable[[Callable[[], tuple[Batch, ...]]], tuple[Batch, ...]]  # prepares a batch as it is told

_SEED = 0  # of the order of the samples: two runs with other seeds are judged by the same ones


class NothingCounted(RunFailed):
    """An evaluation had no token that counts; all ranks know it alike."""


def refuse_evaluation(plan: Plan, training: Training, engine: str) -> None:
    """Refuse to judge a run that could not be judged, or by sets that cannot be read."""
    if not training.eval.sets:
        return
    model = plan.model
    drops = max(model.hidden_dropout, model.attention_dropout)
    of_code = "runs of a module's code are not judged meanwhile: what the code drops it would drop then as well"
    named = f"{engine} judges no run meanwhile; the torch engine does. Leave eval out"
    dropping = f"{model.name} drops numbers at random ({drops:g}), also in an evaluation. Plan it without dropout"
    require((engine == "torch", "eval", named), (not drops, "eval", dropping), (plan.code is None, "eval", of_code))
    source_of(plan, training.eval_data, _SEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Judges the weights of a run."""

    training: Training
    source: SampleSource
    shape: StepShape
    seq_len: int

    @classmethod
    def of(cls, plan: Plan, training: Training) -> "Evaluator":
        """Open the sets that judge a run."""
        source = source_of(plan, replace(training.eval_data, check="sizes"), _SEED)
        return cls(training=training, source=source, shape=StepShape.of(plan), seq_len=plan.workload.seq_len)

    @property
    def num_steps(self) -> int:
        """How many batches of a step are read."""
        return -(-self.training.eval.samples // self.shape.num_samples)

    @property
    def judges(self) -> str:
        """Name the sets, what they hold, how much is read, and what of it counts: losses by other tokens differ."""
        sets = ",".join(f"{name}={weight:g}" for name, weight in sorted(self.training.eval.sets.items()))
        counted = f"{self.training.data.loss_on}{' of separate documents' if self.shape.separate else ''}"
        contents = SetContents.of(self.source)
        sums = dict(contents.checksums)
        sizes = " + ".join(f"{size:,} {sums.get(name, 0):08x}" for name, size in contents.sizes)
        words = f"{self.num_steps * self.shape.num_samples} of {self.seq_len} tokens ({counted}) of {sets}"
        return f"{words} ({sizes})" if sizes else words

    def judged(
        self, engine: Evaluates, state: "RunState", activity: RankActivity, read: Reads = lambda prepare: prepare()
    ) -> "tuple[EvaluatedStep, RunState]":
        """Return the mean loss of all counted tokens, and the state that knows the best step so far.

        The watchdog looks at it as at a step. Each batch is prepared by ``read``, which may break the evaluation off.
        """
        start_s, total, count = time.perf_counter(), 0.0, 0
        activity.begin(state.step)
        for number in range(self.num_steps):
            activity.wait("the data of the evaluation", of_storage=True)
            micro_batches = read(partial(batches, self.source, number * self.shape.num_samples, self.shape))
            activity.act("the evaluation")
            counted = sum(int(np.count_nonzero(batch["token_weight"])) for batch in micro_batches)
            total, count = total + engine.evaluate(micro_batches) * counted, count + counted
        activity.begin(0)
        if not count:
            what = f"no token of the {self.num_steps * self.shape.num_samples} samples of eval.set counts in the loss"
            raise NothingCounted(
                f"{what}, so nothing judges step {state.step}. Read more samples, or sets with answers"
            )
        loss = total / count
        first = state.best_loss is None or state.judged_by != self.judges
        best = math.isfinite(loss) and (first or loss < (state.best_loss or 0.0))
        evaluated = EvaluatedStep(
            number=state.step,
            loss=loss,
            num_samples=self.num_steps * self.shape.num_samples,
            time_s=time.perf_counter() - start_s,
            best=best,
        )
        step = state.step if self.training.eval.keep_best else None
        if not best:
            return evaluated, state
        return evaluated, replace(state, best_step=step, best_loss=loss, judged_by=self.judges)
