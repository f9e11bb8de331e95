"""Synthetic tokens that a model can learn: mostly a fixed successor of the token before, sometimes chance."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.engine.base import Batch
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan

_CHANCE = 0.1  # of the tokens follow no rule, so that the loss has a floor as in real text
_UNCOUNTED = 0.1  # of the labels do not count, as the padding of real data


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticData:
    """The batches of a run: the same for a seed and a step, however the plan cuts them."""

    num_micro_batches: int
    micro_batch: int  # sequences, over all data-parallel ranks
    seq_len: int
    vocab: int
    seed: int = 0

    @classmethod
    def of(cls, plan: Plan, seed: int) -> "SyntheticData":
        """Return what a plan eats."""
        return cls(
            num_micro_batches=plan.schedule.num_micro_batches,
            micro_batch=plan.micro_batch * plan.mesh.size("dp"),
            seq_len=plan.workload.seq_len,
            vocab=plan.model.vocab,
            seed=seed,
        )

    def step(self, number: int) -> tuple[Batch, ...]:
        """Return the micro-batches of a step; the weights of all counted tokens add up to one over all of them."""
        generator = np.random.default_rng((self.seed, 1, number))
        num_sequences = self.num_micro_batches * self.micro_batch
        tokens = self._sequences(generator, num_sequences)
        counts = generator.random((num_sequences, self.seq_len)) >= _UNCOUNTED
        counts |= not counts.any()
        return tuple(self._micro_batches(tokens, counts / counts.sum()))

    def _sequences(self, generator: np.random.Generator, num_sequences: int) -> Array:
        """Draw one token more than a sequence is long, because labels are the next tokens."""
        successor = np.random.default_rng((self.seed, 0)).permutation(self.vocab)
        shape = (self.seq_len + 1, num_sequences)
        drawn, by_chance = generator.integers(0, self.vocab, shape), generator.random(shape) < _CHANCE
        for place in range(1, self.seq_len + 1):
            drawn[place] = np.where(by_chance[place], drawn[place], successor[drawn[place - 1]])
        return drawn.T

    def _micro_batches(self, tokens: Array, weights: Array) -> Iterator[Batch]:
        along = np.arange(self.seq_len)
        for start in range(0, len(tokens), self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            yield {
                "tokens": tokens[rows, :-1],
                "labels": tokens[rows, 1:],
                "positions": along,
                "key_positions": along,
                "token_weight": weights[rows],
            }
