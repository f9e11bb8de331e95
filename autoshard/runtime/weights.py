"""Weights of other forms for a run: every rank reads just its boxes of files, which are mapped into memory."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from autoshard.engine.placement import StatePiece
from autoshard.errors import Fault, InputError
from autoshard.plan.plan import Plan
from autoshard.runtime.convert.hf import CONFIG, hf_source
from autoshard.runtime.convert.nxd import nxd_folder, nxd_source
from autoshard.runtime.convert.ours import checkpoint_of
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, read_config


def read_weights(path: Path, plan: Plan, pieces: Sequence[StatePiece]) -> None:
    """Fill the weights among the pieces of a rank with those of a folder that has a config.json, in their formats.

    Every rank looks at all headers, so that all of them find the same faults.
    """
    refuse_other_model(path / CONFIG, load_model(path / CONFIG), plan.model)
    family, folder = str(read_config(path / CONFIG)["model_type"]), nxd_folder(path)
    source = nxd_source(folder, family, plan.model) if folder else hf_source(path, family, plan.model)
    for piece in (one for one in pieces if one.part == "weight" and one.reads):
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
