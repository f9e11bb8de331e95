"""Times of slices as viewers of traces read them without loss: speedscope as they are, Perfetto in whole nanoseconds.

A tick is a binary fraction of a microsecond, so that sums of ticks are exact. Perfetto rounds the begin of a slice and
its length apart (older versions cut both), and leaves out a slice that then overlaps with the one before. A length that
is two ticks shorter does not overlap either way.
"""

TICKS_PER_US = 1024
_APART = 2


def ticks(time_s: float) -> int:
    """Return a time in ticks.

    >>> ticks(1e-6)
    1024
    """
    return round(float(time_s) * 1e6 * TICKS_PER_US)


def slice_times(begin: int, end: int) -> dict[str, float]:
    """Return begin and length of a slice in microseconds, under their names in the format.

    >>> slice_times(1024, 3074)
    {'ts': 1.0, 'dur': 2.0}
    """
    return {"ts": begin / TICKS_PER_US, "dur": max(0, end - begin - _APART) / TICKS_PER_US}
