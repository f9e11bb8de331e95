"""Text becomes a folder of tokens: piece by piece, in several processes, and goes on where it was killed.

What a piece of work is follows from the source alone, and each becomes files of its own; so the folder is byte for byte
the same for any number of processes and however often the work was interrupted.
"""

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autoshard.errors import Fault, InputError, RunFailed, require
from autoshard.files import naming, remove_asides, takes_lock
from autoshard.runtime.data.documents import FilePart, TextSource, Where, documents
from autoshard.runtime.data.indexed import IndexedWriter, dtype_of, sibling_file
from autoshard.runtime.data.opened import (
    NAME,
    SCHEMA,
    FileRecord,
    Kind,
    Manifest,
    TokenizerRecord,
    described,
    missing_or_resized,
    read_manifest,
    text_checksum,
    write_record,
)
from autoshard.runtime.data.tokenizers import (
    ChatTemplate,
    Marked,
    Tokenizer,
    TokenizerSpec,
    messages_of,
    open_tokenizer,
)
from autoshard.runtime.futures import as_they_end
from autoshard.spec import record
from autoshard.spec.files import read_data

_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 20, 1024  # that a tokenizer gets at a time
_WORK, _DONE, _LOCK = "work.json", ".done.json", "work.lock"  # of a folder, until all is done


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The source that becomes tokens, and the tokenizer."""

    source: TextSource
    tokenizer: TokenizerSpec
    kind: Kind
    field: str  # of a record: the text, or the messages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """The work of a folder while it is not finished."""

    work: Work
    tokenizer: TokenizerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRecord:
    """A finished piece: its files, its documents and tokens."""

    source_bytes: int
    num_tokens: int
    num_documents: int
    num_empty: int
    files: tuple[FileRecord, ...]
    num_answers: int | None = None  # of pieces of older releases nobody counted them


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizingProgress:
    """The progress of the work."""

    done_bytes: int
    all_bytes: int
    num_tokens: int
    kept_bytes: int  # done before this start


def tokenize(work: Work, out: Path, num_workers: int, say: Callable[[TokenizingProgress], None]) -> Manifest:
    """Make a folder of tokens, or finish one that was begun."""
    tokenizer = open_tokenizer(work.tokenizer)  # its faults must not wait for a process
    unclosed = work.kind == "text" and tokenizer.record.eos is None
    require((not unclosed, "--eos", f"{work.tokenizer.name} does not say what ends a document. Name the token"))
    unwritten = work.kind == "chat" and tokenizer.template is None
    missing = f"{work.tokenizer.name} has no chat template. Give one in a file of Jinja"
    require((not unwritten, "--chat-template", missing))
    if (out / NAME).exists():
        return _finished(work, tokenizer, out)
    out.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"tokenizer": work.tokenizer, "kind": work.kind, "field": work.field}
    pieces = [
        _WorkPiece(prefix=out / f"part-{number:05d}", parts=parts, **options)
        for number, parts in enumerate(work.source.pieces())
    ]
    with _claimed(_Begun(work=work, tokenizer=tokenizer.record), out):
        remove_asides(out)
        done = {piece.prefix: piece_record for piece in pieces if (piece_record := piece.kept()) is not None}
        kept_bytes = sum(piece_record.source_bytes for piece_record in done.values())
        total = sum(piece.size for piece in pieces)

        def tell() -> None:
            finished = sum(piece_record.source_bytes for piece_record in done.values())
            tokens = sum(piece_record.num_tokens for piece_record in done.values())
            say(TokenizingProgress(done_bytes=finished, all_bytes=total, num_tokens=tokens, kept_bytes=kept_bytes))

        tell()
        for piece, piece_record in _made([piece for piece in pieces if piece.prefix not in done], num_workers):
            done[piece.prefix] = piece_record
            tell()
        records = [done[piece.prefix] for piece in pieces]
        require((any(piece_record.num_tokens for piece_record in records), work.source.text, "holds no text"))
        manifest = Manifest(
            schema=SCHEMA,
            source=work.source.text,
            revision=work.source.revision,
            kind=work.kind,
            tokenizer=tokenizer.record,
            dtype=dtype_of(tokenizer.record.vocab),
            num_tokens=sum(piece_record.num_tokens for piece_record in records),
            num_documents=sum(piece_record.num_documents for piece_record in records),
            num_empty=sum(piece_record.num_empty for piece_record in records),
            num_answers=_num_answers(work.kind, records),
            source_bytes=work.source.num_bytes,
            field=work.field,
            template=_template(work, tokenizer),
            files=tuple(file for piece_record in records for file in piece_record.files),
        )
        write_record(manifest, out / NAME)
        _clear(out)
    return manifest


def _num_answers(kind: Kind, records: Sequence[PieceRecord]) -> int | None:
    """Return the tokens of answers in all pieces; None of text, and where a piece does not say."""
    counts = [piece_record.num_answers for piece_record in records]
    return sum(filter(None, counts)) if kind == "chat" and None not in counts else None


def _clear(out: Path) -> None:
    """Remove what only unfinished work needs."""
    for path in (*out.glob(f"*{_DONE}"), out / _WORK, out / _LOCK):
        path.unlink(missing_ok=True)


def _template(work: Work, tokenizer: Tokenizer) -> str | None:
    return text_checksum(tokenizer.template or "") if work.kind == "chat" else None


def _finished(work: Work, tokenizer: Tokenizer, out: Path) -> Manifest:
    """Return the manifest of a folder that is finished; refuse that of other work, as far as it says what it is of."""
    manifest = read_manifest(out / NAME)
    read, by = manifest.tokenizer, tokenizer.record
    differs = {
        "source": manifest.source != work.source.text,
        "kind": manifest.kind != work.kind,
        "tokenizer": (read.sha256 or read.name, read.vocab) != (by.sha256 or by.name, by.vocab),
        "eos": read.eos != by.eos,
        "bos": read.bos != by.bos,
        "revision": work.source.revision not in (None, manifest.revision),  # without a network there is none
        "field": manifest.field not in (None, work.field),
        "chat template": manifest.template not in (None, _template(work, tokenizer)),
        "size of the source": not manifest.revision and manifest.source_bytes not in (None, work.source.num_bytes),
    }
    others = ", ".join(name for name, is_other in differs.items() if is_other)
    require((not others, str(out), f"holds another set ({others}). Give another --out, or remove the folder"))
    if faults := list(missing_or_resized(out, manifest.files)):
        raise InputError(faults)
    _clear(out)
    return manifest


@contextmanager
def _claimed(work: _Begun, out: Path) -> Iterator[None]:
    """Reserve a folder for this work: a lock keeps other processes out, and other work is refused."""
    path = out / _WORK
    with (out / _LOCK).open("a") as file:
        busy = "another process tokenizes into it. Wait for it, or give another --out"
        require((takes_lock(file), str(out), busy))
        message = (
            "holds unfinished work on another source, or with another tokenizer, or the source has changed "
            "since. Give another --out, or remove the folder"
        )
        require((not path.exists() or read_data(path) == record.encode(work), str(out), message))
        if not path.exists():
            write_record(work, path)
        yield


def _made(pieces: "Sequence[_WorkPiece]", num_workers: int) -> "Iterator[tuple[_WorkPiece, PieceRecord]]":
    """Tokenize pieces, in one process or several; yield each with its record. A fault lets running pieces end."""
    if num_workers == 1 or len(pieces) < 2:
        yield from ((piece, _make(piece)) for piece in pieces)
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit the library's threads, but not their locks
    ends_with_us, stop = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(num_workers, len(pieces)), context, _start, (ends_with_us,))
    faults: list[Fault] = []
    try:
        waiting = {pool.submit(_make, piece): piece for piece in pieces}
        for future in as_they_end(waiting):
            try:
                if not future.cancelled():
                    yield waiting[future], future.result()
            except InputError as error:
                faults += error.faults
                for pending in waiting:
                    pending.cancel()
    except BrokenProcessPool:
        message = "a process that tokenized was killed, perhaps for its memory: fewer --workers take less"
        raise RunFailed(message) from None
    finally:
        stop.close()  # what still runs here after an interrupt ends now
        pool.shutdown(cancel_futures=True)
        ends_with_us.close()
    if faults:
        raise InputError(faults)


def _start(parent: Connection) -> None:
    """Make this process a worker that ends when its parent does, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # typed for the parent, which closes the pipe
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # processes share the cores already

    def end_with_parent() -> None:
        try:
            parent.poll(None)
        finally:
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkPiece:
    """One piece of work, as a worker gets it."""

    prefix: Path  # of the files that it becomes
    parts: tuple[FilePart, ...]
    tokenizer: TokenizerSpec
    kind: Kind
    field: str

    @property
    def size(self) -> int:
        """Bytes of text, about."""
        return sum(part.size for part in self.parts)

    def kept(self) -> PieceRecord | None:
        """Return the record of an earlier start, if its files are there."""
        path = sibling_file(self.prefix, _DONE)
        if not path.exists():
            return None
        piece_record = record.decode(PieceRecord, read_data(path))
        return None if any(missing_or_resized(self.prefix.parent, piece_record.files)) else piece_record


