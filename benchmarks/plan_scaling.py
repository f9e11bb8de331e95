"""How the time of a search grows with the machine: from 16 to 4,096 nodes, odd numbers of nodes among them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.spec.cluster_catalogue import load_cluster
from benchmarks.planning import Round, Summary, rounds_of, yardstick_of
from benchmarks.result import Extra, Result

ROUNDS = 3
BAR = 1.0
CLUSTER = "trn2.48xlarge"
NODES = (16, 24, 60, 64, 256, 720, 1024, 4095, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Seconds as a power of the number of ranks, by least squares of the logarithms."""

    exponent: float
    first_s: float  # of one rank, by the fit
    explained: float  # share of the spread of the logarithms

    @classmethod
    def of(cls, seconds: Mapping[int, float]) -> "Growth":
        """Fit.

        >>> growth = Growth.of({1: 3.0, 4: 6.0, 16: 12.0})
        >>> round(growth.exponent, 6), round(growth.at(64), 6), round(growth.explained, 6)
        (0.5, 24.0, 1.0)
        """
        ranks, spent = np.log(list(seconds)), np.log(list(seconds.values()))
        exponent, first = np.polyfit(ranks, spent, 1)
        rest = float(np.sum((spent - exponent * ranks - first) ** 2))
        spread = float(np.sum((spent - spent.mean()) ** 2))
        return cls(
            exponent=float(exponent), first_s=float(np.exp(first)), explained=1 - rest / spread if spread else 1.0
        )

    def at(self, ranks: int) -> float:
        """Return the seconds of the fit."""
        return self.first_s * ranks**self.exponent


def run() -> Result:
    """Plan Llama-3.1 405B on every size; where no layout is legal or fits, finding that out is what is timed."""
    questions = {
        str(nodes): ("--model", "llama3.1-405b", "--cluster", CLUSTER, "--nodes", str(nodes)) for nodes in NODES
    }
    return judge(rounds_of(questions, ROUNDS), load_cluster(CLUSTER, 1).num_ranks)


def judge(rounds: Sequence[Round], ranks_per_node: int) -> Result:
    """Fit the medians, those of sizes without a plan too; the value is the exponent, which must be below linear."""
    found = {int(name): Summary.of(rounds, name) for name in rounds[0].planned}
    growth = Growth.of({nodes * ranks_per_node: one.cpu_s for nodes, one in found.items()})
    without = [str(nodes) for nodes, one in found.items() if one.last.certificate is None]
    extras: dict[str, Extra] = {}
    for nodes, one in found.items():
        extras[f"{nodes}_nodes_s"] = round(one.cpu_s, 3)
        extras[f"{nodes}_nodes_fitted_s"] = round(growth.at(nodes * ranks_per_node), 3)
        extras[f"{nodes}_nodes_peak_mb"] = round(one.peak_bytes / 1e6, 1)
    extras |= {
        "ranks_per_node": ranks_per_node,
        "nodes_without_a_plan": ", ".join(without) or None,
        "slowest_s": round(max(one.cpu_s for one in found.values()), 3),
        "worst_gap": max(one.last.gap for one in found.values()),
        "share_explained_by_fit": round(growth.explained, 3),
    }
    return Result(
        name="plan_scaling",
        value=round(growth.exponent, 3),
        unit="exponent of CPU s over ranks",
        bar=BAR,
        holds=growth.exponent < BAR,
        extras={**extras, **yardstick_of(rounds)},
    )
