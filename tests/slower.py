"""Parameters of a test of which `make test` tries a few, `make test-all` some more, and `make thorough` the rest."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

MOST_SLOW = 1


def rest_is_slow(values: Iterable[Any], fast: int = 1, slow: int = MOST_SLOW) -> list[Any]:
    """Mark all parameters but the first ones as slow; of many, all but so many that lie evenly among them as thorough.

    >>> [[mark.name for mark in getattr(value, "marks", ())] for value in rest_is_slow(range(5), 1, 2)]
    [[], ['slow'], ['slow', 'thorough'], ['slow'], ['slow', 'thorough']]
    """
    cases = list(values)
    first, rest = cases[:fast], cases[fast:]
    usual = {number * len(rest) // slow for number in range(slow)} if len(rest) > slow else {*range(len(rest))}
    marks = [[pytest.mark.slow, *([] if number in usual else [pytest.mark.thorough])] for number in range(len(rest))]
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=of_value)
        for value, of_value in zip([*first, *rest], [*([[]] * len(first)), *marks], strict=True)
    ]


def each_third_is_fast(values: Iterable[Any]) -> list[Any]:
    """Mark two thirds of many alike parameters as slow.

    >>> [[mark.name for mark in getattr(value, "marks", ())] for value in each_third_is_fast(range(4))]
    [[], [], ['slow'], ['slow']]
    """
    cases = list(values)
    fast = cases[::3]
    rest = [value for number, value in enumerate(cases) if number % 3]
    return rest_is_slow([*fast, *rest], len(fast), len(rest))


def covering(*lists: Iterable[Any], fast: int = 0) -> list[Any]:
    """Return all combinations of several lists of parameters; slow are so few that each parameter is in one of them.

    The first of these are fast, if so many are asked for; all other combinations are thorough.

    >>> cases = covering("ab", [1, 2, 3], fast=1)
    >>> [(*case.values, *(mark.name for mark in case.marks)) for case in cases[:4]]
    [('a', 1), ('b', 2, 'slow'), ('a', 3, 'slow'), ('a', 2, 'slow', 'thorough')]
    """
    values = [[*one] for one in lists]
    count = max(map(len, values))
    covered = [tuple(one[number % len(one)] for one in values) for number in range(count)]
    rest = [case for case in product(*values) if case not in covered]
    marks = [[]] * fast + [[pytest.mark.slow]] * (count - fast) + [[pytest.mark.slow, pytest.mark.thorough]] * len(rest)
    return [pytest.param(*case, marks=of_case) for case, of_case in zip([*covered, *rest], marks, strict=True)]
