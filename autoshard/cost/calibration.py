"""The constants of a platform that are not on a data sheet, as data with provenance, and how plans carry them.

None is about memory: what a runtime keeps for itself stands in the table of its kernels.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from autoshard.cost.departures import EFFICIENCIES, departures
from autoshard.cost.outside import UNSEEN_OFF, Fit, Seen, features_of
from autoshard.errors import InputError, in_range, require
from autoshard.plan.plan import Plan
from autoshard.spec import record
from autoshard.spec.cluster import LOCAL, LONGEST_S
from autoshard.spec.file_kinds import CALIBRATION_FILE, refuse_other_kinds
from autoshard.spec.files import read_data
from autoshard.spec.kernels import load_kernels

_LEAST = 1e-6  # efficiency; less is a typing error, under which a step would take for ever
SECONDS = ("launch_s", "collective_s", "step_s")
CONSTANTS = (*EFFICIENCIES, *SECONDS)
OUTSIDE = 0.25  # the least interval where software is outside a fit: releases of one layout differ by up to a quarter
_SOFTWARE = ("kernels", "products")  # features that stand for a framework and for what FP8 changes in it
NUMBERS = (*CONSTANTS, "interval")
WIDEST = 2.0  # an interval: a third of the predicted time to three times that
_MORE_SECONDS = ("task_s", "layer_s", "experts_s", "joined_s", "shard_s")
RATIOS = ("dp_ratio",)
OPTIONAL = (*_MORE_SECONDS, *RATIOS)  # of plans and files that do not state it, nothing was known


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What the rows of a fit have: the cluster, the axes that are larger than 1 in any of them, the kernels."""

    cluster: str
    axes: tuple[str, ...]
    kernels: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse a fit to no cluster, or to no kernels."""
        stated = bool(self.cluster.strip()) and bool(self.kernels)
        require((stated, "", "write CLUSTER: AXES with KERNELS, for example trn1.32xlarge: dp,tp with nxd"))

    def __str__(self) -> str:
        """Write as ``trn1.32xlarge: dp,tp with nxd``."""
        return f"{self.cluster}: {','.join(self.axes)} with {','.join(self.kernels)}"

    @classmethod
    def parse(cls, text: str) -> "Reach":
        """Read what ``str`` writes.

        >>> str(Reach.parse("trn1.32xlarge: dp,tp with nxd"))
        'trn1.32xlarge: dp,tp with nxd'
        """
        cluster, _, rest = text.rpartition(": ")
        axes, _, kernels = rest.partition(" with ")
        names = [tuple(filter(None, part.strip().split(","))) for part in (axes, kernels)]
        return cls(cluster=cluster, axes=names[0], kernels=names[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What ran the rows of a fit, and how much longer steps take under other software than a plan is predicted for."""

    frameworks: Mapping[str, float] = field(hash=False)  # of the rows -> how often as long their steps take
    releases: tuple[str, ...] = ()  # of the rows, oldest first
    settled: str = ""  # the release from which on steps take what the constants say
    slower_per_release: float = 0.0  # for each release before that one

    def __post_init__(self) -> None:
        """Refuse factors that are no factors, and releases that are no numbers."""
        numbers = [part for text in (*self.releases, *filter(None, [self.settled])) for part in text.split(".")]
        require(
            (all(0 < factor < 100 for factor in self.frameworks.values()), "frameworks", "must lie in (0, 100)"),
            (0 <= self.slower_per_release < 1, "slower_per_release", "must lie in [0, 1)"),
            (all(part.isdecimal() for part in numbers), "releases", "must be numbers such as 2.18"),
        )

    def slowness(self, framework: str | None, release: tuple[int, ...]) -> float:
        """Return how often as long a step takes.

        >>> old = Software(frameworks={"a": 1.5}, settled="2.18", slower_per_release=0.5)
        >>> old.slowness("a", (2, 17, 1)), old.slowness("b", (2, 20))
        (2.25, 1.0)
        """
        older = 0
        if release and self.settled:
            major, minor = (*_numbers(self.settled), 0)[:2]
            older = max(0, minor - (*release, 0)[1]) if release[0] == major else 0
        return self.frameworks.get(framework or "", 1.0) * (1 + self.slower_per_release) ** older

    def beyond(self, framework: str | None, release: tuple[int, ...]) -> list[str]:
        """Say what of some software no row has; a release that lies between those of the rows counts as theirs."""
        outside = [f"framework {framework}"] if framework and framework not in self.frameworks else []
        if release and self.releases:
            within = _numbers(self.releases[0])[:2] <= release[:2] <= _numbers(self.releases[-1])[:2]
            outside += [] if within else [f"release {'.'.join(map(str, release))}"]
        return outside


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Which part of each peak rate is reached, what takes time besides, and what the numbers rest on.

    More than a peak is reached where that is no data sheet's but declared, so that plans are the same on all machines.
    """

    name: str
    matrix_efficiency: float  # of products as large as models have
    attention_efficiency: float  # of the matrix peak
    vector_efficiency: float
    memory_efficiency: float
    near_link_efficiency: float  # inside a node
    far_link_efficiency: float  # between nodes
    launch_s: float  # of a host, for each kernel that it starts
    collective_s: float  # of hosts, for each send or collective, whatever its size
    step_s: float  # of every step, whatever it does
    task_s: float = 0.0  # of each stage and micro-batch: forward and backward are graphs of their own
    layer_s: float = 0.0  # of hosts, for each layer that goes forward or backward, beside its launches
    experts_s: float = 0.0  # of hosts, for each layer of experts likewise: they wait to know how many tokens each gets
    joined_s: float = 0.0  # of hosts, for each rank of a collective, in a pipeline over several nodes
    shard_s: float = 0.0  # of every step, for each rank over which ZeRO divides the weights
    dp_ratio: float = 1.0  # of what data parallelism sends in a step: how often as long as links say
    interval: float  # what is promised lies within a factor of 1 + this, either way
    basis: str
    reach: Reach | None = None  # None where nothing was measured
    seen: Mapping[str, Seen] = field(default_factory=dict[str, Seen], hash=False)  # of features, by the rows
    best_mfu: float | None = None  # of a row, without pairs that are masked
    software: Software | None = None  # None where rows do not say
    fit: Fit | None = None
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        """Refuse efficiencies outside (0, 1], negative times and numbers without a source."""
        most = self.most_efficient
        require(
            (bool(self.name.strip()), "name", "must not be empty"),
            (bool(self.basis.strip()), "basis", "say what the numbers are worth"),
            *(
                (_LEAST <= getattr(self, name) <= most, name, f"must lie in [{_LEAST}, {most:g}]")
                for name in EFFICIENCIES
            ),
            *in_range(self, *SECONDS, *_MORE_SECONDS, high=LONGEST_S),
            *in_range(self, *RATIOS),
            (0 <= self.interval < 1, "interval", "must lie in [0, 1)"),
            *((bool(self.sources.get(name)), f"sources.{name}", "say where this number is from") for name in NUMBERS),
        )

    @property
    def most_efficient(self) -> float:
        """What an efficiency is at most; a machine may be faster than declared."""
        return 100.0 if self.reach and self.reach.cluster == LOCAL else 1.0

    def running(self, framework: str | None, release: tuple[int, ...]) -> "Calibration":
        """Return the constants under some software, with an interval that is wide where no row has such software."""
        if not self.software:
            return self
        slowness, beyond = self.software.slowness(framework, release), self.software.beyond(framework, release)
        changes: dict[str, Any] = {}
        if slowness != 1:
            changes |= {name: getattr(self, name) / slowness for name in EFFICIENCIES}
            changes |= {name: getattr(self, name) * slowness for name in (*SECONDS, *_MORE_SECONDS)}
        if beyond:
            changes["interval"] = interval = max(self.interval, OUTSIDE)
            words = f"none of these rows has {' and '.join(beyond)}, so the interval is {interval:.0%}"
            changes["basis"] = f"{self.basis}; {words}"
        return replace(self, **changes)

    def under_release(self, release: str) -> "Calibration":
        """Return the constants under a release of the platform's software, which their basis names."""
        software = self.software
        if not software or not software.releases:
            message = f"the rows of {self.name} name no releases, so nothing says what one changes. Leave it out"
            raise InputError.of("release", message)
        message = f"must be a number such as {software.releases[-1]}, not {release!r}"
        is_number = all(part.isdecimal() and len(part) < 10 for part in release.split("."))
        require((is_number and "." in release, "release", message))
        majors = {str(_numbers(row)[0]) for row in software.releases}
        message = (
            f"{release} is of no generation of software that rows of {self.name} have: {', '.join(sorted(majors))}.x"
        )
        require((release.partition(".")[0] in majors, "release", message))
        slowed, lacking = self.running(None, _numbers(release)), software.beyond(None, _numbers(release))
        slower = self.matrix_efficiency / slowed.matrix_efficiency - 1
        words = f", {slower:.1%} slower than from {software.settled} on" if slower else ""
        head, colon, tail = slowed.basis.partition(":")  # a short answer prints the head
        said = f"{head}; for release {release}{', which no row has' if lacking else ''}{words}"
        return replace(slowed, basis=f"{said}{colon}{tail}")


