"""The options of a question, and of how it is searched, which commands share; a plan file has answered its question."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from autoshard.command_line import Counts
from autoshard.errors import InputError, require
from autoshard.layout.pin import Pin, pins_of
from autoshard.plan.lowering import ATOMS
from autoshard.search.api import request_of
from autoshard.search.request import Request
from autoshard.search.stage_filling import EVERYTHING, Effort
from autoshard.spec.recipe import Recipe
from autoshard.spec.workload import Documents, Optimizer, PrecisionName

_LONGEST_S = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionOptions:
    """Which model, where, for which work, and what is fixed; nothing is asked that is not given.

    Args:
        model: A model card by name (see `autoshard list models`), or the path of a Hugging Face config.json.
        nodes: How many nodes the cluster has; several with plan --pareto, e.g. 4,8,16. Default: 1.
        cluster: A cluster by name (see `autoshard list clusters`), or the path of a cluster file.
            Default: trn1.32xlarge.
        lnc: Logical NeuronCore configuration of trn2: 1 or 2. Default: both are tried.
        ranks: Processes on this machine, 1 to 64; only for the cluster `local`. Default: 4.
        seq_len: Tokens in a sequence. Default: the card's context, at most 8192.
        global_batch: Sequences in an optimizer step. Default: 1024, on `local` 32.
        precision: Number format of weights and activations; bf16 and fp16 keep FP32 masters,
            bf16-sr keeps none and rounds its weights stochastically. Default: bf16.
        optimizer: What updates the weights: adamw, or sgd without momentum and decay. Default: adamw.
        documents: Whether documents packed into one sequence see each other (joined), or attention and positions
            stop where one ends (separate). Default: joined.
        engine: Only what this engine runs; any lifts the restriction. Default: the cluster's own.
        calibration: A calibration file, made by `autoshard calibrate`. Default: what is known of the cluster.
        fix: Pin some keys of the layout, e.g. tp=32,pp=8.
        pins: Pin the layout of a tensor, e.g. 'up=[batch/dp, seq, ffn/tp]'; may be given several times.
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
    engine: Literal["nxd", "torch", "any"] | None = None
    calibration: str | None = None
    fix: str | None = None
    pins: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    @property
    def given(self) -> dict[str, Any]:
        """What is asked, by the names of the options."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) not in (None, (), {})}

    def refuse(self, why: str, *but: str) -> None:
        """Refuse all options that are given, but for some."""
        given = [name for name in self.given if name not in but]
        require(*((False, f"--{name.replace('_', '-')}", why) for name in given))

    def requests(self, options: "SearchOptions") -> list[Request]:
        """Look everything up, once for every number of nodes."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What the search minimises, and how far it goes.

    Args:
        objective: What is minimised; on one cluster dollars are time.
        prove: Search on until nothing better can be left, instead of within 0.5%.
        exhaustive: Leave out no layout because of a bound; slow, and only to check that bounds are right.
        time_limit: Stop after so many seconds with the best so far, and say how far it may be from the best there is.
    """

    objective: Literal["time", "dollars", "memory"] = "time"
    prove: bool = False
    exhaustive: bool = False
    time_limit: int | None = None

    def __post_init__(self) -> None:
        """Refuse a limit that nobody could wait for, or that leaves no time."""
        limit = self.time_limit
        require((limit is None or 1 <= limit <= _LONGEST_S, "time_limit", f"must be 1 to {_LONGEST_S}, not {limit}"))

    def applied(self, request: Request) -> Request:
        """Return a request with these options."""
        effort = replace(EVERYTHING if self.prove else Effort(), exhaustive=self.exhaustive)
        return replace(request, effort=effort, objective=self.objective)
