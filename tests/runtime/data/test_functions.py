"""Samples of data sets that functions make: each is a function of its number, whatever was read before."""

from pathlib import Path

import numpy as np
import pytest

from autoshard.errors import RunFailed
from autoshard.plan.code import DataArgument
from autoshard.runtime.data.batches import StepShape, batches
from autoshard.runtime.data.functions import DrawnData, MixedData

ARGUMENTS = (
    DataArgument(name="images", shape=(2, 3), dtype="float32"),
    DataArgument(name="labels", shape=(), dtype="int64", below=5),
    DataArgument(name="masks", shape=(4,), dtype="bool"),
)
SOURCE = """
import numpy as np

def numbered(first, count):
    def sample(number):
        return np.full((2, 3), first + number, np.float16), first + number, np.arange(4) < number
    return type("Numbered", (), {"__len__": lambda _: count, "__getitem__": lambda _, number: sample(number)})()

def few():
    return numbered(0, 3)

def many():
    return numbered(100, 7)

def ending():
    data = numbered(0, 3)
    return type("Ending", (), {"__len__": lambda _: 5, "__getitem__": lambda _, k: data[k] if k < 3 else 1 / 0})()
"""


@pytest.fixture(autouse=True)
def a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sets.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


def opened(*names: str) -> MixedData:
    return MixedData.opened(dict.fromkeys(names, 1.0), ARGUMENTS, 6, 3)


def test_every_epoch_has_each_sample_once_in_an_order_of_its_own():
    labels = opened("sets.py:many").samples(0, 21).data["labels"].reshape(3, 7)
    assert all(sorted(epoch) == [*range(100, 107)] for epoch in labels.tolist())
    assert len({tuple(epoch) for epoch in labels.tolist()}) == 3


def test_samples_are_functions_of_their_numbers():
    for source in (opened("sets.py:few", "sets.py:many"), DrawnData(arguments=ARGUMENTS, seq_len=6, seed=3)):
        whole, part = source.samples(0, 12), source.samples(5, 4)
        assert all((whole.data[name][5:9] == part.data[name]).all() for name in ("images", "labels", "masks"))
        assert whole.tokens.shape == (12, 7) and whole.counted.all()
    assert {"float32", "int64", "bool"} == {str(numbers.dtype) for numbers in part.data.values()}


def test_sets_are_mixed_by_weight():
    labels = MixedData.opened({"sets.py:few": 3.0, "sets.py:many": 1.0}, ARGUMENTS, 6, 3).samples(0, 400).data["labels"]
    assert (labels < 100).sum() == 300


def test_batches_hold_the_rows_of_their_samples():
    source = DrawnData(arguments=ARGUMENTS, seq_len=6, seed=0)
    parts = batches(source, 4, StepShape(num_micro_batches=2, micro_batch=3))
    joined = np.concatenate([part["data.images"] for part in parts])
    assert (joined == source.samples(4, 6).data["images"]).all()
    assert sum(float(part["token_weight"].sum()) for part in parts) == pytest.approx(1.0)


def test_a_sample_that_cannot_be_read_is_named():
    with pytest.raises(RunFailed, match=r"sets.py:ending: sample [34]: ZeroDivisionError: division by zero"):
        opened("sets.py:ending").samples(0, 5)
