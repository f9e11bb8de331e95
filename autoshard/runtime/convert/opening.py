"""Weights of any form, opened: for a conversion, or for a run whose ranks each read their boxes."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Literal

from autoshard.engine.placement import StatePiece
from autoshard.errors import Fault, InputError
from autoshard.plan.plan import Plan
from autoshard.runtime.convert.hf import CONFIG, hf_source, is_hf
from autoshard.runtime.convert.nxd import nxd_folder, nxd_source
from autoshard.runtime.convert.ours import checkpoint_of, ours_source
from autoshard.runtime.convert.stored import WeightSource
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, read_config

Form = Literal["hf", "autoshard", "nxd", "pt"]


def form_of(path: Path) -> Form:
    """Tell from a folder's files in which form weights are."""
    if not path.exists():
        raise InputError.of(str(path), "there is no such file or folder")
    if path.is_file():
        return "pt"
    ours = checkpoint_of(path)
    if is_hf(path) and ours is None:
        return "hf"
    if nxd_folder(path):
        return "nxd"
    if ours:
        return "autoshard"
    known = "*.safetensors with a config.json, a checkpoint of autoshard (step-.../index.json), or of NxD (model/*.pt)"
    raise InputError.of(str(path), f"holds no weights that are known: {known}")


def open_weights(path: Path, form: Form, family: str | None, model: ModelSpec) -> WeightSource:
    """Open weights of a form; the family is the architecture as transformers names it."""
    if form == "autoshard" and (found := checkpoint_of(path)):
        return ours_source(*found, model)
    assert family, "other forms have the names of a family"
    folder = nxd_folder(path) if form == "nxd" else None
    return nxd_source(folder, family, model) if folder else hf_source(path, family, model)


def read_weights(path: Path, plan: Plan, pieces: Sequence[StatePiece]) -> None:
    """Fill the weights among the pieces of a rank with those of a folder that has a config.json, in their formats.

    Every rank looks at all headers, so that all of them find the same faults.
    """
    refuse_other_model(path / CONFIG, load_model(path / CONFIG), plan.model)
    family = str(read_config(path / CONFIG)["model_type"])
    source = open_weights(path, "nxd" if nxd_folder(path) else "hf", family, plan.model)
    for piece in pieces:
        if piece.part == "weight" and piece.reads:
            assert source.wanted[piece.weight] == piece.whole, f"{piece.weight} has shape {piece.whole}"
            source.fill(piece.memory, piece.weight, piece.offsets)


def is_foreign(path: Path) -> bool:
    """Whether a folder holds a model of Hugging Face or of NxD, and no checkpoints of autoshard."""
    return (path / CONFIG).is_file() and checkpoint_of(path) is None


def refuse_other_model(config: Path, found: ModelSpec, wanted: ModelSpec) -> None:
    """Name the fields in which a model is not the plan's; how many positions rotary ones were trained on is free."""
    free = {"name", "source", *(("max_positions",) if wanted.positions == "rotary" else ())}
    pairs = {one.name: (getattr(found, one.name), getattr(wanted, one.name)) for one in fields(ModelSpec)}
    faults = [
        Fault(where=f"{config}: {name}", message=f"is {there} there and {here} in the plan's {wanted.name}")
        for name, (there, here) in pairs.items()
        if there != here and name not in free
    ]
    if faults:
        hint = f"To train the model of this folder, plan for it: --model {config.parent}"
        raise InputError([*faults[:-1], Fault(where=faults[-1].where, message=f"{faults[-1].message}. {hint}")])
