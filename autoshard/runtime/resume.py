"""Where a run begins: at a checkpoint of its own, at weights from elsewhere, or at random weights."""

import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from autoshard.engine.base import Engine, Run
from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from autoshard.runtime.checkpoint.index import RunState
from autoshard.runtime.checkpoint.saver import load
from autoshard.runtime.checkpoint.shelf import Checkpoint, Shelf, newest, refuse_other
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from autoshard.runtime.weights import is_foreign, read_weights

Begun = tuple[RunState, tuple[str, ...]]  # and what the user should know of it
Value = TypeVar("Value")

_TOKEN = ".token"


def place_of(run: Run) -> Storage:
    """Return where a run's checkpoints lie."""
    to = run.training.checkpoint.to
    return Storage.of(str((run.folder / "checkpoints").absolute()) if to in (None, "none") else to)


def require_place(run: Run, group: Any) -> None:
    """Find out before the first step whether all ranks see one place, in which files can be written and removed."""
    place = place_of(run)
    token = from_first_rank(lambda: _usable(lambda: _write_token(place)), group)
    here = f"rank {dist.get_rank()} on {socket.gethostname()}"
    try:
        fault = "" if place.read(_TOKEN) == token else f"{here} does not see what rank 0 writes there"
    except StorageError as error:
        fault = f"{here} cannot read there: {error}. {error.remedy}"
    found: list[str] = [fault] * dist.get_world_size()
    dist.all_gather_object(found, fault, group)
    from_first_rank(lambda: _usable(lambda: place.remove(_TOKEN)), group)
    if fault := next(filter(None, found), ""):
        remedy = "Checkpoints need a folder that all nodes share, or a URL such as s3://bucket/run"
        raise InputError.of("checkpoint.to", f"{place.path()}: {fault}. {remedy}")


def _write_token(place: Storage) -> bytes:
    token = uuid.uuid4().bytes
    with place.writing(_TOKEN) as file:
        file.write(token)
    return token


def _usable(operation: Callable[[], Value]) -> Value:
    try:
        return operation()
    except StorageError as error:
        raise InputError.of("checkpoint.to", f"cannot be used: {error}. {error.remedy}") from None


def begin(plan: Plan, run: Run, engine: Engine, group: Any) -> Begun:
    """Bring an engine to where its run begins; every rank calls this."""
    if run.resume != "never" and run.training.checkpoint.saves:
        begun = _continued(plan, run, engine, group)
        if begun is not None:
            return begun
    fresh = RunState(step=0, num_updates=0, next_sample=0, seed=run.training.seed)
    path = run.training.init_weights
    return fresh, (_initialised(path, plan, engine, group),) if path else ()


def _continued(plan: Plan, run: Run, engine: Engine, group: Any) -> Begun | None:
    """Go on from the newest checkpoint that can be read, or from the one that is named; None if there is none."""
    shelf, pieces = Shelf(place=place_of(run)), engine.pieces()
    candidates = _candidates(shelf, run.resume)
    remarks: list[str] = []
    while checkpoint := from_first_rank(lambda: next(candidates, None), group):
        index = checkpoint.index
        refuse_other(index, pieces, shelf.place.path(checkpoint.folder))
        try:
            load(shelf, checkpoint, pieces, group)
        except StorageError as error:
            remarks.append(f"the checkpoint of step {index.state.step} is passed over: {error}")
            continue
        engine.restored(index.state.num_updates)
        later = [step for step in from_first_rank(shelf.steps, group) if step > index.state.step]
        if later:
            steps = ", ".join(map(str, reversed(later)))
            remarks.append(f"checkpoints of later steps ({steps}) are removed when the first new one is saved")
        other = "" if index.candidate == str(plan.candidate) else f", which was saved under {index.candidate}"
        return index.state, (*shelf.remarks, *remarks, f"continues after step {index.state.step}{other}")
    if from_first_rank(lambda: bool(shelf.steps()), group):
        what = "none of its checkpoints can be used: " + "; ".join([*shelf.remarks, *remarks])
        raise InputError.of("--resume", f"{what}. To begin again, type another --out")
    return None


def _candidates(shelf: Shelf, resume: str | int) -> Iterator[Checkpoint]:
    if isinstance(resume, int):
        yield shelf.open(resume)
    else:
        yield from shelf.usable()


def _initialised(path: str, plan: Plan, engine: Engine, group: Any) -> str:
    """Fill the weights alone, from a checkpoint of autoshard or of NxD, or from a folder of Hugging Face."""
    pieces = [piece for piece in engine.pieces() if piece.part == "weight"]
    if is_foreign(Path(path)):
        read_weights(Path(path), plan, pieces)
        engine.restored(0)
        return f"weights from {path}"
    place = Storage.of(path, "init_weights")
    checkpoint, remarks = from_first_rank(lambda: newest(place), group)
    if checkpoint is None:
        message = f"{path} holds neither a checkpoint of autoshard nor a config.json with safetensors or files of NxD"
        raise InputError.of("init_weights", "; ".join([message, *remarks]))
    refuse_other(checkpoint.index, pieces, place.path(checkpoint.folder))
    load(Shelf(place=place), checkpoint, pieces, group)
    engine.restored(0)
    return f"weights from step {checkpoint.index.state.step} of {path}"


def from_first_rank(look: Callable[[], Value], group: Any) -> Value:
    """Return what the first rank finds, on every rank; its fault is everybody's."""
    message: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            message[0] = look()
        except InputError as error:
            message[1] = error.faults
        except StorageError as error:
            message[1] = InputError.of("checkpoint.to", f"cannot be read: {error}").faults
    dist.broadcast_object_list(message, 0, group=group)
    if message[1] is not None:
        raise InputError(message[1])
    return message[0]
