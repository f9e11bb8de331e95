"""The pages of the site: whose they are, their sentences, words, files and commands."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = tuple(sorted(DOCS.rglob("*.md")))
# What a developer or a program reads has longer lines; all else is for users.
USERS = tuple(path for path in PAGES if path.parent.name not in ("developers", "reference"))
_WRITTEN = re.compile(
    r"<!-- (?P<mark>[\w -]+?)(?:: written by [^>]*)? -->.*?<!-- (?:/|end of )(?P=mark) -->", re.DOTALL
)
_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>[^>]*) -->\n)?^```(?P<kind>\w*)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Fence:
    """A block of code of a page: its language, the file that it is, its text, and why no test runs it."""

    kind: str
    title: str | None
    text: str
    not_run: str | None


def hand_written(text: str) -> str:
    """A page without the tables that programs write into it."""
    return _WRITTEN.sub("", text)


def fences(text: str) -> list[Fence]:
    """The blocks of code of a page, in order."""
    return [Fence(found["kind"], found["title"], found["text"], found["why"]) for found in _FENCE.finditer(text)]


def commands(fence: Fence) -> Iterator[str]:
    """The lines of a shell block, continued lines joined, without comments."""
    for line in fence.text.replace("\\\n", " ").splitlines():
        if command := re.sub(r"(?:^|\s+)#\s.*$", "", line).strip():
            yield command


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page: of its paragraphs, its list items and the cells of its tables; code counts as a word."""
    text = re.sub(r"<!--.*?-->", "", _FENCE.sub("\n\n", hand_written(text)), flags=re.DOTALL)
    text = re.sub(r"`[^`\n]+`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(\s*(?:[-*]|\d+\.) |#+ |!!! )", r"\n\n\1", text, flags=re.MULTILINE)
    text = re.sub(r"(?<!\\)\|", "\n\n", text)
    for block in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])[)*_\"]*\s+", " ".join(block.split())):
            if re.search(r"\w", sentence):
                yield sentence


def num_words(sentence: str) -> int:
    """How many words a sentence has, marks of punctuation left out."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())
