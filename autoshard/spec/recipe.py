"""A recipe: the whole question in one small file, with the same keys as the options of ``autoshard plan``."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, cast

from autoshard.errors import Fault, InputError, require
from autoshard.spec import record
from autoshard.spec.files import read_data
from autoshard.spec.training import Training
from autoshard.spec.workload import Documents, Optimizer, PrecisionName

EngineChoice = Literal["nxd", "torch", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which model, where, for which work; None leaves the default to the model and the cluster."""

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
    engine: EngineChoice | None = None
    calibration: str | None = None  # a calibration file; None takes what is known of the cluster
    fix: str | None = None
    pins: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # tensor -> layout
    training: Training = field(default_factory=Training)  # whose keys stand beside the others in a file

    def __post_init__(self) -> None:
        """Refuse an empty name; numbers are judged where they are used."""
        require(
            (bool(self.model.strip()), "model", "must name a card or a config.json"),
            (bool(self.cluster.strip()), "cluster", "must name a cluster or a cluster file"),
        )


_TRAINING = tuple(entry.name for entry in fields(Training))
RECIPE_KEYS = (*(entry.name for entry in fields(Recipe) if entry.name != "training"), *_TRAINING)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from YAML or JSON; every fault names the file."""
    try:
        data = read_data(path)
        if isinstance(data, dict):
            given = cast(dict[str, object], data)
            training = {key: value for key, value in given.items() if key in _TRAINING}
            data = {key: value for key, value in given.items() if key not in _TRAINING} | {"training": training}
        return record.decode(Recipe, data)
    except InputError as error:
        faults = (Fault(where=fault.where.removeprefix("training."), message=fault.message) for fault in error.faults)
        raise InputError(faults).under(str(path)) from error
