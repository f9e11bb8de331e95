"""A sweep: one small file that stands for many questions, each a point with a name of its own."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal, cast

from autoshard.errors import Faults, require
from autoshard.extensions import EXTENSIONS
from autoshard.plan.codec import load
from autoshard.spec import record
from autoshard.spec.file_kinds import SWEEP_FILE, refuse_other_kinds
from autoshard.spec.files import named_file, read_data, seen_from
from autoshard.spec.recipe import RECIPES, SWEEPS, TRAINING_KEYS, Recipe, entries_seen_from, recipe_of

MOST_POINTS = 100_000
_PLAN = "plan"  # a key that stands for a whole question: the path of a plan file
MODULE = "module"  # a key that stands for the model: FILE.py:FUNCTION of a torch.nn.Module
# Keys that may name a file, whose contents belong to the question.
_FILES = ("model", "cluster", "calibration", _PLAN, MODULE)
_COMMA = re.compile(r",(?![^\[]*\])")  # between pinned keys, not inside brackets

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
        """The name of the point in a table."""
        parts = [f"{key}={_plain(value)}" for key, value in self.varied.items()]
        return " ".join(parts + ([f"#{self.choice}"] if self.choice > 1 else [])) or "the only point"

    @property
    def plan(self) -> Path | None:
        """The path of the plan file that the point names; None if it asks a question."""
        return Path(str(self.entries[_PLAN])) if _PLAN in self.entries else None

    @property
    def module(self) -> str | None:
        """The function that makes the model of the point, if that is read off its code."""
        return str(self.entries[MODULE]) if MODULE in self.entries else None

    @property
    def recipe(self) -> Recipe:
        """The recipe of the point: its question and its training; for a plan file, the nodes of that plan."""
        if self.plan is None:
            return recipe_of({"model" if key == MODULE else key: value for key, value in self.entries.items()})
        answered = load(self.plan)
        training = {key: value for key, value in self.entries.items() if key in TRAINING_KEYS}
        return recipe_of({"model": answered.model.name, "nodes": answered.cluster.num_nodes, **training})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a sweep file holds.

    Args:
        mode: Whether points are planned only, or run as well.
        recipe: A recipe of which every point is a variation: one that comes along by name, or a file.
        base: Keys of a recipe, set for every point.
        grid: Keys of a recipe, each with a list of values: every combination is a point.
        zip: Keys with lists of one length, which go together.
        list: Sets of keys, one for each point. The key plan names a plan file in the place of a question, module a
            FILE.py:FUNCTION in the place of a model.
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
        """Refuse a sweep without points, or with more than can ever be done."""
        lengths = sorted({len(values) for values in self.zip.values()})
        together = f"lists of one length go together, not of {' and '.join(map(str, lengths))}"
        require(
            *((bool(values), f"grid.{key}", "has no values") for key, values in self.grid.items()),
            (len(lengths) <= 1, "zip", together),
            (0 not in lengths, "zip", "has no values"),
            (1 <= self.frontier <= 100, "frontier", f"must be 1 to 100, not {self.frontier}"),
            (self.rehearse is None or self.mode == "run", "rehearse", "is of mode run. Write mode: run"),
            (self.rehearse is None or self.rehearse >= 1, "rehearse", f"must be at least 1, not {self.rehearse}"),
            *((False, where, f"sets the same as {other}, so that the values of one are lost. Keep one of them")
              for where, other in self._clashes()),
        )  # fmt: skip

    def _clashes(self) -> Iterator[tuple[str, str]]:
        """Yield the pairs of keys that set the same: they are equal, or one is the section of the other."""
        keys = [("list", key) for key in dict.fromkeys(key for keyset in self.list for key in keyset)]
        keys += [(axis, key) for axis, lists in (("zip", self.zip), ("grid", self.grid)) for key in lists]
        texts = [*(keyset.get("fix") for keyset in self.list), *self.zip.get("fix", ()), *self.grid.get("fix", ())]
        pinned = {f"fix.{pin.partition('=')[0].strip()}" for text in texts for pin in _COMMA.split(str(text))}
        for (axis, key), (other, more) in combinations(keys, 2):
            short, long = sorted((key, more), key=len)
            in_section = long.startswith(f"{short}.") and (short != "fix" or long in pinned)
            if (short == long or in_section) and not axis == other == "list":
                yield f"{axis}.{key}", f"{other}.{more}"

    @property
    def varies_training(self) -> bool:
        """Whether points differ in how they are trained, so that their losses say which is the best."""
        return self.mode == "run" and bool(self.training_keys)

    @property
    def training_keys(self) -> tuple[str, ...]:
        """The keys of training that the axes set; they tell no plans from each other."""
        keys = dict.fromkeys(key for choices in self.axes.values() for choice in choices for key in choice)
        return tuple(key for key in keys if key.partition(".")[0] in TRAINING_KEYS)

    @property
    def axes(self) -> "dict[str, Sequence[Entries]]":
        """The axes that are combined: a list of choices for each, every choice with the keys that it sets."""
        zipped = [dict(zip(self.zip, values, strict=True)) for values in zip(*self.zip.values(), strict=True)]
        axes: dict[str, Sequence[Entries]] = {"list": self.list, "zip": zipped}
        axes |= {key: [{key: value} for value in values] for key, values in self.grid.items()}
        return {name: choices for name, choices in axes.items() if choices}


def sweep_path(name: Path) -> Path:
    """Return where a sweep lies: one that comes along may be called by its name.

    >>> sweep_path(Path("tiny")).name
    'tiny.yaml'
    """
    return named_file(name, SWEEPS)


def load_sweep(path: Path) -> Sweep:
    """Read a sweep; every fault names the file."""
    data = read_data(path)
    refuse_other_kinds(path, data, SWEEP_FILE)
    if isinstance(data, dict):  # a value in the place of a list has no other meaning
        for name in ("grid", "zip"):
            axes = cast(dict[str, Any], data).get(name)
            if isinstance(axes, dict):
                values = cast(dict[str, Any], axes)
                data[name] = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
    return record.decode(Sweep, data, path)


def points_of(sweep: Sweep, folder: Path) -> tuple[SweepPoint, ...]:
    """Return the points of a sweep file in this folder, each question once; all that is wrong with any is one error."""
    count = sweep.frontier * math.prod(len(choices) for choices in sweep.axes.values())
    require((count <= MOST_POINTS, "points", f"a sweep has at most {MOST_POINTS}, not {count}"))
    base, faults, points = base_of(sweep, folder), Faults(), dict[str, SweepPoint]()
    for choices in product(*sweep.axes.values()):
        with faults.of():
            override = {key: value for choice in choices for key, value in choice.items()}
            for point in points_of_question(sweep, base, override, folder):
                points.setdefault(point.id, point)
    faults.refuse()
    return tuple(points.values())


def points_of_question(sweep: Sweep, base: Entries, override: Entries, folder: Path) -> list[SweepPoint]:
    """Return the points of one question: its best plan, and as many more as the sweep wants."""
    entries = entries_seen_from(merged_entries(base, override), folder)
    if _PLAN in entries:
        entries[_PLAN] = seen_from(str(entries[_PLAN]), folder)
        question_keys = sorted(entries.keys() - {_PLAN, *TRAINING_KEYS})
        require((not question_keys, _PLAN, f"has answered its question. Leave out {', '.join(question_keys)}"))
    require((not {MODULE, "model"} <= {*entries}, MODULE, "is the model. Leave out model"))
    recipe = SweepPoint(id="", varied={}, entries=entries).recipe
    if sweep.mode == "run":
        seen = recipe.training.seen_from(folder)
        for key, sets in (("data", seen.data.sets), ("eval", seen.eval.sets)):
            entries = {**entries, key: {**entries[key], "sets": dict(sets)}} if key in entries else entries
    content: dict[str, Any] = {key: value for key, value in entries.items() if key not in TRAINING_KEYS}
    files = {key: Path(str(content[key])) for key in _FILES if key in content}
    files |= {MODULE: Path(str(content[MODULE]).rpartition(":")[0])} if MODULE in content else {}
    digests = {key: _digest(path.read_bytes(), 64) if path.is_file() else None for key, path in files.items()}
    content["files"] = digests | EXTENSIONS.entries()
    if sweep.mode == "run":
        content |= {"run": {key: entries[key] for key in TRAINING_KEYS if key in entries}, "rehearse": sweep.rehearse}
    points: list[SweepPoint] = []
    for number in range(1, sweep.frontier + 1):
        text = json.dumps({**content, "choice": number}, sort_keys=True, default=str)
        points.append(SweepPoint(id=_digest(text.encode(), 12), varied=override, entries=entries, choice=number))
    return points


def base_of(sweep: Sweep, folder: Path) -> Entries:
    """Return the entries that all points share: those of the recipe, with those of the sweep over them."""
    path = _recipe_path(sweep.recipe, folder) if sweep.recipe else None
    data = read_data(path) if path else {}
    require((isinstance(data, dict), "recipe", f"{sweep.recipe} is no recipe"))
    entries = cast(dict[str, Any], data)
    return merged_entries(entries_seen_from(entries, path.parent) if path else entries, sweep.base)


def _recipe_path(name: str, folder: Path) -> Path:
    """Return the file of a sweep's recipe: beside the sweep, or one that comes with autoshard."""
    beside = folder / name
    return beside if beside.is_file() else named_file(Path(name), RECIPES)


def merged_entries(base: Entries, override: Entries) -> dict[str, Any]:
    """Set keys over a base; a dot goes into a section, null takes a key away, and ``fix.tp`` is tp of ``fix``."""
    merged: dict[str, Any] = json.loads(json.dumps(base, default=str))
    pins: dict[str, Any] = {}
    for key, value in override.items():
        *sections, last = key.split(".")
        if sections == ["fix"]:
            pins[last] = value
            continue
        place = merged
        for section in sections:
            inner = place.get(section)
            place[section] = place = {} if not isinstance(inner, dict) else cast(dict[str, Any], inner)
        place.pop(last, None)
        if value is not None:
            place[last] = value
    if pins:
        before = _COMMA.split(merged.pop("fix", None) or "")
        fixed = [pin for pin in before if pin.partition("=")[0].strip() not in pins]
        fixed += [f"{key}={_plain(value)}" for key, value in pins.items() if value is not None]
        merged |= {"fix": ",".join(filter(None, fixed))} if any(fixed) else {}
    return merged


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _digest(content: bytes, length: int) -> str:
    return hashlib.sha256(content).hexdigest()[:length]
