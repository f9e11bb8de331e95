"""Sets as one source: streams of tokens, cut into samples; sample k is a function of a seed and k, without any index.

The set of sample k, and how many samples of that set came before it, follow from k and the weights (``WeightTree``).
That count names an epoch of the set and a place in it; a permutation of the epoch, keyed by seed, set and epoch, names
the sample. So every sample costs the same, whatever k, and a change of data-parallel size, workers or machine changes
nothing.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from pathlib import Path

import numpy as np

from autoshard.errors import RunFailed
from autoshard.graph.op import Array
from autoshard.runtime.data.batches import Samples
from autoshard.runtime.data.indexed import OpenFiles, TokenIndex, document_lengths, foreign_token, starts_within

_BYTE = np.dtype("u1")
_SPOTS, _SPOT_TOKENS = 16, 1024  # of a set that its checksum is over
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
    listed: str = ""  # what its manifest says that its files hold: their checksums

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

    def checksum(self) -> int:
        """Return a checksum of some spots, and of what its manifest says: a few small reads for any size."""
        spots, sum_ = [index for index in self.files if index.num_tokens], zlib.crc32(self.listed.encode())
        for number in range(_SPOTS):
            index = spots[number * len(spots) // _SPOTS]
            count = min(_SPOT_TOKENS, index.num_tokens)
            first = (index.num_tokens - count) * number // (_SPOTS - 1)
            sum_ = zlib.crc32(self._open.read(index.bin, index.dtype, first, count).tobytes(), sum_)
        return sum_


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

    @cached_property
    def _tokens(self) -> Array:
        return np.append(np.frombuffer(self.path.read_bytes(), _BYTE).astype(np.int64), BYTES_EOS)

    @property
    def num_tokens(self) -> int:
        """Bytes, and the end."""
        return len(self._tokens)

    def read(self, first: int, count: int) -> TokenSpan:
        """Return some tokens."""
        return TokenSpan(tokens=self._tokens[first : first + count], starts=np.zeros(int(first == 0), np.int64))

    def checksum(self) -> int:
        """Return a checksum of all bytes, which are in memory."""
        return zlib.crc32(self._tokens.astype(np.uint16).tobytes())


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

    def span(self, number: int) -> tuple[int, int]:
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

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self.firsts)

    def span(self, number: int) -> tuple[int, int]:
        """Return the first token of a sample and how many it has."""
        return int(self.firsts[number]), int(self.counts[number])


def packs(lengths: Array, seq_len: int) -> Packs:
    """Fill samples with documents of these lengths, each with the next ones that fit.

    >>> found = packs(np.array([3, 2, 4, 9, 1]), seq_len=4)
    >>> list(zip(found.firsts.tolist(), found.counts.tolist()))
    [(0, 5), (5, 4), (9, 5), (13, 5), (18, 1)]
    """
    ends = np.cumsum(lengths)
    places: list[tuple[int, int]] = []
    document, begin = 0, 0
    while document < len(lengths):
        after = int(np.searchsorted(ends, begin + seq_len + 1, side="right"))
        if after == document:  # it does not fit alone
            windows = Windows(num_tokens=int(lengths[document]), seq_len=seq_len)
            places += [(begin + first, count) for first, count in map(windows.span, range(len(windows)))]
            after = document + 1
        else:
            places.append((begin, int(ends[after - 1]) - begin))
        document, begin = after, int(ends[after - 1])
    firsts, counts = np.array(places, np.int64).reshape(-1, 2).T
    return Packs(firsts=firsts, counts=counts)


_ROUNDS = 8  # four would be enough to look random (Luby and Rackoff, 1988); more cost a microsecond each


def permuted(places: Array, size: int, key: Sequence[int]) -> Array:
    """Return what stands at these places of the permutation that a key names.

    A Feistel network permutes a grid of rows and columns that has at most ``isqrt(size) + 1`` cells more than asked
    for; who lands on one of those goes on until it leaves them, which keeps it a permutation (cycle walking).

    >>> permuted(np.arange(10), 20, key=(1, 2)).tolist()
    [3, 0, 15, 4, 16, 10, 14, 2, 7, 12]
    """
    if size == 1:
        return np.zeros_like(places)
    keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    landed = _network(places, rows, columns, keys)
    while (outside := landed >= size).any():
        landed[outside] = _network(landed[outside], rows, columns, keys)
    return landed


def _network(places: Array, rows: int, columns: int, keys: Array) -> Array:
    row, column = np.divmod(places, columns)
    for even, odd in keys.reshape(-1, 2):
        row = (row + _mixed(column, even) % np.uint64(rows)).astype(np.int64) % rows
        column = (column + _mixed(row, odd) % np.uint64(columns)).astype(np.int64) % columns
    return row * columns + column


def _mixed(numbers: Array, key: np.uint64) -> Array:
    """Scatter the bits of whole numbers over 64 bits (the finalizer of splitmix64)."""
    bits = numbers.astype(np.uint64) ^ key
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


_BITS = 30  # of a weight: one sample in a billion is off, and products stay inside 64 bits
_ONE = 1 << _BITS


@dataclass(frozen=True, slots=True)
class WeightTree:
    """A tree that parts sample numbers by weight: evenly, and with a closed form for any number.

    Of the first k numbers that reach a node, k times its weight go left, rounded; leaves are sets. Joining the two
    lightest first keeps what any set got after any k less than two samples from what its weight says.
    """

    left: "WeightTree | int"
    right: "WeightTree | int | None" = None
    weight: int = _ONE  # of the left, in parts of _ONE

    @classmethod
    def of(cls, weights: Sequence[float]) -> "WeightTree":
        """Build the tree of some positive weights.

        >>> WeightTree.of([3, 1]).assigned(np.arange(8))[0].tolist()
        [0, 0, 1, 0, 0, 0, 1, 0]
        """
        nodes: list[tuple[float, int, WeightTree | int]] = [
            (weight, number, number) for number, weight in enumerate(weights)
        ]
        while len(nodes) > 1:
            light, heavy, *nodes = sorted(nodes, key=lambda node: node[:2])
            both = light[0] + heavy[0]
            joined = cls(heavy[2], light[2], round(heavy[0] / both * _ONE))
            nodes.append((both, min(light[1], heavy[1]), joined))
        node = nodes[0][2]
        return node if isinstance(node, WeightTree) else cls(node)

    def assigned(self, numbers: Array) -> tuple[Array, Array]:
        """Return the set of each sample, and how many samples of that set come before it."""
        before = self._left_of_first(numbers)
        goes_left = self._left_of_first(numbers + 1) > before
        sets, counts = np.empty_like(numbers), np.empty_like(numbers)
        for side, of_side, local in ((self.left, goes_left, before), (self.right, ~goes_left, numbers - before)):
            if isinstance(side, WeightTree):
                sets[of_side], counts[of_side] = side.assigned(local[of_side])
            elif side is not None:
                sets[of_side], counts[of_side] = side, local[of_side]
        return sets, counts

    def _left_of_first(self, count: Array) -> Array:
        whole, rest = count >> _BITS, count & (_ONE - 1)
        return whole * self.weight + ((rest * self.weight + _ONE // 2) >> _BITS)


def sample_places(
    shares: WeightTree, lengths: Sequence[int], seed: int, samples: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """Return the set of each of some ``samples``, a first number and a count, and its number in that set."""
    first, count = samples
    which, before = shares.assigned(np.arange(first, first + count))
    numbers = np.empty_like(before)
    for number, length in enumerate(lengths):
        epochs, places = np.divmod(before, length)
        for epoch in np.unique(epochs[which == number]).tolist():
            of_epoch = (which == number) & (epochs == epoch)
            numbers[of_epoch] = permuted(places[of_epoch], length, (seed, number, epoch))
    return which.tolist(), numbers.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStream:
    """A set, cut into samples, and what it weighs in the mixture."""

    stream: FileStream | TextStream
    cut: Windows | Packs
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMixture:
    """A source of samples from several sets."""

    sets: tuple[CutStream, ...]
    shares: WeightTree
    seq_len: int
    seed: int
    separate: bool  # labels in another document than their token do not count
    answers_only: bool

    def samples(self, first: int, count: int) -> Samples:
        """Read the samples of these numbers."""
        tokens = np.zeros((count, self.seq_len + 1), np.int64)
        counted = np.zeros((count, self.seq_len), np.bool_)
        starts = np.zeros((count, self.seq_len), np.int64)
        for row, (number, sample) in enumerate(zip(*self.members(first, count), strict=True)):
            cut_stream = self.sets[number]
            span = cut_stream.stream.read(*cut_stream.cut.span(sample))
            tokens[row, : len(span.tokens)] = span.tokens
            counted[row], starts[row] = self._labels(span)
        return Samples(tokens=tokens, counted=counted, document_starts=starts)

    def members(self, first: int, count: int) -> tuple[list[int], list[int]]:
        """Return the set of each sample, and its number in that set."""
        lengths = [len(cut_stream.cut) for cut_stream in self.sets]
        return sample_places(self.shares, lengths, self.seed, (first, count))

    def _labels(self, span: TokenSpan) -> tuple[Array, Array]:
        """Return which labels count, and where the document of each token begins; what is padded is one of its own."""
        length = len(span.tokens)
        begins = np.zeros(self.seq_len + 1, np.int64)
        begins[span.starts] = span.starts
        if length <= self.seq_len:
            begins[length] = length
        begins = np.maximum.accumulate(begins)
        counted = np.arange(1, self.seq_len + 1) < length
        if self.answers_only and span.answers is not None:
            counted[: length - 1] &= span.answers[1:]
        if self.separate:
            counted &= begins[1:] == begins[:-1]
        return counted, begins[:-1]
