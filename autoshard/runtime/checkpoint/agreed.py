"""What ranks agree on: an operation of the first rank, or of all ranks, succeeds for all of them or fails for all."""

import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from autoshard.errors import InputError
from autoshard.runtime.checkpoint.storage import StorageError

Value = TypeVar("Value")


def from_first_rank(operation: Callable[[], Value], group: Any) -> Value:
    """Return the result of the first rank's operation on every rank, or raise its error on every rank."""
    message: list[Any] = [_tried(operation) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(message, 0, group=group)
    value, error = message[0]
    if error:
        raise error
    return value


def from_all_ranks(operation: Callable[[], Value], group: Any) -> list[Value]:
    """Run an operation on every rank; return all results on the first rank, or raise the first error on all."""
    results: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(_tried(operation), results, 0, group)

    def look() -> None:
        for rank, (_, error) in enumerate(results or ()):
            if error:
                raise StorageError(f"rank {rank}: {error}")

    from_first_rank(look, group)
    return [value for value, _ in results or ()]


def _tried(operation: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    """Return the result of an operation, or its error; the other ranks wait for one of the two."""
    try:
        return operation(), None
    except (InputError, StorageError) as error:
        return None, error
    except Exception as error:
        with suppress(OSError):  # the disk of the log may be full, and the others wait
            traceback.print_exc()
        return None, StorageError(f"{type(error).__name__}: {error}")
