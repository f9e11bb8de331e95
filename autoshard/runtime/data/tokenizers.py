"""From text to tokens: bytes without any download, or a tokenizer of Hugging Face's library."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from autoshard.errors import InputError
from autoshard.graph.op import Array
from autoshard.runtime.data.chat import CHATML, Marked
from autoshard.runtime.data.manifest import TokenizerRecord, sha256
from autoshard.runtime.data.stream import BYTES_EOS

BYTES = "bytes"
Tokens = Sequence[int] | Array
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer as other processes can open it."""

    name: str  # as the user gave it
    folder: Path | None = None  # where its files are; None: bytes
    eos: str | None = None  # the token that closes a document, where the user says it
    bos: str | None = None  # the token that opens one; none is the usual
    template: Path | None = None  # a chat template that the user gives


class Tokenizer(Protocol):
    """What tokenizing needs."""

    @property
    def record(self) -> TokenizerRecord:
        """What the manifest says of it."""
        ...

    @property
    def template(self) -> str | None:
        """Its chat template."""
        ...

    @property
    def special(self) -> dict[str, str]:
        """Tokens that templates name: bos_token, eos_token."""
        ...

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of documents, each closed."""
        ...

    def conversations(self, marked: Sequence[Marked]) -> list[tuple[Tokens, Sequence[bool]]]:
        """Return the tokens of conversations as their template wrote them, and which of them are answers."""
        ...


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Open a tokenizer; costs a second for a large vocabulary."""
    if spec.folder is None:
        return ByteTokenizer(template=_text(spec.template) or CHATML)
    return LibraryTokenizer.opened(spec, spec.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTokenizer:
    """Each byte of UTF-8 is a token, 0 to 255; 256 closes a document. Any model with 257 tokens can learn from it."""

    template: str | None = CHATML

    @property
    def record(self) -> TokenizerRecord:
        """What the manifest says of it."""
        return TokenizerRecord(name=BYTES, vocab=BYTES_EOS + 1, eos=BYTES_EOS)

    @property
    def special(self) -> dict[str, str]:
        """Templates get no tokens to name."""
        return {}

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the bytes of documents, each closed."""
        return [_closed(text) for text in texts]

    def conversations(self, marked: Sequence[Marked]) -> list[tuple[Tokens, Sequence[bool]]]:
        """Return the bytes of conversations; after the last turn one of them closes the document."""
        return [self._conversation(one) for one in marked]

    def _conversation(self, marked: Marked) -> tuple[Tokens, Sequence[bool]]:
        answers = [
            is_answer
            for character, is_answer in zip(marked.text, marked.answers(), strict=True)
            for _ in character.encode(errors="replace")
        ]
        return _closed(marked.text), [*answers, False]


def _closed(text: str) -> Array:
    data = np.frombuffer(text.encode(errors="replace"), np.uint8)
    return np.append(data.astype(np.uint16), np.uint16(BYTES_EOS))


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryTokenizer:
    """A ``tokenizer.json``, run by the ``tokenizers`` library."""

    name: str
    library: Any
    vocab: int
    eos: int | None
    bos: int | None
    checksum: str
    template: str | None
    special: dict[str, str]

    @classmethod
    def opened(cls, spec: TokenizerSpec, folder: Path) -> "LibraryTokenizer":
        """Read the files of a tokenizer."""
        from tokenizers import Tokenizer as Library

        path = folder / "tokenizer.json"
        try:
            library = Library.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise InputError.of(str(path), f"is not a tokenizer that the tokenizers library reads: {error}") from None
        config = _config(folder)
        special = {key: found for key in ("bos_token", "eos_token") if (found := _token(config.get(key)))}
        template = _text(spec.template) or _text(folder / "chat_template.jinja") or _template(config)
        return cls(
            name=spec.name,
            library=library,
            vocab=max(library.get_vocab(with_added_tokens=True).values()) + 1,
            eos=_id(library, spec.eos or special.get("eos_token"), "--eos", path),
            bos=_id(library, spec.bos, "--bos", path),
            checksum=sha256(path),
            template=template,
            special=special,
        )

    @property
    def record(self) -> TokenizerRecord:
        """What the manifest says of it."""
        return TokenizerRecord(name=self.name, vocab=self.vocab, eos=self.eos, sha256=self.checksum)

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of documents: text alone between the tokens that open and close it."""
        opened, closed = ([] if token is None else [token] for token in (self.bos, self.eos))
        found = self.library.encode_batch_fast(_whole(texts), add_special_tokens=False)
        return [[*opened, *encoding.ids, *closed] for encoding in found]

    def conversations(self, marked: Sequence[Marked]) -> list[tuple[Tokens, Sequence[bool]]]:
        """Return tokens as the template wrote them; one is of an answer if its first character is."""
        found = self.library.encode_batch(_whole([one.text for one in marked]), add_special_tokens=False)
        conversations: list[tuple[Tokens, Sequence[bool]]] = []
        for one, encoding in zip(marked, found, strict=True):
            answers = one.answers()
            conversations.append((encoding.ids, [begin < end and answers[begin] for begin, end in encoding.offsets]))
        return conversations


def tokenizer_files() -> tuple[str, ...]:
    """Return the files that a tokenizer may consist of; the first must be there."""
    return _FILES


def _whole(texts: Sequence[str]) -> list[str]:
    """Replace halves of characters, which JSON can hold and UTF-8 cannot."""
    try:
        for text in texts:
            text.encode()
        return list(texts)
    except UnicodeEncodeError:
        return [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]


def _id(library: Any, token: str | None, option: str, path: Path) -> int | None:
    if token is None:
        return None
    found = library.token_to_id(token)
    if found is None:
        raise InputError.of(option, f"{token!r} is not a token of {path}")
    return int(found)


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        text = _text(folder / name)
        if text is None:
            continue
        try:
            found = json.loads(text)
        except ValueError as error:
            raise InputError.of(str(folder / name), f"is not JSON: {error}") from None
        config |= found if isinstance(found, dict) else {}
    return config


def _token(entry: Any) -> str | None:
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _template(config: dict[str, Any]) -> str | None:
    """Return the template of a tokenizer_config.json; some hold several by name."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    return found if isinstance(found, str) else None


def _text(path: Path | None) -> str | None:
    if path is None or not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError.of(str(path), "is not text in UTF-8") from None
