"""From text to tokens: bytes without any download, or a tokenizer of Hugging Face's library."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.errors import InputError, require
from autoshard.graph.op import Array
from autoshard.runtime.data.chat import CHATML, Marked
from autoshard.runtime.data.manifest import TokenizerRecord, sha256
from autoshard.runtime.data.stream import BYTES_EOS

BYTES = "bytes"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
Tokens = Sequence[int] | Array
MarkedTokens = tuple[Tokens, Sequence[bool]]  # and which of them are answers


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer as other processes can open it."""

    name: str  # as the user gave it
    folder: Path | None = None  # where its files are; None: bytes
    eos: str | None = None  # the token that closes a document, where the user says it
    bos: str | None = None  # the token that opens one; none is the usual
    template: Path | None = None  # a chat template that the user gives


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTokenizer:
    """Each byte of UTF-8 is a token, 0 to 255; 256 closes a document. Any model with 257 tokens can learn from it."""

    template: str | None = CHATML
    special: Mapping[str, str] = field(default_factory=dict[str, str])  # templates get no tokens to name
    record: TokenizerRecord = field(
        default_factory=lambda: TokenizerRecord(name=BYTES, vocab=BYTES_EOS + 1, eos=BYTES_EOS)
    )

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the bytes of documents, each closed."""
        data = [np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts]
        return [np.append(one.astype(np.uint16), np.uint16(BYTES_EOS)) for one in data]

    def conversations(self, marked: Sequence[Marked]) -> list[MarkedTokens]:
        """Return the bytes of conversations; after the last turn one of them closes the document."""
        found: list[MarkedTokens] = []
        for one, tokens in zip(marked, self.documents([one.text for one in marked]), strict=True):
            pairs = zip(one.text, one.answers(), strict=True)
            answers = [is_answer for letter, is_answer in pairs for _ in letter.encode(errors="replace")]
            found.append((tokens, [*answers, False]))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryTokenizer:
    """A ``tokenizer.json``, run by the ``tokenizers`` library."""

    library: Any
    record: TokenizerRecord  # what the manifest says of it
    bos: int | None
    template: str | None  # of chats
    special: Mapping[str, str]  # tokens that templates name: bos_token, eos_token

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of documents: text alone between the tokens that open and close it."""
        opened, closed = ([] if token is None else [token] for token in (self.bos, self.record.eos))
        found = self.library.encode_batch_fast(_whole(texts), add_special_tokens=False)
        return [[*opened, *encoding.ids, *closed] for encoding in found]

    def conversations(self, marked: Sequence[Marked]) -> list[MarkedTokens]:
        """Return tokens as the template wrote them; one is of an answer if its first character is."""
        found = self.library.encode_batch(_whole([one.text for one in marked]), add_special_tokens=False)
        conversations: list[MarkedTokens] = []
        for one, encoding in zip(marked, found, strict=True):
            answers = one.answers()
            conversations.append((encoding.ids, [begin < end and answers[begin] for begin, end in encoding.offsets]))
        return conversations


Tokenizer = ByteTokenizer | LibraryTokenizer


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Open a tokenizer; costs a second for a large vocabulary."""
    given = _text(spec.template)
    if spec.folder is None:
        return ByteTokenizer(template=given or CHATML)
    from tokenizers import Tokenizer as Library

    path = spec.folder / "tokenizer.json"
    try:
        library: Any = Library.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InputError.of(str(path), f"is not a tokenizer that the tokenizers library reads: {error}") from None
    config = _config(spec.folder)
    special: dict[str, str] = {}
    for key in ("bos_token", "eos_token"):
        entry = config.get(key)
        content = entry.get("content") if isinstance(entry, dict) else entry
        special |= {key: content} if isinstance(content, str) and content else {}
    template = config.get("chat_template")
    if isinstance(template, list):  # some hold several by name
        template = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}.get("default")
    own = _text(spec.folder / "chat_template.jinja") or (template if isinstance(template, str) else None)

    def number(token: str | None, option: str) -> int | None:
        found = None if token is None else library.token_to_id(token)
        require((token is None or found is not None, option, f"{token!r} is not a token of {path}"))
        return found

    vocab = max(library.get_vocab(with_added_tokens=True).values()) + 1
    eos, bos = number(spec.eos or special.get("eos_token"), "--eos"), number(spec.bos, "--bos")
    record = TokenizerRecord(name=spec.name, vocab=vocab, eos=eos, sha256=sha256(path))
    return LibraryTokenizer(library=library, record=record, bos=bos, template=given or own, special=special)


def _whole(texts: Sequence[str]) -> list[str]:
    """Replace halves of characters, which JSON can hold and UTF-8 cannot."""
    try:
        for text in texts:
            text.encode()
        return list(texts)
    except UnicodeEncodeError:
        return [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            found = json.loads(_text(folder / name) or "{}")
        except ValueError as error:
            raise InputError.of(str(folder / name), f"is not JSON: {error}") from None
        config |= found if isinstance(found, dict) else {}
    return config


def _text(path: Path | None) -> str | None:
    if path is None or not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError.of(str(path), "is not text in UTF-8") from None
