"""Offline runs of W&B (``run-ID.wandb``), read without its package.

Records lie in blocks as in a log of LevelDB: wandb/wandb wandb/sdk/internal/datastore.py; their messages are those of
wandb/proto/wandb_internal.proto.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from autoshard.errors import file_faults
from autoshard.imports.forms.flat import flat
from autoshard.imports.logs.log import TrainingLog
from autoshard.imports.logs.scalars import ScalarTable
from autoshard.imports.logs.wire import BrokenMessage, decoded_text, double_of, signed, wire_fields
from autoshard.spec.files import json_line

HEAD = b":W&B"
_HEAD_BYTES, _BLOCK, _RECORD_HEAD = 7, 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _CONFIG, _RUN = 2, 5, 17  # of a Record
_ITEM, _STEP, _STEP_NUMBER = 1, 2, 1  # of a HistoryRecord, of its HistoryStep
_KEY, _NESTED, _JSON = 1, 2, 16  # of an item
_INTEGER, _NUMBER = 5, 6  # of an item, in later releases
_UPDATE, _RUN_CONFIG = 1, 4  # of a ConfigRecord, of a RunRecord
_LONGEST = 1 << 28


def wandb_log(path: Path) -> TrainingLog | None:
    """Read an offline run; None where no program is known by the names in it."""
    table = ScalarTable()
    with file_faults(str(path), "read"), path.open("rb") as file:
        for message in _records(file, table):
            try:
                _record(message, table)
            except BrokenMessage as error:
                table.remarks.append(f"a record is left out: {error}")
    return table.log(str(path))


def _records(file: BinaryIO, table: ScalarTable) -> Iterator[bytes]:
    """Yield the messages, which may lie in several blocks."""
    file.seek(_HEAD_BYTES)
    place, parts = _HEAD_BYTES, list[bytes]()
    while True:
        room = _BLOCK - place % _BLOCK
        if room < _RECORD_HEAD:  # the rest of a block is empty
            file.seek(room, 1)
            place += room
        head = file.read(_RECORD_HEAD)
        if len(head) < _RECORD_HEAD:
            break
        _, size, kind = struct.unpack("<IHB", head)
        data = file.read(size)
        place += _RECORD_HEAD + size
        if len(data) < size or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            parts = parts or [b""]
            break
        parts = [*([] if kind in (_FULL, _FIRST) else parts), data]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts = []
    if parts:
        table.remarks.append("the file ends inside a record, which is left out")


def _record(message: bytes, table: ScalarTable) -> None:
    for field, value in wire_fields(message):
        if not isinstance(value, bytes):
            continue
        if field == _HISTORY:
            _history(value, table)
        elif field == _CONFIG:
            table.config.update(_config(value))
        elif field == _RUN:
            configs = [part for number, part in wire_fields(value) if number == _RUN_CONFIG]
            for part in configs:
                table.config.update(_config(part) if isinstance(part, bytes) else {})


def _history(message: bytes, table: ScalarTable) -> None:
    items, step = dict[str, Any](), None
    for field, value in wire_fields(message):
        if field == _ITEM and isinstance(value, bytes):
            name, content = _item(value)
            items[name] = content
        elif field == _STEP and isinstance(value, bytes):
            step = signed(dict(wire_fields(value)).get(_STEP_NUMBER, 0))
    step = items.get("_step", step)
    step = items.get("train/global_step", step)
    stamp_s = items.get("_timestamp")
    if not isinstance(step, int | float):
        return
    for name, value in items.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            table.add(int(step), name, float(value), float(stamp_s) if isinstance(stamp_s, int | float) else 0.0)


def _item(message: bytes) -> tuple[str, Any]:
    names, content = list[str](), None
    for field, value in wire_fields(message):
        if field in (_KEY, _NESTED):
            names.append(decoded_text(value))
        elif field == _JSON:
            content = json_line(decoded_text(value))
        elif field == _INTEGER:
            content = signed(value)
        elif field == _NUMBER:
            content = double_of(value)
    return ".".join(filter(None, names)), content


def _config(message: bytes) -> Mapping[str, Any]:
    values: dict[str, Any] = {}
    for field, value in wire_fields(message):
        if field == _UPDATE and isinstance(value, bytes):
            name, content = _item(value)
            if name.startswith("_wandb"):
                continue
            values |= flat(cast(dict[str, Any], content), f"{name}.") if isinstance(content, dict) else {name: content}
    return values
