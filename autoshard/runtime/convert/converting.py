"""A conversion from beginning to end: what is read, as which model, what is written, and when it is whole."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from autoshard.engine.nxd.shards import Qkv
from autoshard.errors import InputError, require
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan
from autoshard.runtime.checkpoint.shelf import folder_of
from autoshard.runtime.checkpoint.storage import Storage
from autoshard.runtime.convert.copying import JOURNAL, Copying, CopyProgress, TargetFile, WrittenFile
from autoshard.runtime.convert.hf import (
    CONFIG,
    copy_companions,
    finish_hf,
    hf_outputs,
    hf_source,
    is_hf,
    state_outputs,
    write_json,
)  # fmt: skip
from autoshard.runtime.convert.nxd import finish_nxd, nxd_folder, nxd_outputs, nxd_source
from autoshard.runtime.convert.ours import checkpoint_of, finish_ours, fresh, ours_outputs, ours_source
from autoshard.runtime.convert.stored import WeightSource
from autoshard.runtime.weights import refuse_other_model
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_config, load_model, model_names
from autoshard.units import format_bytes

Form = Literal["hf", "autoshard", "nxd", "pt"]
Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES: Mapping[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ASIDE = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion as the user asks for it."""

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
    """What was written."""

    folder: Path
    form: Form
    num_files: int
    num_bytes: int
    kept_bytes: int  # that were there from before


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceModel:
    """The model that a source holds; where its configuration lies there may be a tokenizer."""

    model: ModelSpec
    config: Mapping[str, Any] | None  # as transformers reads it
    folder: Path | None = None

    @property
    def family(self) -> str:
        """The architecture, as transformers names it."""
        assert self.config, "asked for only where it is known"
        return str(self.config["model_type"])


def form_of(path: Path) -> Form:
    """Tell from what is there in which form weights are."""
    if not path.exists():
        raise InputError.of(str(path), "there is no such file or folder")
    if path.is_file():
        return "pt"
    if is_hf(path) and checkpoint_of(path) is None:
        return "hf"
    if nxd_folder(path):
        return "nxd"
    if checkpoint_of(path):
        return "autoshard"
    known = "*.safetensors with a config.json, a checkpoint of autoshard (step-.../index.json), or of NxD (model/*.pt)"
    raise InputError.of(str(path), f"holds no weights that are known: {known}")


def convert(asked: Conversion, say: Callable[[CopyProgress], None]) -> Done:
    """Convert; what was begun and killed goes on, and nothing has its name before it is whole."""
    form = form_of(asked.source)
    known = _known(asked, form)
    source = _opened(asked.source, form, known)
    dtypes = {
        name: DTYPES[asked.dtype] if asked.dtype and "/" not in name else dtype for name, dtype in source.dtypes.items()
    }
    final = asked.target
    if asked.form == "autoshard":
        final = asked.target / folder_of((source.state or fresh()).step)
    taken = final.exists() and (final.is_file() or any(final.iterdir()))
    require((not taken, str(final), "exists already. Name another place, or remove it"))
    outputs = _outputs(asked, known, source, dtypes, final.name)
    aside = final.with_name(f"{final.name}{_ASIDE}")
    _refuse_small_disk(asked.target, aside, sum(one.num_bytes for one in outputs))
    seen = CopyProgress(done_bytes=0, all_bytes=0, kept_bytes=0)

    def note(now: CopyProgress) -> None:
        nonlocal seen
        seen = now
        say(now)

    written = Copying(source, outputs, aside, note).run(asked.workers)
    _finish(asked, known, source, (outputs, written), aside)
    _publish(asked, final, aside)
    num_bytes = sum(one.num_bytes for one in written)
    return Done(
        folder=asked.target, form=asked.form, num_files=len(written), num_bytes=num_bytes, kept_bytes=seen.kept_bytes
    )


