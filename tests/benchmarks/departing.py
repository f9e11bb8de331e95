"""The rows of this repository by program, priced once for all tests of a process: a quarter of a minute."""

import functools

from benchmarks import departures

departing_rows = functools.cache(departures.departing_rows)
