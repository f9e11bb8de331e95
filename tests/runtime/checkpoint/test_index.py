"""The index: it comes back as it was, and damage is found."""

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.runtime.checkpoint.index import (
    CheckpointIndex,
    RunState,
    StoredBox,
    StoredTensor,
    dump_index,
    load_index,
)

INDEX = CheckpointIndex(
    state=RunState(step=7, num_updates=6, next_sample=56, num_tokens=448, seed=3, trackers=(("wandb", "ab12"),)),
    model="tiny",
    candidate="tp=1,pp=1,dp=2",
    finite=True,
    files={"rank-00000.safetensors": 96, "rank-00001.safetensors": 64},
    tensors={
        "weight/layer.0.up.weight": StoredTensor(
            "F32", (4, 2), (StoredBox((0, 0), (4, 2), "rank-00000.safetensors", 64, 32, 123),)
        ),
        "weight/scalar": StoredTensor("BF16", (), (StoredBox((), (), "rank-00001.safetensors", 62, 2, 5),)),
    },
)


def test_an_index_comes_back() -> None:
    assert load_index(dump_index(INDEX), "here") == INDEX


@given(st.integers(0, len(dump_index(INDEX)) - 1), st.integers(0, 7))
def test_a_flipped_bit_is_found(place: int, bit: int) -> None:
    data = bytearray(dump_index(INDEX))
    data[place] ^= 1 << bit
    try:
        found = load_index(bytes(data), "here")
    except InputError as error:
        assert "here" in str(error)
    else:
        assert found == INDEX, "a flip that changes nothing, such as of a digit's case in an escape"


@pytest.mark.parametrize("length", [0, 1, 40, len(dump_index(INDEX)) - 1])
def test_an_index_that_ends_too_early_is_damaged(length: int) -> None:
    with pytest.raises(InputError, match="here: is damaged"):
        load_index(dump_index(INDEX)[:length], "here")


def test_another_format_is_refused_by_its_number() -> None:
    import json
    import zlib

    body = json.loads(dump_index(INDEX))["index"] | {"format": 9}
    text = json.dumps(body, separators=(",", ":"))
    data = f'{{"crc32":{zlib.crc32(text.encode())},"index":{text}}}'.encode()
    with pytest.raises(InputError, match="is of format 9, and this version reads 1"):
        load_index(data, "here")
