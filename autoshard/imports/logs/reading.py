"""Which program wrote a log, told by its content, and the log."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from autoshard.errors import InputError, file_faults, no_such_file, require
from autoshard.imports.logs.deepspeed import DeepSpeedReader, TrainerReader
from autoshard.imports.logs.lightning import LightningReader
from autoshard.imports.logs.lines import LogLine, ReadSoFar, log_lines
from autoshard.imports.logs.log import TrainingLog
from autoshard.imports.logs.megatron import MegatronReader
from autoshard.imports.logs.tensorboard import event_log, is_event_file
from autoshard.imports.logs.text import TextReader
from autoshard.imports.logs.torchtitan import TorchtitanReader
from autoshard.imports.logs.wandb_run import HEAD, wandb_log

# In this order: Megatron-DeepSpeed writes lines of both, and the Trainer's bar runs beside DeepSpeed's reports.
READERS: tuple[type[TextReader], ...] = (
    MegatronReader, TorchtitanReader, LightningReader, DeepSpeedReader, TrainerReader,
)  # fmt: skip
READ = "Megatron-LM, torchtitan, NxD Training, NeMo, DeepSpeed, event files of TensorBoard, offline runs of W&B"
_HEAD_BYTES = 12
_MOST_FILES = 1000  # of a folder, each of which is looked at


def holds_log(path: Path) -> bool:
    """Say whether a file is a log; the reading ends at its first report."""
    if not path.is_file():
        return False
    head = _head_of(path)
    if head.startswith(HEAD) or is_event_file(head):
        return True
    readers = tuple(reader() for reader in READERS)
    return any(any(reader.has_reports for reader in readers) for _ in _taken(path, readers))


def logs_in(path: Path) -> list[Path]:
    """Return the logs of a folder and of the folders in it, or the path itself if it is no folder."""
    if not path.is_dir():
        return [path]
    with file_faults(str(path), "read"):
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        require((len(files) <= _MOST_FILES, str(path), f"holds {len(files)} files. Type those that are logs"))
    logs = [file for file in files if holds_log(file)]
    require((bool(logs), str(path), f"is a folder without a log. Logs of {READ} are read"))
    return logs


def read_log(path: Path, report: Callable[[ReadSoFar], None] = lambda _: None) -> TrainingLog:
    """Return the log of a run, or refuse the file."""
    with file_faults(str(path), "read"):
        remedy = "Type the configuration or the logs of a run of yours"
        require((path.is_file(), str(path), "is not a file" if path.exists() else no_such_file(path, remedy)))
    head = _head_of(path)
    if head.startswith(HEAD):
        log = wandb_log(path)
    else:
        log = event_log(path) if is_event_file(head) else _text_log(path, report)
    if log is None:
        raise InputError.of(str(path), f"holds no report of a step that is known. Logs of {READ} are read")
    return log


def _head_of(path: Path) -> bytes:
    with file_faults(str(path), "read"), path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def _text_log(path: Path, report: Callable[[ReadSoFar], None]) -> TrainingLog | None:
    readers = tuple(reader() for reader in READERS)
    for _ in _taken(path, readers, report):
        pass
    logs = (reader.log(str(path)) for reader in readers)
    return next((log for log in logs if log is not None), None)


def _taken(
    path: Path, readers: Sequence[TextReader], report: Callable[[ReadSoFar], None] = lambda _: None
) -> Iterator[LogLine]:
    """Yield the lines that say something, each when the readers have taken it."""
    marks = tuple(dict.fromkeys(mark for reader in readers for mark in reader.marks))
    for line in log_lines(path, marks, report):
        for reader in readers:
            if any(mark in line.text for mark in reader.marks):
                reader.take(line)
        yield line
