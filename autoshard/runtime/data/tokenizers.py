"""From text to tokens: bytes without any download, or a tokenizer of Hugging Face's library.

A chat template writes a conversation as one text, and marks the answers in it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from autoshard.errors import InputError, require
from autoshard.graph.op import Array
from autoshard.runtime.data.mixture import BYTES_EOS
from autoshard.runtime.data.opened import BYTE_TOKENIZER, TokenizerRecord, sha256
from autoshard.spec.files import parsed_json

Message = Mapping[str, Any]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_EOS = "<|endoftext|>"  # what transformers calls the token that closes a document of bytes
_OPENS, _CLOSES, _ANSWER = "\ue0f0", "\ue0f1", "\ue0f2"  # of a private range: no text of people holds them


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A text, and the ranges of its characters that are answers."""

    text: str
    ranges: tuple[tuple[int, int], ...]

    def answers(self) -> list[bool]:
        """Return which characters are answers."""
        is_answer = [False] * len(self.text)
        for begin, end in self.ranges:
            is_answer[begin:end] = [True] * (end - begin)
        return is_answer


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template in Jinja, as models carry it, in a sandbox: it comes from strangers."""

    source: str
    special: Mapping[str, str] = field(default_factory=dict[str, str])

    def marked(self, messages: Sequence[Message]) -> Marked:
        """Write a conversation, and find the answers in it.

        A template may mark them itself, by ``{% generation %}``. Else an answer is what its message adds to all
        messages before it and the prompt for an answer, which holds for templates that never rewrite earlier turns.
        """
        whole = self._written(messages)
        ranges: list[tuple[int, int]] = []
        if "endgeneration" in self.source:
            parts = whole.replace(_CLOSES, _OPENS).split(_OPENS)
            for number in range(1, len(parts), 2):
                begin = sum(map(len, parts[:number]))
                ranges.append((begin, begin + len(parts[number])))
            return Marked(text="".join(parts), ranges=tuple(ranges))
        rewrites = (
            "writes earlier turns otherwise when later ones follow, so that answers cannot be told from the "
            "rest. Give one with --chat-template that marks them by {% generation %} ... {% endgeneration %}"
        )
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._written(messages[:number], add_generation_prompt=True)
                after = self._written(messages[: number + 1])
                require((after.startswith(before) and whole.startswith(after), "the chat template", rewrites))
                ranges.append((len(before), len(after)))
        return Marked(text=whole, ranges=tuple(ranges))

    def around_answer(self, question: str) -> tuple[str, str]:
        """Return what stands before the answer to a question, and what closes the answer."""
        conversation: list[Message] = [{"role": "user", "content": question}]
        before = self._written(conversation, add_generation_prompt=True)
        after = self._written([*conversation, {"role": "assistant", "content": _ANSWER}]).rpartition(_ANSWER)[2]
        return before, after.replace(_CLOSES, "").strip()

    def _written(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return self._compiled.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self.special
            )
        except (TemplateError, TypeError) as error:
            raise InputError.of("the chat template", f"refuses a conversation: {error}") from None

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError, TemplateSyntaxError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """The tag of templates that mark what the assistant says."""

            tags = {"generation"}  # noqa: RUF012 (the library wants a set here, and changes none)

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
                opens, closes = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_OPENS, _CLOSES))
                return [opens, *body, closes]

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation], keep_trailing_newline=False
        )
        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        try:
            return environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise InputError.of("the chat template", f"is not Jinja: {error}") from None


def messages_of(value: object, where: str) -> Sequence[Message]:
    """Check the messages of a record."""
    if not isinstance(value, list) or not value:
        raise InputError.of(where, 'expected a list of {"role": ..., "content": ...}, and at least one')
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError.of(f"{where}[{number}]", 'expected {"role": ..., "content": ...}')
        content = message.get("content")
        if not isinstance(content, str):
            raise InputError.of(f"{where}[{number}].content", "expected text; only conversations in words can be read")
        private = _OPENS in content or _CLOSES in content
        require((not private, f"{where}[{number}].content", "holds the private characters U+E0F0 or U+E0F1"))
    return value


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
    record: TokenizerRecord = BYTE_TOKENIZER

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the bytes of documents, each followed by the token that ends a document."""
        data = [np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts]
        return [np.append(codes.astype(np.uint16), np.uint16(BYTES_EOS)) for codes in data]

    def opened(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on."""
        return [*text.encode(errors="replace")]

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; what closes a document is none."""
        return bytes(token for token in tokens if token < BYTES_EOS).decode(errors="replace")

    def conversations(self, marked: Sequence[Marked]) -> list[MarkedTokens]:
        """Return the bytes of conversations; after the last turn one of them closes the document."""
        conversations: list[MarkedTokens] = []
        for conversation, tokens in zip(
            marked, self.documents([conversation.text for conversation in marked]), strict=True
        ):
            pairs = zip(conversation.text, conversation.answers(), strict=True)
            answers = [is_answer for letter, is_answer in pairs for _ in letter.encode(errors="replace")]
            conversations.append((tokens, [*answers, False]))
        return conversations


def byte_tokenizer_files() -> dict[str, Any]:
    """Return the files with which transformers reads and writes bytes as ``ByteTokenizer`` does: name -> JSON.

    The library writes bytes as letters: those that can be seen as themselves, the others as letters from 256 on.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [code for code in range(256) if code not in seen]
    letters = {code: chr(code) for code in seen} | {code: chr(256 + place) for place, code in enumerate(unseen)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    library = {
        "version": "1.0",
        "added_tokens": [{"id": BYTES_EOS, "content": _EOS, **plain, "special": True}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {letters[code]: code for code in range(256)}, "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _EOS, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": library, "tokenizer_config.json": config | {"chat_template": CHATML}}


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryTokenizer:
    """A ``tokenizer.json``, run by the ``tokenizers`` library."""

    library: Any
    record: TokenizerRecord  # what the manifest says of it
    template: str | None  # of chats
    special: Mapping[str, str]  # tokens that templates name: bos_token, eos_token

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of documents: text alone between the tokens that open and close it."""
        opened, closed = ([] if token is None else [token] for token in (self.record.bos, self.record.eos))
        encodings = self.library.encode_batch_fast(_whole(texts), add_special_tokens=False)
        return [[*opened, *encoding.ids, *closed] for encoding in encodings]

    def opened(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on, behind what opens a document."""
        opened = [] if self.record.bos is None else [self.record.bos]
        return [*opened, *self.library.encode(*_whole([text]), add_special_tokens=False).ids]

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without those that open and close documents."""
        return self.library.decode([*tokens], skip_special_tokens=True)

    def conversations(self, marked: Sequence[Marked]) -> list[MarkedTokens]:
        """Return tokens as the template wrote them; one is of an answer if its first character is."""
        encodings = self.library.encode_batch(
            _whole([conversation.text for conversation in marked]), add_special_tokens=False
        )
        conversations: list[MarkedTokens] = []
        for conversation, encoding in zip(marked, encodings, strict=True):
            answers = conversation.answers()
            conversations.append((encoding.ids, [begin < end and answers[begin] for begin, end in encoding.offsets]))
        return conversations


Tokenizer = ByteTokenizer | LibraryTokenizer


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Open a tokenizer; costs a second for a large vocabulary."""
    user_template = _text(spec.template)
    if spec.folder is None:
        return ByteTokenizer(template=user_template or CHATML)
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
        template = {
            named_template.get("name"): named_template.get("template")
            for named_template in template
            if isinstance(named_template, dict)
        }.get("default")
    folder_template = _text(spec.folder / "chat_template.jinja") or (template if isinstance(template, str) else None)

    def number(token: str | None, option: str) -> int | None:
        token_id = None if token is None else library.token_to_id(token)
        require((token is None or token_id is not None, option, f"{token!r} is not a token of {path}"))
        return token_id

    vocab = max(library.get_vocab(with_added_tokens=True).values()) + 1
    eos, bos = number(spec.eos or special.get("eos_token"), "--eos"), number(spec.bos, "--bos")
    record = TokenizerRecord(name=spec.name, vocab=vocab, eos=eos, bos=bos, sha256=sha256(path))
    chat_template = user_template or folder_template
    return LibraryTokenizer(library=library, record=record, template=chat_template, special=special)


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
        entries = parsed_json(_text(folder / name) or "{}", str(folder / name))
        config |= cast(dict[str, Any], entries) if isinstance(entries, dict) else {}
    return config


def _text(path: Path | None) -> str | None:
    if path is None or not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError.of(str(path), "is not text in UTF-8") from None
