"""The benchmarks of data on small sizes: that they measure what they say."""

from pathlib import Path

import numpy as np
import pytest

from autoshard.runtime.data.indexed import OpenFiles, faults_inside, read_index
from benchmarks import loading, tokenize_speed


def test_sparse_files_are_a_whole_set_that_takes_no_room(tmp_path: Path) -> None:
    loading.write_sparse(tmp_path, 3, 60_000, 100)
    for number in range(3):
        index = read_index(tmp_path / str(number))
        assert index.num_tokens == 60_000
        assert not list(faults_inside(index, OpenFiles(), 10))
    assert (tmp_path / "1.bin").stat().st_blocks == 0
    open_s, start_s = loading.start_s(tmp_path, 1000)
    assert 0 < open_s < start_s


@pytest.mark.slow
@pytest.mark.ranks
def test_a_step_waits_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "STEPS", 3)
    found = loading.loader_wait()
    assert 0 <= found.value < 0.5 and found.extras["steps"] == 3


def test_both_tokenize_the_same_text(tmp_path: Path) -> None:
    texts = tokenize_speed.write_text(tmp_path / "text.jsonl", 50_000)
    tokenize_speed.write_tokenizer(tmp_path / "tokenizer.json", texts)
    assert sum(map(len, texts)) >= 50_000 and np.mean([len(text) for text in texts]) > 1000
    assert tokenize_speed._library_s(tmp_path, texts) > 0 and tokenize_speed._ours_s(tmp_path) > 0
