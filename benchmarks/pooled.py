"""How programs depart from their hardware, fitted to their rows: one departure for each program on each cluster.

What a chip reaches in micro-benchmarks is where the fit starts and what it is pulled to (``cost/hardware.json``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.calibration.fitting import FitRows, Sample, judged
from autoshard.calibration.prior import Prior, prior_around, reach_of
from autoshard.cost.calibration import RATIOS, Calibration, uncalibrated
from autoshard.cost.departures import Departure, numbers_of
from autoshard.errors import InputError

_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class ProgramRows:
    """The rows of one program on one cluster."""

    framework: str
    cluster: str
    samples: tuple[Sample, ...]
    newest: str
    chip: str  # whose shares the fit starts from
    without: tuple[str, ...] = ()  # constants that are taken to add nothing
    suspected: frozenset[str] = frozenset()  # ids of rows that look wrong

    @cached_property
    def hardware(self) -> Mapping[str, float]:
        """The constants of a program that does not depart."""
        return numbers_of(self.chip, {})

    @cached_property
    def rows(self) -> FitRows:
        """The rows of a fit that starts from the hardware."""
        runs = [sample.run for sample in self.samples]
        prior = prior_around(replace(uncalibrated(), **self.hardware), runs, self.chip)
        nothing = {name: float(name in RATIOS) for name in self.without}
        unknowns = tuple(unknown for unknown in prior.unknowns if unknown.names[0] not in nothing)
        prior = Prior(centre=replace(prior.centre, **nothing), unknowns=unknowns)
        return FitRows(samples=self.samples, prior=prior, suspected=self.suspected)

    def departed(self, constants: Calibration, names: Iterable[str]) -> Mapping[str, float]:
        """Return factors of shares and seconds of hosts, as files state them."""
        factors: dict[str, float] = {}
        for name in names:
            value = getattr(constants, name)
            factors[name] = float(f"{value / self.hardware[name] if 'efficiency' in name else value:.{_DIGITS}g}")
        return factors


def departure_of(program: ProgramRows) -> Departure:
    """Fit one departure, with what it rests on."""
    judgement, reach = judged(program.rows, program.newest), reach_of(program.rows.runs)
    return Departure(
        framework=program.framework,
        cluster=program.cluster,
        kernels=reach.kernels,
        constants=program.departed(judgement.constants, judgement.moving),
        interval=judgement.interval,
        best_mfu=judgement.best_mfu,
        axes=reach.axes,
        seen=judgement.seen,
        fit=judgement.fit,
    )


def program_rows(
    samples: Sequence[Sample], dates: Mapping[str, str], suspected: Iterable[str] = ()
) -> list[ProgramRows]:
    """Tell programs and clusters apart; ``dates`` are those of rows, by their names; some rows look wrong."""
    by_program: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        framework = (sample.run.framework or "").partition(" (")[0]
        if not framework:
            raise InputError.of(sample.id, "has no framework, so nothing says which program ran")
        by_program.setdefault((framework, sample.run.cluster.name), []).append(sample)
    return [
        ProgramRows(
            framework=framework,
            cluster=cluster,
            samples=tuple(rows),
            chip=rows[0].run.cluster.chip.name,
            newest=max(dates.get(sample.id, "") for sample in rows),
            suspected=frozenset(suspected) & {sample.id for sample in rows},
        )
        for (framework, cluster), rows in by_program.items()
    ]
