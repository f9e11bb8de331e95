"""A sweep: one small file that stands for many questions, each a point with a name of its own."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

from autoshard.errors import Fault, InputError, require
from autoshard.spec import record
from autoshard.spec.files import read_data, shipped
from autoshard.spec.recipe import TRAINING_KEYS, Recipe, recipe_files, recipe_of

MOST_POINTS = 100_000
_ID_LENGTH = 12
_FILES = ("model", "cluster", "calibration")  # keys that may name a file, whose contents belong to the question
_FIX = "fix."

Entries = Mapping[str, Any]  # of a recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One question, as the entries of a recipe, and which of its best plans is meant: 1 is the best."""

    id: str
    varied: Entries  # what tells it from other points of its sweep
    entries: Entries
    choice: int = 1

    @property
    def name(self) -> str:
        """What it is called in a table."""
        parts = [f"{key}={_plain(value)}" for key, value in self.varied.items()]
        return " ".join(parts + ([f"#{self.choice}"] if self.choice > 1 else [])) or "the only point"

    @property
    def recipe(self) -> Recipe:
        """The question, and what is trained."""
        return recipe_of(self.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a sweep file holds.

    Args:
        mode: Whether points are planned only, or run as well.
        recipe: A recipe of which every point is a variation: one that comes along by name, or a file.
        base: Keys of a recipe, set for every point.
        grid: Keys of a recipe, each with a list of values: every combination is a point.
        zip: Keys with lists of one length, which go together.
        list: Sets of keys, one for each point.
        frontier: How many of the best plans of each question are points, the best one included.
        rehearse: With mode run: rehearse on at most so many ranks instead.
    """

    mode: Literal["plan", "run"] = "plan"
    recipe: str | None = None
    base: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    grid: Mapping[str, tuple[object, ...]] = field(default_factory=dict[str, tuple[object, ...]], hash=False)
    zip: Mapping[str, tuple[object, ...]] = field(default_factory=dict[str, tuple[object, ...]], hash=False)
    list: tuple[Mapping[str, object], ...] = field(default=(), hash=False)
    frontier: int = 1
    rehearse: int | None = None

    def __post_init__(self) -> None:
        """Refuse what would make no point, or too many to ever be done."""
        lengths = {len(values) for values in self.zip.values()}
        require(
            *((bool(values), f"grid.{key}", "has no values") for key, values in self.grid.items()),
            (len(lengths) <= 1, "zip", f"lists of one length go together, not of {_said(lengths)}"),
            (0 not in lengths, "zip", "has no values"),
            (1 <= self.frontier <= 100, "frontier", f"must be 1 to 100, not {self.frontier}"),
            (self.rehearse is None or self.mode == "run", "rehearse", "is of mode run. Write mode: run"),
            (self.rehearse is None or self.rehearse >= 1, "rehearse", f"must be at least 1, not {self.rehearse}"),
        )

    @property
    def axes(self) -> "dict[str, Sequence[Entries]]":
        """What is combined: the choices of each axis, every choice with the keys that it sets."""
        zipped = [dict(zip(self.zip, values, strict=True)) for values in zip(*self.zip.values(), strict=True)]
        axes: dict[str, Sequence[Entries]] = {"list": self.list, "zip": zipped}
        axes |= {key: [{key: value} for value in values] for key, values in self.grid.items()}
        return {name: choices for name, choices in axes.items() if choices}

    @property
    def overrides(self) -> "Iterator[Entries]":
        """Yield the keys that every question sets."""
        for choice in product(*self.axes.values()):
            yield {key: value for part in choice for key, value in part.items()}


def place_of(name: Path) -> Path:
    """Return where a sweep lies: one that comes along may be called by its name.

    >>> place_of(Path("tiny")).name
    'tiny.yaml'
    """
    shipped_one = shipped("recipes") / "sweeps" / f"{name}.yaml"
    return shipped_one if not name.exists() and shipped_one.is_file() else name


def load_sweep(path: Path) -> Sweep:
    """Read a sweep; every fault names the file."""
    data = read_data(path)
    try:
        if isinstance(data, dict):  # a value or a mapping in the place of a list has no other meaning
            data = {key: _axes(value) if key in ("grid", "zip") else value for key, value in data.items()}
        return record.decode(Sweep, data)
    except InputError as error:
        raise error.under(str(path)) from None


def points_of(sweep: Sweep, folder: Path) -> tuple[SweepPoint, ...]:
    """Return the points of a sweep file in this folder, each question once; all that is wrong with any is one error."""
    count = sweep.frontier
    for choices in sweep.axes.values():
        count *= len(choices)
    require((count <= MOST_POINTS, "points", f"a sweep has at most {MOST_POINTS}, not {count}"))
    base, faults, found = base_of(sweep, folder), dict[Fault, None](), dict[str, SweepPoint]()
    for override in sweep.overrides:
        try:
            for point in question(sweep, base, override, folder):
                found.setdefault(point.id, point)
        except InputError as error:
            faults.update(dict.fromkeys(error.faults))
    if faults:
        raise InputError(faults)
    return tuple(found.values())


def question(sweep: Sweep, base: Entries, override: Entries, folder: Path) -> list[SweepPoint]:
    """Return the points of one question: its best plan, and as many more as are asked for."""
    entries = _merged(base, override)
    recipe = recipe_of(entries)
    if sweep.mode == "run" and "data" in entries:
        entries = {**entries, "data": {**entries["data"], "sets": dict(recipe.training.data.seen_from(folder).sets)}}
    asked: dict[str, Any] = {key: value for key, value in entries.items() if key not in TRAINING_KEYS}
    asked["files"] = {key: _contents(asked[key]) for key in _FILES if key in asked}
    if sweep.mode == "run":
        asked |= {"run": {key: entries[key] for key in TRAINING_KEYS if key in entries}, "rehearse": sweep.rehearse}
    return [
        SweepPoint(id=_id({**asked, "choice": number}), varied=override, entries=entries, choice=number)
        for number in range(1, sweep.frontier + 1)
    ]


def base_of(sweep: Sweep, folder: Path) -> Entries:
    """Return what all points have: the entries of the recipe that is named, with the sweep's own over them."""
    named = {path.stem: path for path in recipe_files()}
    data = {} if sweep.recipe is None else read_data(named.get(sweep.recipe, folder / sweep.recipe))
    require((isinstance(data, dict), "recipe", f"{sweep.recipe} is no recipe"))
    return _merged(cast(dict[str, Any], data), sweep.base)


def _axes(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {key: one if isinstance(one, list) else [one] for key, one in cast(dict[Any, Any], value).items()}


def _merged(base: Entries, override: Entries) -> dict[str, Any]:
    """Set keys over a base; a dot goes into a section, null takes a key away, and keys after ``fix.`` are pinned."""
    found: dict[str, Any] = json.loads(json.dumps(base, default=str))
    pins = {key.removeprefix(_FIX): value for key, value in override.items() if key.startswith(_FIX)}
    pinned = [f"{key}={_plain(value)}" for key, value in pins.items() if value is not None]
    for key, value in override.items():
        if key.startswith(_FIX):
            continue
        *sections, last = key.split(".")
        place = found
        for section in sections:
            inner = place.get(section)
            place[section] = place = {} if not isinstance(inner, dict) else cast(dict[str, Any], inner)
        place.pop(last, None)
        if value is not None:
            place[last] = value
    if pinned:
        found["fix"] = ",".join([*filter(None, [found.get("fix")]), *pinned])
    return found


def _contents(name: object) -> str | None:
    path = Path(str(name))
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _id(question: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()[:_ID_LENGTH]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _said(numbers: set[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))
