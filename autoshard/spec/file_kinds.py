"""Which of autoshard's files a file is, so that one in the place of another is named instead of taken apart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from autoshard.errors import InputError


class FileKind(NamedTuple):
    """A kind of file: how faults name it, the keys that only it has, and what is done with it."""

    words: str
    keys: frozenset[str]
    remedy: str  # {0} is the path


PLAN_FILE = FileKind(
    "a plan", frozenset({"schema", "mesh"}),
    "`autoshard explain {0}` shows it; `autoshard plan --like {0}` asks its question again",
)  # fmt: skip
MODULE_PLAN_FILE = FileKind("the plan of a module", frozenset({"schema", "kind"}), "`autoshard explain {0}` shows it")
SWEEP_FILE = FileKind("a sweep", frozenset({"grid"}), "type `autoshard sweep {0}`")
RECIPE_FILE = FileKind("a recipe", frozenset({"model", "cluster"}), "type `autoshard plan {0}` or `autoshard run {0}`")
CLUSTER_FILE = FileKind("a cluster", frozenset({"chip", "links"}), "type --cluster {0}")
CALIBRATION_FILE = FileKind("a calibration", frozenset({"matrix_efficiency"}), "type --calibration {0}")
CONFIG_FILE = FileKind("the config of a model", frozenset({"model_type"}), "type --model {0}")
_KINDS = (
    PLAN_FILE, MODULE_PLAN_FILE, SWEEP_FILE, RECIPE_FILE, CLUSTER_FILE, CALIBRATION_FILE, CONFIG_FILE,
)  # fmt: skip


def file_kind_of(data: object) -> FileKind | None:
    """Return the kind of a file's data; None where it is none of ours.

    >>> file_kind_of({"schema": 9, "mesh": {}}).words
    'a plan'
    """
    keys = cast(Mapping[str, Any], data).keys() if isinstance(data, Mapping) else set[str]()
    return next((kind for kind in _KINDS if kind.keys <= keys), None)


def refuse_other_kinds(path: Path, data: object, expected: FileKind) -> None:
    """Raise an InputError where a file is of another kind than is read here."""
    kind = file_kind_of(data)
    if kind is not None and kind is not expected:
        raise InputError.of(str(path), f"is {kind.words}, not {expected.words}; {kind.remedy.format(path)}")
