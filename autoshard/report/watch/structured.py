"""A run that is watched, as JSON."""

from typing import Any

from autoshard.report.watch.progress import RunProgress
from autoshard.run.reports import with_nulls
from autoshard.spec.record import encode


def progress_json(one: RunProgress) -> dict[str, Any]:
    """Return all that is known of a run; a loss that is not finite is null, and ``nonfinite`` says what it was."""
    last = one.last and with_nulls({
        "step": one.last.step.number, "loss": one.last.step.loss, "norm": one.last.step.norm, "at": one.last.at,
        "learning_rate": one.last.step.learning_rate, "updated": one.last.step.updated, "phase": one.last.step.phase,
    })  # fmt: skip
    pace = one.pace and {**encode(one.pace), "ratio": one.pace.ratio, "inside": one.pace.inside}
    plain = {name: value for name, value in encode(one).items() if name not in ("last", "pace")}
    return {**plain, "last": last, "pace": pace, "is_bad": one.is_bad, "is_over": one.is_over}
