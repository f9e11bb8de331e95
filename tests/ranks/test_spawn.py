import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.spawn import RankFailed, on_ranks

pytestmark = pytest.mark.ranks


def summed(number):
    tensor = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(tensor)
    return int(tensor), tensor


def failing():
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.all_reduce(torch.zeros(1))


def dying():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.zeros(1))


def sleeping():
    time.sleep(60)


def test_every_rank_answers_in_order():
    assert [number for number, _ in on_ranks(3, summed, 10)] == [33, 33, 33]


def test_the_rank_that_failed_first_is_named_with_its_traceback():
    with pytest.raises(RankFailed, match=r"failing on 2 ranks: rank 1 failed\n(.|\n)*ValueError: on purpose"):
        on_ranks(2, failing)


def test_a_process_that_vanishes_is_a_failure():
    with pytest.raises(RankFailed, match=r"rank [01] failed"):
        on_ranks(2, dying)


def test_silence_ends_after_the_time_allowed():
    with pytest.raises(RankFailed, match=r"no answer from ranks \[0, 1\] within 0.5 s"):
        on_ranks(2, sleeping, timeout_s=0.5)


@pytest.mark.parametrize("body", [failing, dying, sleeping])
def test_no_process_is_left_behind(body):
    before = set(multiprocessing.active_children())
    with pytest.raises(RankFailed):
        on_ranks(2, body, timeout_s=1.0)
    assert set(multiprocessing.active_children()) == before
