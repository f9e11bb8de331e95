"""A recipe: the whole question in one small file, with the same keys as the options of ``autoshard plan``."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, cast

from autoshard.errors import Fault, InputError, inside, nearest, require
from autoshard.spec import record
from autoshard.spec.cluster import HEADROOM, headroom_check
from autoshard.spec.files import read_data, shipped
from autoshard.spec.training import Training
from autoshard.spec.workload import EXPERT_IMBALANCE, Documents, Optimizer, PrecisionName

EngineChoice = Literal["nxd", "torch", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Model, cluster, workload and training of one question; None is the default of the model or the cluster."""

    model: str
    nodes: int = 1
    cluster: str = "trn1.32xlarge"
    lnc: int | None = None
    ranks: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    precision: PrecisionName = "bf16"
    optimizer: Optimizer = "adamw"
    documents: Documents = "joined"
    expert_imbalance: float = EXPERT_IMBALANCE  # of the busiest expert over the mean
    engine: EngineChoice | None = None
    headroom: float = HEADROOM  # share of the memory of a rank that plans leave free
    calibration: str | None = None  # a calibration file; None is the built-in one of the cluster
    release: str | None = None  # of the platform's software; None is the newest that the calibration knows
    fix: str | None = None
    pins: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # tensor -> layout
    training: Training = field(default_factory=Training)  # in a file, its keys stand at the top level

    def __post_init__(self) -> None:
        require(
            (bool(self.model.strip()), "model", "must name a card or a config.json"),
            (bool(self.cluster.strip()), "cluster", "must name a cluster or a cluster file"),
            headroom_check(self.headroom),
        )


TRAINING_KEYS = tuple(entry.name for entry in fields(Training))
_QUESTION = tuple(entry.name for entry in fields(Recipe) if entry.name != "training")
RECIPE_KEYS = (*_QUESTION, *TRAINING_KEYS)


def recipe_files() -> tuple[Path, ...]:
    """Return the files of the recipes that come with autoshard, in order of their names.

    >>> "llama3-70b-trn1-16" in [path.stem for path in recipe_files()]
    True
    """
    return tuple(sorted(shipped("recipes").glob("*.yaml")))


def about(path: Path) -> str:
    """Return the description of a recipe: the comment in its first line."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def training_faults(entries: Mapping[str, object]) -> tuple[Fault, ...]:
    """Return the faults of the training keys of a recipe; other keys are not checked."""
    try:
        record.decode(Training, {key: entries[key] for key in TRAINING_KEYS if entries.get(key) is not None})
    except InputError as error:
        return error.faults
    return ()


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from YAML or JSON; every fault names the file."""
    data = read_data(path)
    with inside(path):
        return recipe_of(data)


def recipe_of(data: object) -> Recipe:
    """Return the recipe of a file's entries, or raise one InputError with all faults."""
    faults = list[Fault]()
    if isinstance(data, dict):
        given = cast(dict[str, object], data)
        unknown = [key for key in given if key not in RECIPE_KEYS]
        faults = [Fault(where=key, message=f"unknown key. {nearest(key, RECIPE_KEYS)}") for key in map(str, unknown)]
        training = {key: given[key] for key in given if key in TRAINING_KEYS}
        data = {key: given[key] for key in given if key in _QUESTION} | {"training": training}
    recipe: Recipe | None = None
    try:
        recipe = record.decode(Recipe, data)
    except InputError as error:
        faults += (Fault(where=one.where.removeprefix("training."), message=one.message) for one in error.faults)
    if faults or recipe is None:
        raise InputError(faults)
    return recipe
