"""From a question to the best plan, with what was looked at, what was refused and why."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np

from autoshard import __version__
from autoshard.cost.calibration import Calibration, uncalibrated
from autoshard.cost.predict import predicted
from autoshard.cost.setting import Question
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.certificate import NOTHING_LOOKED_AT, Certificate, Refusal
from autoshard.plan.plan import Plan
from autoshard.plan.rules.check import all_rules, legality
from autoshard.plan.rules.columns import Columns, Engine
from autoshard.plan.rules.rule import Rule
from autoshard.search.columns import Evaluated, evaluate
from autoshard.search.space import Pins, Space, default_kernels, whole_space
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

TIE_DIGITS = 9  # times that agree in so many digits count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a user asks: which model, where, for which work; what is pinned, and which engines may run it."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    engines: tuple[Engine, ...]
    pins: Pins = field(default_factory=dict[str, Any])
    calibration: Calibration | None = None
    extra_rules: tuple[Rule, ...] = ()

    @property
    def constants(self) -> Calibration:
        """The calibration that is used."""
        return self.calibration or uncalibrated()

    def plan(self, candidate: Candidate, engine: Engine) -> Plan:
        """Return the plan of a candidate with its prediction; its provenance names no time and no path."""
        origin = {"autoshard": __version__, "calibration": self.constants.name, "model": self.model.source}
        plan = build_plan(candidate, self.model, self.cluster, self.workload, engine, provenance=origin)
        return predicted(plan, self.constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer: plans that fit, fastest first; if there is none, the legal one that misses memory by least."""

    plans: tuple[Plan, ...]
    nearest_miss: Plan | None
    certificate: Certificate


def search(request: Request, num_plans: int = 1) -> Found:
    """Price every legal candidate of every engine and return the fastest that fit."""
    answers = [_search_engine(request, engine, num_plans) for engine in request.engines]
    plans = sorted((plan for answer in answers for plan in answer.plans), key=_step_time_s)
    misses = [answer.nearest_miss for answer in answers if answer.nearest_miss]
    return Found(
        plans=tuple(plans[:num_plans]),
        nearest_miss=None if plans else min(misses, key=_peak_bytes, default=None),
        certificate=reduce(Certificate.plus, (answer.certificate for answer in answers), NOTHING_LOOKED_AT),
    )


def plan_at(request: Request, candidate: Candidate) -> Plan:
    """Return the plan of exactly one candidate for the first engine, legal or not, as long as it has a shape."""
    engine = request.engines[0]
    kernels = candidate.kernels or default_kernels(request.cluster, engine)
    return request.plan(replace(candidate, kernels=None if kernels == request.cluster.kernels else kernels), engine)


def _search_engine(request: Request, engine: Engine, num_plans: int) -> Found:
    rules = (*all_rules(), *request.extra_rules)
    space = whole_space(request.model, request.cluster, request.workload, engine, request.pins)
    if not space.num_layouts:
        return Found(plans=(), nearest_miss=None, certificate=NOTHING_LOOKED_AT)
    columns = space.columns(request.model, request.cluster, request.workload)
    mask = legality(columns, rules).mask
    legal = space.keep(mask)
    priced = _price(request, legal)
    fits = priced.peak_bytes <= request.cluster.rank_memory_bytes
    plans = tuple(request.plan(candidate, engine) for candidate in _fastest(legal, priced, fits, num_plans))
    miss = None
    if not plans and legal.num_layouts:
        miss = request.plan(_candidate(legal, int(np.argmin(priced.peak_bytes))), engine)
    certificate = Certificate(
        num_layouts=space.num_layouts,
        refusals=tuple(_refusals(request, space, columns, rules)),
        num_legal_layouts=legal.num_layouts,
        num_candidates=legal.num_candidates,
        num_fitting=int(fits.sum()),
    )
    return Found(plans=plans, nearest_miss=miss, certificate=certificate)


def _price(request: Request, legal: Space) -> Evaluated:
    if not legal.num_layouts:
        empty = np.empty((0, len(legal.recomputes)))
        return Evaluated(time_s=empty, peak_bytes=empty)
    question = Question(
        model=request.model,
        cluster=request.cluster,
        workload=request.workload,
        kernels=legal.base.kernels or request.cluster.kernels,
        calibration=request.constants,
    )
    return evaluate(question, legal)


def _refusals(request: Request, space: Space, columns: Columns, rules: Sequence[Rule]) -> list[Refusal]:
    """Count what each Rule refuses, with its words about the first."""
    refusals: list[Refusal] = []
    for rule in rules:
        if not rule.applies(columns):
            continue
        refused = np.flatnonzero(~np.broadcast_to(rule.allows(columns), space.num_layouts))
        if len(refused):
            candidate = space.at(int(refused[0]), 0)
            single = Columns.of(candidate, request.model, request.cluster, request.workload, space.engine)
            message = rule.message(single)
            refusals.append(Refusal(rule_id=rule.id, num_layouts=len(refused), example=message))
    return refusals


def _candidate(space: Space, flat: int) -> Candidate:
    return space.at(*divmod(flat, len(space.recomputes)))


def _fastest(space: Space, priced: Evaluated, fits: Any, count: int) -> list[Candidate]:
    """Return the fastest layouts that fit, each with its best recompute.

    Among equals the one with less memory goes first, then the first by its sizes.
    """
    flat = np.flatnonzero(fits.reshape(-1))
    times = [float(f"{value:.{TIE_DIGITS}g}") for value in priced.time_s.reshape(-1)[flat]]
    rows, recomputes = np.divmod(flat, len(space.recomputes))
    sizes = [space.rows[key][rows] for key in ("mbs", "ep", "cp", "pp", "tp")]
    keys = [recomputes, *sizes, priced.peak_bytes.reshape(-1)[flat], np.array(times)]
    order = np.lexsort(np.stack([key.astype(np.float64) for key in keys]))
    best = {int(rows[index]): int(recomputes[index]) for index in reversed(order)}
    first = dict.fromkeys(int(rows[index]) for index in order)
    return [space.at(row, best[row]) for row in list(first)[:count]]


def _step_time_s(plan: Plan) -> float:
    assert plan.prediction, "a found plan has its prediction"
    return plan.prediction.step_time_s


def _peak_bytes(plan: Plan) -> int:
    assert plan.prediction, "a found plan has its prediction"
    return plan.prediction.peak_bytes
