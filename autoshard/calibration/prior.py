"""What is known of constants before any row: where they lie, and by how much each may be off, by kind of platform.

The unknowns of a fit are how far constants lie from their centre, 0 each at first. Factors of shares, and of
frameworks, are unknown as logarithms. Seconds of hosts are squares of their unknowns, so that they are never negative
and can grow a hundredfold. A common slowness of all rates that is less certain than the single ones gives one share for
all where rows do not tell rates apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.calibration.measured_run import MeasuredRun
from autoshard.cost.built_in import known_before
from autoshard.cost.calibration import Calibration, Reach, Software
from autoshard.cost.departures import EFFICIENCIES, MOST, hardware, is_measured
from autoshard.spec import record
from autoshard.spec.files import parsed_json
from autoshard.spec.kernels import load_kernels

Array = NDArray[np.float64]
Kind = Literal["eager", "compiled", "host"]  # hosts start kernels of accelerators, graphs, or are the device
_AXES = ("tp", "pp", "cp", "ep", "dp", "vp")
_DIGITS = 6  # of a constant: far beyond what rows decide, and a file that people can read
_SLOWEST = 0.05  # of squares, whose slopes are nothing at nothing
_RELEASE, _FRAMEWORK = "slower_per_release", "framework "


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """By how much the constants of a kind of platform may be off, as standard deviations.

    ``shares`` are of logarithms, by names of constants that move together. Seconds are usual ones times the square of
    1 + an unknown with the deviation in ``hosts``.
    """

    common: float
    shares: Mapping[str, float] = field(hash=False)
    hosts: Mapping[str, float] = field(hash=False)
    usual: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    per_release: float = 0.0  # by how much older releases may be slower, each
    framework: float = 0.0
    believed: float = 0.0  # what a single share may be off by at least, though a fit does better to tell none apart
    settled: str = ""  # the release from which on steps take what the constants say


@cache
def widths(kind: Kind) -> Widths:
    """Return the widths of a kind of platform."""
    text = (resources.files("autoshard.calibration") / "priors.json").read_text("utf-8")
    priors: Any = parsed_json(text, "priors.json")
    return record.decode(Widths, priors[kind], where=f"priors.json {kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """What a fit may move: the constants of one factor, one number of seconds, or what software adds."""

    names: tuple[str, ...]
    deviation: float
    usual: float = 0.0  # of seconds

    def __str__(self) -> str:
        """Name its constants."""
        return ", ".join(self.names)


@dataclass(frozen=True, kw_only=True)
class Prior:
    """The constants before any row, and what may be off."""

    centre: Calibration
    unknowns: tuple[Unknown, ...]

    @cached_property
    def deviations(self) -> Array:
        """The standard deviation of every unknown."""
        return np.array([unknown.deviation for unknown in self.unknowns])

    def constants(self, values: Array) -> Calibration:
        """Return the constants of some unknowns."""
        numbers: dict[str, Any] = {}
        most = self.centre.most_efficient if self.centre.most_efficient > 1 else MOST
        software = self.centre.software or Software(frameworks={})
        frameworks: dict[str, float] = {**software.frameworks}
        for unknown, value in zip(self.unknowns, values.tolist(), strict=True):
            name = unknown.names[0]
            if name == _RELEASE:
                software = replace(software, slower_per_release=max(0.0, software.slower_per_release + value))
            elif name.startswith(_FRAMEWORK):
                frameworks[name.removeprefix(_FRAMEWORK)] *= math.exp(value)
            elif unknown.usual:
                root = math.sqrt(getattr(self.centre, name) / unknown.usual)
                numbers[name] = unknown.usual * max(0.0, root + value) ** 2
            else:
                numbers |= {
                    constant: numbers.get(constant, getattr(self.centre, constant)) * math.exp(-value)
                    for constant in unknown.names
                }
        numbers = {name: min(number, most) if name in EFFICIENCIES else number for name, number in numbers.items()}
        numbers = {name: float(f"{number:.{_DIGITS}g}") for name, number in numbers.items()}
        moved_software = replace(software, frameworks=frameworks) if self.centre.software else None
        return replace(self.centre, **numbers, software=moved_software)

    def speeds(self, values: Array) -> Array:
        """Return how fast each constant moves with its unknown, but for a factor: squares move faster from afar."""
        roots = [
            math.sqrt(getattr(self.centre, unknown.names[0]) / unknown.usual) if unknown.usual else 0.0
            for unknown in self.unknowns
        ]
        is_square = np.array([unknown.usual > 0 for unknown in self.unknowns])
        return np.where(is_square, np.maximum(roots + values, _SLOWEST), 1.0)

    def believed(self, least: float) -> "Prior":
        """Return it with shares that may be off by at least so much."""
        wide = (
            replace(unknown, deviation=max(unknown.deviation, least)) if unknown.names[0] in EFFICIENCIES else unknown
            for unknown in self.unknowns
        )
        return replace(self, unknowns=tuple(wide))


def kind_of(run: MeasuredRun) -> Kind:
    """Say what starts the work of a run."""
    if run.cluster.engine == "nxd":
        return "compiled"
    return "host" if load_kernels(run.cluster.kernels).host_computes else "eager"


def prior_of(runs: Sequence[MeasuredRun], ids: Sequence[str] = ()) -> Prior:
    """Return what is known of the constants of some runs of one cluster, without the rows that have these names."""
    programs, cluster = [*dict.fromkeys((run.kernels, run.framework) for run in runs)], runs[0].cluster
    constants = known_before(cluster.name, cluster.chip.name, programs, {*ids})
    return prior_around(replace(constants, reach=reach_of(runs)), runs, cluster.chip.name)


def reach_of(runs: Sequence[MeasuredRun]) -> Reach:
    """Return what some rows have."""
    return Reach(
        cluster=",".join(sorted({run.cluster.name for run in runs})),
        axes=tuple(axis for axis in _AXES if any(getattr(run.candidate, axis) > 1 for run in runs)),
        kernels=tuple(sorted({run.kernels for run in runs})),
    )


def believed_prior(constants: Calibration, runs: Sequence[MeasuredRun]) -> Prior:
    """Return how uncertain some constants are, whatever a fit to rows would do best to tell apart."""
    prior = prior_around(replace(constants, reach=reach_of(runs)), runs, runs[0].cluster.chip.name)
    return prior.believed(widths(kind_of(runs[0])).believed)


def prior_around(constants: Calibration, runs: Sequence[MeasuredRun], chip: str) -> Prior:
    """Return how uncertain some constants of a chip are: its rates in common only where nobody has measured these."""
    kind_widths = widths(kind_of(runs[0]))
    usual = {**hardware().hosts, **kind_widths.usual}
    at_least = {name: usual[name] for name in kind_widths.hosts if not getattr(constants, name)}
    software = _software(constants.software, runs, kind_widths.settled)
    unknowns = [] if is_measured(chip) else [Unknown(names=EFFICIENCIES, deviation=kind_widths.common)]
    unknowns += [Unknown(names=tuple(names.split(",")), deviation=width) for names, width in kind_widths.shares.items()]
    unknowns += [
        Unknown(names=(name,), deviation=width, usual=usual[name]) for name, width in kind_widths.hosts.items()
    ]
    if kind_widths.per_release and any(run.release for run in runs):
        unknowns.append(Unknown(names=(_RELEASE,), deviation=kind_widths.per_release))
    if kind_widths.framework and software:
        newest = max(runs, key=lambda run: run.release).framework
        older_frameworks = [name for name in software.frameworks if name != newest]
        unknowns += [Unknown(names=(_FRAMEWORK + name,), deviation=kind_widths.framework) for name in older_frameworks]
    return Prior(centre=replace(constants, **at_least, software=software), unknowns=tuple(unknowns))


def _software(software: Software | None, runs: Sequence[MeasuredRun], settled: str) -> Software | None:
    """Add the frameworks and releases of runs to software, with slowdown 1; None if neither names any."""
    frameworks = {run.framework for run in runs if run.framework}
    releases = {run.release[:2] for run in runs if run.release}
    if not frameworks and not releases:
        return software
    software = software or Software(frameworks={}, settled=settled)
    releases |= {tuple(map(int, release.split("."))) for release in software.releases}
    names = {**dict.fromkeys(sorted(frameworks), 1.0), **software.frameworks}
    texts = tuple(".".join(map(str, release)) for release in sorted(releases))
    return replace(software, frameworks=names, releases=texts)
