"""Samples of a run by their number, the micro-batches of a step, cut from consecutive samples, and steps made ahead."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from autoshard.graph.kinds.indexing import random_document_starts
from autoshard.graph.op import Array
from autoshard.plan.code import data_key
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Batch

_CHANCE = 0.1  # of the synthetic tokens follow no rule, so that the loss has a floor as in real text
_UNCOUNTED = 0.1  # of their labels do not count, as the padding of real data
_AHEAD = 2  # steps: one slow read is hidden behind a whole step
_CLOSING_S = 0.5  # for a step that is being made


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Consecutive samples: their tokens, which labels count, and where documents start."""

    tokens: Array  # [count, seq_len + 1] int64: labels are the next tokens
    counted: Array  # [count, seq_len] bool: which labels count in the loss
    document_starts: Array  # [count, seq_len] int64: index of the first token of each token's document
    data: Mapping[str, Array] = field(default_factory=dict[str, Array])  # by argument, where samples are no tokens


class SampleSource(Protocol):
    """Where samples come from. Sample k is a pure function of the source and k: no position, no state."""

    def samples(self, first: int, count: int) -> Samples:
        """Return the samples of these numbers, however they were asked for before."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How a step cuts its samples."""

    num_micro_batches: int
    micro_batch: int  # samples, over all data-parallel ranks
    separate: bool = False  # attention and positions stop at documents, so batches say where these start

    @classmethod
    def of(cls, plan: Plan) -> "StepShape":
        """Return the shape of a plan's step."""
        return cls(
            num_micro_batches=plan.schedule.num_micro_batches,
            micro_batch=plan.micro_batch * plan.mesh.size("dp"),
            separate=plan.workload.documents == "separate",
        )

    @property
    def num_samples(self) -> int:
        """Samples of one step."""
        return self.num_micro_batches * self.micro_batch


def batches(source: SampleSource, first_sample: int, shape: StepShape) -> tuple[Batch, ...]:
    """Return the micro-batches of the step that begins with this sample.

    All counted tokens of the step weigh the same, and together one: a mean of the means of micro-batches would favour
    those that count few. A step without any counted label weighs nothing, so its loss and its gradients are zero.
    """
    samples = source.samples(first_sample, shape.num_samples)
    along = np.arange(samples.counted.shape[1])
    weights = samples.counted / max(1, int(samples.counted.sum()))
    micro_batches: list[Batch] = []
    for start in range(0, shape.num_samples, shape.micro_batch):
        rows = slice(start, start + shape.micro_batch)
        batch = {
            "samples": first_sample + np.arange(start, start + shape.micro_batch),
            "tokens": samples.tokens[rows, :-1],
            "labels": samples.tokens[rows, 1:],
            "positions": along,
            "key_positions": along,
            "token_weight": weights[rows],
        }
        batch |= {data_key(name): numbers[rows] for name, numbers in samples.data.items()}
        micro_batches.append(batch | ({"document_starts": samples.document_starts[rows]} if shape.separate else {}))
    return tuple(micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticTokens:
    """A source that needs no files; a sample holds a few documents, which its tokens do not show."""

    seq_len: int
    vocab: int
    seed: int = 0

    def samples(self, first: int, count: int) -> Samples:
        """Draw each sample from a generator of its own; at least one of its labels counts."""
        generators = [np.random.default_rng((self.seed, 1, number)) for number in range(first, first + count)]
        counted = np.stack([generator.random(self.seq_len) for generator in generators]) >= _UNCOUNTED
        counted |= ~counted.any(axis=1, keepdims=True)
        starts = [
            random_document_starts(np.random.default_rng((self.seed, 2, number)), (1, self.seq_len))
            for number in range(first, first + count)
        ]
        successor = np.random.default_rng((self.seed, 0)).permutation(self.vocab)
        length = self.seq_len + 1  # one token more than a sequence is long, because labels are the next tokens
        drawn = np.stack([generator.integers(0, self.vocab, length) for generator in generators], axis=1)
        by_chance = np.stack([generator.random(length) for generator in generators], axis=1) < _CHANCE
        for place in range(1, length):
            drawn[place] = np.where(by_chance[place], drawn[place], successor[drawn[place - 1]])
        return Samples(tokens=drawn.T, counted=counted, document_starts=np.concatenate(starts))


def synthetic_step(plan: Plan) -> tuple[Batch, ...]:
    """Return the first step of a plan on synthetic tokens, for a measurement."""
    return batches(SyntheticTokens(seq_len=plan.workload.seq_len, vocab=plan.model.vocab), 0, StepShape.of(plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The batches of a step."""

    batches: tuple[Batch, ...]
    first_sample: int
    next_sample: int  # the whole state of the loader: a loader that starts there goes on exactly
    waited_s: float  # how long the step had to wait for them


class PrefetchLoader:
    """Prepares the next steps in a thread of its own while one runs. Leave it by ``close``, or as a context.

    An error in the thread is raised by the ``next`` that asks for its step, and by every later one. A read that never
    ends holds up neither ``close`` nor the end of the process.
    """

    def __init__(self, source: SampleSource, shape: StepShape, first_sample: int = 0, ahead: int = _AHEAD) -> None:
        self._source, self._shape, self._first = source, shape, first_sample
        self._steps: deque[tuple[Batch, ...] | Exception] = deque()
        self._changed, self._ahead, self._closed = threading.Condition(), ahead, False
        self._thread = threading.Thread(target=self._prepare, args=(first_sample,), name="loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> "PrefetchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_ready(self, patience_s: float) -> bool:
        """Wait for the next step for a while; return whether it is there."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._steps), patience_s)

    @property
    def failure(self) -> Exception | None:
        """The error that the next step raises, if that is known already."""
        with self._changed:
            first = self._steps[0] if self._steps else None
        return first if isinstance(first, Exception) else None

    def next(self) -> Prepared:
        """Return the next step."""
        start_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: bool(self._steps))
            prepared = self._steps[0]
            if isinstance(prepared, Exception):
                raise prepared
            self._steps.popleft()
            self._changed.notify_all()
        first, self._first = self._first, self._first + self._shape.num_samples
        waited_s = time.perf_counter() - start_s
        return Prepared(batches=prepared, first_sample=first, next_sample=self._first, waited_s=waited_s)

    def close(self) -> None:
        """End the thread, or leave it alone with what it reads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSING_S)

    def _prepare(self, first_sample: int) -> None:
        """Prepare the batches of one step after another, a few steps ahead, until one fails."""
        prepared: tuple[Batch, ...] | Exception = ()
        while not isinstance(prepared, Exception):
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._steps) < self._ahead)
                if self._closed:
                    return
            try:
                prepared = batches(self._source, first_sample, self._shape)
            except Exception as error:  # the step that asks for it raises it
                prepared = error
            with self._changed:
                self._steps.append(prepared)
                self._changed.notify_all()
            first_sample += self._shape.num_samples
