"""A whole space asked of the Rules: layouts first, by those that need no more; then every form of cp; then variants."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from autoshard.plan.certificate import Refusal
from autoshard.plan.rules.check import all_rules
from autoshard.plan.rules.columns import Columns, Engine
from autoshard.plan.rules.rule import Rule
from autoshard.search.points import Legal
from autoshard.search.space import Pins, Space, whole_space
from autoshard.search.variants import CHOSEN, CP_FORM, Variant, cp_forms, num_variants, variants
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

Column = Any


class Asked(Protocol):
    """What a question must say to be judged."""

    @property
    def model(self) -> ModelSpec:
        """The model."""
        ...

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        ...

    @property
    def workload(self) -> Workload:
        """The work."""
        ...

    @property
    def pins(self) -> Pins:
        """Keys of the candidate that are fixed."""
        ...

    @property
    def extra_rules(self) -> tuple[Rule, ...]:
        """The user's own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ruled:
    """A space under its Rules: how many outer points it has, who refuses how many, and what is left of each variant."""

    space: Space
    num_points: int
    refusals: tuple[Refusal, ...]
    hopeless: frozenset[str]  # Rules that refuse all that they were asked about
    legal: tuple[Legal, ...]

    @property
    def num_legal(self) -> int:
        """Outer points that no Rule refuses."""
        return sum(len(one.variant.layouts) for one in self.legal)

    def only(self, layouts: Column) -> "Ruled":
        """Return what is left where only some layouts may be used, by truth values."""
        legal = [one.only(np.flatnonzero(layouts[one.variant.layouts])) for one in self.legal]
        return replace(self, legal=tuple(one for one in legal if len(one.variant.layouts)))


def judge_space(asked: Asked, engine: Engine) -> Ruled:
    """Enumerate all points of an engine and ask every Rule about all of them."""
    space = whole_space(asked.model, asked.cluster, asked.workload, engine, asked.pins)
    counts = num_variants(space, asked.model, asked.pins)
    num_forms = sum(np.bincount(one.layouts, minlength=len(counts)) for one in cp_forms(space, asked.pins))
    early, middle, late = _in_turn(asked)
    tally = _Tally(asked=asked)
    allowed = tally.judged(space, early, counts * num_forms)
    alive = np.flatnonzero(allowed.any(axis=1))
    space, allowed, own = space.keep(alive), allowed[alive], counts[alive]
    forms: list[Variant] = []
    for form in cp_forms(space, asked.pins):
        kept = np.flatnonzero(tally.judged(form.space, middle, own[form.layouts]).any(axis=1))
        if len(kept):
            forms.append(Variant(space=form.space.keep(kept), layouts=form.layouts[kept]))
    legal: list[Legal] = []
    for variant in variants(forms, asked.model, asked.pins):
        ones = np.ones(len(variant.layouts), dtype=np.int64)
        left = allowed[variant.layouts] & tally.judged(variant.space, late, ones)
        kept = np.flatnonzero(left.any(axis=1))
        if len(kept):
            legal.append(Legal(variant=variant, allowed=left).only(kept))
    return Ruled(
        space=space,
        num_points=int((counts * num_forms).sum()),
        refusals=tally.refusals(),
        hopeless=tally.hopeless,
        legal=tuple(legal),
    )


def _in_turn(asked: Asked) -> tuple[Sequence[Rule], Sequence[Rule], Sequence[Rule]]:
    """Part the Rules: those about layouts, those that need to know the form of cp as well, and all others."""
    # Recompute that is pinned stage by stage depends on how many stages there are.
    chosen = {*CHOSEN, *({"recompute"} & asked.pins.keys())}
    late = [rule for rule in all_rules() if _keys(rule) & chosen - {*CP_FORM}]
    left = [rule for rule in all_rules() if rule not in late]
    early = [rule for rule in left if not _keys(rule) & chosen]
    middle = [rule for rule in left if rule not in early]
    return early, middle, (*sorted(late, key=_by_row), *asked.extra_rules)


def _keys(rule: Rule) -> set[str]:
    return set(rule.subject.replace(" ", "").split(","))


def _by_row(rule: Rule) -> bool:
    """Say whether a Rule may judge the rows of a variant differently; the others are asked first."""
    return not _keys(rule) <= {"zero", "schedule"}


class _Tally:
    """What every Rule has refused so far, with its words about the candidate that had least else against it."""

    def __init__(self, *, asked: Asked) -> None:
        self._asked = asked
        self._counts: dict[str, int] = {}
        self._examples: dict[str, tuple[int, str]] = {}
        self._hopeful: set[str] = set()

    def judged(self, space: Space, rules: Sequence[Rule], counts: Column) -> Column:
        """Ask Rules about a space; a row stands for so many points. Return what all allow, by row and recompute.

        Once a Rule has refused every row, no other is asked.
        """
        facts = (self._asked.model, self._asked.cluster, self._asked.workload)
        columns = [space.columns(*facts, 0)]
        answers: list[tuple[Rule, Column]] = []  # of those that do not ask what is recomputed, one for all kinds
        for rule in rules:
            if rule.applies(columns[0]):
                mine = rule in self._asked.extra_rules
                whole = rule.allows(columns[0])
                # A Rule of autoshard names all keys that it judges; one of the user's is asked about everything.
                kinds = len(space.recomputes) if mine or "recompute" in rule.subject else 1
                allowed = np.empty((space.num_layouts, kinds), dtype=bool)
                allowed[:, :1] = np.reshape(whole, (-1, 1))
                answers.append((rule, allowed))
                if np.ndim(whole) == 0 and not whole and not mine:
                    break
                columns += [space.columns(*facts, kind) for kind in range(len(columns), kinds)]
                for kind in range(1, kinds):
                    allowed[:, kind] = rule.allows(columns[kind])
        if space.num_layouts:
            self._count(space, answers, counts)
        found = np.ones((space.num_layouts, len(space.recomputes)), dtype=bool)
        for _, allowed in answers:
            found &= allowed
        return found

    def _count(self, space: Space, answers: Sequence[tuple[Rule, Column]], counts: Column) -> None:
        against = np.zeros((space.num_layouts, len(space.recomputes)), dtype=np.uint8)
        for _, allowed in answers:
            against += ~allowed
        for rule, allowed in answers:
            if allowed.any():
                self._hopeful.add(rule.id)
            if allowed.all():
                continue
            self._counts[rule.id] = self._counts.get(rule.id, 0) + int(counts[~allowed.all(axis=1)].sum())
            mildest = int(np.where(allowed, len(answers) + 1, against).argmin())
            reasons = int(against.reshape(-1)[mildest])
            if rule.id not in self._examples or reasons < self._examples[rule.id][0]:
                candidate = space.at(*divmod(mildest, len(space.recomputes)))
                facts = (self._asked.model, self._asked.cluster, self._asked.workload, space.engine)
                self._examples[rule.id] = (reasons, rule.message(Columns.of(candidate, *facts)))

    @property
    def hopeless(self) -> frozenset[str]:
        """Rules that refused some point and allowed nothing so far."""
        return frozenset({rule_id for rule_id, count in self._counts.items() if count} - self._hopeful)

    def refusals(self) -> tuple[Refusal, ...]:
        """Return what was refused, by Rule."""
        return tuple(
            Refusal(rule_id=rule_id, num_points=count, example=self._examples[rule_id][1])
            for rule_id, count in self._counts.items()
            if count
        )
