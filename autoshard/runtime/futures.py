"""Waiting for work that others do, so that Ctrl-C ends it."""

import queue
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def as_they_end(futures: Collection[Future[T]]) -> Iterator[Future[T]]:
    """Yield futures in the order in which they end.

    `concurrent.futures.wait` takes the locks of all of them, each time. An interrupt at that moment leaves locks taken,
    and the pool waits for them for ever: so ended 3 of 40 interrupts of a tokenization in 900 pieces. Here locks are
    taken once, in the beginning; waiting takes none.
    """
    ended: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(ended.put)
    for _ in futures:
        yield ended.get()
