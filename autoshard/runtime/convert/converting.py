"""Weights of any form, opened for a run, or converted from beginning to end into another form."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from autoshard.engine.hf_names import exact_weights
from autoshard.engine.nxd.shards import Qkv
from autoshard.errors import Fault, InputError, inside, require
from autoshard.files import naming, replacing
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan
from autoshard.run.folder import PARTIAL, PLAN, RUNS, checkpoint_step, folder_of, run_meant
from autoshard.run.placement import StatePiece
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from autoshard.runtime.convert.copying import JOURNAL, Copying, CopyProgress, TargetFile
from autoshard.runtime.convert.hf import (
    CONFIG,
    copy_companions,
    finish_hf,
    hf_outputs,
    hf_source,
    is_hf,
    state_outputs,
    write_json,
)
from autoshard.runtime.convert.nxd import SourcePlan, finish_nxd, nxd_folder, nxd_outputs, nxd_source
from autoshard.runtime.convert.of_code import SAFETENSORS, code_source, module_state, plan_of_code, write_state
from autoshard.runtime.convert.ours import checkpoint_of, finish_ours, naming_removed, ours_outputs, ours_source
from autoshard.runtime.convert.squares import refuse_other_sums
from autoshard.runtime.convert.stored import WeightSource
from autoshard.runtime.convert.words import write_ends, write_tokenizer
from autoshard.runtime.data.opened import tokenizer_of
from autoshard.runtime.restart import stated_place
from autoshard.spec.hf.reader import PACKED
from autoshard.spec.hf.writing import config_of
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_config, load_model, model_names, read_config
from autoshard.units import format_bytes

Form = Literal["hf", "autoshard", "nxd", "pt"]


def form_of(path: Path) -> Form:
    """Return the form of the weights in a folder, or in a file, told from the files alone."""
    if not path.exists():
        is_run = RUNS in (path.parent.name, path.parent.parent.name)
        is_hub = not path.is_absolute() and len(path.parts) == 2 and not path.parent.exists()
        remedy = "Weights are a folder of Hugging Face, or the checkpoint of a run: runs/NAME"
        if is_run:
            remedy = run_meant(path)
        elif is_hub:
            remedy = f"To download it, type: hf download {path} --local-dir {path.name}"
        raise InputError.of(str(path), f"there is no such file or folder. {remedy}")
    if path.is_file():
        return "pt"
    ours = checkpoint_of(path)
    is_step = checkpoint_step(path.name.removesuffix(PARTIAL)) is not None
    is_whole = ours is not None or (path / CONFIG).is_file() or nxd_folder(path) is not None
    unfinished = "is a checkpoint that was not finished. Take one before it, or type the folder of the run"
    require((is_whole or not is_step, str(path), unfinished))
    if is_hf(path) and ours is None:
        return "hf"
    if nxd_folder(path):
        return "nxd"
    if ours:
        return "autoshard"
    place = stated_place(path)
    require((not place, str(path), f"is a run whose checkpoints lie in {place}. Name that place"))
    forms = "*.safetensors with a config.json, a checkpoint of autoshard (step-.../index.json), or of NxD (model/*.pt)"
    raise InputError.of(str(path), f"holds no weights that are known: {forms}")


def open_weights(
    path: Path, form: Form, family: str | None, model: ModelSpec, source_plan: SourcePlan | None = None
) -> WeightSource:
    """Open weights of a form; the family is the architecture as transformers names it.

    A plan may say in which order files of NxD lie.
    """
    if form == "autoshard" and (checkpoint := checkpoint_of(path)):
        return ours_source(*checkpoint, model)
    assert family, "other forms have the names of a family"
    folder = nxd_folder(path) if form == "nxd" else None
    return nxd_source(folder, family, model, source_plan) if folder else hf_source(path, family, model)


def read_weights(path: Path, plan: Plan, pieces: Sequence[StatePiece]) -> None:
    """Fill the weights among the pieces of a rank with those of a folder that has a config.json, in their formats.

    Every rank looks at all headers, so that all of them find the same faults.
    """
    refuse_other_model(path / CONFIG, load_model(path / CONFIG), plan.model)
    family = str(read_config(path / CONFIG)["model_type"])
    source = open_weights(path, "nxd" if nxd_folder(path) else "hf", family, plan.model)
    for piece in pieces:
        if piece.part == "weight" and piece.reads:
            assert source.shapes[piece.weight] == piece.whole, f"{piece.weight} has shape {piece.whole}"
            source.fill(piece.memory, piece.weight, piece.offsets)


def is_foreign(path: Path) -> bool:
    """Whether a folder holds a model of Hugging Face or of NxD, and no checkpoints of autoshard."""
    return (path / CONFIG).is_file() and checkpoint_of(path) is None


def refuse_other_model(config: Path, theirs: ModelSpec, planned: ModelSpec) -> None:
    """Name the fields in which a model is not the plan's; how many positions rotary ones were trained on is free."""
    free = {"name", "source", *(("max_positions",) if planned.positions == "rotary" else ())}
    pairs = {field.name: (getattr(theirs, field.name), getattr(planned, field.name)) for field in fields(ModelSpec)}
    faults = [
        Fault(where=f"{config}: {name}", message=f"is {there} there and {here} in the plan's {planned.name}")
        for name, (there, here) in pairs.items()
        if there != here and name not in free
    ]
    if faults:
        hint = f"To train the model of this folder, plan for it: --model {config.parent}"
        raise InputError([*faults[:-1], Fault(where=faults[-1].where, message=f"{faults[-1].message}. {hint}")])


Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES: Mapping[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ASIDE = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The question of a conversion."""

    source: Path
    target: Path
    plan: Plan | None
    form: Form  # of the target
    model: str | None
    dtype: Dtype | None
    tokenizer: Path | None
    qkv: Qkv | None
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The result of a conversion."""

    folder: Path
    form: Form
    num_files: int
    num_bytes: int
    kept_bytes: int  # that were there from before
    remark: str = ""  # on how the source was read


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceModel:
    """The model of a source; where its configuration lies there may be a tokenizer."""

    model: ModelSpec
    config: Mapping[str, Any] | None  # as transformers reads it
    folder: Path | None = None

    @property
    def family(self) -> str | None:
        """The architecture, as transformers names it."""
        return str(self.config["model_type"]) if self.config else None


def convert(conversion: Conversion, say: Callable[[CopyProgress], None]) -> Done:
    """Convert; a killed conversion is taken up, and nothing has its name before it is complete."""
    try:
        with naming_removed(conversion.source), naming(conversion.target):
            return _convert(conversion, say)
    except StorageError as error:
        raise InputError.of("autoshard convert", str(error)) from None


def _convert(conversion: Conversion, say: Callable[[CopyProgress], None]) -> Done:
    form = form_of(conversion.source)
    if form == "autoshard" and (coded := plan_of_code(conversion.source)):
        return _of_code(conversion, coded)
    into_code = conversion.plan if conversion.plan and conversion.plan.model.traced else None
    if into_code:
        source_model, source, exact = _state_of_code(conversion, into_code, form)
    else:
        source_model = _source_model(conversion, form)
        plan = conversion.plan and SourcePlan(plan=conversion.plan, saved=conversion.form in ("hf", "pt"))
        source = open_weights(conversion.source, form, source_model.family, source_model.model, plan)
        exact = exact_weights(source_model.model)
    dtypes = {
        name: DTYPES[conversion.dtype] if conversion.dtype and "/" not in name and name not in exact else dtype
        for name, dtype in source.dtypes.items()
    }
    final = conversion.target
    if conversion.form == "autoshard":
        final = conversion.target / folder_of(source.state.step if source.state else 0)
    is_taken = final.exists() and (final.is_file() or any(final.iterdir()))
    require((not is_taken, str(final), "exists already. Name another place, or remove it"))
    outputs = (
        ours_outputs(None if into_code else conversion.plan, source, dtypes)
        if conversion.form == "autoshard"
        else _outputs(conversion, source_model, dtypes)
    )
    aside = final.with_name(f"{final.name}{_ASIDE}")
    _require_room(conversion.target, aside, sum(output.num_bytes for output in outputs))
    copying = Copying(source, outputs, aside, say)
    pairs = list(zip(outputs, copying.run(conversion.workers), strict=True))
    if source.squares:
        rounded = any(dtype != source.dtypes[name] for name, dtype in dtypes.items())
        refuse_other_sums(source.squares(conversion.workers), source.shapes, rounded, pairs, str(conversion.source))
    if conversion.form == "autoshard":
        finish_ours(aside, source_model.model, conversion.plan, source, pairs)
    _finish(conversion, source_model, outputs, aside)
    (aside / JOURNAL).unlink()
    if conversion.form == "pt":
        (aside / final.name).rename(final)
        aside.rmdir()
    else:
        if final.exists():
            final.rmdir()  # an empty folder
        Storage.of(str(final.resolve().parent)).rename(aside.name, final.name)
    num_bytes, kept_bytes = sum(written.num_bytes for _, written in pairs), copying.kept_bytes
    return Done(
        folder=conversion.target, form=conversion.form, num_files=len(pairs), num_bytes=num_bytes,
        kept_bytes=kept_bytes, remark=source.remark,
    )  # fmt: skip


def _of_code(conversion: Conversion, plan: Plan) -> Done:
    """Write the state dict of the module off whose code a model was read."""
    target, checkpoint = conversion.target, checkpoint_of(conversion.source)
    only = f"{plan.model.name} was read off its code, and its weights become those of its module"
    as_file = conversion.form == "pt" or (conversion.form == "hf" and target.suffix == SAFETENSORS)
    require((as_file, str(target), f"{only}. Name a target model.pt or model{SAFETENSORS}"))
    require((not target.exists(), str(target), "exists already. Name another place, or remove it"))
    assert checkpoint, "a checkpoint lies there"
    state = module_state(plan, *checkpoint, DTYPES[conversion.dtype] if conversion.dtype else None)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    _require_room(target, target.with_name(f"{target.name}{_ASIDE}"), num_bytes)
    with replacing(target) as aside:
        write_state(state, aside, target.suffix)
    return Done(folder=target, form="pt", num_files=1, num_bytes=num_bytes, kept_bytes=0)


def _state_of_code(conversion: Conversion, plan: Plan, form: Form) -> tuple[_SourceModel, WeightSource, frozenset[str]]:
    """Open the state dict of a module as the weights of a plan of its code; none of these are exact."""
    whole = (
        f"{plan.model.name} was read off its code: only a file model.pt or model{SAFETENSORS} becomes its checkpoint"
    )
    require((form == "pt" and conversion.form == "autoshard", str(conversion.source), whole))
    return _SourceModel(model=plan.model, config=None), code_source(plan, conversion.source), frozenset()


def _require_room(target: Path, aside: Path, need_bytes: int) -> None:
    """Refuse a disk that is too small, beside what was written aside before."""
    whole = target.resolve()
    there = next(path for path in (whole, *whole.parents) if path.exists())
    aside_bytes = sum(path.stat().st_size for path in aside.rglob("*") if path.is_file())
    free = shutil.disk_usage(there).free + aside_bytes
    message = f"{format_bytes(need_bytes)} are to be written, and the disk has {format_bytes(free)} left"
    require((need_bytes <= free, str(target), message))


def _source_model(conversion: Conversion, form: Form) -> _SourceModel:
    """Return the model of the source: of --model, of a file beside the weights, or of a plan."""
    needs_config = {"hf", "pt", "nxd"} & {form, conversion.form}
    source, upwards = conversion.source, conversion.source.resolve().parents
    folders = [source.parent if source.is_file() else source]  # where a configuration, or the plan of a run, may lie
    folders += list(upwards)[:2] if form == "autoshard" else [source / "model"] if form == "nxd" else []
    # The nearest one speaks: above the folder of a run may lie what is of another model.
    nearest = [place for place in folders if (place / CONFIG).is_file() or (place / PLAN).is_file()][:1]
    for where in (conversion.model, *(str(place) for place in nearest if (place / CONFIG).is_file())):
        if where is None:
            continue
        model, path = load_model(where), Path(where)
        folder = path if path.is_dir() else path.parent if path.is_file() else None
        if conversion.plan:
            refuse_other_model((folder or path) / CONFIG, model, conversion.plan.model)
        config = {key: value for key, value in load_config(where).items() if key != PACKED}  # written in plain numbers
        return _SourceModel(model=model, config=config, folder=folder)
    plans = [conversion.plan, *(load(place / PLAN) for place in nearest)]
    plans = plans if form == "pt" else plans[::-1]  # a plan beside a file may be of another model
    model = next((plan.model for plan in plans if plan), None)
    nothing = "nothing beside it says which model it is. Type --model with a card's name or a config.json"
    if model is None:
        raise InputError.of(str(conversion.source), nothing)
    card = model.name if model.name in model_names() and load_model(model.name) == model else None
    with inside(conversion.source):
        config = load_config(card) if card else config_of(model) if needs_config else None
    return _SourceModel(model=model, config=config)


def _outputs(conversion: Conversion, source_model: _SourceModel, dtypes: Mapping[str, torch.dtype]) -> list[TargetFile]:
    assert source_model.family, "its configuration was needed"
    if conversion.form == "nxd":
        if conversion.plan is None:
            raise InputError.of("--to nxd", "needs --plan: it says how many ranks tp and pp have, and who holds what")
        return nxd_outputs(conversion.plan, source_model.family, source_model.model, dtypes, conversion.qkv)
    if conversion.form == "pt":
        return state_outputs(source_model.family, source_model.model, dtypes, conversion.target.name)
    return hf_outputs(source_model.family, source_model.model, dtypes)


def _finish(conversion: Conversion, source_model: _SourceModel, outputs: list[TargetFile], aside: Path) -> None:
    """Write the files beside weights: indexes, configurations, tokenizers."""
    if conversion.form == "pt":
        return
    beside = conversion.target if conversion.form == "autoshard" else aside
    if conversion.form == "nxd":
        finish_nxd(aside)
    if source_model.config and conversion.form == "hf":
        finish_hf(aside, outputs, source_model.config)
    elif source_model.config:
        write_json(beside / CONFIG, source_model.config)
    checkpoint = checkpoint_of(conversion.source) if conversion.form == "hf" else None
    record = tokenizer_of(checkpoint[0]) if checkpoint else None
    if source_model.folder:
        copy_companions(source_model.folder, beside)
    if record and not conversion.tokenizer:
        write_tokenizer(record, beside)
    if conversion.tokenizer:
        copy_companions(conversion.tokenizer, beside)
    if record:
        write_ends(record, beside)
