"""Every way in which layouts can be run, and which of these the Rules allow.

A layout may run attention over cp in several ways, cut the sequence over tp or not, spread states over dp, and follow
any schedule with any number of chunks. A variant is a space of its own, whose layouts share these choices; it holds a
layout only where the choice changes something that is executed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.blocks.cutting import Terms
from autoshard.cost.setting import PerCandidate
from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import Refusal
from autoshard.plan.rules.check import all_rules
from autoshard.plan.rules.columns import Columns, Engine
from autoshard.plan.rules.rule import Rule
from autoshard.schedule.builders import builders
from autoshard.schedule.waves import Ints
from autoshard.search.bound.request import Request
from autoshard.search.bound.space import Pins, Space, divisors, whole_space
from autoshard.search.bound.watch import Watch, go_on, never_stop
from autoshard.search.fill.stage_options import ALL_RANGES
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec

VARIANT_KEYS = (
    "cp_kind",
    "cp_order",
    "sp",
    "zero",
    "zero_group",
    "schedule",
    "vp",
    "stages",
)  # keys that a variant decides

# That are tried where neither chunks nor stages are pinned. More of them shorten a bubble that is short already.
MOST_CHUNKS = 8

Truths = NDArray[np.bool_]
Choice = tuple[Candidate, bool | None, Ints, Ints]  # what is shared, sp, and the layouts, with the chunks of each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunVariant(PerCandidate):
    """Layouts of a space with one choice of everything else; several numbers of chunks stand as several rows."""

    space: Space
    layouts: Ints  # the number of each row's layout in the space that this is made of
    allowed: Truths  # [kind of recompute, row]: what the Rules allow

    @property
    def terms(self) -> Terms:
        """The terms under which its blocks are cut; with tp 1 it makes no difference whether tp cuts the sequence."""
        base, sp = self.space.base, self.space.sp is not False
        return Terms(
            engine=self.space.engine, sequence_parallel=sp, cp_kind=base.cp_kind, between=base.boundary, fold=base.fold
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LegalSpace:
    """A space under its Rules: the number of its outer points, each Rule's refusals, and each variant's legal rows."""

    space: Space
    num_points: int
    refusals: tuple[Refusal, ...]
    hopeless: frozenset[str]  # Rules that refuse all that they were asked about
    variants: tuple[RunVariant, ...]

    @property
    def num_legal(self) -> int:
        """Outer points that no Rule refuses."""
        return sum(len(variant.layouts) for variant in self.variants)

    def num_near_even(self, model: ModelSpec) -> int:
        """Return how many points try near-even splits alone of layers that differ; see ``listed_splits``."""
        variants = () if self.space.base.stages or not model.order else self.variants
        rows = [variant.space.rows for variant in variants if variant.space.base.schedule not in ALL_RANGES]
        stages = np.concatenate([np.zeros(0, int), *(row["pp"] * row["vp"] for row in rows)])
        return int(((stages > 1) & (stages < model.num_layers)).sum())

    def with_layouts(self, layouts: Truths) -> "LegalSpace":
        """Return the space with only some of its layouts."""
        reduced = (variant.only(np.flatnonzero(layouts[variant.layouts])) for variant in self.variants)
        return replace(self, variants=tuple(variant for variant in reduced if len(variant.layouts)))

    def of_least_memory(self) -> "LegalSpace":
        """Return the part that keeps little in flight: 1F1B, the smallest micro-batches, all or nothing recomputed.

        Where a space has none of these, it is whole in that respect.
        """
        plain = [variant for variant in self.variants if variant.space.base.schedule == "1f1b"] or self.variants
        least = min(int(variant.space.rows["mbs"].min()) for variant in plain)
        selected = [variant.only(np.flatnonzero(variant.space.rows["mbs"] == least)) for variant in plain]
        extreme = [all(kind.kind != "selective" for kind in kinds) for kinds in self.space.recomputes]
        chosen = np.flatnonzero(extreme if any(extreme) else np.ones(len(extreme)))
        recomputes = tuple(self.space.recomputes[number] for number in chosen.tolist())
        return replace(
            self,
            space=replace(self.space, recomputes=recomputes),
            variants=tuple(
                replace(variant, space=replace(variant.space, recomputes=recomputes), allowed=variant.allowed[chosen])
                for variant in selected
                if len(variant.layouts)
            ),
        )


def node_groups(cluster: Cluster, engine: Engine) -> tuple[int, ...]:
    """Return over how many ranks of dp and cp an engine may divide states, so that each node holds a copy of them.

    With more ranks of tp there are fewer on a node; see ``run_choices``.
    """
    return divisors(cluster.ranks_per_node)[1:] if engine == "torch" and cluster.num_nodes > 1 else ()


def run_choices(space: Space, model: ModelSpec, cluster: Cluster, pins: Pins) -> Iterator[Choice]:
    """Yield every choice that is not pinned, with the layouts for which it changes something.

    With heads cut over cp every rank sees whole sequences, so their order changes nothing; and tp cuts no sequence.
    """
    tp, pp, cp, ep, dp = (space.rows[key] for key in ("tp", "pp", "cp", "ep", "dp"))
    schedules = [
        name
        for name, builder in builders().items()
        if "vp" not in pins or (builder.num_chunks == pins["vp"] if builder.num_chunks else pins["vp"] > 1)
    ]
    free: dict[str, Sequence[Any]] = {"sp": (None, False), "zero": (1, 0, 3), "cp_kind": ("ring", "all_to_all")}
    free |= {"zero_group": (None, *node_groups(cluster, space.engine))}
    free |= {"cp_order": ("contiguous", "zigzag"), "schedule": schedules}
    choices = [[pins[key]] if key in pins else values for key, values in free.items()]
    for sp, zero, kind, group, order, builder in product(*choices):
        of_node = (group or 1) * tp == cluster.ranks_per_node
        changes = {
            "sp": sp is None or tp > 1,
            "zero": zero == 1 or dp * cp > 1,
            "zero_group": group is None or ((zero > 0) & of_node & (dp * cp > group) & (group % (ep * cp) == 0)),
            "cp_kind": kind == "ring" or (cp > 1) & (tp == 1),
            "cp_order": order == "contiguous" or (cp > 1) & (kind == "ring"),
            "schedule": builder == "1f1b" or pp > 1,
        }
        means = np.ones(space.num_layouts, dtype=bool)
        for key, where in changes.items():
            means &= np.True_ if key in pins else where
        layouts = np.flatnonzero(means)
        fixed = pins.get("vp", builders()[builder].num_chunks)
        if fixed is None:  # from two chunks on
            most = np.minimum(model.num_layers // pp[layouts], model.num_layers if "stages" in pins else MOST_CHUNKS)
            counts = np.maximum(most - 1, 0)
            first = np.repeat(np.cumsum(counts) - counts, counts)
            layouts, chunks = np.repeat(layouts, counts), np.arange(int(counts.sum())) - first + 2
        else:
            layouts = layouts if "vp" in pins else layouts[pp[layouts] * fixed <= model.num_layers]
            chunks = np.full(len(layouts), fixed)
        if len(layouts):
            base = replace(space.base, zero=zero, zero_group=group, cp_kind=kind, cp_order=order, schedule=builder)
            yield base, sp, layouts, chunks


def legal_space(request: Request, engine: Engine, watch: Watch = never_stop) -> LegalSpace:
    """Enumerate all points of an engine and ask every Rule about all of them.

    Rules that judge layouts alone are asked first, about each layout once.
    """
    model, pins = request.model, request.pins
    whole = whole_space(model, request.cluster, request.workload, engine, pins)
    choices = list(run_choices(whole, model, request.cluster, pins))
    counts = np.bincount(
        np.concatenate([np.zeros(0, int), *(choice[2] for choice in choices)]), minlength=whole.num_layouts
    )
    # Recompute that is pinned stage by stage depends on how many stages there are.
    decided = {*VARIANT_KEYS, *({"recompute"} & pins.keys())}
    late = [rule for rule in all_rules() if rule.keys & decided]
    late.sort(key=lambda rule: not rule.keys <= {"zero", "schedule"})  # Rules that differ between rows come last
    tally = _Tally(request)
    allowed = tally.allowed(whole, [rule for rule in all_rules() if not rule.keys & decided], counts)
    alive: Truths = np.any(allowed, axis=1)
    number = np.cumsum(alive) - 1
    legal: list[RunVariant] = []
    for base, sp, layouts, chunks in choices:
        go_on(watch)
        live, vp = layouts[alive[layouts]], chunks[alive[layouts]]
        rows = {key: column[live] for key, column in whole.rows.items()}
        space = replace(whole, rows={**rows, "vp": vp}, base=base, sp=sp)
        verdicts = allowed[live] & tally.allowed(space, [*late, *request.extra_rules], np.ones_like(live))
        legal_rows = np.flatnonzero(verdicts.any(axis=1))
        if len(legal_rows):
            legal.append(RunVariant(space=space, layouts=number[live], allowed=verdicts.T).only(legal_rows))
    return LegalSpace(
        space=whole.only(np.flatnonzero(alive)),
        num_points=int(counts.sum()),
        refusals=tuple(tally.refusals.values()),
        hopeless=frozenset(tally.refusals.keys() - tally.hopeful),
        variants=tuple(legal),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InTheWay:
    """Rules that alone refuse some candidates, one of these candidates, and their number."""

    rules: tuple[str, ...]  # ids
    candidate: Candidate
    num_candidates: int


def in_the_way(request: Request, engine: Engine) -> tuple[InTheWay, ...]:
    """Return the smallest sets of Rules against a candidate, first the sets that refuse most candidates."""
    model, facts = request.model, (request.model, request.cluster, request.workload)
    whole = whole_space(*facts, engine, request.pins)
    rules = [*all_rules(), *request.extra_rules]
    by_rules: dict[tuple[str, ...], InTheWay] = {}
    for base, sp, layouts, chunks in run_choices(whole, model, request.cluster, request.pins):
        rows = {key: column[layouts] for key, column in whole.rows.items()}
        space = replace(whole, rows={**rows, "vp": chunks}, base=base, sp=sp)
        for kind in range(len(space.recomputes)):
            columns = space.columns(*facts, kind)
            against = np.stack([~np.broadcast_to(rule.allows(columns), len(layouts)) for rule in rules])
            few = np.flatnonzero(against.sum(axis=0) == against.sum(axis=0).min(initial=len(rules)))
            for row in few.tolist():
                ids = tuple(rule.id for rule, wrong in zip(rules, against[:, row], strict=True) if wrong)
                counted = by_rules.get(ids)
                number = counted.num_candidates + 1 if counted else 1
                candidate = counted.candidate if counted else space.candidate(row, kind)
                by_rules[ids] = InTheWay(rules=ids, candidate=candidate, num_candidates=number)
    least = min(map(len, by_rules), default=0)
    return tuple(
        sorted(
            (obstacle for obstacle in by_rules.values() if len(obstacle.rules) == least),
            key=lambda obstacle: -obstacle.num_candidates,
        )
    )


class _Tally:
    """The refusals of every Rule so far, with its message about the candidate that the fewest other Rules refuse."""

    def __init__(self, request: Request) -> None:
        self._facts = (request.model, request.cluster, request.workload)
        self._own_rules = request.extra_rules
        self._reasons: dict[str, int] = {}  # against the candidate that is the example of a refusal
        self.refusals: dict[str, Refusal] = {}
        self.hopeful: set[str] = set()  # Rules that allowed something

    def allowed(self, space: Space, rules: Sequence[Rule], counts: Ints) -> Truths:
        """Judge a space, each row of which is so many points; return whether all Rules allow it: [row, recompute].

        Once a Rule has refused every row, no other Rule is asked.
        """
        shape = (space.num_layouts, len(space.recomputes))
        answers: list[tuple[Rule, Truths]] = []
        is_allowed, against = np.ones(shape, dtype=bool), np.zeros(shape, dtype=np.uint8)
        if not space.num_layouts:
            return is_allowed

        @cache
        def columns(kind: int) -> Columns:
            return space.columns(*self._facts, kind)

        for rule in rules:
            if rule.applies(columns(0)):
                # A Rule of autoshard names all keys that it judges; a Rule of the user is asked about everything.
                is_custom = rule in self._own_rules
                verdicts = [
                    rule.allows(columns(kind))
                    for kind in range(shape[1] if is_custom or "recompute" in rule.keys else 1)
                ]
                by_kind = [np.broadcast_to(verdict, shape[0]) for verdict in verdicts]
                answers.append((rule, np.broadcast_to(np.stack(by_kind, axis=1), shape)))
                if np.ndim(verdicts[0]) == 0 and not verdicts[0] and not is_custom:
                    break
        for _, allowed in answers:
            is_allowed &= allowed
            against += ~allowed
        for rule, allowed in answers:
            if allowed.any():
                self.hopeful.add(rule.id)
            if not allowed.all():
                mildest = np.where(allowed, len(answers) + 1, against).argmin()
                self._refuse(
                    space, rule, int(mildest), int(against.flat[mildest]), int(counts[~allowed.all(axis=1)].sum())
                )
        return is_allowed

    def _refuse(self, space: Space, rule: Rule, mildest: int, reasons: int, num_points: int) -> None:
        """Add the points that a Rule refuses, and its message if no milder example is known."""
        refusal = self.refusals.get(rule.id)
        num_points += refusal.num_points if refusal else 0
        if num_points and (refusal is None or reasons < self._reasons[rule.id]):
            self._reasons[rule.id] = reasons
            candidate = space.candidate(*divmod(mildest, len(space.recomputes)))
            example = rule.message(Columns.of(candidate, *self._facts, space.engine))
            self.refusals[rule.id] = Refusal(rule_id=rule.id, num_points=num_points, example=example)
        elif refusal:
            self.refusals[rule.id] = replace(refusal, num_points=num_points)
