"""Synthetic samples, and how a step is cut from samples of any source."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.runtime.data.batches import Samples, StepShape, SyntheticTokens, batches

TOKENS = SyntheticTokens(seq_len=50, vocab=11, seed=4)
SHAPE = StepShape(num_micro_batches=3, micro_batch=2)


class Uncounted:
    """Samples in which nothing counts, as of answers that were all cut off."""

    def samples(self, first: int, count: int) -> Samples:
        nothing = np.zeros((count, 5), np.int64)
        return Samples(tokens=np.zeros((count, 6), np.int64), counted=nothing > 0, document_starts=nothing)


def test_the_weights_of_counted_tokens_add_up_to_one() -> None:
    weights = [batch["token_weight"] for batch in batches(TOKENS, 0, SHAPE)]
    assert sum(weight.sum() for weight in weights) == pytest.approx(1)
    counted = {float(value) for weight in weights for value in weight.ravel()}
    assert len(counted) == 2 and 0.0 in counted, "all that count weigh the same, some do not count"


def test_a_step_in_which_nothing_counts_weighs_nothing() -> None:
    assert all(batch["token_weight"].sum() == 0 for batch in batches(Uncounted(), 0, SHAPE))


def test_labels_are_the_next_tokens_which_mostly_follow_a_rule() -> None:
    cut = batches(TOKENS, 0, SHAPE)
    assert len(cut) == 3
    for batch in cut:
        assert batch["tokens"].shape == batch["labels"].shape == (2, 50)
        assert (batch["tokens"][:, 1:] == batch["labels"][:, :-1]).all()
        assert batch["tokens"].min() >= 0 and batch["tokens"].max() < 11
    pairs = {(int(a), int(b)) for batch in cut for a, b in zip(batch["tokens"].flat, batch["labels"].flat, strict=True)}
    assert len(pairs) < 60, "of 121; chance alone would show nearly all"


def test_a_step_is_the_same_however_it_is_cut() -> None:
    (whole,) = batches(TOKENS, 42, StepShape(num_micro_batches=1, micro_batch=6))
    cut = batches(TOKENS, 42, SHAPE)
    for name in ("tokens", "labels", "token_weight"):
        np.testing.assert_array_equal(np.concatenate([batch[name] for batch in cut]), whole[name])


@given(first=st.integers(0, 10**12), number=st.integers(0, 7))
def test_a_synthetic_sample_depends_on_its_number_alone(first: int, number: int) -> None:
    several, one = TOKENS.samples(first, 8), TOKENS.samples(first + number, 1)
    np.testing.assert_array_equal(several.tokens[number], one.tokens[0])
    np.testing.assert_array_equal(several.counted[number], one.counted[0])


def test_samples_and_seeds_differ() -> None:
    other = SyntheticTokens(seq_len=50, vocab=11, seed=5)
    drawn = [TOKENS.samples(0, 1), TOKENS.samples(1, 1), other.samples(0, 1)]
    assert len({samples.tokens.tobytes() for samples in drawn}) == 3


def test_one_label_of_a_synthetic_sample_always_counts() -> None:
    assert SyntheticTokens(seq_len=1, vocab=3).samples(0, 30).counted.all()


def test_batches_say_where_documents_start_only_when_asked() -> None:
    shape = StepShape(num_micro_batches=3, micro_batch=2, separate=True)
    assert all("document_starts" not in batch for batch in batches(TOKENS, 0, SHAPE))
    assert [batch["document_starts"].shape for batch in batches(TOKENS, 0, shape)] == [(2, 50)] * 3
