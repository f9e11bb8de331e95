"""One set of tokenized files as a stream of tokens, and how the stream is cut into samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from autoshard.errors import RunFailed
from autoshard.graph.op import Array
from autoshard.runtime.data.indexed import OpenFiles, TokenIndex, document_lengths, foreign_token, starts_within

_BYTE = np.dtype("u1")
BYTES_EOS = 256  # what closes a document of bytes; see ``tokenizers.ByteTokenizer``


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Consecutive tokens of a stream."""

    tokens: Array  # int64
    starts: Array  # places in the span at which a document begins
    answers: Array | None = None  # bool: which tokens are answers, where the set knows


@dataclass(frozen=True, kw_only=True)
class FileStream:
    """Pairs of indexed files, one after the other: the tokens of a set, document after document."""

    name: str  # as the user gave it
    files: tuple[TokenIndex, ...]
    vocab: int  # of the model: other tokens are refused when they are read
    has_answers: bool  # whether it holds conversations, and knows which tokens are answers

    @cached_property
    def _ends(self) -> Array:
        return np.cumsum([index.num_tokens for index in self.files])

    @cached_property
    def _open(self) -> OpenFiles:
        return OpenFiles()

    @property
    def num_tokens(self) -> int:
        """Tokens of all files."""
        return int(self._ends[-1])

    def lengths(self) -> Array:
        """Return the tokens of every document; reads every index."""
        return np.concatenate([document_lengths(index, self._open) for index in self.files])

    def read(self, first: int, count: int) -> TokenSpan:
        """Read some tokens, from as many files as they lie in."""
        parts: list[TokenSpan] = []
        number = int(np.searchsorted(self._ends, first, side="right"))
        while count:
            index, end = self.files[number], int(self._ends[number])
            at, length = first - (end - index.num_tokens), min(count, end - first)
            tokens = self._open.read(index.bin, index.dtype, at, length).astype(np.int64)
            if wrong := foreign_token(tokens, self.vocab):
                raise RunFailed(f"{index.bin}: {wrong}")
            starts = starts_within(index, self._open, at, length)
            answers = self._open.read(index.mask, _BYTE, at, length) > 0 if self.has_answers else None
            parts.append(TokenSpan(tokens=tokens, starts=starts, answers=answers))
            first, count, number = first + length, count - length, number + 1
        return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: Sequence[TokenSpan]) -> TokenSpan:
    ends = np.cumsum([len(part.tokens) for part in parts])
    answers = [part.answers for part in parts if part.answers is not None]
    return TokenSpan(
        tokens=np.concatenate([part.tokens for part in parts]),
        starts=np.concatenate([part.starts + end - len(part.tokens) for part, end in zip(parts, ends, strict=True)]),
        answers=np.concatenate(answers) if answers else None,
    )


@dataclass(frozen=True, kw_only=True)
class TextStream:
    """A small text file as it is: each byte a token, its paragraphs one document."""

    name: str
    path: Path
    has_answers: bool = False

    @cached_property
    def _tokens(self) -> Array:
        return np.append(np.frombuffer(self.path.read_bytes(), _BYTE).astype(np.int64), BYTES_EOS)

    @property
    def num_tokens(self) -> int:
        """Bytes, and the end."""
        return len(self._tokens)

    def lengths(self) -> Array:
        """Return the tokens of the only document."""
        return np.array([self.num_tokens])

    def read(self, first: int, count: int) -> TokenSpan:
        """Return some tokens."""
        return TokenSpan(tokens=self._tokens[first : first + count], starts=np.zeros(int(first == 0), np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Text: cut every ``seq_len`` tokens. The last token of a window is the first of the next, once label, once input.

    So every token but the first of all is the label of one sample; only the last sample of an epoch is padded.
    """

    num_tokens: int
    seq_len: int

    def __len__(self) -> int:
        """Samples of an epoch."""
        return max(0, -(-(self.num_tokens - 1) // self.seq_len))

    def place(self, number: int) -> tuple[int, int]:
        """Return the first token of a sample and how many it has, at most one more than a sequence is long."""
        first = number * self.seq_len
        return first, min(self.seq_len + 1, self.num_tokens - first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """Conversations: as many whole ones as fit into a sample, in the order of the set.

    One that is longer than a sample is cut into windows of its own: none of its tokens is dropped.
    """

    firsts: Array
    counts: Array
    num_cut: int  # conversations that were cut

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self.firsts)

    def place(self, number: int) -> tuple[int, int]:
        """Return the first token of a sample and how many it has."""
        return int(self.firsts[number]), int(self.counts[number])


def packs(lengths: Array, seq_len: int) -> Packs:
    """Fill samples with documents of these lengths, each with the next ones that fit.

    >>> found = packs(np.array([3, 2, 4, 9, 1]), seq_len=4)
    >>> list(zip(found.firsts.tolist(), found.counts.tolist())), found.num_cut
    ([(0, 5), (5, 4), (9, 5), (13, 5), (18, 1)], 1)
    """
    ends = np.cumsum(lengths)
    places: list[tuple[int, int]] = []
    document, begin, num_cut = 0, 0, 0
    while document < len(lengths):
        after = int(np.searchsorted(ends, begin + seq_len + 1, side="right"))
        if after == document:  # it does not fit alone
            windows = Windows(num_tokens=int(lengths[document]), seq_len=seq_len)
            places += [(begin + first, count) for first, count in map(windows.place, range(len(windows)))]
            after, num_cut = document + 1, num_cut + 1
        else:
            places.append((begin, int(ends[after - 1]) - begin))
        document, begin = after, int(ends[after - 1])
    firsts, counts = np.array(places, np.int64).reshape(-1, 2).T
    return Packs(firsts=firsts, counts=counts, num_cut=num_cut)
