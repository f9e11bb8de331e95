"""Synthetic samples, how a step is cut from samples of any source, and a loader that makes steps ahead."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.errors import RunFailed
from autoshard.runtime.data.batches import PrefetchLoader, Samples, StepShape, SyntheticTokens, batches
from tests.runtime.cases import wait_until

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
    (whole,) = batches(TOKENS, 42, StepShape(num_micro_batches=1, micro_batch=6, separate=True))
    cut = batches(TOKENS, 42, StepShape(num_micro_batches=3, micro_batch=2, separate=True))
    for name in ("tokens", "labels", "token_weight", "document_starts"):
        np.testing.assert_array_equal(np.concatenate([batch[name] for batch in cut]), whole[name])
    assert all("document_starts" not in batch for batch in batches(TOKENS, 0, SHAPE)), "only if they matter"


@given(first=st.integers(0, 10**12), number=st.integers(0, 7))
def test_a_synthetic_sample_depends_on_its_number_and_seed_alone(first: int, number: int) -> None:
    several, one = TOKENS.samples(first, 8), TOKENS.samples(first + number, 1)
    np.testing.assert_array_equal(several.tokens[number], one.tokens[0])
    np.testing.assert_array_equal(several.counted[number], one.counted[0])
    other = SyntheticTokens(seq_len=50, vocab=11, seed=5).samples(first, 1)
    assert len({samples.tobytes() for samples in (*several.tokens, *other.tokens)}) == 9
    assert SyntheticTokens(seq_len=1, vocab=3).samples(first, 4).counted.all(), "at least one label counts"


def test_steps_come_in_order_and_their_state_is_one_number() -> None:
    with PrefetchLoader(TOKENS, SHAPE) as loader:
        first = [loader.next() for _ in range(4)]
    assert [step.first_sample for step in first] == [0, 6, 12, 18]
    with PrefetchLoader(TOKENS, SHAPE, first[1].next_sample) as loader:  # a resumed run
        second = [loader.next()]
    with PrefetchLoader(TOKENS, SHAPE, second[0].next_sample) as loader:  # and one resumed again
        third = loader.next()
    for one, other in ((first[2], second[0]), (first[3], third)):
        assert one.next_sample == other.next_sample
        for mine, its in zip(one.batches, other.batches, strict=True):
            np.testing.assert_array_equal(mine["tokens"], its["tokens"])
    np.testing.assert_array_equal(first[3].batches[1]["labels"], batches(TOKENS, 18, SHAPE)[1]["labels"])


class Slow:
    def __init__(self, fails_at: int = 10**9, takes_s: float = 0.05) -> None:
        self.asked: list[int] = []
        self.fails_at, self.takes_s, self.num_read = fails_at, takes_s, 0

    def samples(self, first: int, count: int) -> Samples:
        self.asked.append(first)
        if first >= self.fails_at:
            raise RunFailed("x.bin: ends too early")
        time.sleep(self.takes_s)
        self.num_read += 1
        return TOKENS.samples(first, count)


def test_the_next_steps_are_made_while_one_runs_but_not_without_end() -> None:
    source = Slow(takes_s=0.5)
    with PrefetchLoader(source, SHAPE) as loader:
        loader.next()
        wait_until(lambda: source.num_read >= 3, "the next step and the one after it are read")
        waited_s = loader.next().waited_s
    assert waited_s < 0.4, "less than the 0.5 s that it takes to make"
    assert len(source.asked) <= 6
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_errors_are_raised_where_the_step_is_asked_for_and_again() -> None:
    with PrefetchLoader(Slow(fails_at=6), SHAPE) as loader:
        loader.next()
        for _ in range(2):
            with pytest.raises(RunFailed, match="ends too early"):
                loader.next()