def _known(asked: Conversion, form: Form) -> _SourceModel:
    """Find out which model it is: from --model, from beside the weights, or from a plan."""
    needs = "hf" in (form, asked.form) or {"pt", "nxd"} & {form, asked.form}
    for where in (asked.model, *(str(one) for one in _folders(asked.source, form) if (one / CONFIG).is_file())):
        if where is None:
            continue
        model = load_model(where)
        folder = Path(where) if Path(where).is_dir() else Path(where).parent if Path(where).is_file() else None
        if asked.plan:
            refuse_other_model((folder or Path(where)) / CONFIG, model, asked.plan.model)
        return _SourceModel(model=model, config=load_config(where), folder=folder)
    plans = [load(path) for one in _folders(asked.source, form) if (path := one / "plan.json").is_file()]
    model = next((plan.model for plan in (*plans, asked.plan) if plan), None)
    card = model.name if model and model.name in model_names() and load_model(model.name) == model else None
    if model is None or (needs and card is None):
        message = "nothing beside it says which model it is. Type --model with a card's name or a config.json"
        if model is not None:
            message = f"its model, {model.name}, has no card. Type --model with the config.json of its plan"
        raise InputError.of(str(asked.source), message)
    return _SourceModel(model=model, config=load_config(card) if card else None)


def _folders(source: Path, form: Form) -> Sequence[Path]:
    """Return where a configuration, or the plan of a run, may lie."""
    if form == "autoshard":
        return source, source.resolve().parent, source.resolve().parent.parent
    return (source.parent if source.is_file() else source), *([source / "model"] if form == "nxd" else [])


def _opened(path: Path, form: Form, known: _SourceModel) -> WeightSource:
    if form == "autoshard":
        found = checkpoint_of(path)
        assert found, "its form says so"
        return ours_source(*found, known.model)
    if form == "nxd":
        folder = nxd_folder(path)
        assert folder, "its form says so"
        return nxd_source(folder, known.family, known.model)
    return hf_source(path, known.family, known.model)


def _outputs(
    asked: Conversion, known: _SourceModel, source: WeightSource, dtypes: Mapping[str, torch.dtype], name: str
) -> Sequence[TargetFile]:
    if asked.form == "autoshard":
        return ours_outputs(asked.plan, source, dtypes)
    if asked.form == "nxd":
        if asked.plan is None:
            raise InputError.of("--to nxd", "needs --plan: it says how many ranks tp and pp have, and who holds what")
        return nxd_outputs(asked.plan, known.family, known.model, dtypes, asked.qkv)
    if asked.form == "pt":
        return state_outputs(known.family, known.model, dtypes, name)
    return hf_outputs(known.family, known.model, dtypes)


def _finish(
    asked: Conversion,
    known: _SourceModel,
    source: WeightSource,
    made: tuple[Sequence[TargetFile], Sequence[WrittenFile]],
    aside: Path,
) -> None:
    """Write what makes the files a whole: indexes and configurations, and what lies beside weights."""
    outputs, written = made
    beside = aside
    if asked.form == "hf":
        assert known.config, "asked for before"
        finish_hf(aside, outputs, known.config)
    elif asked.form == "nxd":
        finish_nxd(aside)
    elif asked.form == "autoshard":
        finish_ours(aside, known.model, asked.plan, source, list(zip(outputs, written, strict=True)))
        beside = asked.target
    if asked.form != "pt":
        if known.config and asked.form != "hf":
            write_json(beside / CONFIG, known.config)
        for folder in (known.folder, asked.tokenizer):
            if folder:
                copy_companions(folder, beside)


def _publish(asked: Conversion, final: Path, aside: Path) -> None:
    """Give what is whole its name."""
    (aside / JOURNAL).unlink()
    if asked.form == "pt":
        (aside / final.name).rename(final)
        aside.rmdir()
        return
    if final.exists():
        final.rmdir()  # an empty folder
    Storage.of(str(final.resolve().parent)).rename(aside.name, final.name)


def _refuse_small_disk(target: Path, aside: Path, num_bytes: int) -> None:
    there = next(one for one in (target.resolve(), *target.resolve().parents) if one.exists())
    begun = sum(one.stat().st_size for one in aside.rglob("*") if one.is_file()) if aside.exists() else 0
    free = shutil.disk_usage(there).free + begun
    message = f"{format_bytes(num_bytes)} are to be written, and the disk has {format_bytes(free)} left"
    require((num_bytes <= free, str(target), message))
