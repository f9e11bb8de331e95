"""The options of a question, and of how it is searched, which commands share."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from autoshard.command_line import Counts, SaidOften
from autoshard.errors import Fault, InputError, require

if TYPE_CHECKING:
    from pathlib import Path

    from autoshard.layout.pin import Pin
    from autoshard.plan.plan import Plan
    from autoshard.search.exact_ranges import Effort
    from autoshard.search.planner import Request

_LONGEST_S = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which model, where, for which work, and what is fixed.

    Args:
        model: A model card by name (see `autoshard list models`), or the path of a Hugging Face config.json.
        nodes: How many nodes the cluster has; several with --pareto, e.g. 4,8,16. Default: 1.
        cluster: A cluster by name (see `autoshard list clusters`), or the path of a cluster file.
        lnc: Logical NeuronCore configuration of trn2: 1 or 2. Default: both are tried.
        ranks: Processes on this machine, 1 to 64; only for the cluster `local`. Default: 4.
        seq_len: Tokens in a sequence. Default: the card's context, at most 8192.
        global_batch: Sequences in an optimizer step. Default: 1024, on `local` 32.
        precision: Number format of weights and activations; bf16 and fp16 keep FP32 masters,
            bf16-sr keeps none and rounds its weights stochastically.
        optimizer: What updates the weights: adamw, or sgd without momentum and decay.
        documents: Whether documents packed into one sequence see each other (joined), or attention and positions
            stop where one ends (separate).
        engine: Only what this engine runs; any lifts the restriction. Default: the cluster's own.
        calibration: A calibration file, made by `autoshard calibrate`. Default: what is known of the cluster.
        fix: Pin some keys of the layout, e.g. tp=32,pp=8.
        pins: Pin the layout of a tensor, e.g. 'up=[batch/dp, seq, ffn/tp]'; may be given several times.
    """

    model: str | None = None
    nodes: Counts = ()
    cluster: str = "trn1.32xlarge"
    lnc: int | None = None
    ranks: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    precision: Literal["bf16", "bf16-sr", "fp16", "fp32"] = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    documents: Literal["joined", "separate"] = "joined"
    engine: Literal["nxd", "torch", "any"] | None = None
    calibration: str | None = None
    fix: str | None = None
    pins: SaidOften = ()

    def requests(self, how: "How") -> "list[Request]":
        """Look everything up, once for every number of nodes."""
        from autoshard.search.api import request_of
        from autoshard.spec.recipe import Recipe

        if self.model is None:
            raise InputError.of("--model", "missing")
        recipes = [
            Recipe(
                model=self.model, nodes=nodes, cluster=self.cluster, lnc=self.lnc, ranks=self.ranks,
                seq_len=self.seq_len, global_batch=self.global_batch, precision=self.precision,
                optimizer=self.optimizer, documents=self.documents, engine=self.engine, calibration=self.calibration,
                fix=self.fix,
            )
            for nodes in self.nodes or (1,)
        ]  # fmt: skip
        pinned = pins_of(self.pins)
        return [replace(request_of(recipe, pinned), effort=how.effort, objective=how.objective) for recipe in recipes]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRecipe:
    """The question of a recipe, which a run plans first; a plan file has answered it.

    Args:
        model: Of a recipe: a model card by name, or the path of a Hugging Face config.json.
        nodes: Of a recipe: how many nodes the cluster has.
        cluster: Of a recipe: a cluster by name, or the path of a cluster file.
        lnc: Of a recipe: logical NeuronCore configuration of trn2, 1 or 2.
        ranks: Of a recipe: processes on this machine; only for the cluster `local`.
        seq_len: Of a recipe: tokens in a sequence.
        global_batch: Of a recipe: sequences in an optimizer step.
        precision: Of a recipe: number format of weights and activations.
        optimizer: Of a recipe: what updates the weights.
        documents: Of a recipe: whether attention and positions stop where a document ends.
        engine: Of a recipe: only what this engine runs.
        calibration: Of a recipe: a calibration file.
        fix: Of a recipe: pin some keys of the layout, e.g. tp=32,pp=8.
        pins: Of a recipe: pin the layout of a tensor; may be given several times.
    """

    model: str | None = None
    nodes: int | None = None
    cluster: str | None = None
    lnc: int | None = None
    ranks: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    precision: Literal["bf16", "bf16-sr", "fp16", "fp32"] | None = None
    optimizer: Literal["adamw", "sgd"] | None = None
    documents: Literal["joined", "separate"] | None = None
    engine: Literal["nxd", "torch", "any"] | None = None
    calibration: str | None = None
    fix: str | None = None
    pins: SaidOften = ()

    def refuse_any(self, path: object) -> None:
        """Refuse keys of a question that a plan file has answered already."""
        given = [entry.name for entry in fields(self) if getattr(self, entry.name) not in (None, ())]
        message = f"is part of the question that {path} has answered. Plan again with it, or run a recipe"
        require(*((False, f"--{name.replace('_', '-')}", message) for name in given))

    def asked(self) -> Asked:
        """Return the question, with the defaults of ``plan`` where it is silent."""
        require((self.model is not None, "model", "missing in the recipe"))
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        named = {name: value for name, value in given.items() if value is not None}
        return Asked(**{**named, "nodes": (self.nodes or 1,)})


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What the search minimises, and how far it goes.

    Args:
        objective: What is minimised; on one cluster dollars are time.
        prove: Search on until nothing better can be left, instead of within 0.1%.
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
        require((limit is None or 1 <= limit <= _LONGEST_S, "--time-limit", f"must be 1 to {_LONGEST_S}, not {limit}"))

    @property
    def effort(self) -> "Effort":
        """How far the search goes."""
        from autoshard.search.exact_ranges import EVERYTHING, Effort

        return replace(EVERYTHING if self.prove else Effort(), exhaustive=self.exhaustive)


def is_recipe(path: "Path") -> bool:
    """Say whether a file is a recipe, which is planned first, and not a plan."""
    return path.suffix in (".yaml", ".yml")


def plan_of(path: "Path", question: OfRecipe) -> "Plan":
    """Read a plan file, or answer the question of a recipe."""
    if not is_recipe(path):
        from autoshard.plan.codec import load

        question.refuse_any(path)
        return load(path)
    from autoshard.commands.plan import searched

    how = How()
    return searched(question.asked().requests(how)[0], 1, how).plans[0]


def pins_of(said: SaidOften) -> "list[Pin]":
    """Read pinned layouts; one on the command line goes before one of the same name in a file."""
    from autoshard.layout.pin import Pin, parse_pin
    from autoshard.plan.lowering import ATOMS

    atoms: dict[str, int] = dict.fromkeys(ATOMS, 1)
    faults: list[Fault] = []
    pins: dict[str, Pin] = {}
    for one in said:
        try:
            pin = parse_pin(one.text, one.where)
        except InputError as error:
            faults.extend(error.faults)
            continue
        if pin.tensor in pins and pins[pin.tensor].origin == one.where:
            faults.append(Fault(where=f"{one.where} {pin.tensor}", message="is given twice; keep one"))
        faults += [fault.under(f"{one.where} {pin.tensor}") for fault in pin.layout.faults(atoms)]
        pins[pin.tensor] = pin
    if faults:
        raise InputError(faults)
    return list(pins.values())
