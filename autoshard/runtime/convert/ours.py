"""Checkpoints of autoshard: read whatever plan saved them, written as the ranks of another would save them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from autoshard.engine.hf_names import shapes_of
from autoshard.engine.patches import whole
from autoshard.engine.programs import programs_of
from autoshard.errors import InputError, RunFailed
from autoshard.plan.plan import Plan
from autoshard.run.folder import CHECKPOINTS, INDEX
from autoshard.run.placement import MeshRank, StatePart, StatePiece
from autoshard.runtime.checkpoint.files import (
    DTYPES,
    CheckpointIndex,
    RunState,
    StoredBox,
    StoredTensor,
    box_name,
    cut_piece,
    dump_index,
    fills_once,
)
from autoshard.runtime.checkpoint.shelf import Shelf, meant, refuse_other
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from autoshard.runtime.convert.copying import Entry, TargetFile, WrittenFile
from autoshard.runtime.convert.stored import WeightSource, read_tensors, with_checksum
from autoshard.spec.model import ModelSpec

_WEIGHT = "weight/"  # before the names of weights in a checkpoint; moments have the same names everywhere
_WITHOUT_PLAN_BYTES = 2**32  # of a file


def checkpoint_of(path: Path) -> tuple[Path, CheckpointIndex] | None:
    """Return the newest checkpoint of a folder, a run's among them, or the one that the folder is; None without any."""
    if not path.is_dir():
        return None
    folder, index, remarks = meant(Storage.of(str(path)))
    if index is None and remarks:
        raise InputError.of(str(path), "; ".join(remarks))
    return (path / folder, index) if index else None


@contextmanager
def naming_removed(source: Path) -> Iterator[None]:
    """Say of what could not be read that the run, which goes on, has removed checkpoints meanwhile."""
    before = _steps_in(source)
    try:
        yield
    except (InputError, RunFailed, StorageError, OSError) as error:
        gone = ", ".join(map(str, sorted(before - _steps_in(source))))
        if not gone:
            raise
        why = f"its run has saved newer checkpoints and removed that of step {gone} meanwhile ({error})"
        raise InputError.of(str(source), f"{why}. Type the same command again") from error


def _steps_in(source: Path) -> set[int]:
    place = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    return set(Shelf(storage=Storage.of(str(place))).steps()) if place.is_dir() else set()


def ours_source(folder: Path, index: CheckpointIndex, model: ModelSpec) -> WeightSource:
    """Open a checkpoint, or say in what it does not fit the model."""
    shapes = {f"{_WEIGHT}{name}": shape for name, shape in shapes_of(model).items()}
    refuse_other(index, shapes, str(folder), "Type --model with the model of the checkpoint")
    return stored_source(folder, index)


def stored_source(folder: Path, index: CheckpointIndex) -> WeightSource:
    """Open a checkpoint of any model."""
    files = {name: read_tensors(folder / name, "Take the checkpoint before") for name in index.files}
    stored = (
        with_checksum(files[box.file][box_name(name, box.offsets)], box, name.removeprefix(_WEIGHT))
        for name, tensor in index.tensors.items()
        for box in tensor.boxes
    )
    shapes_of_weights = {name.removeprefix(_WEIGHT): tensor.shape for name, tensor in index.tensors.items()}
    return WeightSource(stored, shapes_of_weights, str(folder), state=index.state)


def ours_outputs(plan: Plan | None, source: WeightSource, dtypes: Mapping[str, torch.dtype]) -> list[TargetFile]:
    """List a file for each rank of a plan that would save something; without a plan, files of some size."""
    files: dict[str, list[Entry]] = defaultdict(list)
    for file, piece in _placed(plan, source, dtypes):
        for part in cut_piece(piece):
            lengths = tuple(part.memory.shape)
            patch = whole(part.name.removeprefix(_WEIGHT), part.offsets, lengths)
            name = box_name(part.name, part.offsets)
            files[file].append(Entry(name=name, dtype=part.memory.dtype, shape=lengths, patches=(patch,)))
    return [TargetFile(file=file, entries=tuple(entries), summed=True) for file, entries in files.items()]


