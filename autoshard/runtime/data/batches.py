"""Samples of a run by their number, and the micro-batches of a step, cut from consecutive samples."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Protocol

import numpy as np

from autoshard.engine.base import Batch
from autoshard.graph.kinds.indexing import random_document_starts
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Some samples, in order."""

    tokens: Array  # [count, seq_len + 1] int64: labels are the next tokens
    counted: Array  # [count, seq_len] bool: which labels count in the loss
    document_starts: Array  # [count, seq_len] int64: index of the first token of each token's document

    def __post_init__(self) -> None:
        """Hold the shapes together."""
        count, length = self.tokens.shape
        assert self.counted.shape == self.document_starts.shape == (count, length - 1)


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
        """Return what a plan eats in a step."""
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
    those that count few. A step without any counted label weighs nothing, so its loss is zero.
    """
    return tuple(_micro_batches(source.samples(first_sample, shape.num_samples), shape))


def _micro_batches(samples: Samples, shape: StepShape) -> Iterator[Batch]:
    along = np.arange(samples.counted.shape[1])
    weights = samples.counted / max(1, int(samples.counted.sum()))
    for start in range(0, shape.num_samples, shape.micro_batch):
        rows = slice(start, start + shape.micro_batch)
        batch = {
            "tokens": samples.tokens[rows, :-1],
            "labels": samples.tokens[rows, 1:],
            "positions": along,
            "key_positions": along,
            "token_weight": weights[rows],
        }
        yield batch | ({"document_starts": samples.document_starts[rows]} if shape.separate else {})


_CHANCE = 0.1  # of the tokens follow no rule, so that the loss has a floor as in real text
_UNCOUNTED = 0.1  # of the labels do not count, as the padding of real data


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticTokens:
    """A source that needs no files; a sample holds a few documents, which its tokens do not show."""

    seq_len: int
    vocab: int
    seed: int = 0

    @classmethod
    def of(cls, plan: Plan, seed: int = 0) -> "SyntheticTokens":
        """Return what a plan can eat."""
        return cls(seq_len=plan.workload.seq_len, vocab=plan.model.vocab, seed=seed)

    def samples(self, first: int, count: int) -> Samples:
        """Draw each sample from a generator of its own; at least one of its labels counts."""
        generators = [np.random.default_rng((self.seed, 1, number)) for number in range(first, first + count)]
        counted = np.stack([generator.random(self.seq_len) for generator in generators]) >= _UNCOUNTED
        counted |= ~counted.any(axis=1, keepdims=True)
        starts = [
            random_document_starts(np.random.default_rng((self.seed, 2, number)), (1, self.seq_len))
            for number in range(first, first + count)
        ]
        return Samples(tokens=self._sequences(generators), counted=counted, document_starts=np.concatenate(starts))

    def _sequences(self, generators: list[np.random.Generator]) -> Array:
        """Draw one token more than a sequence is long, because labels are the next tokens."""
        successor = np.random.default_rng((self.seed, 0)).permutation(self.vocab)
        length = self.seq_len + 1
        drawn = np.stack([generator.integers(0, self.vocab, length) for generator in generators], axis=1)
        by_chance = np.stack([generator.random(length) for generator in generators], axis=1) < _CHANCE
        for place in range(1, length):
            drawn[place] = np.where(by_chance[place], drawn[place], successor[drawn[place - 1]])
        return drawn.T


def synthetic_step(plan: Plan) -> tuple[Batch, ...]:
    """Return the first step of a plan, for a measurement or a rehearsal."""
    return batches(SyntheticTokens.of(plan), 0, StepShape.of(plan))


_AHEAD = 2  # steps: one slow read is hidden behind a whole step
_LOOK_S = 0.1  # how often a thread that waits for room looks whether it is still wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The batches of a step."""

    batches: tuple[Batch, ...]
    first_sample: int
    next_sample: int  # the whole state of the loader: a loader that starts there goes on exactly
    waited_s: float  # how long the step had to wait for them


class PrefetchLoader:
    """Reads ahead in a thread of its own; a step is asked for by ``next``. Leave it by ``close``, or as a context.

    What goes wrong in the thread is raised by the ``next`` that asks for the step which could not be made.
    """

    def __init__(self, source: SampleSource, shape: StepShape, first_sample: int = 0, ahead: int = _AHEAD) -> None:
        self._source, self._shape, self._next_sample = source, shape, first_sample
        self._made: Queue[tuple[Batch, ...] | BaseException] = Queue(maxsize=ahead)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._prepare, args=(first_sample,), name="loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> "PrefetchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self) -> Prepared:
        """Return the next step; a failed loader fails again whenever it is asked."""
        start_s = time.perf_counter()
        while True:
            try:
                made = self._made.get(timeout=_LOOK_S)
                break
            except Empty:
                assert not self._left.is_set(), "the loader was closed"
        waited_s = time.perf_counter() - start_s
        if isinstance(made, BaseException):
            self._made.put(made)
            raise made
        first, self._next_sample = self._next_sample, self._next_sample + self._shape.num_samples
        return Prepared(batches=made, first_sample=first, next_sample=self._next_sample, waited_s=waited_s)

    def close(self) -> None:
        """End the thread."""
        self._left.set()
        self._thread.join()

    def _prepare(self, first_sample: int) -> None:
        while not self._left.is_set():
            try:
                made: tuple[Batch, ...] | BaseException = batches(self._source, first_sample, self._shape)
            except BaseException as error:  # to be raised where the step is asked for
                made = error
            self._hand_over(made)
            if isinstance(made, BaseException):
                return
            first_sample += self._shape.num_samples

    def _hand_over(self, made: tuple[Batch, ...] | BaseException) -> None:
        while not self._left.is_set():
            try:
                self._made.put(made, timeout=_LOOK_S)
                return
            except Full:
                continue
