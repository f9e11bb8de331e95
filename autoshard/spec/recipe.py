"""A recipe: the whole question in one small file, with the same keys as the options of ``autoshard plan``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NewType, cast, get_args, get_type_hints

from autoshard.errors import Check, Fault, Faults, InputError, inside, nearest, require
from autoshard.spec import record
from autoshard.spec.cluster_catalogue import cluster_names
from autoshard.spec.file_kinds import RECIPE_FILE, refuse_other_kinds
from autoshard.spec.files import read_data, seen_from, shipped_files
from autoshard.spec.model_catalogue import model_names
from autoshard.spec.price import checked_prices
from autoshard.spec.training import Training
from autoshard.spec.workload import BalancedOver, Documents, Optimizer, Precision
from autoshard.units import counted

DEFAULT_CLUSTER = "trn1.32xlarge"
RECIPES, SWEEPS = "recipes", "recipes/sweeps"  # folders of data that come with autoshard
EngineChoice = Literal["nxd", "torch", "any"]
_PATHS = ("model", "cluster", "calibration", "module")
_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKMG])")  # of a batch
_LENGTHS = ("seq_len",)  # counted as contexts are named: 8k is 8192
_UNITS = {"k": 1, "K": 1, "M": 2, "G": 3, "B": 3, "T": 4}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKMGBT])")
Pins = NewType("Pins", str)  # keys of a candidate

# A convention: twice what the interval of reserved memory leaves open with TransformerEngine (kernel_tables/te.json).
# What it costs a plan stands in its certificate.
HEADROOM = 0.1


def headroom_check(headroom: float) -> Check:
    """Make the check (for ``errors.require``) of the share of usable memory that plans leave free."""
    message = f"is a share of the memory, at least 0 and below 1, for example 0.1 for 10 %, not {headroom:g}"
    return (0 <= headroom < 1, "headroom", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionOptions:
    """Which model, on which cluster, for which work, and which keys are pinned; None where that is not stated.

    Args:
        model: A model card by name (see `autoshard list models`), or the path of a Hugging Face config.json.
        cluster: A cluster by name (see `autoshard list clusters`), or the path of a cluster file.
            Default: trn1.32xlarge.
        lnc: Logical NeuronCore configuration of trn2 and trn3: 1 or 2. Default: search both.
        ranks: Processes on this machine, 1 to 64; only for the cluster `local`. Default: 4.
        seq_len: Tokens in a sequence. Default: what a vendor documents for this model on this cluster; without that
            the card's context, at most 8192.
        global_batch: Sequences in an optimizer step, or their tokens: 4M is 4,194,304. Default: what a vendor
            documents for this model, cluster and length; without that the largest power of two with at most 4 M
            tokens, on `local` 32.
        precision: Number format of weights and activations; bf16 and fp16 keep FP32 masters,
            bf16-sr keeps none and rounds its weights stochastically. Parts may have formats of their own:
            bf16,gradients=bf16,moments=bf16,products=fp8. Default: bf16.
        optimizer: adamw, or sgd without momentum and weight decay. Default: adamw.
        documents: How documents packed into one sequence are treated: attention crosses their borders (joined), or
            attention and positions begin anew with each document (separate). Default: joined.
        expert_imbalance: How many more tokens than the mean the busiest expert gets: 0.5 is half as many again, 0 is
            routing that is forced to be even. Default: 0.5, as published of routers with an auxiliary loss.
        router_balance_loss: The coefficient of the loss that keeps the experts of a mixture equally busy, in every
            layer; published ones lie between 0.001 and 0.02. Default: 0, so that nothing keeps them so.
        router_balance_over: The tokens over which they shall be equally busy: a micro-batch on all ranks (batch), or
            each sequence by itself (sequence). Default: batch.
        router_z_loss: The coefficient of the loss that keeps routers' logits small, in every layer; 0.001 is usual.
            Default: 0.
        router_bias_speed: By how much a step moves the correction bias of an expert that was chosen too often or too
            seldom, where a model has such biases; DeepSeek-V3 had 0.001. Default: 0, so that they stay as they are.
        engine: Search only plans that this engine runs; `any` searches all engines. Default: the cluster's own.
        headroom: The share of a rank's usable memory that stays free: 0.1 is 10 %, 0 none. Default: 0.1.
        calibration: A calibration file, made by `autoshard calibrate`. Default: the one that comes with the cluster.
        price: What an hour costs you in dollars, of a node (21.5) or of a chip (2.5/chip); with several clusters one
            for each: 21.5,98. Default: the price on demand of `autoshard list clusters`.
        release: The release of the platform's software, e.g. 2.17 of the Neuron SDK; older ones are slower.
            Default: the newest of the calibration's rows.
        fix: Pin some keys of the layout, e.g. tp=32,pp=8.
        pins: Pin the layout of a tensor, e.g. 'up=[batch/dp, seq, ffn/tp]'; can be given several times.
    """

    model: str | None = None
    cluster: str | None = None
    lnc: int | None = None
    ranks: int | None = None
    seq_len: int | None = None
    global_batch: int | str | None = None
    precision: str | None = None
    optimizer: Optimizer | None = None
    documents: Documents | None = None
    expert_imbalance: float | None = None
    router_balance_loss: float | None = None
    router_balance_over: BalancedOver | None = None
    router_z_loss: float | None = None
    router_bias_speed: float | None = None
    engine: EngineChoice | None = None
    headroom: float | None = None
    calibration: str | None = None
    price: float | str | None = None
    release: str | None = None
    fix: Pins | None = None
    pins: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # tensor -> layout

    def __post_init__(self) -> None:
        require(
            (self.model is None or bool(self.model.strip()), "model", "must name a card or a config.json"),
            (self.cluster is None or bool(self.cluster.strip()), "cluster", "must name a cluster or a cluster file"),
            headroom_check(self.headroom or 0.0),
            (
                not isinstance(self.global_batch, str) or bool(_TOKENS.fullmatch(self.global_batch)),
                "global_batch",
                f"expected sequences, a whole number, or tokens like 4M, found {self.global_batch!r}",
            ),
        )
        with inside("price"):
            checked_prices(self.price)

    @property
    def given(self) -> dict[str, Any]:
        """The options that are stated, by name."""
        return {key.name: value for key in fields(self) if (value := getattr(self, key.name)) not in (None, {})}


def sequences_of(global_batch: int | str, seq_len: int) -> int:
    """Return the sequences of a batch, of which tokens may be stated: 1k is 1024.

    >>> sequences_of("4M", 8192), sequences_of(512, 8192)
    (512, 512)
    """
    if isinstance(global_batch, int):
        return global_batch
    match = _TOKENS.fullmatch(global_batch)
    assert match, "checked by QuestionOptions"
    seq_len = max(1, seq_len)  # a length of nothing is refused where the workload is made
    tokens = float(match[1]) * 1024 ** ("kMG".index(match[2].replace("K", "k")) + 1)
    if tokens < seq_len or tokens % seq_len:
        length = counted(seq_len, "token", form=",")
        message = f"{global_batch} are {tokens:,.0f} tokens, not a whole number of sequences of {length}"
        raise InputError.of("global_batch", message)
    return int(tokens) // seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A question, on how many nodes it is asked, and how its plan is trained; in a file all keys stand side by side."""

    question: QuestionOptions
    nodes: int = 1
    training: Training = field(default_factory=Training)


