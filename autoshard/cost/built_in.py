"""Which constants come with autoshard for a cluster and a program, and which ones a plan carries."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any, cast

from autoshard.cost.calibration import NUMBERS, OPTIONAL, OUTSIDE, SECONDS, Calibration, Reach, uncalibrated
from autoshard.cost.departures import (
    Basis,
    Departure,
    applicable,
    chip_family,
    departures,
    hardware,
    is_measured,
    mean_constants,
    numbers_of,
)
from autoshard.cost.outside import Seen
from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from autoshard.spec import record
from autoshard.spec.cluster_catalogue import cluster_names, load_node_type
from autoshard.spec.files import parsed_json
from autoshard.spec.kernels import program_table
from autoshard.units import counted

_GONE = ("shared_ports", "straggling")  # constants that plans of before may state


@cache
def built_in(cluster: str, kernels: str = "", framework: str | None = None, chip: str = "") -> Calibration:
    """Return the constants that come with autoshard for a cluster and a program on it; nominal ones of other machines.

    Where a host starts kernels they are the chip's and what the program adds, which its framework or its kernels name;
    elsewhere those of a fit to the cluster, or to the nearest machine. A cluster that is not in the catalogue is the
    first machine there with its ``chip``, so that a name alone makes no step faster.

    >>> built_in("local").name, built_in("trn2.48xlarge").name, built_in("h100-80", "mcore").name
    ('uncalibrated', 'trn1.32xlarge', 'h100-80 under Megatron-Core')
    """
    like = cluster if cluster in cluster_names() else _with_chip(chip) or cluster
    if shipped := _shipped(like):
        return shipped
    if not is_measured(_chips().get(like, "")):
        return uncalibrated()
    chips = {**_chips(), cluster: _chips()[like]}
    return _of_program(cluster, chips, kernels or load_node_type(like).kernels, framework)


def known_before(cluster: str, chip: str, programs: Sequence[tuple[str, str | None]], rows: Set[str]) -> Calibration:
    """Return the constants that would come for programs, by kernels and framework, had nobody measured some rows."""
    shipped = _shipped(cluster)
    if shipped and not (shipped.fit and rows & shipped.fit.rows.keys()):
        return shipped
    if not is_measured(chip):
        return uncalibrated()
    rest = [departure for departure in departures().programs if not rows & departure.fit.rows.keys()]
    chips = {**_chips(), cluster: chip}
    used = [departure for kernels, name in programs for departure in applicable(rest, cluster, chips, kernels, name)[0]]
    used = [*dict.fromkeys(used)]
    frameworks = dict.fromkeys(departure.framework for departure in used)
    who = ", ".join(frameworks) if len(used) < len(rest) else "all programs"
    adds = f"{who} adds" if len(frameworks) == 1 else f"{who or 'hosts'} add"
    name = f"the rates of {chip}, and what {adds}"
    numbers: Mapping[str, Any] = numbers_of(chip, mean_constants(used, rest))
    return replace(uncalibrated(), name=name, sources=_sources(chip), **numbers)


def _sources(chip: str) -> Mapping[str, str]:
    """Return where the rates of a chip are from, and what hosts take."""
    constants = hardware()
    hosts = {name: constants.sources.get(name, constants.sources["hosts"]) for name in SECONDS}
    return {**uncalibrated().sources, **constants.chips[chip_family(chip)].sources, **hosts}


@cache
def _shipped(cluster: str) -> Calibration | None:
    """Return the constants of a file, of the cluster itself or of the nearest one."""
    folder = resources.files("autoshard.cost") / "calibrations"
    nearest: Any = parsed_json((resources.files("autoshard.cost") / "nearest.json").read_text("utf-8"), "nearest.json")
    name = f"{nearest[cluster]['to'] if cluster in nearest else cluster}.json"
    texts = (entry.read_text("utf-8") for entry in folder.iterdir() if entry.name == name)
    return next((record.decode(Calibration, parsed_json(text, name), where=name) for text in texts), None)


@cache
def measured_schedules() -> frozenset[str]:
    """Return the schedules of pipelines that rows of any platform have.

    >>> sorted(measured_schedules())
    ['1f1b', 'interleaved']
    """
    shipped = filter(None, map(_shipped, cluster_names()))
    fitted = [fitted_entry.seen for fitted_entry in (*departures().programs, *shipped)]
    return frozenset(name for seen in fitted if "schedule" in seen for name in seen["schedule"].values)


@cache
def _chips() -> Mapping[str, str]:
    return {name: load_node_type(name).chip.name for name in cluster_names()}


def _with_chip(chip: str) -> str | None:
    """Return the first cluster of the catalogue with a chip of this name."""
    return next((name for name, chip_name in _chips().items() if chip_name == chip), None)


def _of_program(cluster: str, chips: Mapping[str, str], kernels: str, framework: str | None) -> Calibration:
    """Return the constants of a chip, and of a program on it as far as its rows say."""
    chip = chips[cluster]
    programs, basis = applicable(departures().programs, cluster, chips, kernels, framework)
    constants, has_rows, alone = mean_constants(programs, departures().programs), basis == "rows", len(programs) == 1
    frameworks = dict.fromkeys(program.framework for program in programs)
    who = ", ".join(frameworks) if basis != "other programs" else "any program"
    axes = tuple(dict.fromkeys(axis for program in programs for axis in program.axes))
    intervals = {"rows": max(program.interval for program in programs)}
    intervals |= {"other machines": departures().elsewhere} if axes else {}
    interval = intervals.get(basis, max(OUTSIDE, departures().unknown))
    same_chip = [program for program in departures().programs if chips[program.cluster] == chip]
    words = f"{_words(programs, basis, who, chip)}; nominal 80% interval of a factor of {1 + interval:.2f} either way"
    tables = [name for program in programs for name in program.kernels]
    seen = programs[0].seen if alone else dict[str, Seen]()
    experts = seen.get("experts", Seen(values=("0",)))
    reach = Reach(
        cluster=",".join(dict.fromkeys((cluster, *(program.cluster for program in programs)))),
        axes=axes,
        kernels=tuple(dict.fromkeys((program_table(kernels), *tables))),
    )
    numbers: dict[str, Any] = {**numbers_of(chip, constants)}
    return Calibration(
        name=f"{cluster} under {who}",
        **numbers,
        interval=interval,
        basis=words,
        reach=reach if has_rows else None,
        seen=seen if has_rows and alone else {"experts": Seen(values=experts.values)},
        best_mfu=max((program.best_mfu for program in same_chip), default=None),
        fit=programs[0].fit if has_rows and alone else None,
        sources={**_sources(chip), "interval": words},
    )


def _words(programs: Sequence[Departure], basis: Basis, who: str, chip: str) -> str:
    """Say what constants of a program rest on."""
    where = ", ".join(dict.fromkeys(program.cluster for program in programs))
    count, newest = sum(len(program.fit.rows) for program in programs), max(program.fit.date for program in programs)
    error = sum(program.fit.left_out_mape for program in programs) / len(programs)
    if basis == "rows":
        words = f"the rates of {chip}, and what {who} adds, by {counted(count, 'row')} of {where}, newest {newest}"
        return f"{words}: mean error {error:.1%} where a {programs[0].fit.left_out_by} is left out"
    if basis == "other machines":
        alone = "" if any(program.axes for program in programs) else " of one rank"
        links = alone and "; for messages the mean of all programs counts"
        return f"the rates of {chip}, and what {who} adds on {where}, by {counted(count, 'row')}{alone} there{links}"
    return f"the rates of {chip}, and what {len(programs)} programs add on average; no row is of this program"


def _seen_of(entries: Mapping[str, str]) -> Mapping[str, Any]:
    """Return what a plan's provenance says of the rows of its calibration."""
    text = entries.get("calibration.rows")
    if text is None:
        return {}
    fields = parsed_json(text, "provenance.calibration.rows")
    if not isinstance(fields, dict) or not fields.keys() <= {"seen", "best_mfu"}:
        raise InputError.of("provenance.calibration.rows", "must be an object of seen and best_mfu")
    return cast(dict[str, Any], fields)


def calibration_of(plan: Plan) -> Calibration:
    """Return the constants that a plan carries; where it carries none, those of its cluster."""
    entries = plan.provenance
    if "calibration.constants" not in entries:
        return built_in(plan.cluster.name, plan.kernels, chip=plan.cluster.chip.name)
    pairs = [part.partition("=") for part in entries["calibration.constants"].split(",")]
    pairs = [pair for pair in pairs if pair[0] not in _GONE]
    if sorted(name for name, _, _ in pairs if name not in OPTIONAL) != sorted(NUMBERS):
        names = ", ".join(NUMBERS)
        raise InputError.of("provenance.calibration.constants", f"must be NAME=NUMBER,... for each of {names}")
    numbers: dict[str, float | str] = {}
    for name, _, text in pairs:
        try:
            numbers[name] = float(text)
        except ValueError:
            numbers[name] = text  # which no record takes
    fields = {
        "name": entries.get("calibration", ""),
        "basis": entries.get("calibration.basis", ""),
        "reach": entries.get("calibration.reach"),
        **_seen_of(entries),
        "sources": dict.fromkeys(NUMBERS, "the plan's provenance"),
        **numbers,
    }
    return record.decode(Calibration, fields, "provenance.calibration")
