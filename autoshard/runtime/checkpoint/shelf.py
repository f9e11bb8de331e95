"""The checkpoints of a run: which are complete, which is the newest, which are kept."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice

from autoshard.errors import InputError
from autoshard.run.folder import CHECKPOINTS, INDEX, PARTIAL, checkpoint_step, folder_of
from autoshard.runtime.checkpoint.files import CheckpointIndex, load_index
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from autoshard.spec.training import Checkpointing


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """A place of checkpoints, one folder each."""

    storage: Storage
    remarks: list[str] = field(default_factory=list[str])  # on folders that were passed over, each once

    def steps(self) -> list[int]:
        """Return the steps of all folders that have their final name, newest first."""
        steps = (checkpoint_step(name) for name in self.storage.folders())
        return sorted((step for step in steps if step is not None), reverse=True)

    def usable(self, most: int | None = None) -> Iterator[CheckpointIndex]:
        """Yield the indexes of complete, finite checkpoints, newest first; faults of any others become remarks."""
        for step in self.steps():
            if most is not None and step > most:
                continue
            try:
                index = self.open(step)
                if index.finite:
                    yield index
                    continue
                faults = [f"{self.storage.path(folder_of(step))}: holds numbers that are not finite"]
            except InputError as error:
                faults = [str(fault) for fault in error.faults]
            self.remarks.extend(fault for fault in faults if fault not in self.remarks)

    def open(self, step: int) -> CheckpointIndex:
        """Read the index of a checkpoint, and check that its files are there, as long as it says."""
        folder = folder_of(step)
        path = self.storage.path(folder)
        data = self.storage.read(f"{folder}/{INDEX}")
        if data is None and step not in (steps := self.steps()):
            numbers = ", ".join(map(str, sorted(steps)))
            there = f"those of step{'s' if len(steps) > 1 else ''} {numbers} are there" if steps else "none is there"
            raise InputError.of(path, f"there is no checkpoint of step {step}; {there}")
        if data is None:
            raise InputError.of(path, "was not finished: it has no index")
        index = load_index(data, f"{path}/{INDEX}")
        sizes = self.storage.sizes(folder)
        for name, size in index.files.items():
            if name not in sizes:
                raise InputError.of(path, f"is damaged: {name} is missing")
            if sizes[name] != size:
                raise InputError.of(path, f"is damaged: {name} has {sizes[name]} bytes instead of {size}")
        return index

    def folder(self, step: int) -> str:
        """Return the folder in which a checkpoint is written."""
        return folder_of(step) + (PARTIAL if self.storage.is_local else "")

    def make_ready(self, step: int, own_steps: Collection[int]) -> None:
        """Remove the remains of crashes; refuse a place that holds steps which this run does not know."""
        if strange := sorted(set(self.steps()) - set(own_steps)):
            where = self.storage.path(folder_of(strange[0]))
            raise StorageError(f"{where}: was saved by another run meanwhile. Give each run a checkpoint.to of its own")
        if not self.storage.is_local:
            self._remove_index(folder_of(step))  # of the same step, before the run went back
            return
        for name in self.storage.folders():
            if name.endswith(PARTIAL):
                self.storage.remove(name)

    def publish(self, folder: str) -> None:
        """Give a written checkpoint its final name; in a store it has that name already."""
        name = folder.removesuffix(PARTIAL)
        if name == folder:
            return
        if name not in self.storage.folders():
            self.storage.rename(folder, name)
            return
        old = f"{name}.old{PARTIAL}"  # of the same step, judged or before the run went back; removing it takes a while
        self.storage.rename(name, old)
        self.storage.rename(folder, name)
        with suppress(StorageError):  # the next save tries again
            self.storage.remove(old)

    def prune(self, keeping: Checkpointing, step: int, best: int | None = None, *, earlier: bool = True) -> None:
        """Remove checkpoints that are no longer needed when a step is saved; the newest finite ones always stay.

        So does that of the ``best`` step, and all ``earlier`` ones if this step is not to be relied on.

        Later steps go in any case: the run has gone back behind them, or they could not be used.
        """
        kept_steps = [index.state.step for index in islice(self.usable(step), keeping.keep_last)]
        if not kept_steps:
            return
        for_good = set(self._firsts(keeping.keep_every)) if keeping.keep_every else set[int]()
        for saved in self.steps():
            old = earlier and saved < kept_steps[0] and saved not in {*kept_steps, *for_good, best}
            is_behind = saved > step == kept_steps[0]
            if old or is_behind:
                folder = folder_of(saved)
                self._remove_index(folder)
                if self.storage.is_local or self.storage.sizes(folder):
                    self.storage.remove(folder)

    def _firsts(self, period: int) -> Iterator[int]:
        """Yield the first complete checkpoint at or after each multiple of so many steps, before the next multiple."""
        for multiple, its_steps in groupby(sorted(self.steps()), key=lambda step: step // period):
            steps = list(its_steps)
            complete = (
                steps
                if len(steps) == 1
                else (saved for saved in steps if INDEX in self.storage.sizes(folder_of(saved)))
            )
            if multiple > 0:
                yield from islice(complete, 1)

    def _remove_index(self, folder: str) -> None:
        """Make a folder no checkpoint, before anything else in it changes: a crash may follow."""
        if INDEX in self.storage.sizes(folder):
            self.storage.remove(f"{folder}/{INDEX}")


def refuse_other(index: CheckpointIndex, shapes: Mapping[str, tuple[int, ...]], where: str, remedy: str) -> None:
    """Refuse a checkpoint without tensors of these shapes, as one of another model; name what differs."""
    faults: list[str] = []
    for name, shape in shapes.items():
        stored = index.tensors.get(name)
        if stored is None:
            faults.append(f"{name} is missing")
        elif stored.shape != shape:
            faults.append(f"{name} has shape {list(stored.shape)}, the model {list(shape)}")
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise InputError.of(where, f"does not fit: {'; '.join(faults[:3])}{more}. {remedy}")


def newest(storage: Storage) -> tuple[CheckpointIndex | None, tuple[str, ...]]:
    """Return the newest checkpoint that is complete and finite, and remarks on those passed over."""
    shelf = Shelf(storage=storage)
    try:
        index = next(shelf.usable(), None)
    except StorageError as error:
        raise InputError.of("checkpoint.to", f"cannot be read: {error}") from None
    return index, tuple(shelf.remarks)


def unusable(faults: Sequence[str]) -> InputError:
    """Return the error of a run that has checkpoints, all of which were passed over."""
    what = "none of its checkpoints can be used: " + "; ".join(faults)
    return InputError.of("--resume", f"{what}. To begin again, type another --out")


def meant(storage: Storage) -> tuple[str, CheckpointIndex | None, tuple[str, ...]]:
    """Return the newest checkpoint of a place, or of the run that it holds, or the checkpoint that the place is.

    Before it its folder in the place ("" for the place itself), behind it remarks on those that were passed over.
    """
    above, _, name = storage.root.rpartition("/")
    step = checkpoint_step(name)
    if step is not None and INDEX in storage.sizes(""):
        return "", Shelf(storage=replace(storage, root=above)).open(step), ()
    remarks = list[str]()
    for folder in ("", f"{CHECKPOINTS}/"):
        shelf = Shelf(storage=replace(storage, root=storage.path(folder).rstrip("/")))
        if index := next(shelf.usable(), None):
            return f"{folder}{folder_of(index.state.step)}", index, tuple(shelf.remarks)
        remarks += shelf.remarks
    return "", None, tuple(remarks)
