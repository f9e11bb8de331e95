import gc
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.modules.test_loops_of_others import import_accelerate
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


def waiting_alone():
    if dist.get_rank():
        time.sleep(60)
    dist.all_reduce(torch.zeros(1))


def folder_of_its_store():
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return Path(store.path).parent


def test_the_folder_of_a_store_outlives_its_case():
    """A rank that ends its store just when the file is removed waits for it for minutes, and dies then."""
    folders = {*on_ranks(2, folder_of_its_store), *on_ranks(2, folder_of_its_store)}
    assert len(folders) == 1 and folders.pop().is_dir()


def test_every_rank_answers_in_order():
    assert [number for number, _ in on_ranks(3, summed, 10)] == [33, 33, 33]


@pytest.mark.parametrize(
    ("body", "timeout_s", "message"),
    [
        (failing, 100.0, r"failing on 2 ranks: rank 1 failed\n(.|\n)*ValueError: on purpose"),
        (dying, 100.0, r"rank [01] failed"),
        (waiting_alone, 4.0, r"rank 0 failed\n(.|\n)*dist.all_reduce(.|\n)*imed out"),
        (sleeping, 2.0, r"no answer from ranks \[0, 1\] within 2.0 s"),
    ],
)
def test_the_first_failure_is_told_and_no_process_is_left_behind(body, timeout_s, message):
    before = set(multiprocessing.active_children())
    with pytest.raises(RankFailed, match=message):
        on_ranks(2, body, timeout_s=timeout_s)
    assert set(multiprocessing.active_children()) == before


def test_a_rank_that_gives_no_answer_says_where_it_stands(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(RankFailed, match="no answer"):
        on_ranks(1, sleeping, timeout_s=2.0, prepare=gc.collect)
    assert "in sleeping\n" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux does")
def test_a_process_that_has_prepared_begins_no_threads_that_its_forks_would_miss():
    (names,) = on_ranks(1, threads_of_parent, prepare=import_accelerate)
    assert len(names) == 1, names


def settling():
    os.environ["A_CASE"] = "was here"


def threads_of_parent():
    return [(thread / "comm").read_text() for thread in Path(f"/proc/{os.getppid()}/task").iterdir()]


def parent():
    return os.getppid()


def test_what_is_prepared_is_no_fork_of_a_process_that_has_worked():
    (worked,) = on_ranks(1, os.getpid)
    first, second = on_ranks(1, parent, prepare=gc.collect), on_ranks(1, parent, prepare=gc.collect)
    assert first == second != [worked]


def test_a_case_leaves_its_process_as_it_was_unless_the_process_is_its_own():
    with pytest.raises(RankFailed, match=r"settling changes \['the environment'\] of a process; with prepare"):
        on_ranks(1, settling)
    assert on_ranks(1, settling, prepare=gc.collect) == [None]
