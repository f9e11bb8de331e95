"""The checkpoints of a run: which are complete, which is the newest, which are kept."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

from autoshard.engine.placement import StatePiece
from autoshard.errors import InputError
from autoshard.runtime.checkpoint.files import folder_of, step_of
from autoshard.runtime.checkpoint.index import FILE, CheckpointIndex, load_index
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from autoshard.spec.training import Checkpointing

_ASIDE = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: every file is there, as long as the index says."""

    folder: str
    index: CheckpointIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """A place of checkpoints, one folder each."""

    place: Storage
    remarks: list[str] = field(default_factory=list[str])  # on folders that were passed over, each once

    def steps(self) -> list[int]:
        """Return the steps of all folders that are not under way, newest first."""
        found = (step_of(name) for name in self.place.folders())
        return sorted((step for step in found if step is not None), reverse=True)

    def usable(self, most: int | None = None) -> Iterator[Checkpoint]:
        """Yield those that are complete and finite, newest first; what is wrong with others becomes a remark."""
        for step in self.steps():
            if most is not None and step > most:
                continue
            try:
                one = self.open(step)
            except InputError as error:
                for fault in error.faults:
                    self._remark(str(fault))
                continue
            if one.index.finite:
                yield one
            else:
                self._remark(f"{self.place.path(one.folder)}: holds numbers that are not finite")

    def open(self, step: int) -> Checkpoint:
        """Read the index of a checkpoint, and check that its files are there."""
        folder = folder_of(step)
        path = self.place.path(folder)
        data = self.place.read(f"{folder}/{FILE}")
        if data is None and step not in (steps := self.steps()):
            there = f"there are {', '.join(map(str, sorted(steps)))}" if steps else "there is none"
            raise InputError.of(path, f"there is no checkpoint of step {step}; {there}")
        if data is None:
            raise InputError.of(path, "was not finished: it has no index")
        index = load_index(data, f"{path}/{FILE}")
        there = self.place.sizes(folder)
        missing = [name for name in index.files if name not in there]
        short = [name for name, size in index.files.items() if name in there and there[name] != size]
        if missing or short:
            what = f"{missing[0]} is missing" if missing else f"{short[0]} has {there[short[0]]} bytes"
            was = "" if missing else f" instead of {index.files[short[0]]}"
            raise InputError.of(path, f"is damaged: {what}{was}")
        return Checkpoint(folder=folder, index=index)

    def folder(self, step: int) -> str:
        """Return the folder in which a checkpoint is written."""
        return folder_of(step) + (_ASIDE if self.place.is_local else "")

    def make_ready(self, step: int, known: Collection[int]) -> None:
        """Remove what crashes have left; refuse a place that holds steps beside those that this run knows."""
        if strange := sorted(set(self.steps()) - set(known)):
            remedy = "Give each run a checkpoint.to of its own"
            raise StorageError(
                f"{self.place.path(folder_of(strange[0]))}: was saved by another run meanwhile. {remedy}"
            )
        if not self.place.is_local:
            self._spoil(folder_of(step))  # of the same step, before the run went back
            return
        for name in self.place.folders():
            if name.endswith(_ASIDE):
                self.place.remove(name)

    def publish(self, folder: str) -> None:
        """Give a checkpoint that is written its name."""
        if not folder.endswith(_ASIDE):
            return  # the index was written last
        name = folder.removesuffix(_ASIDE)
        if name in self.place.folders():  # of the same step, before the run went back
            self.place.remove(name)
        self.place.rename(folder, name)

    def prune(self, keeping: Checkpointing, step: int) -> None:
        """Remove what need not be kept when a step is saved; of those that are finite, the newest always stay.

        Later ones are of a course that the run has left: it went back, or they could not be used.
        """
        kept = [one.index.state.step for one in islice(self.usable(step), keeping.keep_last)]
        if not kept:
            return
        for_good = set(self._firsts(keeping.keep_every)) if keeping.keep_every else set[int]()
        for one in self.steps():
            old = one < kept[0] and one not in kept and one not in for_good
            left = one > step == kept[0]
            if old or left:
                self._remove(folder_of(one))

    def _firsts(self, every: int) -> Iterator[int]:
        """Yield the first complete checkpoint at or after each multiple of so many steps, before the next multiple."""
        for multiple, found in groupby(sorted(self.steps()), key=lambda step: step // every):
            steps = list(found)
            complete = steps if len(steps) == 1 else (one for one in steps if self._has_index(folder_of(one)))
            if multiple > 0:
                yield from islice(complete, 1)

    def _has_index(self, folder: str) -> bool:
        return FILE in self.place.sizes(folder)

    def _remove(self, folder: str) -> None:
        self._spoil(folder)
        if self.place.is_local or self.place.sizes(folder):
            self.place.remove(folder)

    def _spoil(self, folder: str) -> None:
        """Remove the index first: what a crash leaves is then no checkpoint."""
        if self._has_index(folder):
            self.place.remove(f"{folder}/{FILE}")

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)


def refuse_other(index: CheckpointIndex, pieces: Sequence[StatePiece], where: str) -> None:
    """Refuse a checkpoint of another model, or without moments that the optimizer has; name what differs."""
    wanted = {piece.name: piece.whole for piece in pieces}
    faults = list(_differences(index, wanted))
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        remedy = "Give the run the model and the optimizer of the checkpoint, or start it with --resume never"
        raise InputError.of(where, f"does not fit: {'; '.join(faults[:3])}{more}. {remedy}")


def _differences(index: CheckpointIndex, wanted: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in wanted.items():
        stored = index.tensors.get(name)
        if stored is None:
            yield f"{name} is missing"
        elif stored.shape != shape:
            yield f"{name} has shape {list(stored.shape)}, the model of this run {list(shape)}"


def newest(place: Storage) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the newest checkpoint that is complete and finite, and remarks on those passed over."""
    shelf = Shelf(place=place)
    try:
        found = next(shelf.usable(), None)
    except StorageError as error:
        raise InputError.of("checkpoint.to", f"cannot be read: {error}") from None
    return found, tuple(shelf.remarks)
