"""Ask all Rules at once: about one candidate, with reasons; or about columns of candidates, with counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.plan.candidate import Candidate
from autoshard.plan.rules import effect, neuron, nxd_engine, nxd_experts, sequence, shape, torch_engine
from autoshard.plan.rules.columns import Column, Columns, Engine
from autoshard.plan.rules.rule import Rejection, Rule
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload


def all_rules() -> tuple[Rule, ...]:
    """List every Rule that comes with autoshard."""
    return (
        *shape.RULES,
        *sequence.RULES,
        *effect.RULES,
        *neuron.RULES,
        *nxd_engine.RULES,
        *nxd_experts.RULES,
        *torch_engine.RULES,
    )


def judge(columns: Columns, rules: Sequence[Rule]) -> tuple[Rejection, ...]:
    """Give every reason why a single candidate may not run."""
    found = (rule.rejection(columns) for rule in rules)
    return tuple(rejection for rejection in found if rejection is not None)


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
    columns = Columns.of(candidate, model, cluster, workload, engine)
    return judge(columns, (*all_rules(), *extra_rules))


@dataclass(frozen=True, slots=True, kw_only=True)
class Legality:
    """Which of many candidates may run, and how many each Rule refuses; several may refuse the same one."""

    mask: Column  # a numpy array of truth values, one per candidate
    refused: Mapping[str, int]  # rule id -> candidates; Rules that refuse none are left out


def legality(columns: Columns, rules: Sequence[Rule] | None = None) -> Legality:
    """Judge columns of candidates by the same predicates that judge a single one."""
    import numpy as np  # only here: planning one candidate does not need it

    shapes = (np.shape(getattr(columns, name)) for name in Columns.names())
    mask = np.ones(np.broadcast_shapes(*shapes), dtype=bool)
    refused: dict[str, int] = {}
    for rule in all_rules() if rules is None else rules:
        if rule.applies(columns):
            allowed = np.broadcast_to(rule.allows(columns), mask.shape)
            mask = mask & allowed
            refused[rule.id] = int(mask.size - np.count_nonzero(allowed))
    return Legality(mask=mask, refused={rule_id: count for rule_id, count in refused.items() if count})


def legal_mask(columns: Columns, rules: Sequence[Rule] | None = None) -> Column:
    """Say for each of many candidates whether it may run."""
    return legality(columns, rules).mask