QUESTION_KEYS = tuple(entry.name for entry in fields(QuestionOptions))
TRAINING_KEYS = tuple(entry.name for entry in fields(Training))
RECIPE_KEYS = ("nodes", *QUESTION_KEYS, *TRAINING_KEYS)


def recipe_files() -> tuple[Path, ...]:
    """Return the files of the recipes that come with autoshard, in order of their names.

    >>> "llama3-70b-trn1-16" in [path.stem for path in recipe_files()]
    True
    """
    return tuple(shipped_files(RECIPES).values())


def about(path: Path) -> str:
    """Return the description of a recipe: the comment in its first line."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from YAML or JSON; every fault names the file."""
    data = read_data(path)
    refuse_other_kinds(path, data, RECIPE_FILE)
    with inside(path):
        return recipe_of(data)


def entries_seen_from(entries: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return entries of a file in a folder with the paths of what they ask about as seen from where we are.

    A name of a catalogue is no path, whatever lies there.
    """
    catalogue = {*model_names(), *cluster_names()}

    def seen(key: str, text: str) -> str:
        is_name = text in catalogue or (key == "cluster" and not (folder / text).is_file())  # it has other names too
        return text if is_name else seen_from(text, folder)

    return {
        key: ",".join(seen(key, part) for part in value.split(","))
        if key in _PATHS and isinstance(value, str)
        else value
        for key, value in entries.items()
    }


def _unknown(key: str) -> str:
    """Say what to write instead of a key that recipes do not have."""
    if key == "module":
        return "is for autoshard plan and for sweeps. Make a plan of the code, and name that file: autoshard run FILE"
    return f"unknown key. {nearest(key, RECIPE_KEYS)}"


def plain_number(name: str, kind: object, raw: object) -> object:
    """Return text like 8k, 1.5M or 10% as the number that it stands for; anything else as it is.

    >>> plain_number("seq_len", int, "8k"), plain_number("steps", int, "8k"), plain_number("seq_len", int, "8 thousand")
    (8192, 8000, '8 thousand')
    """
    text = raw.strip() if isinstance(raw, str) else ""
    if kind is float and re.fullmatch(r"[0-9.]+ ?%", text):
        return round(float(text.rstrip(" %")) / 100, 12) if text.count(".") < 2 else raw
    match = _NUMBER.fullmatch(text) if kind is int else None
    if match is None:
        return raw
    number = float(match[1]) * (1024 if name in _LENGTHS else 1000) ** _UNITS[match[2]]
    return int(number) if number.is_integer() else raw


def _plain(kind: type, entries: Mapping[str, object]) -> dict[str, object]:
    """Return entries with numbers in the place of text that stands for them, as a command reads it."""
    hints, plain = get_type_hints(kind), dict[str, object]()
    for key, value in entries.items():
        hint = hints.get(key)
        kinds = {*(get_args(hint) or (hint,))} - {type(None)}
        if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
            plain[key] = _plain(hint, cast(dict[str, object], value))
        else:
            plain[key] = plain_number(key, next(iter(kinds)), value) if len(kinds) == 1 else value
    return plain


def recipe_of(data: object) -> Recipe:
    """Return the recipe of a file's entries, or raise one InputError with all faults."""
    entries, faults, recipe = record.decode(dict[str, object], data), Faults(), None
    unknown = [key for key in entries if key not in RECIPE_KEYS]
    faults += (Fault(where=key, message=_unknown(key)) for key in unknown)
    faults += [] if {"model", "module"} & entries.keys() else [Fault(where="model", message="missing")]
    parts = _plain(Recipe, {"nodes": entries["nodes"]} if "nodes" in entries else {})
    for name, keys, kind in (("question", QUESTION_KEYS, QuestionOptions), ("training", TRAINING_KEYS, Training)):
        parts[name] = _plain(kind, {key: entries[key] for key in entries if key in keys})
    try:
        recipe = record.decode(Recipe, parts)
    except InputError as error:
        prefix = re.compile(r"(question|training)\.")
        faults += (Fault(where=prefix.sub("", fault.where, count=1), message=fault.message) for fault in error.faults)
    if recipe and recipe.question.precision is not None:
        with faults.of():
            Precision.named(recipe.question.precision)
    faults.refuse()
    assert recipe, "what has no fault has a value"
    return recipe
