"""Ask all Rules at once: about one candidate, with reasons; or about columns of candidates, with counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autoshard.extensions import EXTENSIONS
from autoshard.plan.candidate import Candidate
from autoshard.plan.rules import effect, neuron, nxd_engine, shape
from autoshard.plan.rules.columns import COLUMNS, Columns, Engine
from autoshard.plan.rules.rule import Rejection, Rule, judge
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload


@cache
def all_rules() -> tuple[Rule, ...]:
    """List every Rule that comes with autoshard."""
    modules = shape, effect, neuron, nxd_engine
    return tuple(value for module in modules for value in vars(module).values() if isinstance(value, Rule))


def user_rules() -> tuple[Rule, ...]:
    """List the Rules of files that ``--extend`` has loaded."""
    return tuple(EXTENSIONS.of(Rule, [rule.id.replace("-", "_") for rule in all_rules()]).values())


def rejections(
    candidate: Candidate,
    model: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    engine: Engine,
    *,
    extra_rules: Sequence[Rule] = (),
) -> tuple[Rejection, ...]:
    """Give every reason why a candidate may not run; ``extra_rules`` are the user's own."""
    return judge(
        Columns.of(candidate, model, cluster, workload, engine),
        tuple(dict.fromkeys((*all_rules(), *user_rules(), *extra_rules))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Legality:
    """Which of many candidates may run, and how many each Rule refuses; several may refuse the same one."""

    mask: NDArray[np.bool_]
    refused: Mapping[str, int]  # rule id -> candidates; Rules that refuse none are left out


def legality(columns: Columns, rules: Sequence[Rule] | None = None) -> Legality:
    """Judge columns of candidates by the same predicates that judge a single one."""
    shapes = (np.shape(getattr(columns, name)) for name in COLUMNS)
    mask = np.ones(np.broadcast_shapes(*shapes), dtype=bool)
    refused: dict[str, int] = {}
    for rule in all_rules() if rules is None else rules:
        allowed = np.broadcast_to(rule.allows(columns), mask.shape)
        mask = mask & allowed
        refused[rule.id] = int(mask.size - np.count_nonzero(allowed))
    return Legality(mask=mask, refused={rule_id: count for rule_id, count in refused.items() if count})
