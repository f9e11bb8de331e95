"""Tokens of texts and of conversations, and which of them are answers."""

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer as Library

from autoshard.errors import InputError
from autoshard.runtime.data.tokenizers import (
    CHATML,
    ByteTokenizer,
    ChatTemplate,
    LibraryTokenizer,
    TokenizerSpec,
    byte_tokenizer_files,
    messages_of,
    open_tokenizer,
)
from tests.runtime.data.small_tokenizer import write_tokenizer

LLAMA3 = (  # the shape of Llama 3's own
    "{% for message in messages %}"
    "{% set content = '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
MARKED = (
    "{%- for message in messages %}\n{%- if message.role == 'assistant' %}A: {% generation %}"
    "{{ message.content }}.{% endgeneration %}{% else %}Q: {{ message.content }}\n{% endif %}{% endfor %}"
)
LAST_ONLY = "{% for message in messages %}{% if loop.last %}{{ message.content }}{% else %}-{% endif %}{% endfor %}"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Häh?"},
    {"role": "assistant", "content": "Größe 🙂"},
    {"role": "user", "content": "Ah"},
    {"role": "assistant", "content": "ja"},
]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_transformers_gets_a_tokenizer_of_bytes_that_reads_and_writes_the_same_tokens(text: str) -> None:
    library = Library.from_str(json.dumps(byte_tokenizer_files()["tokenizer.json"]))
    assert library.encode(text).ids == ByteTokenizer().opened(text) and library.decode([*text.encode(), 256]) == text
    assert library.token_to_id(byte_tokenizer_files()["tokenizer_config.json"]["eos_token"]) == 256


def answers(template: str, **special: str) -> list[str]:
    marked = ChatTemplate(source=template, special=special).marked(TALK)
    return [marked.text[begin:end] for begin, end in marked.ranges]


def test_answers_are_what_the_assistant_adds_to_its_prompt_or_a_template_marks() -> None:
    assert answers(CHATML) == ["Größe 🙂<|im_end|>\n", "ja<|im_end|>\n"]
    assert answers(LLAMA3, bos_token="<s>") == ["Größe 🙂<|eot|>", "ja<|eot|>"]
    assert answers(MARKED) == ["Größe 🙂.", "ja."]
    assert ChatTemplate(source=MARKED).marked(TALK).text == "Q: Be brief.\nQ: Häh?\nA: Größe 🙂.Q: Ah\nA: ja."


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LAST_ONLY, "writes earlier turns otherwise .* Give one with --chat-template"),
        ("{% for", "is not Jinja"),
        ("{{ raise_exception('only two roles') }}", "refuses a conversation: only two roles"),
        ("{{ ''.__class__.__mro__ }}", "refuses a conversation: .*unsafe"),
    ],
)
def test_a_template_that_cannot_serve_is_refused(template: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        answers(template)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages: expected a list"),
        ([{"content": "x"}], r"messages\[0\]: expected"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\].content: expected text"),
        ([{"role": "user", "content": "\ue0f0"}], "private characters"),
    ],
)
def test_messages_are_checked(messages, said: str) -> None:
    with pytest.raises(InputError, match=said):
        messages_of(messages, "messages")


@pytest.mark.slow
@given(text=st.text())
def test_bytes_are_the_text_and_an_end(text: str) -> None:
    (tokens,) = ByteTokenizer().documents([text])
    assert bytes(list(tokens[:-1])) == text.encode(errors="replace") and tokens[-1] == 256


def test_the_bytes_of_answers_are_marked() -> None:
    ((tokens, mask),) = ByteTokenizer().conversations([ChatTemplate(source=CHATML).marked(TALK)])
    said = bytes(token for token, counts in zip(tokens, mask, strict=True) if counts)
    assert said.decode() == "Größe 🙂<|im_end|>\nja<|im_end|>\n"


def library(folder: Path, **options) -> LibraryTokenizer:
    found = open_tokenizer(TokenizerSpec(name="small", folder=folder, **options))
    assert isinstance(found, LibraryTokenizer)
    return found


def test_a_tokenizer_of_the_library_closes_documents(tmp_path: Path) -> None:
    tokenizer = library(write_tokenizer(tmp_path), bos="<s>")
    first, second = tokenizer.documents(["Größe 🙂", "half \ud800 a character"])
    assert first[0] == second[0] == 1 and first[-1] == second[-1] == 0
    assert tokenizer.library.decode(list(first[1:-1])) == "Größe 🙂"
    assert tokenizer.record.vocab == 300 and tokenizer.record.eos == 0 and len(tokenizer.record.sha256 or "") == 64


def test_the_tokens_of_answers_are_marked(tmp_path: Path) -> None:
    tokenizer = library(write_tokenizer(tmp_path, chat_template=LLAMA3, bos_token={"content": "<s>"}))
    marked = ChatTemplate(source=tokenizer.template or "", special=tokenizer.special).marked(TALK)
    ((tokens, mask),) = tokenizer.conversations([marked])
    assert tokens[0] == 1, "the template names the tokens of the tokenizer"
    said, rest = ([token for token, counts in zip(tokens, mask, strict=True) if counts == one] for one in (True, False))
    assert tokenizer.library.decode(said) == "Größe 🙂<|eot|>ja<|eot|>"
    assert "assistant" in tokenizer.library.decode(rest) and "ja" not in tokenizer.library.decode(rest)


def test_a_template_may_be_a_file_of_its_own_or_one_of_several(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "1", chat_template=[{"name": "default", "template": MARKED}])
    assert library(folder).template == MARKED
    (folder / "chat_template.jinja").write_text(LLAMA3)
    assert library(folder).template == LLAMA3
    (tmp_path / "mine").write_text(CHATML)
    assert library(folder, template=tmp_path / "mine").template == CHATML


@pytest.mark.parametrize(
    ("change", "spec", "said"),
    [
        ({"tokenizer.json": "{}"}, {}, r"tokenizer\.json: is not a tokenizer that the tokenizers library reads"),
        ({"tokenizer_config.json": "{"}, {}, r"tokenizer_config\.json: is not JSON"),
        ({"tokenizer_config.json": "[" * 5000}, {}, r"tokenizer_config\.json: is nested too deeply"),
        ({"tokenizer_config.json": json.dumps({"eos_token": "<x>"})}, {}, "--eos: '<x>' is not a token"),
        ({}, {"bos": "<x>"}, "--bos: '<x>' is not a token"),
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, change, spec, said: str) -> None:
    folder = write_tokenizer(tmp_path)
    for name, text in change.items():
        (folder / name).write_text(text)
    with pytest.raises(InputError, match=said):
        library(folder, **spec)


@pytest.mark.parametrize(
    ("template", "before", "closing"),
    [
        (CHATML, "<|im_start|>user\nHäh?<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
        (MARKED, "Q: Häh?\n", "."),
        (LAST_ONLY, "Häh?", ""),
    ],
)
def test_an_answer_stands_where_the_template_puts_it(template: str, before: str, closing: str) -> None:
    assert ChatTemplate(source=template).around_answer("Häh?") == (before, closing)