_opened = functools.cache(open_tokenizer)  # once in a process, for all its pieces


def _make(piece: _WorkPiece) -> PieceRecord:
    """Tokenize a piece into files; its record comes last, and says that they are whole."""
    aside, tokenizer = sibling_file(piece.prefix, ".partial"), _opened(piece.tokenizer)
    template = ChatTemplate(source=tokenizer.template or "", special=tokenizer.special)
    num_empty = 0
    named = naming(sibling_file(aside, ".bin"))  # a full disk names no file
    with named, IndexedWriter(aside, tokenizer.record.vocab, masked=piece.kind == "chat") as writer:
        for batch in _batches(piece, template):
            texts = [text for text in batch if text]
            num_empty += len(batch) - len(texts)
            if piece.kind == "text":
                for document in tokenizer.documents(texts):
                    writer.add(document)
            else:
                for tokens, answers in tokenizer.conversations(texts):
                    writer.add(tokens, answers)
        written = writer.close()
    files = tuple(replace(described(path), name=path.name.replace(aside.name, piece.prefix.name)) for path in written)
    for path, file in zip(written, files, strict=True):
        path.replace(piece.prefix.with_name(file.name))
    done = PieceRecord(
        source_bytes=piece.size,
        num_tokens=writer.num_tokens,
        num_documents=writer.num_documents,
        num_empty=num_empty,
        num_answers=writer.num_answers,
        files=files,
    )
    write_record(done, sibling_file(piece.prefix, _DONE))
    return done


def _batches(piece: _WorkPiece, template: ChatTemplate) -> Iterator[list[Any]]:
    """Gather texts, or marked conversations, to batches for a tokenizer."""
    batch: list[Any] = []
    size = 0
    for part in piece.parts:
        for where, value in documents(part, piece.field):
            text = _text_of(value, where, piece, template)
            batch.append(text)
            size += len(text.text) if isinstance(text, Marked) else len(text)
            if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
    yield batch


def _text_of(value: Any, where: Where, piece: _WorkPiece, template: ChatTemplate) -> str | Marked:
    if piece.kind == "chat":
        try:
            return template.marked(messages_of(value, piece.field))
        except InputError as error:
            faults = (Fault(where=f"{where()}: {fault.where}", message=fault.message) for fault in error.faults)
            raise InputError(faults) from None
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError.of(where(), f"{piece.field!r} is no text. Name another field with --field, or give --chat")
    return value
