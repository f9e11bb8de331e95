"""How far a choice follows the cost model: plans that differ by less than its doubt are told apart by other things.

A difference of few percent means nothing where predictions are off by half. So the simple plan may take more than the
fastest by a share that grows with the interval of the fastest, and a schedule that nobody has measured on a platform is
chosen only where it gains more than this share.
"""

from typing import Final, Literal

from autoshard.cost.built_in import measured_schedules
from autoshard.cost.calibration import Calibration
from autoshard.plan.plan import Prediction
from autoshard.schedule.builders import builders
from autoshard.search.fill.stage_options import ALL_RANGES

DOUBT: Final = "doubt"
Within = float | Literal["doubt"]  # of the fastest: by which share a simple plan may be slower
# Half of what the best calibration is off on rows that it was not fitted to.
LEAST_DOUBT = 0.02
# Chosen: where an interval is half of the time and more, a choice among plans is worth no more than this.
_MOST = 0.10
# Of an interval: two plans of one question are off by much the same, so an interval is wider than the doubt about
# which of them is faster. Chosen so that the width of calibrated platforms, about 10 %, gives the least.
_SHARE = 0.2


def doubt_of(prediction: Prediction) -> float:
    """Return by which share plans may be slower before that counts: a fifth of the interval, from 2 % to 10 %.

    It is rounded to tenths of a percent, as it is printed.
    """
    width = prediction.high_s / prediction.step_time_s - 1
    return round(min(_MOST, max(LEAST_DOUBT, _SHARE * width)), 3)


def short_percent(share: float) -> str:
    """Print a share to a tenth of a percent.

    >>> short_percent(0.02), short_percent(0.026), short_percent(0.1)
    ('2%', '2.6%', '10%')
    """
    return f"{100 * share:.3g}%"


def usual_schedules(constants: Calibration) -> frozenset[str]:
    """Return the schedules that may be chosen unasked whatever they gain.

    These are 1F1B and GPipe, whose passes all others divide further, and those that rows of the platform have; where
    ranks have chunks, the rows must have chunks as well.
    """
    seen = constants.seen["schedule"].values if "schedule" in constants.seen else ()
    has_chunks = constants.reach is not None and "vp" in constants.reach.axes
    measured = {
        name for name, builder in builders().items() if name in seen and (builder.num_chunks == 1 or has_chunks)
    }
    return frozenset(measured | {*ALL_RANGES})


def known_schedules(constants: Calibration) -> tuple[frozenset[str], ...]:
    """Return the schedules that a choice is made from, the best known first.

    The usual ones come first, then those that rows of any platform have as well.
    """
    usual = usual_schedules(constants)
    return usual, usual | measured_schedules()
