"""What the rows of a fit have of each feature of a plan, and how far predictions are off outside of it.

A planner picks among thousands of layouts the one that looks best, which is often one that nobody has measured: there a
model's errors are all in its favour. So each plan says how far outside the rows it lies, and its interval widens by the
errors that steps outside have had: those of rows whose value of a feature no row of the fit had.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import in_range, require
from autoshard.plan.candidate import Candidate
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

Features = Mapping[str, tuple[str, ...]]  # feature -> what a run has of it
LeftOut = Callable[[list[int]], NDArray[np.float64]]  # runs -> their relative errors under a fit to the others

_RANGES = ("sequence", "nodes")  # all between the least and the most is inside
_LEAST_ROWS = 3  # that constants are fitted to
_INSIDE = 0.8  # of errors that an interval holds
# What rows outside were off by in a feature of which a fit has one value. Experts: 12 runs of Qwen3-235B-A22B,
# predicted by dense rows of Megatron-Core and by what hosts take for experts under Megatron-LM with TransformerEngine,
# are off by 12.7 % on average, four of five by at most 17 %; twice that, since no row is in FP8 or of another kind.
UNSEEN_OFF: Mapping[str, float] = {"experts": 0.35}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the rows of a fit have of a feature: single values, or the least and the most of a number."""

    values: tuple[str, ...]
    off: float | None = None  # holds 80 % of the errors of rows whose value was left out of a fit; None: no such fit
    counts: tuple[int, ...] = ()  # how many rows have each value; () of a number, and where it is not known

    def __post_init__(self) -> None:
        """Refuse a feature of which nothing was seen."""
        require((bool(self.values), "values", "must hold at least one"), *in_range(self, "off"))

    def distance(self, feature: str, plan_values: Sequence[str]) -> str:
        """Say how far outside a run lies; "" if it does not.

        >>> Seen(values=("2048", "8192")).distance("sequence", ("32768",))
        '32768, and rows have 2048 to 8192: a factor of 4'
        >>> Seen(values=("4096",)).distance("sequence", ("8192",))
        '8192, and rows have 4096: a factor of 2'
        >>> Seen(values=("8", "32")).distance("tp", ("1",)), Seen(values=("8", "32")).distance("tp", ("8",))
        ('1, and rows have 8, 32', '')
        """
        if feature in _RANGES:
            (number,), (low, high) = map(int, plan_values), (int(self.values[0]), int(self.values[-1]))
            factor = max(number / high, low / number)
            rows = f"{low}" if low == high else f"{low} to {high}"
            return "" if factor <= 1 else f"{number}, and rows have {rows}: a factor of {factor:.3g}"
        foreign = [value for value in plan_values if value not in self.values]
        return f"{', '.join(foreign)}, and rows have {', '.join(self.values)}" if foreign else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What constants were fitted to, and how far their predictions are off."""

    date: str  # of the newest row, or the caller's
    rows: Mapping[str, float] = field(hash=False)  # id -> predicted over measured, where it is left out with its like
    num_layouts: int
    left_out_by: Literal["model", "group", "layout"]
    in_sample_mape: float
    left_out_mape: float  # each row predicted with constants fitted to the other rows


def features_of(candidate: Candidate, model: ModelSpec, cluster: Cluster, workload: Workload) -> Features:
    """Return what predictions may be off by: tp, recompute, schedule, kernels, format of products, experts, and so on.

    >>> from autoshard.spec.cluster_catalogue import load_cluster
    >>> from autoshard.spec.model_catalogue import load_model
    >>> from autoshard.spec.workload import Precision
    >>> work = Workload(seq_len=4096, global_batch=8, precision=Precision.named("bf16"))
    >>> some = Candidate.parse("tp=8,pp=4,dp=1,recompute=full:2*3/none", 32)
    >>> features_of(some, load_model("llama3-8b"), load_cluster("trn1.32xlarge"), work)["recompute"]
    ('mixed',)
    """
    names = [f"{entry.kind}{'' if entry.num_layers is None else ':'}" for entry in candidate.recompute]
    kinds = {name + "+offload" * entry.offload for name, entry in zip(names, candidate.recompute, strict=True)}
    mixed = len(kinds) > 1 or any(":" in kind for kind in kinds)  # full:2 computes some layers again
    return {
        "tp": (str(candidate.tp),),
        "recompute": ("mixed",) if mixed else tuple(kinds),
        "schedule": (candidate.schedule,) if candidate.pp > 1 else (),
        "kernels": (candidate.kernels or cluster.kernels,),
        "products": (workload.precision.products or workload.precision.activations,),
        "experts": (str(model.num_experts),),
        "sequence": (str(workload.seq_len),),
        "nodes": (str(cluster.num_nodes),),
    }


def seen_in(runs: Sequence[Features], left_out: LeftOut) -> dict[str, Seen]:
    """Return what runs have of every feature, and how far off those are whose value a fit has not seen.

    Of numbers only the least and the most are left out: what lies between others is not outside.
    """
    seen: dict[str, Seen] = {}
    for feature in runs[0]:
        values = sorted({value for run in runs for value in run[feature]}, key=_order)
        values = [values[0], values[-1]] if feature in _RANGES else values
        errors: list[float] = []
        for value in dict.fromkeys(values):
            out = [number for number, run in enumerate(runs) if value in run[feature]]
            if len(runs) - len(out) >= _LEAST_ROWS:
                errors += left_out(out).tolist()
        if values:
            names = tuple(dict.fromkeys(values))
            counts = () if feature in _RANGES else tuple(sum(name in run[feature] for run in runs) for name in names)
            seen[feature] = Seen(values=names, off=float(f"{holding(errors):.3g}") if errors else None, counts=counts)
    return seen


def _order(value: str) -> tuple[int, str]:
    return (int(value), "") if value.isdigit() else (0, value)


def holding(sizes: Sequence[float]) -> float:
    """Return what four of five sizes are within: of n in order the ceil(0.8 (n + 1))th.

    >>> holding([0.3, 0.1, 0.2, 0.5, 0.4])
    0.5
    """
    return sorted(sizes)[min(len(sizes), math.ceil(_INSIDE * (len(sizes) + 1))) - 1]
