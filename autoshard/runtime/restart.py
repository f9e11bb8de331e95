"""What a start of a run takes over from the start before: its plan, the options that nobody states, how far it came."""

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autoshard.errors import InputError, require
from autoshard.plan.diff import leaf_values
from autoshard.plan.plan import Plan
from autoshard.run.folder import CHECKPOINTS, PLAN, TRAINING
from autoshard.run.protocol import Resume
from autoshard.runtime.folder import folder_before, original_of
from autoshard.spec import record
from autoshard.spec.files import json_line
from autoshard.spec.training import RateSchedule, Training
from autoshard.units import counted

_PREDICTS = ("expert_imbalance",)  # fields of a workload that train nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class StartBefore:
    """What the folder of a run says of the last start in it; its files may be gone, or cut off by a kill."""

    training: Training | None = None
    plan: Plan | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The newest checkpoint that a start can go on from."""

    step: int
    seed: int


def place_of(folder: Path, to: str | None) -> str:
    """Return the folder or URL to which a run in this folder saves checkpoints."""
    return str((folder / CHECKPOINTS).absolute()) if to in (None, "none") else to


def training_text(training: Training) -> str:
    """Write the options of a start; paths in it mean the same in every folder."""
    return json.dumps(record.encode(training.absolute(Path.cwd())), indent=2) + "\n"


def start_before(folder: Path, to: object) -> StartBefore:
    """Read what the last start left; a file that is cut off is taken from the newest checkpoint, which has a copy."""
    from autoshard.plan.codec import load

    training, plan, notes = None, None, list[str]()
    texts: dict[str, str | None] = {}
    for name in (TRAINING, PLAN):
        path = folder / name
        texts[name] = _whole(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
        if path.is_file() and texts[name] is None:
            texts[name], where = _copy(folder, None if to is None else str(to), name)
            notes.append(f"{path} was cut off by a kill; {where}")
    if (text := texts[TRAINING]) is not None:
        training = _as_moved(record.decode(Training, json_line(text), folder / TRAINING), folder)
    if (text := texts[PLAN]) is not None:
        plan = load(folder / PLAN) if not notes else load(text)
    return StartBefore(training=training, plan=plan, notes=tuple(notes))


def stated_place(folder: Path) -> str:
    """Return where the run of a folder saves its checkpoints, if it was told a place; "" otherwise."""
    path = folder / TRAINING
    content = json_line(path.read_bytes()) if path.is_file() else None
    if content is None:
        return ""
    to = _as_moved(record.decode(Training, content, path), folder).checkpoint.to
    return "" if to in (None, "none") else to


def _as_moved(training: Training, folder: Path) -> Training:
    """Return the options with the place of checkpoints that lies in the run's folder where that folder lies now."""
    to, last = training.checkpoint.to, folder_before(folder)
    if to in (None, "none") or not Path(to).is_relative_to(last):
        return training
    place = str(folder.absolute() / Path(to).relative_to(last))
    return replace(training, checkpoint=replace(training.checkpoint, to=place))


def _whole(text: str) -> str | None:
    return None if json_line(text) is None else text


def _copy(folder: Path, to: str | None, name: str) -> tuple[str | None, str]:
    """Return the copy of a run's file in its newest checkpoint, and a note for the user."""
    from autoshard.run.folder import folder_of
    from autoshard.runtime.checkpoint.shelf import newest
    from autoshard.runtime.checkpoint.storage import Storage, StorageError

    try:
        index, _ = newest(storage := Storage.of(place_of(folder, to)))
        data = storage.read(f"{folder_of(index.state.step)}/{name}") if index else None
    except StorageError as error:
        raise InputError.of("checkpoint.to", f"cannot be read: {error}") from None
    text = _whole(data.decode(errors="replace")) if data else None
    if index is None or text is None:
        return None, "no checkpoint has a copy of it, so that only what this command states is known"
    return text, f"it is that of the checkpoint of step {index.state.step}"