@cache
def uncalibrated() -> Calibration:
    """Return nominal constants, for platforms without measurements."""
    text = (resources.files("autoshard.cost") / "uncalibrated.json").read_text("utf-8")
    return record.decode(Calibration, json.loads(text), where="uncalibrated")


def load_calibration(path: Path) -> Calibration:
    """Read a calibration file; every fault names the file."""
    data = read_data(path)
    refuse_other_kinds(path, data, CALIBRATION_FILE)
    try:
        return record.decode(Calibration, data)
    except InputError as error:
        raise InputError.of(str(path), "; ".join(map(str, error.faults))) from None


def calibration_text(calibration: Calibration) -> str:
    """Write a calibration as the JSON that ``load_calibration`` reads."""
    return json.dumps(record.encode(calibration), indent=2, allow_nan=False) + "\n"


def trust(calibration: Calibration, plan: Plan) -> tuple[float, Mapping[str, str]]:
    """Return the factor, less 1, of a plan's interval, and how far outside the rows it lies, by feature.

    The interval widens, in squares, by the excess of every feature that is outside. Other software than that of all
    rows makes it 25 % or more, and so does FP8, of which there are many kinds.
    """
    excesses, base = excesses_of(calibration, plan), calibration.interval
    outside = {feature: words for feature, (words, _) in excesses.items()}
    excess = sum(square for _, square in excesses.values())
    if products := plan.workload.precision.products:
        priced = load_kernels(plan.kernels).cast_bytes
        casts = "are priced by the bytes that they move" if priced else "count as free"
        outside.setdefault("products", f"{products}, whose casts and scales {casts}")
    least = OUTSIDE if outside.keys() & {*_SOFTWARE} else 0.0
    return min(WIDEST, max(least, math.sqrt(base**2 + excess) if excess else base)), outside


