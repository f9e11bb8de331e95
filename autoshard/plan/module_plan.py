"""The plan of a torch module that has no card, as a file: which layouts its operations have, on which mesh."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from autoshard.errors import InputError, file_faults, inside, require
from autoshard.files import replace_text
from autoshard.layout.table import Strategy
from autoshard.spec.files import read_data
from autoshard.spec.record import decode, encode
from autoshard.spec.workload import Optimizer

SCHEMA = 2
_ROUNDED = 1e-9  # of a share: what the order of additions makes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """Layouts and collectives of a module's operations, and what they cost on a rank.

    ``fingerprint`` is that of the traced program, for which alone the table holds. ``rests`` names the axes over which
    the weights of an operation rest in pieces. Seconds and bytes are those that a plan with these lines would predict;
    by the solver's own price, no layouts within the limits that were given are cheaper by more than the share ``gap``.
    """

    kind: Literal["module"] = "module"
    schema: int = SCHEMA
    module: str  # its class
    fingerprint: str
    cluster: str
    mesh: str  # data=2,model=4
    batch: str  # the axes over which the batch is cut where it arrives and leaves
    precision: str
    optimizer: Optimizer  # of which a rank keeps moments
    sizes: Mapping[str, int]
    parameters: Mapping[str, str]  # their layouts where they are used, by path
    strategies: tuple[tuple[str, str], ...]  # operation and line, in the order of the module
    rests: Mapping[str, str]
    kept_whole: tuple[str, ...]
    time_s: float
    memory_bytes: float
    gap: float

    def __post_init__(self) -> None:
        for name, line in self.strategies:
            with inside(f"strategies.{name}"):
                Strategy.parse(line)

    def save(self, path: Path) -> None:
        """Write the file; the same plan gives the same bytes."""
        with file_faults(str(path)):
            replace_text(path, json.dumps(encode(self), indent=2, allow_nan=False) + "\n")

    @property
    def table(self) -> Mapping[str, str]:
        """The lines by operation."""
        return dict(self.strategies)

    @property
    def axes(self) -> Mapping[str, int]:
        """The sizes of the mesh's axes."""
        pairs = (part.split("=") for part in self.mesh.split(","))
        return {name: int(size) for name, size in pairs}


def proof(gap: float, *, fits: bool = True) -> str:
    """Say what is proven of layouts: by which share others may be cheaper, by the solver's price.

    >>> proof(0.0), proof(0.0312)
    ('no others are cheaper by the price of the solver', 'others are at most 3.12 % cheaper by the price of the solver')
    """
    if not fits:
        return "nothing fits; this needs least"
    others = f"others are at most {100 * gap:.3g} %" if gap > _ROUNDED else "no others are"
    return f"{others} cheaper by the price of the solver"


def load_module_plan(path: Path) -> ModulePlan:
    """Read the file."""
    with inside(path):
        data = read_data(path)
        schema = cast(dict[str, Any], data).get("schema", SCHEMA) if isinstance(data, dict) else SCHEMA
        require((schema == SCHEMA, "schema", f"is {schema}; this autoshard reads {SCHEMA}"))
        return decode(ModulePlan, cast(Any, data))


def is_module_plan(path: Path) -> bool:
    """Say whether a file is the plan of a module, if it is a plan at all."""
    try:
        found = read_data(path)
    except InputError:
        return False
    return isinstance(found, dict) and cast(dict[str, Any], found).get("kind") == "module"
