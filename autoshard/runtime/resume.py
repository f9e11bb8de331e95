"""Where a run begins: at a checkpoint of its own, at weights from elsewhere, or at random weights."""

import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from autoshard.errors import InputError, require
from autoshard.plan.plan import Plan
from autoshard.run.folder import folder_of
from autoshard.run.placement import StatePiece
from autoshard.run.protocol import Engine, Run
from autoshard.runtime.checkpoint.agreed import from_all_ranks, from_first_rank
from autoshard.runtime.checkpoint.files import CheckpointIndex, RunState
from autoshard.runtime.checkpoint.loading import LoadRates, load_checkpoint
from autoshard.runtime.checkpoint.shelf import Shelf, meant, refuse_other, unusable
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from autoshard.runtime.convert.converting import is_foreign, read_weights
from autoshard.runtime.data.batches import SampleSource
from autoshard.runtime.data.contents import SetContents, refuse_other_contents
from autoshard.runtime.data.opened import source_of
from autoshard.runtime.restart import place_of, stated_place

Begun = tuple[RunState, tuple[str, ...]]  # and notes for the user
Value = TypeVar("Value")

_TOKEN = ".token"


def run_storage(run: Run) -> Storage:
    """Return where a run's checkpoints lie."""
    return Storage.of(place_of(run.folder, run.training.checkpoint.to))


def usable(operation: Callable[[], Value]) -> Value:
    """Return the result of an operation on checkpoints; turn its failure into a fault of the user's input."""
    try:
        return operation()
    except StorageError as error:
        raise InputError.of("checkpoint.to", f"cannot be used: {error}. {error.remedy}") from None


def require_storage(run: Run, group: Any) -> None:
    """Refuse a place that ranks do not share, or in which no files can be written and removed."""
    storage = run_storage(run)

    def write() -> bytes:
        token = uuid.uuid4().bytes
        storage.write(_TOKEN, token)
        return token

    token = from_first_rank(lambda: usable(write), group)

    def look() -> None:
        if usable(lambda: storage.read(_TOKEN)) != token:
            raise StorageError(f"{socket.gethostname()} does not see what rank 0 writes there")

    try:
        from_all_ranks(look, group)
    except StorageError as error:
        remedy = "Checkpoints need a folder that all nodes share, or a URL such as s3://bucket/run"
        raise InputError.of("checkpoint.to", f"{storage.path()}: {error}. {remedy}") from None
    finally:
        from_first_rank(lambda: usable(lambda: storage.remove(_TOKEN)), group)


def begin(plan: Plan, run: Run, engine: Engine, group: Any) -> Begun:
    """Fill an engine with the state with which its run begins; return that state and notes. Every rank calls this."""
    if run.resume != "never" and run.training.checkpoint.saves:
        continued = _continued(plan, run, engine, group)
        if continued is not None:
            return continued
    fresh = RunState(seed=run.training.seed)
    path = run.training.init_weights
    if path is None:
        return fresh, ()
    note = _initialised(path, plan, engine, group)
    engine.restored(0)
    return fresh, (note,)


def opened_data(plan: Plan, run: Run, state: RunState, group: Any) -> tuple[SampleSource, RunState, list[str]]:
    """Open the data of a run, which all ranks must see alike; return also the state that knows it, and notes."""
    source = source_of(plan, replace(run.training.data, check="sizes"), state.seed)
    contents = SetContents.of(source)
    of_first = from_first_rank(lambda: contents, group)
    try:
        from_all_ranks(lambda: refuse_other_contents(contents, of_first, StorageError), group)
    except StorageError as error:
        raise InputError.of("data.sets", str(error)) from None
    before = SetContents(sizes=state.set_sizes, checksums=state.set_checksums)
    state = replace(state, set_sizes=contents.sizes, set_checksums=contents.checksums)
    return source, state, before.notes(contents)


def _continued(plan: Plan, run: Run, engine: Engine, group: Any) -> Begun | None:
    """Load the newest checkpoint that can be read, or the named one; return None if there is none."""
    shelf, pieces, remarks = Shelf(storage=run_storage(run)), engine.pieces(), list[str]()
    candidates = shelf.usable() if isinstance(run.resume, str) else (shelf.open(step) for step in (run.resume,))
    while index := from_first_rank(lambda: usable(lambda: next(candidates, None)), group):
        _refuse_other(index, pieces, shelf.storage)
        try:
            note = load_checkpoint(shelf, index, pieces, group, LoadRates.of(plan))
        except StorageError as error:
            remarks.append(f"the checkpoint of step {index.state.step} is passed over: {error}")
            continue
        engine.restored(index.state.num_updates)
        later = [step for step in from_first_rank(lambda: usable(shelf.steps), group) if step > index.state.step]
        if later:
            steps = ", ".join(map(str, reversed(later)))
            remarks.append(f"checkpoints of later steps ({steps}) are removed when the first new one is saved")
        saved_under = "" if index.candidate == str(plan.candidate) else f", which was saved under {index.candidate}"
        remarks += [note] if note else []
        return index.state, (*shelf.remarks, *remarks, f"continues after step {index.state.step}{saved_under}")
    steps, faults = from_first_rank(lambda: (usable(shelf.steps), [*shelf.remarks]), group)
    if steps:
        raise unusable([*faults, *remarks])
    return None


def _refuse_other(index: CheckpointIndex, pieces: Sequence[StatePiece], storage: Storage) -> None:
    remedy = "Give the run the model and the optimizer of the checkpoint, or type another --out"
    shapes = {piece.name: piece.whole for piece in pieces}
    refuse_other(index, shapes, storage.path(folder_of(index.state.step)), remedy)


def _initialised(path: str, plan: Plan, engine: Engine, group: Any) -> str:
    """Fill the weights alone, from a checkpoint of autoshard or of NxD, or from a folder of Hugging Face."""
    pieces = [piece for piece in engine.pieces() if piece.part == "weight"]
    if is_foreign(Path(path)):
        try:
            from_all_ranks(lambda: read_weights(Path(path), plan, pieces), group)
        except StorageError as error:
            raise InputError.of("init_weights", str(error)) from None
        return f"weights from {path}"
    storage = Storage.of(path, "init_weights")
    try:
        folder, index, remarks = from_first_rank(lambda: meant(storage), group)
    except StorageError as error:
        raise InputError.of("init_weights", f"cannot be read: {error}") from None
    if index is None:
        place = stated_place(Path(path))
        require((not place, "init_weights", f"{path} is a run whose checkpoints lie in {place}. Name that place"))
        message = f"{path} holds neither a checkpoint of autoshard nor a config.json with safetensors or files of NxD"
        raise InputError.of("init_weights", "; ".join([message, *remarks]))
    require((index.finite, "init_weights", f"{path} holds numbers that are not finite. Take the checkpoint before"))
    storage = replace(storage, root=storage.path(folder).rpartition("/")[0])
    _refuse_other(index, pieces, storage)
    note = load_checkpoint(Shelf(storage=storage), index, pieces, group, LoadRates.of(plan))
    return f"weights from step {index.state.step} of {path}{f': {note}' if note else ''}"
