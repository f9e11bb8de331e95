"""What the planner takes from a script: small parts, checked when made, and arguments that are told apart by type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any, cast, get_args

from autoshard.cost.calibration import Calibration
from autoshard.cost.terms import CostTerm
from autoshard.errors import Check, require
from autoshard.plan.rules.rule import Rule
from autoshard.search.ask.answers import MOST_PLANS, NAMES, NUMBERS
from autoshard.search.ask.planner import SearchResult
from autoshard.search.bound.request import Objective, Request
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.recipe import HEADROOM, EngineChoice, QuestionOptions, headroom_check
from autoshard.spec.workload import Workload

_COUNTS = ("nodes", "seq_len", "global_batch", "top")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How to look: pinned tensors, Rules of your own beside the built-in ones, another search than the built-in one."""

    layouts: Mapping[str, str] = field(default_factory=dict[str, str])  # tensor -> layout, as after --pin
    rules: tuple[Rule, ...] = ()
    headroom: float = HEADROOM  # share of a rank's memory that stays free
    method: Callable[[Request], SearchResult] | None = None
    engine: EngineChoice | None = None  # that runs the plan; None is the cluster's own

    def __post_init__(self) -> None:
        require(
            _is_a(self.layouts, Mapping, "layouts", "layouts by tensors"),
            *_all_of(self.rules, Rule, "rules", "rules, made by @rule"),
            headroom_check(self.headroom),
            (self.method is None or callable(self.method), "method", f"must be a function, not {self.method!r}"),
            (self.engine in (None, *get_args(EngineChoice)), "engine", f"is nxd, torch or any, not {self.engine!r}"),
        )

    def applied(self, question: QuestionOptions) -> QuestionOptions:
        """Return a question that is looked for in this way; a headroom that it states holds."""
        headroom = self.headroom if question.headroom is None else question.headroom
        return replace(question, headroom=headroom, engine=self.engine, pins=self.layouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """How to price: constants other than those of the cluster, terms of your own beside those of the cost model."""

    calibration: Calibration | None = None
    release: str | None = None  # of the platform's software; None is the newest of the calibration's rows
    terms: tuple[CostTerm, ...] = ()

    def __post_init__(self) -> None:
        values = self.calibration, Calibration | None, "calibration", "a Calibration: load_calibration(path)"
        require(_is_a(*values), *_all_of(self.terms, CostTerm, "terms", "cost terms"))


def _is_a(value: object, kinds: Any, where: str, what: str) -> Check:
    return (isinstance(value, kinds), where, f"must be {what}, not {value!r}")


def _all_of(values: object, kind: type, where: str, what: str) -> tuple[Check, ...]:
    right = isinstance(values, tuple | list) and all(isinstance(value, kind) for value in cast(list[Any], values))
    return ((right, where, f"must be a tuple of {what}, not {values!r}"),)


# Of arguments: their types, these in words, and what to do about others.
_NAME, _COSTS = "a name or a path", "a Cost or a Calibration"
_TYPES: Mapping[str, tuple[Any, *tuple[str, ...]]] = {
    "model": (ModelSpec | str | Path, f"a ModelSpec, {_NAME}"),
    "cluster": (Cluster | str | Path, f"a Cluster, {_NAME}"),
    "workload": (Workload | None, "a Workload", ". Name the others: nodes=4, seq_len=8192"),
    "nodes": (int | None, "a whole number"),
    "seq_len": (int | None, "a whole number"),
    "top": (int, "a whole number"),
    "global_batch": (int | str | None, "a whole number, or tokens in words as '4M'"),
    "fix": ((Mapping, str, type(None)), "keys with values, as {'tp': 8} or 'tp=8'"),
    "cost": (Cost | Calibration | None, _COSTS),
    "search": (Search | None, "a Search"),
    "precision": (str | None, "number formats in words, as 'bf16'"),
    "headroom": (float | int | None, "a share such as 0.1"),
    "choose": (int | str | None, "the name or the number of an answer"),
    "price": (float | int | str | None, "dollars, as 21.5 or '2.5/chip'"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What a script, or a reader of files, has in the place of what a question names or states."""

    model: ModelSpec | None = None
    cluster: Cluster | None = None
    workload: Workload | None = None
    calibration: Calibration | None = None

    @classmethod
    def of(cls, model: object, cluster: object, workload: Workload | None, cost: Cost) -> "Brought":
        """Return what of the arguments of a script is a value, and not a name or a path."""
        return cls(
            model=model if isinstance(model, ModelSpec) else None,
            cluster=cluster if isinstance(cluster, Cluster) else None,
            workload=workload,
            calibration=cost.calibration,
        )


def stated_name(value: object) -> str | None:
    """Return a name or a path as text, and nothing of any other value."""
    return str(value) if isinstance(value, str | Path) else None


def as_whole(value: Any) -> Any:
    """Return a whole number of numpy as one of Python, and anything else as it is."""
    return int(value) if not isinstance(value, bool) and isinstance(value, Integral) else value


def require_types(**arguments: object) -> None:
    """Refuse arguments of other types than they must have, and counts of nothing; None leaves all but ``top`` open."""
    checks = list[Check]()
    for name, value in arguments.items():
        types, expected, *advice = _TYPES[name]
        right = isinstance(value, types) and not isinstance(value, bool)
        counts_none = name in _COUNTS and isinstance(value, int) and value < 1
        checks += [
            (right, name, f"must be {expected}, not {value!r}{''.join(advice)}"),
            (not right or not counts_none, name, f"must be at least 1, not {value!r}"),
        ]
    require(*checks)


def require_choices(objective: Objective, choose: str | int | None) -> None:
    """Refuse what is no objective, and what no answer is ever named."""
    names = f"must be {', '.join(NAMES)}, or a number up to {MOST_PLANS}, not {choose!r}"
    require(
        (objective in get_args(Objective), "objective", f"must be time, memory or dollars, not {objective!r}"),
        (choose is None or str(choose) in (*NAMES, *NUMBERS), "choose", names),
    )


def require_price(cluster: Cluster, objective: Objective) -> None:
    """Refuse to minimise dollars that nobody knows."""
    message = f"no price of {cluster.name} is known. State price=, in dollars of a node hour, or minimise time"
    require((objective != "dollars" or cluster.price_usd_per_node_hour is not None, "objective", message))
