"""Event files of TensorBoard: TFRecords of messages, read without its package.

A record is its length, a checksum of that, the message, a checksum of it: tensorflow/tensorflow
core/lib/io/record_writer.h; messages: core/util/event.proto, core/framework/summary.proto, tensor.proto.
"""

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

from autoshard.errors import file_faults
from autoshard.imports.logs.log import TrainingLog
from autoshard.imports.logs.megatron import value_of_text
from autoshard.imports.logs.scalars import ScalarTable
from autoshard.imports.logs.wire import BrokenMessage, decoded_text, double_of, float_of, signed, wire_fields

_WALL_TIME, _STEP, _SUMMARY = 1, 2, 5  # of an Event
_VALUE = 1  # of a Summary
_TAG, _SIMPLE, _TENSOR = 1, 2, 8  # of a Summary.Value
_CONTENT, _FLOATS, _STRINGS = 4, 5, 8  # of a TensorProto
_HEAD, _TAIL = 12, 4  # bytes of a record before and behind its message
_LONGEST = 1 << 28
_TEXT = "/text_summary"  # ends the tag of a text, as Megatron-LM writes each of its arguments
_POLYNOMIAL, _MASK = 0x82F63B78, 0xA282EAD8  # of the checksum, CRC-32C


@cache
def _table() -> tuple[int, ...]:
    values: list[int] = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        values.append(byte)
    return tuple(values)


def masked_checksum(data: bytes) -> int:
    """Return the checksum that records carry.

    >>> hex(masked_checksum(b"123456789"))
    '0xc78ab0e5'
    """
    value, table = 0xFFFFFFFF, _table()
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + _MASK) & 0xFFFFFFFF


def is_event_file(head: bytes) -> bool:
    """Say whether a file begins with a record."""
    return len(head) >= _HEAD and struct.unpack("<I", head[8:_HEAD])[0] == masked_checksum(head[:8])


def event_log(path: Path) -> TrainingLog | None:
    """Read an event file; None where no program is known by the names in it."""
    table = ScalarTable()
    with file_faults(str(path), "read"), path.open("rb") as file:
        for message in _records(file, table):
            try:
                _event(message, table)
            except BrokenMessage as error:
                table.remarks.append(f"a record is left out: {error}")
                break
    return table.log(str(path))


def _records(file: BinaryIO, table: ScalarTable) -> Iterator[bytes]:
    while head := file.read(_HEAD):
        size = struct.unpack("<Q", head[:8])[0] if is_event_file(head) else _LONGEST + 1
        message = file.read(size + _TAIL) if size <= _LONGEST else b""
        if len(message) < size + _TAIL:
            table.remarks.append("the file ends inside a record, which is left out")
            return
        yield message[:size]


def _event(message: bytes, table: ScalarTable) -> None:
    fields = dict(wire_fields(message))
    summary = fields.get(_SUMMARY)
    if not isinstance(summary, bytes):
        return
    step, stamp_s = signed(fields.get(_STEP, 0)), double_of(fields.get(_WALL_TIME, b""))
    for field, value in wire_fields(summary):
        if field != _VALUE or not isinstance(value, bytes):
            continue
        parts = dict(wire_fields(value))
        tag, tensor = decoded_text(parts.get(_TAG, b"")), parts.get(_TENSOR)
        if _SIMPLE in parts:
            table.add(step, tag, float_of(parts[_SIMPLE]), stamp_s)
        elif isinstance(tensor, bytes) and tag.endswith(_TEXT):
            texts = [decoded_text(part) for number, part in wire_fields(tensor) if number == _STRINGS]
            if texts:
                table.config[tag.removesuffix(_TEXT)] = value_of_text(texts[0])
        elif isinstance(tensor, bytes):
            content = dict(wire_fields(tensor))
            number = content.get(_CONTENT) or content.get(_FLOATS) or b""
            table.add(step, tag, float_of(number), stamp_s)
