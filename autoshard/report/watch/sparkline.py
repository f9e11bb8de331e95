"""Numbers as columns of characters."""

import math
import statistics
from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:|"


def columns(values: Sequence[float | None], width: int, height: int = 1, *, ascii_only: bool = False) -> list[str]:
    """Draw numbers in a row as lines of text, the top one first: the least is a column of one part, the most is full.

    Neighbours share a column, as their mean, where there are more of them than columns. None and what is no number is
    marked by ``x``.

    >>> columns([1, 2, 3, None, 8], width=5)
    ['▁▂▃x█']
    >>> columns([0, 2, 4], width=3, height=2)
    [' ▁█', '▁██']
    """
    parts = _ASCII if ascii_only else _EIGHTHS
    means = [_mean(values[low:high]) for low, high in _bounds(len(values), width)]
    finite = [mean for mean in means if mean is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    full = (len(parts) - 1) * height

    def cell(mean: float | None, line: int) -> str:
        if mean is None:
            return " " if line else "x"
        share = (mean - low) / (high - low) if high > low else 0.5
        above = 1 + round((full - 1) * share) - line * (len(parts) - 1)
        return parts[min(max(above, 0), len(parts) - 1)]

    return ["".join(cell(mean, line) for mean in means) for line in reversed(range(height))]


def _bounds(count: int, width: int) -> list[tuple[int, int]]:
    """Return where neighbourhoods of ``count`` numbers begin and end, at most ``width`` of them."""
    num = min(count, width)
    return [(count * place // num, count * (place + 1) // num) for place in range(num)]


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(finite) if len(finite) == len(values) and finite else None
