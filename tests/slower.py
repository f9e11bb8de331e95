"""Parameters of a test of which `make test` tries a few, and `make test-all` the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest_is_slow(values: Iterable[Any], fast: int = 1) -> list[Any]:
    """Mark all parameters but the first ones as slow."""
    return [
        value
        if number < fast
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for number, value in enumerate(values)
    ]