def resume_point(place: str, resume: Resume) -> Progress | None:
    """Return the checkpoint of a place that a start would go on from; None if there is none."""
    from autoshard.runtime.checkpoint.shelf import Shelf, newest
    from autoshard.runtime.checkpoint.storage import Storage, StorageError

    storage = Storage.of(place)
    try:
        index = Shelf(storage=storage).open(resume) if isinstance(resume, int) else newest(storage)[0]
    except StorageError as error:
        raise InputError.of("checkpoint.to", f"cannot be read: {error}. {error.remedy}") from None
    return index and Progress(step=index.state.step, seed=index.state.seed)


def start_point(folder: Path, to: str | None, resume: Resume) -> Progress | None:
    """Return the checkpoint that a start goes on from; refuse a place without a usable one, or that takes none.

    Ranks find that out too, but only when they have been started.
    """
    from autoshard.runtime.checkpoint.shelf import newest, unusable
    from autoshard.runtime.checkpoint.storage import Storage

    place = place_of(folder, to)
    progress = resume_point(place, resume)
    if to is not None:
        _refuse_unwritable(place)
    if progress is None and (faults := newest(Storage.of(place))[1]):
        raise unusable(faults)
    return progress


def saved_steps(place: str) -> Sequence[int]:
    """Return the steps of the checkpoints of a place, newest first; none where it cannot be read."""
    from autoshard.runtime.checkpoint.shelf import Shelf
    from autoshard.runtime.checkpoint.storage import Storage, StorageError

    try:
        return Shelf(storage=Storage.of(place)).steps()
    except StorageError:  # so that a start must read it, and says why it cannot
        return ()


def refuse_strange_place(folder: Path, training: Training, before: Training | None, resume: Resume) -> None:
    """Refuse a place with the checkpoints of another run, or without those of this run, that nobody has asked for."""
    to = training.checkpoint.to
    option, outside = f"--checkpoint.to {to}", to not in (None, "none")
    if before is None:
        strange = resume_point(place_of(folder, to), "auto") if outside and resume in ("auto", "never") else None
        holds = f"holds the checkpoints of a run (newest: step {strange and strange.step}), and {folder} is new"
        remedy = "Name another place, or type --resume newest to go on with that run here"
        require((strange is None, option, f"{holds}. {remedy}"))
        return
    place, place_before = place_of(folder, to), place_of(folder, before.checkpoint.to)
    if before.checkpoint.to == "none":
        return
    if place_before == place and to != "none":
        lies_inside = Path(place).is_relative_to(folder.absolute())
        original = None if lies_inside or resume == "newest" else original_of(folder)
        shared = f"{folder} is a copy of {original}, and both would save to {place} and remove what the other saved"
        remedy = "Copy these checkpoints too, and name their copy; or type --resume newest to go on with them here"
        require((original is None, f"--checkpoint.to {place}", f"{shared}. {remedy}"))
        return
    old = resume_point(place_before, "auto")
    if old and (to == "none" or resume_point(place, "auto") is None):
        there = f"the checkpoints of this run lie in {place_before} (newest: step {old.step})"
        raise InputError.of(option, f"{there}, so that it would begin again. Leave the option out")


def _refuse_unwritable(place: str) -> None:
    """Refuse a folder into which nothing can be written; of a store the ranks find that out."""
    from autoshard.runtime.checkpoint.storage import Storage, StorageError

    storage, name = Storage.of(place), f".token-{os.getpid()}"
    if storage.is_local:
        try:
            storage.write(name, b"")
            storage.remove(name)
        except StorageError as error:
            raise InputError.of("checkpoint.to", f"cannot be used: {error}. {error.remedy}") from None


