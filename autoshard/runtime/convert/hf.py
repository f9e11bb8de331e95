"""Weights in Hugging Face form: a folder of safetensors with a config.json, or one state dict of torch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autoshard.engine.hf_names import DERIVED, HEADS, HfNames, further_modules, shapes_of
from autoshard.errors import InputError, inside, require
from autoshard.files import naming
from autoshard.runtime.convert.copying import Entry, TargetFile
from autoshard.runtime.convert.packed import unpacked
from autoshard.runtime.convert.stored import Stored, WeightSource, read_state, read_tensors, shape_faults
from autoshard.spec.hf.reader import fp8_block
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import read_config

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"
_ADAPTER = "adapter_config.json"
_OTHER = "transformers_weights"  # a field of the configuration that names another file
_KEPT_EXACT = "e_score_correction_bias"  # FP32 in transformers whatever its config says
_MOST_BYTES = 5 * 10**9  # of a file, as transformers cuts them
_ADVICE = "Download it again"
_UNTIED = (
    "The config.json says that they are one, by tie_word_embeddings, and transformers unties them. Say false there to "
    "keep both, or remove the head"
)
# The files of a tokenizer, and those that say how text is generated.
_COMPANIONS = (
    "tokenizer*.json", "tokenizer.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.*", "generation_config.json",
)  # fmt: skip


def hf_source(path: Path, family: str, model: ModelSpec) -> WeightSource:
    """Open a folder, or a file of ``torch.save``, or say all that is wrong."""
    found = read_state(path) if path.is_file() else _stored(path)
    further = further_modules(found)
    tensors = unpacked({name: found[name] for name in found if not name.startswith(further)}, _fp8_block(path))
    names = HfNames.fitting(family, model, tensors.keys())
    shapes, patches = dict(names.shapes), dict(names.patches())
    for owner in names.tied.values():  # files may repeat the table as the head, which must be the same
        table = next(row.theirs for row in names.rows if row.ours == owner)
        for head in tensors.keys() & set(HEADS):
            shapes[head], patches[head] = shapes[table], patches[table]
    faults = list(shape_faults(tensors, shapes, DERIVED, str(path)))
    if faults:
        raise InputError(sorted(faults, key=lambda fault: fault.where))
    stored = (replace(tensors[name], patches=tuple(parts), remedy=_UNTIED) for name, parts in patches.items())
    return WeightSource(stored, shapes_of(model), str(path))


def _fp8_block(path: Path) -> tuple[int, int]:
    """Return how many rows and columns have one scale, as the configuration beside weights says."""
    config = (path.parent if path.is_file() else path) / CONFIG
    if not config.is_file():
        return fp8_block({})
    with inside(config):
        return fp8_block(read_config(config))


def is_hf(path: Path) -> bool:
    """Whether a folder holds a model as transformers saves it."""
    return path.is_dir() and ((path / _INDEX).exists() or any(path.glob("*.safetensors")))


def hf_outputs(family: str, model: ModelSpec, dtypes: Mapping[str, torch.dtype]) -> list[TargetFile]:
    """List the files of a folder; ``dtypes`` are those of our tensors."""
    files: list[list[Entry]] = [[]]
    for entry in _entries(family, model, dtypes):
        if files[-1] and sum(earlier.num_bytes for earlier in files[-1]) + entry.num_bytes > _MOST_BYTES:
            files.append([])
        files[-1].append(entry)
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    return [
        TargetFile(file=name if len(files) > 1 else _ONE, entries=tuple(entries), metadata={"format": "pt"})
        for name, entries in zip(names, files, strict=True)
    ]


def state_outputs(family: str, model: ModelSpec, dtypes: Mapping[str, torch.dtype], file: str) -> list[TargetFile]:
    """List one state dict with the names of Hugging Face."""
    return [TargetFile(file=file, entries=tuple(_entries(family, model, dtypes)), kind="state")]


def finish_hf(folder: Path, outputs: Sequence[TargetFile], config: Mapping[str, Any]) -> None:
    """Write the index, where there are several files, and the configuration."""
    if len(outputs) > 1:
        files = {entry.name: output.file for output in outputs for entry in output.entries}
        total = sum(output.num_bytes for output in outputs)
        write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": files})
    entries = [entry for output in outputs for entry in output.entries if not entry.name.endswith(_KEPT_EXACT)]
    kinds = {str(entry.dtype).removeprefix("torch.") for entry in entries}
    key = "dtype" if "dtype" in config else "torch_dtype"  # as transformers 5 and 4 write it; both read the latter
    write_json(folder / CONFIG, {**config, **({key: kinds.pop()} if len(kinds) == 1 else {})})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file as transformers would."""
    with naming(path):
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer, and those that say how text is generated."""
    for path in sorted({path for pattern in _COMPANIONS for path in source.glob(pattern)}):
        with naming(target / path.name):
            (target / path.name).write_bytes(path.read_bytes())


def _entries(family: str, model: ModelSpec, dtypes: Mapping[str, torch.dtype]) -> Iterable[Entry]:
    names = HfNames.of(family, model)
    shapes = names.shapes
    for name, patches in names.patches().items():
        yield Entry(name=name, dtype=dtypes[patches[0].tensor], shape=shapes[name], patches=tuple(patches))


def _stored(path: Path) -> Mapping[str, Stored]:
    """Return every tensor of a folder; where there is an index, those that it names."""
    _refuse_other_files(path)
    listed = _listed(path / _INDEX) if (path / _INDEX).exists() else {}
    if listed:
        files = sorted({path / file for file in listed.values()})
    else:
        files = [path / _ONE] if (path / _ONE).exists() else sorted(path.glob("*.safetensors"))
    lacking = "holds no *.safetensors. Write them with transformers: model.save_pretrained"
    require((bool(files), str(path), lacking))
    for file in files:
        require((file.exists(), str(file), f"there is no such file, though {_INDEX} names it. {_ADVICE}"))
    both = f"lies beside {_INDEX}, which does not name it, and transformers reads it alone. Remove what is not meant"
    require((not listed or path / _ONE in files or not (path / _ONE).exists(), str(path / _ONE), both))
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in read_tensors(file, _ADVICE).items():
            if first := tensors.get(name):
                raise InputError.of(f"{file}: {name}", f"is in {first.file} too. Remove what is not meant")
            tensors[name] = stored
    astray = [name for name, file in listed.items() if name not in tensors or tensors[name].file != str(path / file)]
    if astray:
        where = f"{path / listed[astray[0]]}: {astray[0]}"
        raise InputError.of(where, f"is not there, though {_INDEX} says so ({len(astray)} such tensors)")
    return tensors


def _listed(index: Path) -> Mapping[str, str]:
    """Read which file each tensor is in; no name leaves the folder; a file may be a link, as in the hub's caches."""
    named = read_config(index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise InputError.of(f"{index}: weight_map", "must say for each tensor the file that it is in")
    listed = {str(name): str(file) for name, file in named.items()}
    outside = sorted({file for file in listed.values() if Path(file).is_absolute() or ".." in Path(file).parts})
    message = f"names files outside of its folder: {', '.join(outside[:3])}. {_ADVICE} from where you trust it"
    require((not outside, f"{index}: weight_map", message))
    return listed


def _refuse_other_files(path: Path) -> None:
    """Refuse a folder of which transformers would load other weights, or more, than are read here."""
    adapter = (
        "transformers adds this adapter to the weights, and it is not read here. Save them as one: merge_and_unload()"
    )
    require((not (path / _ADAPTER).exists(), str(path / _ADAPTER), adapter))
    if (path / CONFIG).exists() and (weights_file := read_config(path / CONFIG).get(_OTHER)):
        raise InputError.of(
            f"{path / CONFIG}: {_OTHER}", f"names {weights_file}, which is not read. Save the model without it"
        )
