"""Futures in the order in which they end, and none left locked by an interrupt."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count
from types import FrameType
from typing import Any

import pytest

from autoshard.runtime.futures import as_they_end


def test_futures_come_in_the_order_in_which_they_end():
    first, second = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        slow, quick = pool.submit(second.wait, 60), pool.submit(first.wait, 60)
        ended = as_they_end([slow, quick])
        first.set()
        assert next(ended) is quick
        second.set()
        assert next(ended) is slow
        assert next(ended, None) is None


def test_futures_that_are_cancelled_on_the_way_come_too():
    futures = [Future[int]() for _ in range(3)]
    futures[1].set_result(1)
    ended = as_they_end(futures)
    assert next(ended).result() == 1
    assert futures[0].cancel() and futures[2].cancel()
    assert {*ended} == {futures[0], futures[2]}


def by_us(futures: list[Future[int]]) -> Callable[[], object]:
    ended = as_they_end(futures)
    next(ended)
    return lambda: next(ended)


def by_the_library(futures: list[Future[int]]) -> Callable[[], object]:
    return lambda: wait(futures, return_when=FIRST_COMPLETED)


class Interrupt:
    """Raises KeyboardInterrupt before a line is run, which is given by its number."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, _: FrameType, event: str, __: Any) -> "Interrupt":
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def some_are_stuck(waiting: Callable[[list[Future[int]]], Callable[[], object]]) -> bool:
    """Interrupt waiting before each of its lines; return whether a future can no longer end after one of them."""
    for line in count(1):
        futures = [Future[int]() for _ in range(4)]
        for future in futures[:2]:
            future.set_result(0)
        waits, before = waiting(futures), sys.gettrace()
        try:
            sys.settrace(Interrupt(line))
            waits()
            assert line > 1, "some line was interrupted"
            return False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        for future in futures[2:]:
            worker = threading.Thread(target=future.set_result, args=(1,), daemon=True)
            worker.start()
            worker.join(0.5)
            if worker.is_alive():
                return True
    raise AssertionError


@pytest.mark.parametrize(("waiting", "is_safe"), [(by_us, True), (by_the_library, False)])
def test_an_interrupt_while_waiting_leaves_no_future_locked(waiting: Any, is_safe: bool):
    assert some_are_stuck(waiting) != is_safe
