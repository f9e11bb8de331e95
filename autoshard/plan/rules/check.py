"""Ask all Rules at once: about one candidate, with reasons, or about columns of candidates."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autoshard.extensions import EXTENSIONS
from autoshard.plan.candidate import Candidate
from autoshard.plan.rules import neuron, nxd_engine, nxd_kernels, offload, shape
from autoshard.plan.rules.columns import COLUMNS, Columns, Engine
from autoshard.plan.rules.rule import Rejection, Rule, judge
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload


@cache
def all_rules() -> tuple[Rule, ...]:
    """List every Rule that comes with autoshard."""
    modules = shape, offload, neuron, nxd_engine, nxd_kernels
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


def legality(columns: Columns, rules: Sequence[Rule] | None = None) -> NDArray[np.bool_]:
    """Say which of many candidates all Rules allow, by the same predicates that judge a single one."""
    shapes = (np.shape(getattr(columns, name)) for name in COLUMNS)
    legal = np.ones(np.broadcast_shapes(*shapes), dtype=bool)
    for rule in all_rules() if rules is None else rules:
        legal = legal & rule.allows(columns)
    return legal
