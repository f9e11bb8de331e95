"""Synthetic tokens that a model can learn: mostly a fixed successor of the token before, sometimes chance."""

from dataclasses import dataclass

import numpy as np

from autoshard.engine.base import Batch
from autoshard.graph.evaluate import random_document_starts
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan
from autoshard.runtime.data.batches import StepShape, batches
from autoshard.runtime.data.source import Samples

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
