"""Megatron's format: files that others lay out are read, ours have the same bytes, and broken ones are named."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError, RunFailed
from autoshard.runtime.data.indexed import (
    IndexedWriter,
    OpenFiles,
    document_lengths,
    faults_inside,
    foreign_token,
    read_index,
    starts_within,
)
from tests.runtime.data.cases import stream_of, write_set

SEQUENCES = st.lists(st.integers(0, 255), max_size=6)
DOCUMENTS = st.lists(st.lists(SEQUENCES, min_size=1, max_size=3), max_size=8)


@given(documents=DOCUMENTS, dtype=st.sampled_from(["uint8", "uint16", "int32", "int64"]), data=st.data())
def test_any_range_of_a_set_is_read_as_it_was_laid_out(tmp_path_factory, documents, dtype, data) -> None:
    prefix = write_set(tmp_path_factory.mktemp("set") / "a.b", documents, dtype)
    index, files, stream = read_index(prefix), OpenFiles(), stream_of(documents)
    assert index.num_tokens == len(stream)
    first = data.draw(st.integers(0, len(stream)))
    count = data.draw(st.integers(0, len(stream) - first))
    assert files.read(index.bin, index.dtype, first, count).tolist() == stream[first : first + count].tolist()

    lengths = [sum(map(len, document)) for document in documents]
    begins = {sum(lengths[:number]) for number in range(len(lengths)) if lengths[number]}
    found = {int(place) + first for place in starts_within(index, files, first, count)}
    assert found & begins == {begin for begin in begins if first <= begin < first + count}
    assert found <= {sum(lengths[:number]) for number in range(len(lengths))}, "an empty one begins where the next does"
    assert [length for length in document_lengths(index, files) if length] == [length for length in lengths if length]
    assert not list(faults_inside(index, files, 256))
    files.close()


@given(documents=st.lists(SEQUENCES, min_size=1, max_size=8), vocab=st.sampled_from([256, 70_000]))
def test_what_we_write_has_the_bytes_of_the_format(tmp_path_factory, documents, vocab) -> None:
    folder = tmp_path_factory.mktemp("set")
    writer = IndexedWriter(folder / "ours", vocab, masked=True)
    for document in documents:
        writer.add(document, [token > 9 for token in document])
    assert [path.suffixes for path in writer.close()] == [[".bin"], [".idx"], [".mask", ".bin"]]
    write_set(folder / "theirs", [[document] for document in documents], "uint16" if vocab == 256 else "int32")
    for suffix in (".bin", ".idx"):
        assert (folder / f"ours{suffix}").read_bytes() == (folder / f"theirs{suffix}").read_bytes()
    mask = [token > 9 for document in documents for token in document]
    assert (folder / "ours.mask.bin").read_bytes() == bytes(mask), "one byte for each token"


def test_nothing_is_left_of_a_set_without_documents(tmp_path: Path) -> None:
    assert IndexedWriter(tmp_path / "none", 300).close() == ()
    assert not list(tmp_path.iterdir())


@given(
    lengths=st.lists(st.one_of(st.integers(0, 3), st.integers(1, 400)), min_size=1, max_size=40),
    repeats=st.integers(1, 200),
    joined=st.integers(1, 3),
    data=st.data(),
)
def test_documents_of_a_large_index_are_found(tmp_path_factory, lengths, repeats: int, joined: int, data) -> None:
    lengths = (sorted(lengths) * repeats)[: len(lengths) * repeats // joined * joined or joined]
    lengths += [1] * (-len(lengths) % joined)
    documents = [[[1] * length for length in lengths[at : at + joined]] for at in range(0, len(lengths), joined)]
    index, files = read_index(write_set(tmp_path_factory.mktemp("set") / "s", documents, "uint8")), OpenFiles()
    begins = np.cumsum([0, *(sum(map(len, document)) for document in documents)])[:-1]
    for _ in range(5):
        first = data.draw(st.integers(0, max(0, index.num_tokens - 1)))
        count = data.draw(st.integers(0, index.num_tokens - first))
        found = starts_within(index, files, first, count) + first
        assert set(found.tolist()) == set(begins[(first <= begins) & (begins < first + count)].tolist())
    files.close()


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grown(num_bytes: int):
    return lambda path: path.write_bytes(path.read_bytes() + bytes(num_bytes))


def edited(offset: int, data: bytes):
    def edit(path: Path) -> None:
        whole = bytearray(path.read_bytes())
        whole[offset : offset + len(data)] = data
        path.write_bytes(whole)

    return edit


@pytest.mark.parametrize(
    ("suffix", "change", "said"),
    [
        (".bin", truncated, r"s\.bin: is truncated: copy it again .* 13 bytes and should have 14 by its index"),
        (".bin", grown(1), r"s\.bin: is altered"),
        (".bin", Path.unlink, r"s\.bin: cannot be read: No such file"),
        (".idx", Path.unlink, r"s\.idx: cannot be read: No such file"),
        (".idx", truncated, r"s\.idx: is truncated: .* by its header"),
        (".idx", grown(3), r"s\.idx: holds the modes of a multimodal set"),
        (".idx", edited(0, b"TNTIDX\0\0"), "older form"),
        (".idx", edited(0, b"PK"), "is not an index of Megatron's form"),
        (".idx", lambda path: path.write_bytes(b"MMID"), "is not an index"),
        (".idx", edited(9, b"\x02"), "version 2"),
        (".idx", edited(17, b"\x07"), "float32"),
        (".idx", edited(17, b"\x63"), "unknown format 99"),
        (".idx", edited(34 + 3 * 4 + 2 * 8, struct.pack("<q", 2)), r"s\.bin: is altered"),
        (".idx", edited(34 + 3 * 4, b"\x01"), "first or last sequence cannot be"),
        (".idx", edited(34 + 3 * 4 + 3 * 8, b"\x01"), "do not begin with sequence 0"),
    ],
)
def test_a_broken_file_is_named_before_it_is_read(tmp_path: Path, suffix, change, said) -> None:
    prefix = write_set(tmp_path / "s", [[[1, 2, 3]], [[4, 5]], [[6, 7]]])
    change(tmp_path / f"s{suffix}")
    with pytest.raises(InputError, match=said):
        read_index(prefix)


def test_what_sizes_do_not_show_a_full_check_finds(tmp_path: Path) -> None:
    prefix = write_set(tmp_path / "s", [[[1, 2, 3]], [[4, 5]], [[6, 900]]])
    edited(34, struct.pack("<ii", 2, 3))(tmp_path / "s.idx")
    edited(34 + 3 * 12 + 8, struct.pack("<qq", 2, 1))(tmp_path / "s.idx")
    faults = [str(fault) for fault in faults_inside(read_index(prefix), OpenFiles(), 512)]
    assert len(faults) == 3
    assert "sequences do not follow" in faults[0] and "documents do not follow" in faults[1]
    assert "s.bin: holds the token 900, and the model knows 0 to 511" in faults[2]


def test_a_file_that_shrinks_under_a_run_is_named(tmp_path: Path) -> None:
    index, files = read_index(write_set(tmp_path / "s", [[[1, 2, 3]]])), OpenFiles()
    files.read(index.bin, index.dtype, 0, 3)
    truncated(index.bin)
    with pytest.raises(RunFailed, match=r"s\.bin: ends too early"):
        files.read(index.bin, index.dtype, 0, 3)
    index.bin.unlink()
    files.close()
    with pytest.raises(RunFailed, match=r"s\.bin: cannot be read"):
        files.read(index.bin, index.dtype, 0, 3)


def test_few_descriptors_serve_many_files(tmp_path: Path) -> None:
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before, files = num_open(), OpenFiles()
    indices = [read_index(write_set(tmp_path / str(number), [[[number]]])) for number in range(100)]
    for index in [*indices, *indices]:
        assert files.read(index.bin, index.dtype, 0, 1) == int(index.prefix.name)
    assert num_open() - before <= 64
    files.close()
    assert num_open() == before
    assert np.array_equal(files.read(indices[0].bin, indices[0].dtype, 0, 1), [0]), "reading opens again"
    files.close()


def test_a_foreign_token_is_named_whatever_its_format_holds() -> None:
    most = foreign_token(np.array([3, 65535], np.uint16), 512)
    assert most.startswith("holds the token 65535, and the model knows 0 to 511.")
    assert most.endswith("or train a model with at least 65536 tokens")
    least = foreign_token(np.array([-128, 5], np.int8), 512)
    assert least == "holds the token -128, and the model knows 0 to 511. Tokenize with the model's own tokenizer"
    assert foreign_token(np.array([0, 511]), 512) == ""
