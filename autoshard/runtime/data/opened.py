"""From what a recipe says to a source of samples; everything that is wrong is found before training starts."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from autoshard.errors import Fault, InputError
from autoshard.plan.plan import Plan
from autoshard.runtime.data.batches import SampleSource, SyntheticTokens
from autoshard.runtime.data.indexed import (
    OpenFiles,
    TokenIndex,
    beside,
    faults_inside,
    foreign_token,
    read_index,
)
from autoshard.runtime.data.manifest import NAME, FileRecord, Manifest, altered, missing_or_resized, read_manifest
from autoshard.runtime.data.mixture import CutStream, DataMixture, WeightTree
from autoshard.runtime.data.stream import BYTES_EOS, FileStream, Stream, TextStream, Windows, packs
from autoshard.spec.training import DataSpec

_LOOKED_AT = 4096  # tokens at the begin of a file without a manifest
_AT_ONCE, _TOGETHER = 16, 64  # threads that open files, and how many each takes at a time
_MOST_TEXT_BYTES = 1 << 24
_HOW = "Make a set with `autoshard tokenize SOURCE --tokenizer NAME --out FOLDER`"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What is wanted of every set."""

    spec: DataSpec
    seq_len: int
    vocab: int


def open_source(spec: DataSpec, *, seq_len: int, vocab: int, seed: int, separate: bool) -> SampleSource:
    """Open the sets of a recipe and check them; raise one error with every fault, each with its file.

    Sizes, headers and manifests are checked always, which takes milliseconds; every byte only if the recipe says so.
    """
    if not spec.sets:
        return SyntheticTokens(seq_len=seq_len, vocab=vocab, seed=seed)
    asked, faults, sets = _Wanted(spec=spec, seq_len=seq_len, vocab=vocab), list[Fault](), list[CutStream]()
    for name in sorted(spec.sets):  # a file may list them in any order
        try:
            sets.append(_cut(_stream(name, asked), asked))
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(faults)
    return DataMixture(
        sets=tuple(sets),
        shares=WeightTree.of([one.weight for one in sets]),
        seq_len=seq_len,
        seed=seed,
        separate=separate,
        answers_only=spec.loss_on == "answers",
    )


def source_of(plan: Plan, spec: DataSpec, seed: int) -> SampleSource:
    """Open the sets of a recipe as a plan reads them."""
    separate = plan.workload.documents == "separate"
    return open_source(spec, seq_len=plan.workload.seq_len, vocab=plan.model.vocab, seed=seed, separate=separate)


def _cut(stream: Stream, asked: _Wanted) -> CutStream:
    if asked.spec.loss_on == "answers" and not stream.has_answers:
        raise InputError.of(
            stream.name,
            "does not know which tokens are answers. Tokenize conversations with --chat, or set loss_on: all",
        )
    if stream.num_tokens < 2:
        raise InputError.of(stream.name, "holds no sample: it has less than 2 tokens")
    cut = (
        packs(stream.lengths(), asked.seq_len)
        if stream.has_answers
        else Windows(num_tokens=stream.num_tokens, seq_len=asked.seq_len)
    )
    return CutStream(stream=stream, cut=cut, weight=asked.spec.sets[stream.name])


def _stream(name: str, asked: _Wanted) -> Stream:
    """Find out what a set is, and open it."""
    path = Path(name)
    if path.is_dir() and (path / NAME).is_file():
        return _with_manifest(name, asked, read_manifest(path / NAME))
    if path.is_dir():
        prefixes = [idx.with_suffix("") for idx in sorted(path.glob("*.idx"))]
        if not prefixes:
            raise InputError.of(name, f"is a folder without {NAME} and without .idx files. {_HOW}")
        return _without_manifest(name, asked, prefixes)
    if path.suffix == ".txt" and path.is_file():
        return _text(name, asked)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if beside(prefix, ".idx").is_file() or beside(prefix, ".bin").is_file():
        return _without_manifest(name, asked, [prefix])
    raise InputError.of(name, f"is neither a folder nor the prefix of a .bin and an .idx file. {_HOW}")


def _text(name: str, asked: _Wanted) -> TextStream:
    if Path(name).stat().st_size > _MOST_TEXT_BYTES:
        raise InputError.of(name, f"is too large to be held in memory as bytes. {_HOW}")
    if asked.vocab <= BYTES_EOS:
        raise InputError.of(name, f"is read as bytes, which takes a model of {BYTES_EOS + 1} tokens, not {asked.vocab}")
    return TextStream(name=name, path=Path(name))


def _with_manifest(name: str, asked: _Wanted, manifest: Manifest) -> FileStream:
    folder, made_by = Path(name), manifest.tokenizer
    faults = list(missing_or_resized(folder, manifest.files))
    if made_by.vocab > asked.vocab:
        faults.append(
            Fault(
                where=str(folder / NAME),
                message=f"tokens of {made_by.name} go to {made_by.vocab - 1}, those of the model to {asked.vocab - 1}. "
                f"Tokenize with the model's own tokenizer, or train a model with at least {made_by.vocab} tokens",
            )
        )
    if not faults and asked.spec.check == "full":
        faults += altered(folder, manifest.files)
    if faults:
        raise InputError(faults)
    prefixes = [folder / file.name.removesuffix(".idx") for file in manifest.files if file.name.endswith(".idx")]
    return _files(name, asked, prefixes, has_answers=manifest.kind == "chat")


def _without_manifest(name: str, asked: _Wanted, prefixes: list[Path]) -> FileStream:
    """Open what others made: only its tokens say of which vocabulary they are."""
    masks = [beside(prefix, ".mask.bin").is_file() for prefix in prefixes]
    stream = _files(name, asked, prefixes, has_answers=all(masks))
    faults = [fault for index in stream.files for fault in _foreign(index, asked)]
    if faults:
        raise InputError(faults)
    return stream


def _foreign(index: TokenIndex, asked: _Wanted) -> Iterator[Fault]:
    files = OpenFiles()
    if asked.spec.check == "full":
        yield from faults_inside(index, files, asked.vocab)
    else:
        tokens = files.read(index.bin, index.dtype, 0, min(_LOOKED_AT, index.num_tokens))
        if wrong := foreign_token(tokens, asked.vocab):
            yield Fault(where=str(index.bin), message=wrong)
    files.close()


def _files(name: str, asked: _Wanted, prefixes: list[Path], *, has_answers: bool) -> FileStream:
    def read(some: list[Path]) -> list[TokenIndex | InputError]:
        return [_index_or_faults(prefix) for prefix in some]

    with ThreadPoolExecutor(_AT_ONCE) as pool:  # a file system in a network answers many at once
        found = [
            one
            for some in pool.map(read, [prefixes[at : at + _TOGETHER] for at in range(0, len(prefixes), _TOGETHER)])
            for one in some
        ]
    faults = [fault for one in found if isinstance(one, InputError) for fault in one.faults]
    files = tuple(one for one in found if isinstance(one, TokenIndex))
    faults += [fault for index in files if has_answers for fault in _mask_faults(index)]
    if faults:
        raise InputError(faults)
    return FileStream(name=name, files=files, vocab=asked.vocab, has_answers=has_answers)


def _index_or_faults(prefix: Path) -> TokenIndex | InputError:
    try:
        return read_index(prefix)
    except InputError as error:
        return error


def _mask_faults(index: TokenIndex) -> Iterator[Fault]:
    record = FileRecord(name=index.mask.name, bytes=index.num_tokens, sha256="")
    yield from missing_or_resized(index.mask.parent, [record])