def excesses_of(calibration: Calibration, plan: Plan) -> Mapping[str, tuple[str, float]]:
    """Return how far outside the rows a plan lies, by feature, and what each adds to the square of its half-width.

    That is what rows outside were off by when their value of a feature was left out; three times the square itself, so
    that the width doubles, where no fit could tell. Kernels of which no fit knows rows on a device are off by as
    much as those of other programs can be.
    """
    reach, outside, base = calibration.reach, dict[str, str](), calibration.interval
    candidate = plan.candidate
    if reach:
        if plan.cluster.name not in reach.cluster.split(","):
            outside["cluster"] = f"{plan.cluster.name}, and rows have {reach.cluster}"
        if plan.kernels not in reach.kernels:
            outside["kernels"] = f"{plan.kernels}, and rows have {', '.join(reach.kernels)}"
        for axis in ("tp", "pp", "dp", "cp", "ep", "vp"):
            if getattr(candidate, axis) > 1 and axis not in reach.axes:
                outside[axis] = f"{getattr(candidate, axis)}, and rows have 1"
    features = features_of(candidate, plan.model, plan.cluster, plan.workload)
    distances = {feature: seen.distance(feature, features[feature]) for feature, seen in calibration.seen.items()}
    outside |= {feature: distance for feature, distance in distances.items() if distance}
    known_offs = {feature: seen.off for feature, seen in calibration.seen.items() if seen.off is not None}
    if plan.model.has_linear_layers:
        outside["attention"] = "linear"
        known_offs["attention"] = departures().unknown  # as kernels of which no fit knows rows
    if load_kernels(plan.kernels).unmeasured and "kernels" in outside:
        words = outside["kernels"].removeprefix(plan.kernels)
        outside["kernels"] = f"{plan.kernels}, of which no fit knows rows on a device{words}"
        known_offs["kernels"] = max(known_offs.get("kernels", 0.0), departures().unknown)
    offs = {feature: known_offs.get(feature, UNSEEN_OFF.get(feature, 2 * base)) for feature in outside}
    return {feature: (words, max(0.0, offs[feature] ** 2 - base**2)) for feature, words in outside.items()}


def calibration_entries(calibration: Calibration) -> Mapping[str, str]:
    """Return the entries of a plan's provenance from which ``calibration_of`` reads the same constants."""
    numbers = ",".join(f"{name}={getattr(calibration, name)!r}" for name in (*NUMBERS, *OPTIONAL))
    entries = {
        "calibration": calibration.name,
        "calibration.basis": calibration.basis,
        "calibration.constants": numbers,
    }
    if calibration.reach:
        entries["calibration.reach"] = str(calibration.reach)
    if calibration.seen:
        seen = {"seen": record.encode(calibration.seen), "best_mfu": calibration.best_mfu}
        entries["calibration.rows"] = json.dumps(seen)
    return entries
