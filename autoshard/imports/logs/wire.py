"""Messages of protobuf without its package: fields by number, as they lie in the bytes."""

import struct
from collections.abc import Iterator

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
_MOST_BITS = 70  # of a number


class BrokenMessage(ValueError):
    """Bytes that are no message."""


def wire_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    r"""Yield the fields of a message: whole numbers as such, all others as bytes.

    >>> list(wire_fields(b"\x08\x96\x01\x12\x02hi"))
    [(1, 150), (2, b'hi')]
    """
    place = 0
    while place < len(data):
        key, place = _number(data, place)
        kind, field = key & 7, key >> 3
        if kind == _VARINT:
            value, place = _number(data, place)
            yield field, value
            continue
        size = {_DOUBLE: 8, _FLOAT: 4}.get(kind, -1)
        if kind == _BYTES:
            size, place = _number(data, place)
        if size < 0 or place + size > len(data):
            raise BrokenMessage(f"field {field} of kind {kind} ends behind the message")
        yield field, data[place : place + size]
        place += size


def _number(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data) or shift > _MOST_BITS:
            raise BrokenMessage("a number does not end")
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def double_of(value: int | bytes) -> float:
    """Return the number in a field of 8 bytes."""
    return struct.unpack("<d", value)[0] if isinstance(value, bytes) and len(value) == 8 else 0.0


def float_of(value: int | bytes) -> float:
    """Return the number in a field of 4 bytes."""
    return struct.unpack("<f", value)[0] if isinstance(value, bytes) and len(value) == 4 else 0.0


def signed(value: int | bytes) -> int:
    """Return a whole number that may be below zero.

    >>> signed(2**64 - 1), signed(7)
    (-1, 7)
    """
    number = value if isinstance(value, int) else 0
    return number - (1 << 64) if number >= 1 << 63 else number


def decoded_text(value: int | bytes) -> str:
    """Return the text in a field."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""
