"""What stages may choose from, and what was chosen for many candidates at once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule

Column = Any
SURE = 1e-12  # of a bound that was computed in another order


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """What every rank may choose from: kinds of recompute, and what is pinned or refused."""

    kinds: tuple[Recompute, ...]  # as the rows of a frame's layers
    allowed: Column  # [kind, candidate]: what Rules allow
    num_layers: int
    stages: tuple[int, ...] | None  # pinned
    recompute: tuple[Recompute, ...] | None  # pinned
    partly: bool = True  # whether some of a stage's layers may recompute in full, the others nothing

    @property
    def plain_kind(self) -> int:
        """The row of no recompute."""
        return self.kinds.index(Recompute())

    @property
    def full_kind(self) -> int | None:
        """The row of full recompute, if it may be chosen for some of a stage's layers."""
        full = Recompute(kind="full")
        return self.kinds.index(full) if self.partly and full in self.kinds else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chosen:
    """The best way found for each candidate: its time and memory, a bound on all ways, layers and recompute by stage.

    Infinite where none fits; the bound then says so too.
    """

    time_s: Column
    bound_s: Column
    peak_bytes: Column
    kind: Column  # [stage, candidate]
    dropped: Column  # [stage, candidate]: layers of this kind
    plain: Column

    def only(self, rows: Column) -> "Chosen":
        """Return those of some candidates."""
        return Chosen(**{field.name: getattr(self, field.name)[..., rows] for field in fields(self)})

    @classmethod
    def side_by_side(cls, parts: "Sequence[Chosen]") -> "Chosen":
        """Return those of several candidates as one."""
        return cls(
            **{field.name: np.concatenate([getattr(one, field.name) for one in parts], -1) for field in fields(cls)}
        )

    @classmethod
    def nothing(cls, schedule: Schedule, bound_s: Column) -> "Chosen":
        """Return that nothing was found, and what anything takes at least."""
        none = np.zeros((schedule.num_stages, len(bound_s)), dtype=np.int64)
        forever = np.full(len(bound_s), np.inf)
        return cls(time_s=forever, bound_s=bound_s, peak_bytes=forever, kind=none, dropped=none, plain=none)

    def where(self, places: Column, others: "Chosen") -> "Chosen":
        """Return the same with other ones at some places."""
        changed = {field.name: np.array(getattr(self, field.name), copy=True) for field in fields(self)}
        for name, column in changed.items():
            column[..., places] = getattr(others, name)
        return Chosen(**changed)

    def bounded(self, bound_s: Column) -> "Chosen":
        """Return the same with another bound."""
        return replace(self, bound_s=np.minimum(self.time_s, bound_s))

    def stages(self, candidate: int) -> tuple[int, ...]:
        """Return the layers of every stage."""
        return tuple((self.dropped[:, candidate] + self.plain[:, candidate]).tolist())

    def recompute(self, candidate: int, kinds: Sequence[Recompute]) -> tuple[Recompute, ...]:
        """Return what every stage computes again."""
        numbers = range(len(self.kind))
        columns = (
            (int(self.kind[stage, candidate]), int(self.dropped[stage, candidate]), int(self.plain[stage, candidate]))
            for stage in numbers
        )
        return tuple(
            Recompute(kind="full", num_layers=dropped) if dropped and plain else kinds[kind] if dropped else Recompute()
            for kind, dropped, plain in columns
        )


def best_of(found: Sequence[Chosen]) -> Chosen:
    """Return for each candidate the fastest of several ways; among equals the first."""
    if len(found) == 1:
        return found[0]
    times = np.array([one.time_s for one in found])
    best = times.argmin(axis=0)
    columns = np.arange(len(found[0].time_s))

    def picked(name: str) -> Column:
        return np.moveaxis(np.array([getattr(one, name) for one in found]), 0, -2)[..., best, columns]

    best_found = Chosen(**{field.name: picked(field.name) for field in fields(Chosen)})
    return replace(best_found, bound_s=np.min([one.bound_s for one in found], axis=0))
