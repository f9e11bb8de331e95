"""Constants of a cluster from measured runs: which rows a fit can use, and what its constants rest on."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from autoshard.calibration.fitting import FitRows, Sample, judged, timer
from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.prior import prior_of
from autoshard.calibration.rows import MeasuredRow, MeasuredRows, measured_rows
from autoshard.calibration.suspects import suspects
from autoshard.calibration.validate import validated
from autoshard.cost.calibration import Calibration
from autoshard.errors import Fault, InputError, require
from autoshard.spec.cluster_catalogue import load_node_type
from autoshard.units import counted

_LEAST_ROWS = 3
_WIDEST = 0.95  # an interval that files may state


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSamples:
    """The runs of a cluster that a fit can use, from when the newest is, and why other rows are left out.

    No fit is to those that are ``suspected`` of being wrong; errors are those of all.
    """

    samples: tuple[Sample, ...]
    newest: str
    left_out: tuple[Fault, ...]
    suspected: frozenset[str] = frozenset()  # ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRows:
    """The rows of a cluster in a path that say how long a step took, with what was run; and all rows of the path."""

    runs: tuple[tuple[MeasuredRow, MeasuredRun], ...]
    rows: MeasuredRows

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The runs as a fit sees them."""
        return tuple(
            Sample(id=row.id, run=run, step_time_s=row.step_time_s or 0.0, group=row.group or row.id)
            for row, run in self.runs
        )


def timed_rows(path: Path, cluster: str) -> TimedRows:
    """Return the rows of a path that are of a cluster, or of its chips, and say how long a step took."""
    node_type = load_node_type(cluster)
    rows = measured_rows(path)
    faults: dict[str, InputError] = {}
    runs: list[tuple[MeasuredRow, MeasuredRun]] = []
    for where, row in rows.rows.items():
        try:
            untimed = "is not there to be fitted to"
            require((not row.unfit, "", row.unfit), (bool(row.step_time_s), "step_time_s", untimed))
            run = run_of(row, node_type if row.platform == node_type.name else rows.clusters.get(where))
            platform, same = run.cluster.name, run.cluster.chip.name == node_type.chip.name
            require((same, "platform", f"was run on {platform}, not on {node_type.name} or its chips"))
            timer(run)
        except InputError as error:
            faults[where] = error
        else:
            runs.append((row, run))
    return TimedRows(runs=tuple(runs), rows=rows.without(faults))


def samples_in(path: Path, cluster: str, date: str | None = None) -> FitSamples:
    """Return the rows of a path that a fit can use, or say why they are too few."""
    timed = timed_rows(path, cluster)
    name, count, left_out = load_node_type(cluster).name, len(timed.runs), timed.rows.left_out_lines
    few = f"{counted(count, 'row')} of {name} with a step_time_s: too few, a fit needs {_LEAST_ROWS}"
    alone = "all rows are of one layout; a fit needs two, to predict one from the other"
    several = len({run for _, run in timed.runs}) > 1
    try:
        require((count >= _LEAST_ROWS, str(path), few), (several or not count, str(path), alone))
    except InputError as error:
        raise InputError([*error.faults, *left_out]) from None
    newest = date or max(row.first_seen or "" for row, _ in timed.runs)
    require((bool(newest), "--date", f"missing; no row of {path} has first_seen, so say from when they are"))
    ids = {row.id for row, _ in timed.runs}
    named = {
        suspect.id: suspect.says
        for suspect in suspects(validated(path, own=load_node_type(cluster)))
        if suspect.id in ids
    }
    if count - len(named) < _LEAST_ROWS:
        named = {}
    wrong = (Fault(where=where, message=f"looks wrong, and is not fitted to: {says}") for where, says in named.items())
    return FitSamples(samples=timed.samples, newest=newest, left_out=(*left_out, *wrong), suspected=frozenset(named))


def fit(fit_samples: FitSamples, name: str, least_interval: float | None = None) -> Calibration:
    """Fit the constants of a cluster to its runs, and say what they rest on.

    The fit starts from what would be known without the rows, and is pulled to it. With ``least_interval`` the interval
    is at least so wide, and rows that no constants describe are accepted.
    """
    samples, runs = fit_samples.samples, [sample.run for sample in fit_samples.samples]
    prior = prior_of(runs, [sample.id for sample in samples])
    result = judged(FitRows(samples=samples, prior=prior, suspected=fit_samples.suspected), fit_samples.newest)
    rests_on, constants, interval = result.fit, result.constants, result.interval
    off = rests_on.left_out_mape
    far_off = f"rows are {off:.0%} off when they are left out: the cost model does not describe them"
    require((max(interval, off) < 1 or least_interval is not None, "interval", f"{far_off}, and no constants make it"))
    interval = interval if least_interval is None else min(max(interval, least_interval), _WIDEST)
    sizes, inside = [abs(math.log(ratio)) for ratio in rests_on.rows.values()], result.inside
    if least_interval is not None:
        inside = sum(size <= math.log1p(interval) for size in sizes) / len(sizes)
    newest, software = fit_samples.newest, constants.software
    count, layouts = counted(len(samples), "row"), counted(rests_on.num_layouts, "layout")
    rows = f"{count} of {', '.join(sorted({run.cluster.name for run in runs}))}"
    newest += f", release {software.releases[-1]}" if software and software.releases else ""
    within = f"{inside:.0%} of rows are within it when their {rests_on.left_out_by} is left out of the fit"
    fitted_to = f"fitted to {rows}, from {prior.centre.name}"
    return replace(
        constants,
        name=name,
        interval=interval,
        seen=result.seen,
        best_mfu=result.best_mfu,
        basis=f"calibrated on {rows} ({layouts}, newest {newest}): mean error "
        f"{rests_on.in_sample_mape:.1%}, {off:.1%} where the {rests_on.left_out_by} is left out; nominal 80% interval "
        f"of a factor of {1 + interval:.2f} either way, which holds {inside:.0%} of those",
        fit=rests_on,
        sources={
            **prior.centre.sources,
            **{constant: fitted_to for unknown in prior.unknowns for constant in unknown.names},
            "interval": within,
        },
    )