def finish_ours(
    folder: Path,
    model: ModelSpec,
    plan: Plan | None,
    source: WeightSource,
    written: Sequence[tuple[TargetFile, WrittenFile]],
) -> None:
    """Write the index, which makes the checkpoint complete."""
    boxes: dict[str, list[StoredBox]] = defaultdict(list)
    dtypes: dict[str, torch.dtype] = {}
    for output, done in written:
        for entry, start, crc32 in zip(output.entries, done.starts, done.crc32s, strict=True):
            (patch,) = entry.patches
            boxes[patch.tensor].append(StoredBox(*patch.box, output.file, start, entry.num_bytes, crc32))
            dtypes[patch.tensor] = entry.dtype
    tensors = {
        name if _part(name) != "weight" else f"{_WEIGHT}{name}": StoredTensor(
            DTYPES[dtypes[name]], source.shapes[name], tuple(its_boxes)
        )
        for name, its_boxes in boxes.items()
    }
    partial = [name for name, tensor in tensors.items() if not fills_once(tensor)]
    assert not partial, f"ranks of the plan hold only a part of {', '.join(partial)}"
    index = CheckpointIndex(
        state=source.state or RunState(),
        model=model.name,
        candidate=str(plan.candidate) if plan else "",
        finite=True,  # the source refuses to fill anything else
        files={done.file: done.num_bytes for _, done in written},
        tensors=tensors,
    )
    Storage.of(str(folder)).write(INDEX, dump_index(index))


def _placed(
    plan: Plan | None, source: WeightSource, dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, StatePiece]]:
    """Yield every box of a checkpoint, with its file."""
    parts: dict[str, list[str]] = defaultdict(list)  # of a weight: itself and its moments
    for name in source.shapes:
        parts[name if _part(name) == "weight" else name.partition("/")[2]].append(name)

    def pieces(weight: str, bounds: Sequence[tuple[int, int]]) -> Iterator[StatePiece]:
        offsets, lengths = tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds)
        for name in parts[weight]:
            memory = torch.empty(lengths, dtype=dtypes[name], device="meta")
            yield StatePiece(weight=weight, part=_part(name), whole=source.shapes[name], offsets=offsets, memory=memory)

    if plan:
        for rank, weight, bounds in _first_owners(plan, parts):
            for piece in pieces(weight, bounds):
                yield f"rank-{rank:05}.safetensors", piece
        return
    total = 0
    for weight in parts:
        for piece in pieces(weight, [(0, size) for size in source.shapes[weight]]):
            yield f"rank-{total // _WITHOUT_PLAN_BYTES:05}.safetensors", piece
            total += piece.memory.nbytes


def _first_owners(plan: Plan, weights: Iterable[str]) -> Iterator[tuple[int, str, tuple[tuple[int, int], ...]]]:
    """Yield for every block of every weight the first rank that owns it."""
    names, programs = set(weights), programs_of(plan)
    seen: set[tuple[str, tuple[tuple[int, int], ...]]] = set()
    for rank in range(plan.mesh.num_ranks):
        standing = MeshRank(mesh=plan.mesh, rank=rank, sizes=programs.graph.sizes)
        for stage, blocks in zip(plan.stages, programs.stages, strict=True):
            if stage.rank != standing.coordinate("pp") or standing.coordinate("edp"):  # which cuts no weight
                continue
            for name, parts in blocks.items():
                for tensor in parts.block.parameters:
                    owned = f"{name}.{tensor.name}", standing.bounds(parts.input_value(tensor.name).layout)
                    if owned[0] in names and owned not in seen and all(start < stop for start, stop in owned[1]):
                        seen.add(owned)
                        yield rank, *owned


def _part(name: str) -> StatePart:
    part = name.partition("/")[0]
    return part if part in ("moment1", "moment2") else "weight"
