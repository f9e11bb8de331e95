"""Options that commands share: those of a question (model, cluster, work), and those of the search."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from autoshard.command_line import Counts, Pins
from autoshard.errors import InputError, require
from autoshard.layout.pin import Pin, pins_of
from autoshard.plan.lowering import ATOMS
from autoshard.search.api import request_of
from autoshard.search.request import Request
from autoshard.search.stage_filling import EVERYTHING, Effort
from autoshard.spec.cluster import headroom_check
from autoshard.spec.recipe import Recipe
from autoshard.spec.workload import Documents, Optimizer, PrecisionName

_LONGEST_S = 10**6
_MOST_TOKENS = 1e18  # ten thousand times what any model has read


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionOptions:
    """Which model, on which cluster, for which work, and which keys are pinned; None where an option is not given.

    Args:
        model: A model card by name (see `autoshard list models`), or the path of a Hugging Face config.json.
        nodes: How many nodes the cluster has; several with plan --pareto, e.g. 4,8,16. Default: 1.
        cluster: A cluster by name (see `autoshard list clusters`), or the path of a cluster file.
            Default: trn1.32xlarge.
        lnc: Logical NeuronCore configuration of trn2 and trn3: 1 or 2. Default: search both.
        ranks: Processes on this machine, 1 to 64; only for the cluster `local`. Default: 4.
        seq_len: Tokens in a sequence. Default: the card's context, at most 8192.
        global_batch: Sequences in an optimizer step. Default: 1024, on `local` 32.
        precision: Number format of weights and activations; bf16 and fp16 keep FP32 masters,
            bf16-sr keeps none and rounds its weights stochastically. Default: bf16.
        optimizer: adamw, or sgd without momentum and weight decay. Default: adamw.
        documents: How documents packed into one sequence are treated: attention crosses their borders (joined), or
            attention and positions begin anew with each document (separate). Default: joined.
        expert_imbalance: How many more tokens than the mean the busiest expert gets: 0.5 is half as many again, 0 is
            routing that is forced to be even. Default: 0.5, as published of routers with an auxiliary loss.
        engine: Search only plans that this engine runs; `any` searches all engines. Default: the cluster's own.
        headroom: The share of a rank's usable memory that stays free: 0.1 is 10 %, 0 none. Default: 0.1.
        calibration: A calibration file, made by `autoshard calibrate`. Default: the one that comes with the cluster.
        release: The release of the platform's software, e.g. 2.17 of the Neuron SDK; older ones are slower.
            Default: the newest of the calibration's rows.
        fix: Pin some keys of the layout, e.g. tp=32,pp=8.
        pins: Pin the layout of a tensor, e.g. 'up=[batch/dp, seq, ffn/tp]'; can be given several times.
    """

    model: str | None = None
    nodes: Counts = ()
    cluster: str | None = None
    lnc: int | None = None
    ranks: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    precision: PrecisionName | None = None
    optimizer: Optimizer | None = None
    documents: Documents | None = None
    expert_imbalance: float | None = None
    engine: Literal["nxd", "torch", "any"] | None = None
    headroom: float | None = None
    calibration: str | None = None
    release: str | None = None
    fix: Pins | None = None
    pins: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    def __post_init__(self) -> None:
        """Refuse a headroom that leaves nothing, or less than nothing."""
        require(headroom_check(self.headroom or 0.0))

    @property
    def given(self) -> dict[str, Any]:
        """The options that are given, by name."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) not in (None, (), {})}

    def refuse(self, why: str, *but: str) -> None:
        """Refuse every given option, except those named in ``but``."""
        given = [name for name in self.given if name not in but]
        require(*((False, f"--{name.replace('_', '-')}", why) for name in given))

    def requests(self, options: "SearchOptions") -> list[Request]:
        """Return one request per number of nodes, with model, cluster and calibration looked up."""
        message = "missing. Type a name of autoshard list models, or the path of a config.json"
        require((self.model is not None, "--model", message))
        entries = {name: value for name, value in self.given.items() if name not in ("nodes", "pins")}
        recipes = [Recipe(**entries, nodes=nodes) for nodes in self.nodes or (1,)]
        pins = self.pinned()
        return [options.applied(request_of(recipe, pins)) for recipe in recipes]

    def pinned(self) -> tuple[Pin, ...]:
        """Read the pinned layouts."""
        pins, atoms = pins_of(self.pins, "--pin"), {str(atom): 1 for atom in ATOMS}
        faults = [fault.under(f"--pin {pin.tensor}") for pin in pins for fault in pin.layout.faults(atoms)]
        if faults:
            raise InputError(faults)
        return pins


def token_total(text: str) -> float:
    """Read a number of tokens.

    >>> token_total("2T"), token_total("1.5e12"), token_total("300b")
    (2000000000000.0, 1500000000000.0, 300000000000.0)
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?)([kmbt]?)", text.strip().lower())
    count = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]] if match else 0.0
    message = f"{text!r} is not a number of tokens. Write it like 2T, 300B or 1.5e12"
    require((0 < count < _MOST_TOKENS, "--tokens", message))
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What the search minimises, and when it ends.

    Args:
        objective: What is minimised. On one cluster dollars are proportional to time.
        prove: Search until the plan is proven to be the best, instead of within 0.5% of the best.
        exhaustive: Solve every layout, without bounds. Slow; it serves to check that the bounds are right.
        time_limit: Stop after so many seconds with the best plan found, and print how far it may be from the best.
    """

    objective: Literal["time", "dollars", "memory"] = "time"
    prove: bool = False
    exhaustive: bool = False
    time_limit: int | None = None

    def __post_init__(self) -> None:
        """Refuse a time limit that is too long or not positive."""
        limit = self.time_limit
        require((limit is None or 1 <= limit <= _LONGEST_S, "time_limit", f"must be 1 to {_LONGEST_S}, not {limit}"))

    def applied(self, request: Request) -> Request:
        """Return a request with these options."""
        cluster = request.cluster
        message = (
            f"no price of {cluster.name} is known. Put price_usd_per_node_hour into a cluster file, or minimise time: "
            "on one cluster the fastest plan is the cheapest"
        )
        require((self.objective != "dollars" or cluster.price_usd_per_node_hour is not None, "--objective", message))
        effort = replace(EVERYTHING if self.prove else Effort(), exhaustive=self.exhaustive)
        return replace(request, effort=effort, objective=self.objective)
