"""Sample k is a function of a seed and k; every token of a set counts once an epoch; weights are kept."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.graph.op import Array
from autoshard.runtime.data.mixture import DataMixture, WeightTree, packs, permuted
from tests.runtime.data.cases import counting, write_set
from tests.runtime.data.test_opened import opened

WEIGHTS = st.lists(st.floats(1e-3, 1), min_size=1, max_size=9)
VOCAB = 60_000


@given(size=st.integers(1, 400), key=st.tuples(st.integers(0, 2**40), st.integers(0, 99)))
def test_a_permutation_shows_everything_once(size: int, key) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


@given(size=st.integers(1, 2**50), places=st.lists(st.integers(0, 2**50), min_size=1), key=st.integers(0, 2**40))
def test_a_place_of_a_permutation_does_not_depend_on_what_else_is_asked(size: int, places, key: int) -> None:
    asked = np.array(places) % size
    together = permuted(asked, size, (key,))
    assert together.min() >= 0 and together.max() < size
    assert len(set(together.tolist())) == len(set(asked.tolist()))
    assert together[-1] == permuted(asked[-1:], size, (key,))[0]


def test_permutations_look_random() -> None:
    size, tries = 10, 2000
    seen = np.zeros((size, size))
    for key in range(tries):
        seen[np.arange(size), permuted(np.arange(size), size, (key,))] += 1
    expected = tries / size
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 130, "81 degrees of freedom: more than 130 comes by chance once in 2,000 times"


@given(weights=WEIGHTS, count=st.integers(1, 2000), first=st.integers(0, 10**15))
def test_every_beginning_of_a_mixture_keeps_its_weights(weights: list[float], count: int, first: int) -> None:
    which, before = WeightTree.of(weights).assigned(np.arange(count))
    counts = (which[:, None] == np.arange(len(weights))).cumsum(axis=0)
    assert (before == counts[np.arange(count), which] - 1).all(), "each set's samples come in order, none twice"
    share = np.array(weights) / sum(weights)
    assert np.abs(counts - np.arange(1, count + 1)[:, None] * share).max() < 2
    numbers = np.arange(first, first + 50)  # far from the beginning
    which, before = WeightTree.of(weights).assigned(numbers)
    assert (np.abs(before - share[which] * numbers) < 2 + 1e-8 * numbers).all()


@given(lengths=st.lists(st.integers(1, 40), min_size=1), seq_len=st.integers(1, 16))
def test_packs_hold_whole_documents_and_every_label_once(lengths: list[int], seq_len: int) -> None:
    found = packs(np.array(lengths), seq_len)
    ends = np.cumsum(lengths)
    begins = dict(zip((ends - lengths).tolist(), lengths, strict=True))
    labels: list[int] = []
    for first, count in map(found.span, range(len(found))):
        assert 1 <= count <= seq_len + 1
        if first in begins and begins[first] <= seq_len + 1:
            assert first + count in ends, "a document that fits is not cut"
        labels += range(first + 1, first + count)
    assert len(labels) == len(set(labels))
    within = {place for begin, length in begins.items() for place in range(begin + 1, begin + length)}
    assert within <= set(labels), "every token that follows another of its document is a label"


@pytest.fixture(scope="module")
def two_sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One of three files with 1,000 tokens, one of 70 tokens with an offset that tells them apart."""
    folder = tmp_path_factory.mktemp("sets")
    for number, documents in enumerate(np.array_split(np.arange(1000), [300, 310])):
        whole = [[piece.tolist()] for piece in np.array_split(documents, 7) if len(piece)]
        write_set(folder / "large" / f"part-{number}", whole)
    write_set(folder / "small", [[list(range(2000, 2070))]])
    return folder / "large", folder / "small"


@given(seq_len=st.integers(1, 40), seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_an_epoch_of_one_set_shows_every_label_once(two_sets, seq_len: int, seed: int, epoch: int) -> None:
    spec = opened({two_sets[0]: 1.0}, seq_len=seq_len, vocab=VOCAB)
    source = DataMixture(
        sets=spec.sets, shares=spec.shares, seq_len=seq_len, seed=seed, separate=False, answers_only=False
    )
    size = len(source.sets[0].cut)
    samples = source.samples(epoch * size, size)
    assert sorted(samples.tokens[:, 1:][samples.counted].tolist()) == list(range(1, 1000))


@given(seed=st.integers(0, 99), first=st.integers(0, 10**12), number=st.integers(0, 15))
def test_a_sample_depends_on_its_number_alone(two_sets, seed: int, first: int, number: int) -> None:
    one = opened(dict(zip(two_sets, (0.7, 0.3), strict=True)), separate=True, vocab=VOCAB)
    other = opened(dict(zip(reversed(two_sets), (0.3, 0.7), strict=True)), separate=True, vocab=VOCAB)  # in any order
    many, alone = one.samples(first, 16), other.samples(first + number, 1)
    for name in ("tokens", "counted", "document_starts"):
        np.testing.assert_array_equal(getattr(many, name)[number], getattr(alone, name)[0])


def test_epochs_seeds_and_sets_are_shuffled_differently(two_sets) -> None:
    source = opened({two_sets[0]: 1.0}, vocab=VOCAB)
    size = len(source.sets[0].cut)
    found = {tuple(source.members(epoch * size, size)[1]) for epoch in (0, 1)}
    both = opened(dict.fromkeys(two_sets, 1.0), vocab=VOCAB).members(0, 2 * size)
    assert len({*found, tuple(both[1])}) == 3
    tokens = opened(dict(zip(two_sets, (3, 1), strict=True)), vocab=VOCAB).samples(0, 400).tokens
    assert (tokens[:, 0] >= 2000).sum() == pytest.approx(100, abs=1), "in the shares of their weights"


def expected_starts(tokens: Array, begins: set[int]) -> list[int]:
    starts, start = [], 0
    for place, token in enumerate(tokens.tolist()):
        start = place if token in begins else start
        starts.append(start)
    return starts


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), seq_len=st.integers(1, 20))
def test_documents_are_found_in_every_window(tmp_path_factory, lengths: list[int], seq_len: int) -> None:
    documents = counting(200, lengths)
    prefix = write_set(tmp_path_factory.mktemp("set") / "s", documents)
    begins = {document[0][0] for document in documents}
    for separate in (False, True):
        source = opened({prefix: 1.0}, seq_len=seq_len, separate=separate, vocab=VOCAB)
        samples = source.samples(0, len(source.sets[0].cut))
        for tokens, counted, starts in zip(samples.tokens, samples.counted, samples.document_starts, strict=True):
            real = 1 + (tokens[1:] > tokens[:-1]).cumprod().sum()  # padding is zeros
            assert starts[:real].tolist() == expected_starts(tokens[:real], begins)[: len(starts[:real])]
            crosses = np.isin(tokens[1:], list(begins)) & separate
            assert counted.tolist() == [place + 1 < real and not crosses[place] for place in range(seq_len)]
