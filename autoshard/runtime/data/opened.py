"""Sets of tokens: what their manifests say, and how a recipe's sets are opened; faults are found before training."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autoshard.errors import Fault, InputError, require
from autoshard.files import replace_text
from autoshard.plan.plan import Plan
from autoshard.run.folder import TRAINING
from autoshard.runtime.data.batches import SampleSource, SyntheticTokens
from autoshard.runtime.data.functions import DrawnData, MixedData
from autoshard.runtime.data.indexed import (
    AGAIN,
    OpenFiles,
    TokenIndex,
    faults_inside,
    foreign_token,
    read_index,
    sibling_file,
    wrong_size,
)
from autoshard.runtime.data.mixture import (
    BYTES_EOS,
    CutStream,
    DataMixture,
    FileStream,
    TextStream,
    WeightTree,
    Windows,
    packs,
)
from autoshard.spec import record
from autoshard.spec.files import read_data
from autoshard.spec.training import DataSpec, Training

NAME = "manifest.json"
BYTES = "bytes"  # the tokenizer that needs no file
SCHEMA = 1
Kind = Literal["text", "chat"]  # chat: whole conversations, with a mask of the answers


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a set, as it was written."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRecord:
    """The tokenizer that made the tokens."""

    name: str  # a folder, or that of a hub
    vocab: int  # ids go from 0 to one less
    eos: int | None  # what closes a document; conversations close as their template says
    sha256: str | None = None  # of tokenizer.json
    bos: int | None = None  # what opens a document

    def refuse_other(self, checksum: str | None) -> None:
        """Refuse a tokenizer.json of another checksum under the same name."""
        differs = f"the tokenizer.json of {self.name} is not the one that made the tokens of this run. Name that one"
        require((checksum == self.sha256, "--tokenizer", differs))


BYTE_TOKENIZER = TokenizerRecord(name=BYTES, vocab=BYTES_EOS + 1, eos=BYTES_EOS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole set; the same for the same source and tokenizer, however many processes made it."""

    schema: int
    source: str
    revision: str | None  # of a data set on a hub
    kind: Kind
    tokenizer: TokenizerRecord
    dtype: Literal["uint16", "int32"]
    num_tokens: int
    num_documents: int
    num_empty: int  # documents without text, which are left out
    num_answers: int | None = None  # tokens of answers; None of text, and of sets of older releases
    source_bytes: int | None = None  # of its files; as the two that follow, None of sets of older releases
    field: str | None = None  # of a record
    template: str | None = None  # of chats, its checksum
    files: tuple[FileRecord, ...]

    def __post_init__(self) -> None:
        """Refuse a manifest of another schema, and one without files."""
        message = f"must be {SCHEMA}, not {self.schema}. Update autoshard, or tokenize again"
        require((self.schema == SCHEMA, "schema", message), (bool(self.files), "files", "must name at least one"))

    @property
    def checksums(self) -> str:
        """Of all files, in their order."""
        return " ".join(file.sha256 for file in self.files)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest; its faults name the file."""
    return record.decode(Manifest, read_data(path), path)


def _sets_of(folder: Path) -> tuple[str, ...]:
    """Return the sets that a run has read, as its checkpoint says."""
    path = folder / TRAINING
    return tuple(record.decode(Training, read_data(path), path).data.sets) if path.is_file() else ()


def tokenizer_of(folder: Path) -> TokenizerRecord | None:
    """Return the tokenizer of the data that a run has read, as its checkpoint says; None of synthetic tokens."""
    for name in _sets_of(folder):
        if name.endswith(".txt"):
            return BYTE_TOKENIZER
        if (Path(name) / NAME).is_file():
            return read_manifest(Path(name) / NAME).tokenizer
    return None


def conversations_of(folder: Path) -> Manifest | None:
    """Return the manifest of the first set that a run has read; None if not all sets hold conversations."""
    places = [Path(name) / NAME for name in _sets_of(folder)]
    manifests = [read_manifest(place) for place in places if place.is_file()]
    is_talk = len(manifests) == len(places) and all(manifest.kind == "chat" for manifest in manifests)
    return manifests[0] if manifests and is_talk else None


def write_record(value: object, path: Path) -> None:
    """Write JSON so that the file is there whole or not at all, also after a power cut."""
    replace_text(path, json.dumps(record.encode(value), indent=1) + "\n")


def sha256(path: Path) -> str:
    """Read a whole file for its checksum."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_checksum(text: str) -> str:
    """Return the checksum of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def described(path: Path) -> FileRecord:
    """Return the record of a file that was just written."""
    return FileRecord(name=path.name, bytes=path.stat().st_size, sha256=sha256(path))


def missing_or_resized(folder: Path, files: Iterable[FileRecord]) -> Iterator[Fault]:
    """Hold files against their records by size alone."""
    for file in files:
        path = folder / file.name
        try:
            actual = path.stat().st_size
        except OSError as error:
            yield Fault(where=str(path), message=f"cannot be read: {error.strerror}. The manifest lists it: {AGAIN}")
            continue
        if actual != file.bytes:
            yield Fault(where=str(path), message=f"{wrong_size(actual, file.bytes)} by its manifest")


def altered(folder: Path, files: Iterable[FileRecord]) -> Iterator[Fault]:
    """Hold files against their checksums, several at a time: reads every byte."""
    records = tuple(files)
    with ThreadPoolExecutor() as pool:
        for file, checksum in zip(records, pool.map(lambda file: sha256(folder / file.name), records), strict=True):
            if checksum != file.sha256:
                yield Fault(where=str(folder / file.name), message=f"is altered: {AGAIN}. Its checksum is another")


_LOOKED_AT = 4096  # tokens at the begin of a file without a manifest
_AT_ONCE = 16  # threads that open files
_MOST_TEXT_BYTES = 1 << 24
_HOW = "Make a set with `autoshard tokenize SOURCE --tokenizer NAME --out FOLDER`"


def open_source(spec: DataSpec, *, seq_len: int, vocab: int, seed: int, separate: bool) -> SampleSource:
    """Open the sets of a recipe and check them; raise one error with every fault, each with its file.

    Sizes, headers and manifests are checked always, which takes milliseconds; every byte only if the recipe says so.
    """
    if not spec.sets:
        return SyntheticTokens(seq_len=seq_len, vocab=vocab, seed=seed)
    opener, faults, sets = _Opener(spec=spec, seq_len=seq_len, vocab=vocab), list[Fault](), list[CutStream]()
    for name in sorted(spec.sets):  # a file may list them in any order
        try:
            sets.append(opener.cut(name))
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(faults)
    return DataMixture(
        sets=tuple(sets),
        shares=WeightTree.of([cut_stream.weight for cut_stream in sets]),
        seq_len=seq_len,
        seed=seed,
        separate=separate,
        answers_only=spec.loss_on == "answers",
    )


def source_of(plan: Plan, spec: DataSpec, seed: int) -> SampleSource:
    """Open the sets of a recipe as a plan reads them."""
    of_code = spec.sets and plan.code is not None and plan.code.own_loss
    message = "is answers, and code that makes its own loss is not told which tokens these are. Let it return logits"
    require((not of_code or spec.loss_on == "all", "data.loss_on", message))
    separate, length = plan.workload.documents == "separate", plan.workload.seq_len
    if plan.code is not None and plan.code.data:
        if not spec.sets:
            return DrawnData(arguments=plan.code.data, seq_len=length, seed=seed)
        return MixedData.opened(spec.sets, plan.code.data, length, seed)
    return open_source(spec, seq_len=length, vocab=plan.model.vocab, seed=seed, separate=separate)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opener:
    """Opens sets, each for sequences and a vocabulary like these."""

    spec: DataSpec
    seq_len: int
    vocab: int

    def cut(self, name: str) -> CutStream:
        """Open a set, and cut it into samples."""
        stream = self._stream(name)
        unmarked = "does not know which tokens are answers. Tokenize conversations with --chat, or set loss_on: all"
        talks = stream if isinstance(stream, FileStream) and stream.has_answers else None
        require((self.spec.loss_on == "all" or talks is not None, name, unmarked))
        require((stream.num_tokens >= 2, name, "holds no sample: it has less than 2 tokens"))
        whole = Windows(num_tokens=stream.num_tokens, seq_len=self.seq_len)
        cut = packs(talks.lengths(), self.seq_len) if talks else whole
        return CutStream(stream=stream, cut=cut, weight=self.spec.sets[name])

    def _stream(self, name: str) -> FileStream | TextStream:
        """Open a set, in the form that its path has."""
        path = Path(name)
        if path.is_dir() and (path / NAME).is_file():
            return self._with_manifest(name)
        if path.is_dir():
            prefixes = [idx.with_suffix("") for idx in sorted(path.glob("*.idx"))]
            require((bool(prefixes), name, f"is a folder without {NAME} and without .idx files. {_HOW}"))
            return self._without_manifest(name, prefixes)
        if path.suffix == ".txt" and path.is_file():
            large = f"is too large to be held in memory as bytes. {_HOW}"
            require((path.stat().st_size <= _MOST_TEXT_BYTES, name, large))
            small = f"is read as bytes, which takes a model of {BYTES_EOS + 1} tokens, not {self.vocab}"
            require((self.vocab > BYTES_EOS, name, small))
            return TextStream(name=name, path=path)
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        there = sibling_file(prefix, ".idx").is_file() or sibling_file(prefix, ".bin").is_file()
        require((there, name, f"is neither a folder nor the prefix of a .bin and an .idx file. {_HOW}"))
        return self._without_manifest(name, [prefix])

    def _with_manifest(self, name: str) -> FileStream:
        folder = Path(name)
        manifest = read_manifest(folder / NAME)
        made_by, faults = manifest.tokenizer, list(missing_or_resized(folder, manifest.files))
        if self.spec.loss_on == "answers" and manifest.num_answers == 0:
            unanswered = "no token of its conversations is an answer. Give conversations with messages of an assistant"
            faults.append(Fault(where=str(folder / NAME), message=unanswered))
        if made_by.vocab > self.vocab:
            what = f"tokens of {made_by.name} go to {made_by.vocab - 1}, those of the model to {self.vocab - 1}"
            remedy = "Tokenize with the model's own tokenizer, or train a model with at least"
            faults.append(Fault(where=str(folder / NAME), message=f"{what}. {remedy} {made_by.vocab} tokens"))
        if not faults and self.spec.check == "full":
            faults += altered(folder, manifest.files)
        if faults:
            raise InputError(faults)
        prefixes = [folder / file.name.removesuffix(".idx") for file in manifest.files if file.name.endswith(".idx")]
        return self._files(name, prefixes, has_answers=manifest.kind == "chat", listed=manifest.checksums)

    def _without_manifest(self, name: str, prefixes: list[Path]) -> FileStream:
        """Open a set without a manifest: only its tokens show the vocabulary."""
        stream, opened, faults = self._files(name, prefixes, has_answers=False), OpenFiles(), list[Fault]()
        for index in stream.files:
            if self.spec.check == "full":
                faults += faults_inside(index, opened, self.vocab)
                continue
            tokens = opened.read(index.bin, index.dtype, 0, min(_LOOKED_AT, index.num_tokens))
            if wrong := foreign_token(tokens, self.vocab):
                faults.append(Fault(where=str(index.bin), message=wrong))
        opened.close()
        if faults:
            raise InputError(faults)
        return stream

    def _files(self, name: str, prefixes: list[Path], *, has_answers: bool, listed: str = "") -> FileStream:
        def read(prefix: Path) -> TokenIndex | tuple[Fault, ...]:
            try:
                return read_index(prefix)
            except InputError as error:
                return error.faults

        with ThreadPoolExecutor(_AT_ONCE) as pool:  # a file system in a network answers many at once
            results = list(pool.map(read, prefixes))
        files = tuple(result for result in results if isinstance(result, TokenIndex))
        faults = [fault for result in results if isinstance(result, tuple) for fault in result]
        if faults:
            raise InputError(faults)
        return FileStream(name=name, files=files, vocab=self.vocab, has_answers=has_answers, listed=listed)
