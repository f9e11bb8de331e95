"""A loader gives the steps in order, starts anywhere, passes on errors, and ends."""

import threading
import time

import numpy as np
import pytest

from autoshard.errors import RunFailed
from autoshard.runtime.data.batches import PrefetchLoader, Samples, StepShape, SyntheticTokens, batches

TOKENS = SyntheticTokens(seq_len=8, vocab=11)
SHAPE = StepShape(num_micro_batches=2, micro_batch=3)


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
    def __init__(self, fails_at: int = 10**9) -> None:
        self.asked: list[int] = []
        self.fails_at = fails_at

    def samples(self, first: int, count: int) -> Samples:
        self.asked.append(first)
        if first >= self.fails_at:
            raise RunFailed("x.bin: ends too early")
        time.sleep(0.05)
        return TOKENS.samples(first, count)


def test_the_next_steps_are_made_while_one_runs_but_not_without_end() -> None:
    source = Slow()
    with PrefetchLoader(source, SHAPE) as loader:
        loader.next()
        time.sleep(0.5)  # a step
        waited_s = loader.next().waited_s
    assert waited_s < 0.04, "less than the 0.05 s that it takes to make"
    assert len(source.asked) <= 6


def test_errors_are_raised_where_the_step_is_asked_for_and_again() -> None:
    with PrefetchLoader(Slow(fails_at=6), SHAPE) as loader:
        loader.next()
        for _ in range(2):
            with pytest.raises(RunFailed, match="ends too early"):
                loader.next()


def test_nothing_is_left_after_closing() -> None:
    loader = PrefetchLoader(Slow(), SHAPE)
    loader.next()
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "loader"]
    loader.close()
