"""Lists in one word: items are joined by ``/``, repeats are written ``item*n``, brackets protect what they hold."""

import itertools
import re
from collections.abc import Iterable

from autoshard.errors import InputError

MAX_ITEMS = 65_536  # more stages than any cluster has ranks; keeps a typing error from filling memory
_REPEATED = re.compile(r"(.*?)(?:\*([0-9]{1,9}))?", re.DOTALL)


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Split at separators that are not inside ``[]`` or ``()``.

    >>> split_outside_brackets("recompute=selective[attend,act],tp=8", ",")
    ['recompute=selective[attend,act]', 'tp=8']
    """
    depth, start, parts = 0, 0, list[str]()
    for index, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == separator and depth <= 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def expand_counts(text: str) -> tuple[str, ...]:
    """Write out a run-length list.

    >>> expand_counts("9/10*2/11")
    ('9', '10', '10', '11')
    """
    runs: list[tuple[str, int]] = []
    for part in split_outside_brackets(text, "/"):
        match = _REPEATED.fullmatch(part)
        assert match is not None, "the pattern takes any text"
        if not match[1] or match[2] == "0":
            raise InputError.of("", f"{part!r} is an empty item. Write item or item*n with n of at least 1")
        runs.append((match[1], int(match[2] or 1)))
    if sum(count for _, count in runs) > MAX_ITEMS:
        raise InputError.of("", f"more than {MAX_ITEMS} items")
    return tuple(item for item, count in runs for _ in range(count))


def compress(items: Iterable[str]) -> str:
    """Write a list in its shortest form.

    >>> compress(["9", "10", "10", "11"])
    '9/10*2/11'
    """
    runs = ((item, len(list(run))) for item, run in itertools.groupby(items))
    return "/".join(item if count == 1 else f"{item}*{count}" for item, count in runs)
