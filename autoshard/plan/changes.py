"""What two plans state and choose otherwise, and the lines of their tables that differ."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from autoshard.plan.candidate import Candidate, show_value
from autoshard.plan.plan import Plan
from autoshard.spec.record import encode

_DEFAULT = "default"
_STATED = ("model", "workload", "cluster")
_PRICES = ("cluster.price_usd_per_node_hour", "cluster.price_date")
_CHOSEN = (
    *_PRICES,
    "cluster.lnc",
)  # the question is the same: prices cost no time, and lnc cuts the same nodes otherwise
# Of clusters with other names or other ranks nearly every number differs; of other models as well.
_TELLING = {"cluster": ("name", "lnc", "num_nodes"), "model": ("name",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that two plans have otherwise, as text; None: this plan has none."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChange:
    """One line of the tables of Strategies that differs; None: this plan has none."""

    block: str
    op: str
    a: str | None
    b: str | None

    @property
    def sends_alike(self) -> bool:
        """Whether only layouts differ, not what is sent and kept."""
        return (self.a or "").partition(" | ")[2] == (self.b or "").partition(" | ")[2]


def asked_changes(a: Plan, b: Plan) -> tuple[Change, ...]:
    """Say in what two plans answer different questions: model, workload, cluster."""
    return tuple(change for change in _stated_changes(a, b) if change.name not in _CHOSEN)


def chosen_changes(a: Plan, b: Plan) -> tuple[Change, ...]:
    """Say what two plans choose otherwise: keys of the candidate first, then engine, sizes, calibration, prices."""
    prices = (change for change in _stated_changes(a, b) if change.name in _PRICES)
    return (
        *_changes(_keys(a), _keys(b)),
        *_changes({"engine": a.engine}, {"engine": b.engine}),
        *_changes(_lists(a), _lists(b)),
        *_changes(_leaves(encode(a.buckets), "buckets"), _leaves(encode(b.buckets), "buckets")),
        *_changes(_leaves(encode(a.padding), "padding"), _leaves(encode(b.padding), "padding")),
        *_provenance_changes(a.provenance, b.provenance),
        *prices,
    )


def line_changes(a: Plan, b: Plan) -> tuple[LineChange, ...]:
    """List the lines that differ in blocks that both plans have; what is sent or kept otherwise comes first."""
    found = [
        LineChange(block=block, op=change.name, a=change.a, b=change.b)
        for block in sorted(a.strategies.keys() & b.strategies.keys())
        for change in _changes(a.strategies[block], b.strategies[block])
    ]
    return tuple(sorted(found, key=lambda line: (line.sends_alike, line.block, line.op)))


def _stated_changes(a: Plan, b: Plan) -> Iterator[Change]:
    for part in _STATED:
        found = _changes(_leaves(encode(getattr(a, part)), part), _leaves(encode(getattr(b, part)), part))
        found = [change for change in found if "source" not in change.name]  # where a number is from costs nothing
        telling = [f"{part}.{name}" for name in _TELLING.get(part, ())]
        swapped = any(change.name in telling and not change.name.endswith("num_nodes") for change in found)
        yield from (change for change in found if not swapped or change.name in telling)


def _keys(plan: Plan) -> dict[str, str]:
    """Return the keys of a plan's candidate as text; what has a default elsewhere is said as it is here."""
    candidate = plan.candidate
    said = {
        key: _DEFAULT if value is None else show_value(key, value)
        for key, value in ((field.name, getattr(candidate, field.name)) for field in dataclasses.fields(Candidate))
    }
    return {**said, "sp": show_value("sp", plan.sp), "kernels": plan.kernels}


def _lists(plan: Plan) -> dict[str, str]:
    """Return what of a schedule its builder's name does not say."""
    schedule = encode(plan.schedule)
    return {
        name: text
        for key in ("placement", "actions")
        if schedule[key] is not None
        for name, text in _leaves(schedule[key], f"schedule.{key}").items()
    }


def _provenance_changes(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Change]:
    """Say which notes differ; of another calibration its name says enough, and a model's source nothing."""
    found = [change for change in _changes(a, b) if change.name != "model"]
    swapped = any(change.name == "calibration" for change in found)
    for change in found:
        if not (swapped and change.name.startswith("calibration.")):
            yield change


def _changes(a: Mapping[str, str], b: Mapping[str, str]) -> list[Change]:
    names = (*a, *(name for name in b if name not in a))
    return [Change(name=name, a=a.get(name), b=b.get(name)) for name in names if a.get(name) != b.get(name)]


def _leaves(data: Any, where: str) -> dict[str, str]:
    """Return every single value of JSON data by its path, as text.

    >>> _leaves({"lnc": None, "links": [{"ports": 2}]}, "cluster")
    {'cluster.lnc': 'none', 'cluster.links[0].ports': '2'}
    """
    if isinstance(data, dict):
        pairs = [(f"{where}.{key}", value) for key, value in cast(dict[str, Any], data).items()]
    elif isinstance(data, list):
        pairs = [(f"{where}[{index}]", value) for index, value in enumerate(cast(list[Any], data))]
    else:
        return {where: "none" if data is None else str(data)}
    return {name: text for inner, value in pairs for name, text in _leaves(value, inner).items()}