def start_options(
    training: Training, stated: Collection[str], before: Training | None, progress: Progress | None
) -> tuple[Training, list[str]]:
    """Return the options that a start trains with, and notes that compare them with those of the start before.

    ``stated`` has the names of the options that the user stated, ``before`` the options of the last start in the
    folder, and ``progress`` the checkpoint from which this start resumes.
    """
    done, training = progress.step if progress else 0, training.absolute(Path.cwd())
    if progress and training.seed != progress.seed:
        message = f"the run has drawn its samples by seed {progress.seed} up to step {done}, and goes on with it"
        require(("seed" not in stated, "--seed", f"{message}. Leave --seed out, or begin in another --out"))
        training = replace(training, seed=progress.seed)
    if before is None:
        return training, []
    if done and (training.init_weights or "") != (before.init_weights or "") and "init_weights" in stated:
        message = f"the run goes on from its checkpoint of step {done}, so that no weights from elsewhere are read"
        raise InputError.of("--init-weights", f"{message}. Leave it out, or begin in another --out")
    training, notes = _with_curve(training, stated, before, done)
    was, now, usual = (leaf_values(record.encode(options)) for options in (before, training, Training()))
    changed = {name for name in {**was, **now} if was.get(name) != now.get(name)}
    unchanged = [
        f"{name} {value}" for name, value in now.items()
        if name not in changed and value != usual.get(name) and not _is_stated(name, stated)
    ]  # fmt: skip
    changes = [f"{name} was {was.get(name)}, now {now.get(name)}" for name in {**was, **now} if name in changed]
    notes = [*(f"changed since the last start: {change}" for change in changes), *notes]
    return training, [*notes, *([f"as at the last start: {', '.join(unchanged)}"] if unchanged else [])]


def workload_notes(before: Plan | None, plan: Plan, progress: Progress | None) -> list[str]:
    """Say what a run that goes on trains otherwise under its new plan: another cut keeps its curve, and this does not.

    After a change of the length its next sample has a number among new ones. A start that saved nothing is not gone on.
    """
    if before is None:
        return []
    if progress is None:
        return ["the start before has left no checkpoint: this one begins at step 1"]
    was, now = (
        record.encode(workload) | {"precision": workload.precision.name}
        for workload in (before.workload, plan.workload)
    )
    drawn = ". The data is cut anew and drawn in another order: some of it comes again before the rest was seen"
    return [
        f"changed since the last start: {name} was {was.get(name)}, now {now[name]}{drawn * (name == 'seq_len')}"
        for name in now
        if was.get(name) != now[name] and name not in _PREDICTS
    ]


def _curve_of(training: Training) -> tuple[float, RateSchedule]:
    """Return what the user says of the learning rate, whatever the steps; a recipe says it again at every start."""
    return training.learning_rate, replace(training.schedule, over_steps=None, extend="keep")


def _is_stated(name: str, stated: Collection[str]) -> bool:
    return any(name == option or name.startswith(f"{option}.") for option in stated)


def _with_curve(
    training: Training, stated: Collection[str], before: Training, done: int
) -> tuple[Training, Sequence[str]]:
    """Keep the curve of the learning rate, or say where it jumps, if the run goes on with another number of steps."""
    schedule, length = training.schedule, before.schedule.over_steps or before.steps
    shaped = "schedule.over_steps" in stated or _curve_of(training) != _curve_of(before)
    rescales = "schedule.extend" in stated and schedule.extend == "rescale"
    if not done or shaped or (training.steps == before.steps and not rescales):
        return training, ()
    old = replace(training, schedule=replace(schedule, over_steps=None if training.steps == length else length))
    new = replace(training, schedule=replace(schedule, over_steps=None))
    if training.steps <= done:
        return old, ()
    last, now_at_last, following = before.rate(done), new.rate(done), new.rate(done + 1)
    if last == now_at_last:
        return new, ()
    if schedule.extend == "rescale":
        jump = f"it is {last:.3g} in step {done} and {following:.3g} in step {done + 1}"
        return new, (f"the learning rate follows its curve over {counted(training.steps, 'step')}: {jump}",)
    rescale = f"--schedule.extend rescale lays it over {training.steps} steps: step {done + 1} then has {following:.3g}"
    curve = f"the learning rate keeps its curve over {counted(length, 'step')}"
    if old.rate(training.steps) == 0:
        message = f"{curve}, and is 0 after them, so that {training.steps} steps would train nothing more"
        raise InputError.of("--steps", f"{message}. {rescale} instead of {last:.3g}; --schedule.final sets its end")
    return old, (f"{curve}: step {done + 1} has {old.rate(done + 1):.3g}. {rescale}",)
