"""What programs take beyond their hardware, on eager accelerators: as data, and which of it applies to a question.

Constants of a chip are from micro-benchmarks, and the same for every program (``hardware.json``). How a program departs
from them is fitted to its rows on one cluster (``departures.json``): a factor for each share, and the seconds of its
hosts. A program without rows on a cluster departs as it does elsewhere, and one without any rows as the mean of all
programs does, each of which counts once however many rows it has. So does a constant on which no row of a program
depends, such as the share of a link under rows of one GPU.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

from autoshard.cost.outside import Fit, Seen
from autoshard.spec import record
from autoshard.spec.files import parsed_json
from autoshard.spec.kernels import program_table

EFFICIENCIES = (
    "matrix_efficiency", "attention_efficiency", "vector_efficiency", "memory_efficiency",
    "near_link_efficiency", "far_link_efficiency",
)  # fmt: skip
MOST = 0.97  # of a rate, whatever the program
Basis = Literal["rows", "other machines", "other programs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipShares:
    """Which share of each rate of its data sheet a chip reaches, and where that was measured."""

    shares: Mapping[str, float] = field(hash=False)
    sources: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Shares of chips, by the first part of their names, and what hosts take where no program says otherwise."""

    chips: Mapping[str, ChipShares] = field(hash=False)
    hosts: Mapping[str, float] = field(hash=False)
    sources: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """How a program departs from its hardware on one cluster."""

    framework: str
    cluster: str
    kernels: tuple[str, ...]
    constants: Mapping[str, float] = field(hash=False)  # on which its rows depend: factors of shares, seconds of hosts
    interval: float
    best_mfu: float  # without masked pairs
    axes: tuple[str, ...]
    seen: Mapping[str, Seen] = field(hash=False)
    fit: Fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """All departures, and how far predictions of other programs and machines are off."""

    programs: tuple[Departure, ...]
    elsewhere: float  # interval of a program on a machine on which it has no rows
    unknown: float  # of a program without any rows


@cache
def hardware() -> Hardware:
    """Return the constants of chips and hosts."""
    return record.decode(Hardware, _read("hardware.json"), where="hardware.json")


@cache
def departures() -> Departures:
    """Return what was fitted."""
    return record.decode(Departures, _read("departures.json"), where="departures.json")


def _read(name: str) -> Any:
    return parsed_json((resources.files("autoshard.cost") / name).read_text("utf-8"), name)


def chip_family(chip: str) -> str:
    """Return the first part of a chip's name; an H200 computes as an H100 does, all Blackwells as a B200."""
    family = chip.partition("-")[0]
    return {"h200": "h100", "gb200": "b200", "b300": "b200", "gb300": "b200"}.get(family, family)


def is_measured(chip: str) -> bool:
    """Say whether shares of a chip are known."""
    return chip_family(chip) in hardware().chips


def numbers_of(chip: str, constants: Mapping[str, float]) -> Mapping[str, float]:
    """Return the shares of a chip, and the seconds of hosts, of a program that departs by these constants."""
    shares = hardware().chips[chip_family(chip)].shares
    hosts = {name: constants.get(name, usual) for name, usual in hardware().hosts.items()}
    return {**hosts, **{name: min(MOST, share * constants.get(name, 1.0)) for name, share in shares.items()}}


def applicable(
    programs: Sequence[Departure], cluster: str, chips: Mapping[str, str], kernels: str, framework: str | None
) -> tuple[Sequence[Departure], Basis]:
    """Return the departures that say most about a program; ``chips`` are those of all clusters.

    The same framework comes before the same kernels, the same cluster before the same chip.
    """
    named = _named(programs, framework)
    same_kernels = [program for program in programs if program_table(kernels) in program.kernels]
    for candidates in (named, same_kernels) if named else (same_kernels,):
        for near in (
            [program for program in candidates if program.cluster == cluster],
            [program for program in candidates if chips.get(program.cluster) == chips.get(cluster)],
        ):
            if near:
                return near, "rows"
        if candidates and candidates is named:
            return candidates, "other machines"
    return (same_kernels, "other machines") if same_kernels else (programs, "other programs")


def _named(programs: Sequence[Departure], framework: str | None) -> list[Departure]:
    """Return the departures of the framework with the longest name that the name of ``framework`` begins with."""
    text = (framework or "").casefold()
    names = {program.framework.casefold() for program in programs}
    longest = max((name for name in names if text.startswith(name)), key=len, default=None)
    return [program for program in programs if program.framework.casefold() == longest]


def mean_constants(programs: Sequence[Departure], everyone: Sequence[Departure]) -> Mapping[str, float]:
    """Return the mean of departures, each counted once: of factors as of logarithms, of seconds as they are.

    A constant that no row of these programs depends on is the mean of everyone's.
    """
    return {**_means(everyone), **_means(programs)}


def _means(programs: Sequence[Departure]) -> Mapping[str, float]:
    """Return the means of the constants that any program states; one that does not state them is its hardware."""
    usual, means = hardware().hosts, dict[str, float]()
    for name in sorted({name for program in programs for name in program.constants}):
        values = [program.constants.get(name, usual.get(name, 1.0)) for program in programs]
        is_share = name in EFFICIENCIES
        means[name] = math.exp(sum(map(math.log, values)) / len(values)) if is_share else sum(values) / len(values)
    return means
