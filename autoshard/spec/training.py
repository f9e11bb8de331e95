"""Settings of a training run that its plan does not hold: data, steps, learning rate, checkpoints, trackers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from autoshard.errors import in_range, require
from autoshard.extensions import from_folder
from autoshard.spec.files import seen_from

LossOn = Literal["all", "answers"]
Check = Literal["sizes", "full"]
Shape = Literal["constant", "linear", "cosine", "wsd"]
Extend = Literal["keep", "rescale"]
NO_PROJECT = "is no project of W&B: type its name, not a file or a path"
_WSD_SHARE = 5  # wsd: the last fifth of the steps decays (Hagele et al. 2024, arXiv:2405.18392, use 10 to 20%)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Sets of tokens, and how they are read; without a set the tokens are synthetic.

    Args:
        sets: Each a folder of `autoshard tokenize`, a prefix of .bin and .idx, or a small .txt file, with its weight;
            of a module whose samples are no tokens, FILE.py:FUNCTION, which returns a data set.
        loss_on: Which tokens count in the loss: all, or only the answers of conversations.
        check: What is checked before the run: the sizes of all files, or (full) every byte of them.
    """

    sets: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    loss_on: LossOn = "all"
    check: Check = "sizes"

    def __post_init__(self) -> None:
        no_set = "answers need a set of conversations. Make one with autoshard tokenize --chat"
        require(
            *_weights_checked(self.sets),
            (self.loss_on == "all" or bool(self.sets), "loss_on", no_set),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """How a run is judged by tokens that it does not train on; without a set it is not judged.

    Args:
        sets: Sets of tokens, as those of data, with their weights.
        every_steps: Evaluate after every this many steps, and after the last one.
        samples: How many sequences are read, the same ones each time; rounded up to whole global batches.
        keep_best: Save the state where the loss is the lowest so far, and never delete that checkpoint.
    """

    sets: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    every_steps: int = 100
    samples: int = 256
    keep_best: bool = True

    def __post_init__(self) -> None:
        require(*_weights_checked(self.sets), *in_range(self, "every_steps", "samples", low=1))

    def is_due(self, step: int, num_steps: int) -> bool:
        """Say whether the model is evaluated after a step, counted from 1.

        >>> [step for step in range(1, 8) if Evaluating(sets={"a": 1.0}, every_steps=3).is_due(step, 7)]
        [3, 6, 7]
        """
        return bool(self.sets) and (step % self.every_steps == 0 or step == num_steps)


def _weights_checked(sets: Mapping[str, float]) -> list[tuple[bool, str, str]]:
    """Check the weights of sets."""
    return [
        (0 < weight < math.inf, f"sets.{name}", f"the weight must be above 0, not {weight}")
        for name, weight in sets.items()
    ]


def _seen_from(sets: Mapping[str, float], folder: Path) -> Mapping[str, float]:
    """Return sets as seen from the folder of a recipe."""
    return {seen_from(name, folder): weight for name, weight in sets.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """The learning rate over the steps: it rises from zero to its peak, then falls in some shape to a share of it.

    Args:
        shape: After the warm-up: constant, linear, cosine, or wsd (constant, then linear over the last decay_steps).
        warm_up_steps: Steps in which the rate rises linearly from 0 to its peak.
        final: The learning rate of the last step as a share of the peak; not for shape constant.
        decay_steps: For wsd: how many steps at the end decay. Default: a fifth of all.
        over_steps: Over how many steps the curve is laid; later steps keep its last rate. Default: all steps.
        extend: Of a run that goes on with other steps, where the new curve would change rates that were used:
            keep the curve as it was, or rescale it over the new steps, with a jump of the rate.
    """

    shape: Shape = "constant"
    warm_up_steps: int = 0
    final: float = 0.0
    decay_steps: int | None = None
    over_steps: int | None = None
    extend: Extend = "keep"

    def __post_init__(self) -> None:
        of_wsd = f"is an option of shape wsd, not of {self.shape}"
        no_effect = "has no effect on the shape constant. Set final to 0"
        require(
            *in_range(self, "warm_up_steps"),
            *in_range(self, "final", high=1),
            *in_range(self, "decay_steps", "over_steps", low=1),
            (self.decay_steps is None or self.shape == "wsd", "decay_steps", of_wsd),
            (self.final == 0 or self.shape != "constant", "final", no_effect),
        )

    def share(self, step: int, num_steps: int) -> float:
        """Return the share of the peak in a step, counted from 1.

        >>> [round(RateSchedule(shape="cosine", warm_up_steps=2).share(step, 6), 3) for step in (1, 2, 3, 4, 5, 6)]
        [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
        """
        num_steps = self.over_steps or num_steps
        if step <= self.warm_up_steps:
            return step / self.warm_up_steps
        first = self.warm_up_steps
        if self.shape == "wsd":
            first = max(first, num_steps - (self.decay_steps or -(-num_steps // _WSD_SHARE)))
        if self.shape == "constant" or step <= first:
            return 1.0
        done = min(1.0, (step - first) / max(1, num_steps - first))
        remaining = (1 + math.cos(math.pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return self.final + (1 - self.final) * remaining


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConstants:
    """The constants of AdamW; weights of norms and biases do not decay.

    Args:
        beta1: Share of the first moment that each step keeps.
        beta2: Share of the second moment that each step keeps.
        eps: Added to the root of the second moment.
        weight_decay: Each step subtracts this times the learning rate times the weight.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        require(
            (0 <= self.beta1 < 1, "beta1", f"must be from 0 to below 1, not {self.beta1}"),
            (0 <= self.beta2 < 1, "beta2", f"must be from 0 to below 1, not {self.beta2}"),
            *in_range(self, "eps", positive=True),
            *in_range(self, "weight_decay"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """When and where the state of a run is saved, and which checkpoints are kept.

    Args:
        to: A folder or a URL such as s3://bucket/run; none saves nothing. Default: checkpoints, in the run's folder.
        every_steps: Save after every this many steps.
        every_minutes: Save when this many minutes have passed since the last checkpoint.
        keep_last: How many of the newest checkpoints are kept.
        keep_every: The first checkpoint at or after each multiple of this many steps is never deleted.
        grace_seconds: How long after SIGTERM or Ctrl-C the ranks may take to end their step and save it. Default: what
            a step and two saves take by the plan, and 30 s.
    """

    to: str | None = None
    every_steps: int | None = None
    every_minutes: float | None = 30.0
    keep_last: int = 2
    keep_every: int | None = None
    grace_seconds: float | None = None

    def __post_init__(self) -> None:
        require(
            *in_range(self, "every_steps", "every_minutes", "keep_every", positive=True),
            *in_range(self, "grace_seconds"),
            *in_range(self, "keep_last", low=1),
        )

    @property
    def saves(self) -> bool:
        """Whether checkpoints are saved."""
        return self.to != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """When a run that stands still is ended; its state is saved before, if the ranks still can.

    Args:
        step_s: Seconds in which no rank moves inside a step. Default: four steps, at least 24 s.
        data_s: Seconds for which a step waits for its data, and a start or a save for its storage.
        off: End no run; only warn.
        collectives: When all ranks compare which collectives they are about to begin: before the first step, before
            every step (to find a fault; steps take longer), or never (off).
    """

    step_s: float | None = None
    data_s: float = 600.0
    off: bool = False
    collectives: Literal["first", "every", "off"] = "first"

    def __post_init__(self) -> None:
        require(*in_range(self, "step_s", "data_s", positive=True))


def is_project(name: str) -> bool:
    """Say whether a name may be a project of W&B; that of a file was meant for another option.

    >>> is_project("scaling"), is_project("list.yaml"), is_project("a/b")
    (True, False, False)
    """
    return not set(name) & {*"/\\#?%:"} and not name.endswith((".yaml", ".yml", ".json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    """Where the metrics of a run go besides its own folder.

    Args:
        wandb: The Weights & Biases project that gets plan, metrics and summary; offline where there is no key.
        tensorboard: Write the metrics for TensorBoard too, in the folder of the run.
        name: The name of the run there. Default: the name of its folder.
        norms: Every so many updates, note the norms of gradient and weights by name, each over all layers.
    """

    wandb: str | None = None
    tensorboard: bool = False
    name: str | None = None
    norms: int | None = None

    def __post_init__(self) -> None:
        named = not self.wandb or is_project(self.wandb)
        require((named, "wandb", f"{self.wandb} {NO_PROJECT}"), *in_range(self, "norms", positive=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All settings of a run that its plan does not hold.

    Args:
        steps: Number of optimizer steps of the whole run.
        seed: Seed of the first weights and of the order of the data.
        learning_rate: The peak of the learning rate.
        on_nonfinite: What to do if loss or gradient norm is not finite: stop before the update, or skip the update.
        skip_budget: With on_nonfinite skip: how many steps of the run may be skipped before it stops.
        data: The tokens to train on.
        eval: How the run is judged meanwhile, by other tokens.
        deterministic: Add numbers in one order on GPUs too, so that equal runs have equal bits. It costs time.
        init_weights: Where weights come from: a run, one of its checkpoints, or a Hugging Face folder. Default: drawn
            at random.
        schedule: The learning rate over the steps.
        adamw: The constants of AdamW.
        checkpoint: When the state is saved, and where.
        watchdog: When a run that stands still is ended.
        track: Where the metrics go besides the folder of the run.
    """

    steps: int = 20
    seed: int = 0
    learning_rate: float = 3e-4
    on_nonfinite: Literal["stop", "skip"] = "stop"
    skip_budget: int = 10
    deterministic: bool = False
    init_weights: str | None = None
    data: DataSpec = field(default_factory=DataSpec)
    eval: Evaluating = field(default_factory=Evaluating)
    schedule: RateSchedule = field(default_factory=RateSchedule)
    adamw: AdamWConstants = field(default_factory=AdamWConstants)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    watchdog: Watching = field(default_factory=Watching)
    track: Tracking = field(default_factory=Tracking)

    def __post_init__(self) -> None:
        require(
            *in_range(self, "steps", low=1),
            *in_range(self, "seed", "skip_budget"),
            *in_range(self, "learning_rate", positive=True),
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return self.learning_rate * self.schedule.share(step, self.steps)

    @property
    def without_data(self) -> str:
        """Say that a run draws its samples, if no set is named."""
        drawn = "data: no --data.set is named, so samples are drawn at random: times and memory count, losses do not"
        return "" if self.data.sets else drawn

    @property
    def eval_data(self) -> DataSpec:
        """The tokens that judge the run, of which count what counts where it trains."""
        return replace(self.data, sets=self.eval.sets)

    def seen_from(self, folder: Path) -> "Training":
        """Return the settings with sets and weights as seen from the folder of a recipe."""
        data = replace(self.data, sets=_seen_from(self.data.sets, folder))
        weights = self.init_weights and seen_from(self.init_weights, folder)
        judging = replace(self.eval, sets=_seen_from(self.eval.sets, folder))
        return replace(self, data=data, eval=judging, init_weights=weights)

    def absolute(self, here: Path) -> "Training":
        """Return the settings with absolute paths; relative ones lead from the folder ``here``."""

        def whole(name: str) -> str:
            return name if "://" in name else from_folder(name, here)

        to, weights = self.checkpoint.to, self.init_weights
        return replace(
            self,
            data=replace(self.data, sets={whole(name): weight for name, weight in self.data.sets.items()}),
            eval=replace(self.eval, sets={whole(name): weight for name, weight in self.eval.sets.items()}),
            checkpoint=replace(self.checkpoint, to=to if to in (None, "none") else whole(to)),
            init_weights=weights and whole(weights),
        )
