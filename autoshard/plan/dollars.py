"""What a plan's predicted step costs, from the price that its cluster carries."""

from dataclasses import dataclass

from autoshard.plan.plan import Plan
from autoshard.plan.prediction import rounded

_SECONDS_PER_HOUR = 3600
_BILLION = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Dollars:
    """What a run costs on demand: all nodes of the cluster, for as long as the prediction says.

    Prices change, and most who rent many nodes pay another one: ``price_date`` says how old this one is.
    """

    usd_per_step: float
    usd_per_billion_tokens: float
    price_usd_per_node_hour: float
    price_date: str | None  # None where the source of the price carries none


def dollars_of(plan: Plan) -> Dollars | None:
    """Return what a predicted plan costs; None where no price of its nodes is known, or nothing is predicted."""
    price, prediction = plan.cluster.price_usd_per_node_hour, plan.prediction
    if price is None or prediction is None:
        return None
    usd_per_s = price * plan.cluster.num_nodes / _SECONDS_PER_HOUR
    return Dollars(
        usd_per_step=rounded(usd_per_s * prediction.step_time_s),
        usd_per_billion_tokens=rounded(usd_per_s * _BILLION / prediction.tokens_per_s),
        price_usd_per_node_hour=price,
        price_date=plan.cluster.price_date,
    )
