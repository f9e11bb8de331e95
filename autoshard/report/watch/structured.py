"""A run that is watched, as JSON."""

from typing import Any

from autoshard.report.watch.progress import RunProgress
from autoshard.run.reports import with_nulls
from autoshard.spec.record import encode


def progress_json(progress: RunProgress) -> dict[str, Any]:
    """Return all that is known of a run; a loss that is not finite is null, and ``nonfinite`` says what it was."""
    newest = progress.last
    last = newest and with_nulls({
        "step": newest.step.number, "loss": newest.step.loss, "norm": newest.step.norm, "at": newest.at,
        "learning_rate": newest.step.learning_rate, "updated": newest.step.updated, "phase": newest.step.phase,
        "router": newest.step.router and newest.step.router.figures,
    })  # fmt: skip
    pace = progress.pace and {**encode(progress.pace), "ratio": progress.pace.ratio, "inside": progress.pace.inside}
    plain = {name: value for name, value in encode(progress).items() if name not in ("last", "pace")}
    return {**plain, "last": last, "pace": pace, "is_bad": progress.is_bad, "is_over": progress.is_over}
