"""Small sets of tokens, written by hand from the description of the format and not by the code under test."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autoshard.graph.op import Array

CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


def write_set(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16", code: int = 0) -> Path:
    """Write documents, each a list of sequences, as Megatron-LM lays them out."""
    sequences = [list(sequence) for document in documents for sequence in document]
    size = np.dtype(dtype).itemsize
    data = struct.pack("<9sQB", b"MMIDIDX\x00\x00", 1, code or CODES[dtype])
    data += struct.pack("<QQ", len(sequences), len(documents) + 1)
    data += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    at, places = 0, []
    for sequence in sequences:
        places.append(at)
        at += len(sequence) * size
    data += struct.pack(f"<{len(places)}q", *places)
    entry, entries = 0, [0]
    for document in documents:
        entry += len(document)
        entries.append(entry)
    data += struct.pack(f"<{len(entries)}q", *entries)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".idx").write_bytes(data)
    tokens = [token for sequence in sequences for token in sequence]
    prefix.with_name(prefix.name + ".bin").write_bytes(np.array(tokens, dtype).tobytes())
    return prefix


def counting(num_tokens: int, lengths: Sequence[int]) -> list[list[list[int]]]:
    """Documents of these lengths, over and over, whose tokens count up: each token says where it stands."""
    documents: list[list[list[int]]] = []
    begin = 0
    while begin < num_tokens:
        end = min(num_tokens, begin + lengths[len(documents) % len(lengths)])
        documents.append([list(range(begin, end))])
        begin = end
    return documents


def stream_of(documents: Sequence[Sequence[Sequence[int]]]) -> Array:
    return np.array([token for document in documents for sequence in document for token in sequence])
